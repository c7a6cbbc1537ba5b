"""Log lines as vLLM 0.20 prints them, with the rig's own time."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator

from llm_bisect.runners.sim.physics import MIB_PER_GIB, Boot, Verdict
from llm_bisect.runners.sim.prefill import Death
from llm_bisect.runners.sim.rig import Card, Model
from llm_bisect.runners.sim.settings import Settings

_DAY_ONE = datetime.datetime(2026, 5, 2, 12, 0, 0, tzinfo=datetime.UTC)
_API, _CORE = "(APIServer pid=1)", "(EngineCore pid=104)"
_V1 = "/usr/local/lib/python3.12/dist-packages/vllm/v1"
_OPS = "/usr/local/lib/python3.12/dist-packages/vllm/model_executor/layers/fla/ops"
_FAILED = ("RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",)
_EXPANDABLE = (
    "If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  "
    "See documentation for Memory Management  "
    "(https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
)
NO_BLOCKS = (
    "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the "
    "engine."
)
_RESERVED_MIB = 121.66
DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."


class Lines:
    """Lines of one boot. `card`, `model`, `settings` and `boot` are what they speak of."""

    def __init__(self, card: Card, model: Model, settings: Settings, boot: Boot) -> None:
        self.card, self.model, self.settings, self.boot = card, model, settings, boot

    def head(self, now_s: float) -> Iterator[str]:
        """What is printed at once: the patches, the banner, the arguments."""
        yield (
            f"[simulated] card {self.card.name} ({self.card.title}), model {self.model.name}: "
            "a model of this rig answers; no GPU is used"
        )
        genesis = self.settings.genesis
        if genesis:
            for patch, applied in genesis.items():
                word, why = ("APPLY", "applied") if applied else ("SKIP", "opt-in")
                yield f"[Genesis] {patch:<8} {word:<6} {why:<17}| simulated"
            on = sum(genesis.values())
            yield f"[Genesis] apply_all: {on} applied, {len(genesis) - on} skipped, 0 failed"
        if self.model.embeds_patch in self.settings.patches:
            name = self.model.embeds_patch.removesuffix(".py")
            yield f"[{name}] applied: no inputs_embeds buffers"
        yield self.api(now_s, "api_server.py:1387", f"vLLM API server version {self.model.engine_version}")
        arguments = {
            "model": self.settings.model_path,
            "max_model_len": self.settings.max_model_len,
            "gpu_memory_utilization": self.settings.gpu_memory_utilization,
            "kv_cache_dtype": self.settings.kv_dtype,
            "max_num_batched_tokens": self.settings.max_num_batched_tokens,
            "max_num_seqs": self.settings.max_num_seqs,
        }
        yield self.api(now_s, "utils.py:233", f"non-default args: {arguments}")

    def booting(self, now_s: float) -> Iterator[str]:
        """What is printed while it boots, as far as it comes; a failed boot ends with its traceback."""
        boot, settings = self.boot, self.settings
        if boot.verdict is Verdict.BAD_ARGUMENT:
            yield f"{_API} Traceback (most recent call last):"
            yield f"{_API} {boot.reason}"
            return
        yield self.api(now_s, "model.py:1725", f"Using max model len {boot.context_tokens}")
        batched = settings.max_num_batched_tokens
        yield self.api(
            now_s, "scheduler.py:252", f"Chunked prefill is enabled with max_num_batched_tokens={batched}."
        )
        version = self.model.engine_version
        yield self.core(
            now_s,
            "core.py:107",
            f"Initializing a V1 LLM engine (v{version}) with config: model='{settings.model_path}', "
            f"max_seq_len={boot.context_tokens}, kv_cache_dtype={settings.kv_dtype}, "
            f"enable_prefix_caching={settings.prefix_caching}",
        )
        if boot.verdict is Verdict.NOT_ENOUGH_FREE:
            yield from self._failed(
                now_s,
                f"ValueError: Free memory on device cuda:0 ({_short(boot.startup_free_gib)}/"
                f"{_short(self.card.cuda_total_gib)} GiB) on startup is less than desired GPU memory "
                f"utilization ({settings.gpu_memory_utilization}, {_short(boot.requested_gib)} GiB). "
                "Decrease GPU memory utilization or reduce GPU memory used by other processes.",
            )
            return
        yield self.core(now_s, "gpu_model_runner.py:4820", f"Starting to load model {settings.model_path}...")
        if boot.verdict is Verdict.LOAD_OOM:
            message = "Failed to load model - not enough GPU memory. Try lowering --gpu-memory-utilization"
            yield self.core(now_s, "gpu_model_runner.py:4870", message, "ERROR")
            held = self.card.cuda_total_mib - 12.0
            yield from self._failed(now_s, self._oom(170.0, 12.0, held))
            return
        weights = _short(boot.weights_gib)
        yield self.core(
            now_s, "gpu_model_runner.py:4905", f"Model loading took {weights} GiB memory and 41.27 seconds"
        )
        yield self.core(
            now_s,
            "interface.py:773",
            f"Setting attention block size to {boot.block_tokens} tokens to ensure that attention page size "
            "is >= mamba page size.",
        )
        if boot.first_of_shape:
            yield self.core(
                now_s,
                "backends.py:1010",
                "Compiling a graph for compile range (cache miss): first boot of this shape",
            )
        yield self.core(
            now_s, "gpu_worker.py:441", f"Available KV cache memory: {boot.available_gib:.2f} GiB"
        )
        if boot.verdict is Verdict.NO_BLOCKS:
            yield from self._failed(now_s, f"ValueError: {NO_BLOCKS}")
            return
        if boot.verdict is Verdict.ADMISSION_REJECTED:
            yield from self._failed(now_s, f"ValueError: {admission_text(boot)}")
            return
        yield self.core(now_s, "kv_cache_utils.py:1711", f"GPU KV cache size: {boot.kv_tokens:,} tokens")
        yield self.core(
            now_s,
            "kv_cache_utils.py:1717",
            f"Maximum concurrency for {boot.context_tokens:,} tokens per request: {boot.concurrency:.2f}x",
        )
        if boot.verdict is Verdict.WARM_UP_OOM:
            seqs = settings.max_num_seqs
            left = max(0.0, self.card.cuda_total_mib - boot.resident_mib)
            yield from self._failed(
                now_s,
                self._oom(50.0, left, boot.resident_mib),
                f"RuntimeError: CUDA out of memory occurred when warming up sampler with {seqs} dummy "
                "requests. Please try lowering `max_num_seqs` or `gpu_memory_utilization` when initializing "
                "the engine.",
            )
            return
        yield self.core(
            now_s,
            "gpu_model_runner.py:5903",
            f"Graph capturing finished in 12 secs, took {self.model.cudagraph_mib / MIB_PER_GIB:.2f} GiB",
        )
        yield self.core(
            now_s,
            "core.py:283",
            f"init engine (profile, create kv cache, warmup model) took {boot.seconds * 0.6:.2f} s",
        )

    def ready(self, now_s: float, port: int) -> Iterator[str]:
        yield self.api(now_s, "api_server.py:581", f"Starting vLLM server on http://127.0.0.1:{port}")
        yield f"{_API} INFO:     Started server process [1]"
        yield f"{_API} INFO:     Waiting for application startup."
        yield f"{_API} INFO:     Application startup complete."

    def stats(self, now_s: float, prompt_tps: float, decode_tps: float, running: int, usage: float) -> str:
        return self.api(
            now_s,
            "loggers.py:259",
            f"Engine 000: Avg prompt throughput: {prompt_tps:.1f} tokens/s, Avg generation throughput: "
            f"{decode_tps:.1f} tokens/s, Running: {running} reqs, Waiting: 0 reqs, GPU KV cache usage: "
            f"{usage * 100:.1f}%, Prefix cache hit rate: 0.0%",
        )

    def oom(self, now_s: float, request: str, scheduled: tuple[int, int], found: Death) -> Iterator[str]:
        """The death of the engine in the middle of a prefill. `scheduled`: computed and scheduled tokens."""
        computed, tokens = scheduled
        yield self.core(
            now_s,
            "dump_input.py:79",
            "Dumping scheduler output for model execution: SchedulerOutput(scheduled_cached_reqs="
            f"CachedRequestData(req_ids=['{request}'],num_computed_tokens=[{computed}]), "
            f"num_scheduled_tokens={{{request}: {tokens}}}, total_num_scheduled_tokens={tokens})",
            "ERROR",
        )

        def core(text: str) -> str:
            return self.core(now_s, "core.py:1132", text, "ERROR")

        yield core("EngineCore encountered a fatal error.")
        yield core("Traceback (most recent call last):")
        yield core(f'  File "{_V1}/engine/core.py", line 1123, in run_engine_core')
        yield core("    engine_core.run_busy_loop()")
        yield core(f'  File "{_OPS}/chunk.py", line 63, in chunk_gated_delta_rule_fwd')
        yield core("    o = chunk_fwd_o(")
        yield core("        ^^^^^^^^^^^^")
        yield core(f'  File "{_OPS}/chunk_o.py", line 161, in chunk_fwd_o')
        yield core("    o = torch.empty_like(v)")
        yield core("        ^^^^^^^^^^^^^^^^^^^")
        held = self.card.cuda_total_mib - found.free_mib
        yield core(self._oom(found.asked_mib, found.free_mib, held))
        yield self.api(now_s, "async_llm.py:707", "AsyncLLM output_handler failed.", "ERROR")
        yield self.api(now_s, "async_llm.py:707", "Traceback (most recent call last):", "ERROR")
        dead = f"vllm.v1.engine.exceptions.EngineDeadError: {DEAD}"
        yield self.api(now_s, "async_llm.py:707", dead, "ERROR")

    def shutdown(self, now_s: float) -> Iterator[str]:
        yield f"{_API} INFO:     Shutting down"
        yield self.api(now_s, "launcher.py:100", "[shutdown] API server: shutdown triggered")
        yield f"{_API} INFO:     Waiting for application shutdown."
        yield f"{_API} INFO:     Application shutdown complete."
        yield f"{_API} INFO:     Finished server process [1]"

    def access(self, client: tuple[str, int], request: str, status: int) -> str:
        words = {200: "OK", 400: "Bad Request", 404: "Not Found", 500: "Internal Server Error"}
        words |= {405: "Method Not Allowed", 503: "Service Unavailable"}
        line = f'{_API} INFO:     {client[0]}:{client[1]} - "{request}" {status} {words.get(status, "")}'
        return line.rstrip()

    def aborted(self, now_s: float, request: str) -> str:
        return self.api(now_s, "async_llm.py:431", f"Aborted request(s) {request}.")

    def api(self, now_s: float, where: str, text: str, level: str = "INFO") -> str:
        return f"{_API} {level} {_stamp(now_s)} [{where}] {text}"

    def core(self, now_s: float, where: str, text: str, level: str = "INFO") -> str:
        return f"{_CORE} {level} {_stamp(now_s)} [{where}] {text}"

    def _failed(self, now_s: float, *causes: str) -> Iterator[str]:
        yield self.core(now_s, "core.py:1132", "EngineCore failed to start.", "ERROR")
        yield self.core(now_s, "core.py:1132", "Traceback (most recent call last):", "ERROR")
        for cause in causes:
            yield self.core(now_s, "core.py:1132", cause, "ERROR")
        yield f"{_API} Traceback (most recent call last):"
        for line in _FAILED:
            yield f"{_API} {line}"

    def _oom(self, asked_mib: float, free_mib: float, held_mib: float) -> str:
        total_gib = self.card.cuda_total_gib
        graphs = self.model.cudagraph_mib
        # contexts and libraries are no PyTorch memory, and some is reserved but unallocated
        other_mib = self.card.context_mib + self.card.startup_used_mib + _RESERVED_MIB
        allocated = max(0.0, held_mib - other_mib)
        return (
            f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {asked_mib:.2f} MiB. GPU 0 has a "
            f"total capacity of {_short(total_gib)} GiB of which {free_mib:.2f} MiB is free. Including "
            f"non-PyTorch memory, this process has {held_mib / MIB_PER_GIB:.2f} GiB memory in use. Of the "
            f"allocated memory {allocated / MIB_PER_GIB:.2f} GiB is allocated by PyTorch, with "
            f"{graphs:.2f} MiB allocated in private pools (e.g., CUDA Graphs), and {_RESERVED_MIB} MiB is "
            f"reserved by PyTorch but unallocated. {_EXPANDABLE}"
        )


def admission_text(boot: Boot) -> str:
    """The engine's words for a pool that is too small for the declared context."""
    text = (
        f"To serve at least one request with the models's max seq len ({boot.context_tokens}), "
        f"({boot.needed_gib:.2f} GiB KV cache is needed, which is larger than the available KV cache memory "
        f"({boot.available_gib:.2f} GiB). "
    )
    if boot.estimated_context_tokens > 0:
        text += (
            "Based on the available memory, the estimated maximum model length is "
            f"{boot.estimated_context_tokens}. "
        )
    advice = (
        "Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine."
    )
    return text + advice


def too_long_text(longest: int, new_tokens: int) -> str:
    """The engine's words for a prompt that does not fit into the context (it counts no further than that)."""
    least = max(1, longest - new_tokens + 1)
    return (
        f"This model's maximum context length is {longest} tokens. However, you requested {new_tokens} "
        f"output tokens and your prompt contains at least {least} input tokens, for a total of at least "
        f"{new_tokens + least} tokens. Please reduce the length of the input prompt or the number of "
        "requested output tokens."
    )


def error_body(message: str, kind: str, code: int, param: str | None = None) -> bytes:
    """An error as the OpenAI-compatible API gives it."""
    return json.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}}).encode()


def _stamp(now_s: float) -> str:
    return (_DAY_ONE + datetime.timedelta(seconds=now_s)).strftime("%m-%d %H:%M:%S")


def _short(gib: float) -> str:
    return f"{round(gib, 2):g}"
