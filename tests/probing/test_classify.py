"""The classifier: labelled logs, the order of decision, and logs that were made to hurt it."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from llm_bisect.model import EngineState, Evidence, Outcome
from llm_bisect.probing.cases import classify_case, read_cases
from llm_bisect.probing.classify import boot_facts, classify_boot, classify_probe, classify_ready
from llm_bisect.spaces.engine_files import load_engine

CORPUS = Path(__file__).parents[1] / "data" / "corpus.jsonl"
KNOWN_MISSES: frozenset[str] = frozenset()

BANNER = "(APIServer pid=1) INFO 05-02 13:22:02 [api_server.py:1387] vLLM API server version 0.24.0\n"
OOM = (
    "(EngineCore pid=9) ERROR 05-02 13:20:41 [core.py:1] torch.OutOfMemoryError: CUDA out of memory. "
    "Tried to allocate 1.74 GiB. GPU 1 has a total capacity of 23.57 GiB of which 605.88 MiB is free. And\n"
)
ADMISSION = (
    "(EngineCore pid=9) ERROR 12-01 01:05:19 [core.py:1] ValueError: To serve at least one request with the "
    "model's max seq len (200000), (3.31 GiB KV cache is needed, which is larger than the available KV cache "
    "memory (2.19 GiB). Based on the available memory, the estimated maximum model length is 111456. Try\n"
)
BUSY = (
    "ValueError: Free memory on device cuda:0 (22.76/24.0 GiB) on startup is less than desired GPU memory "
    "utilization (0.97, 23.28 GiB). Decrease GPU memory utilization\n"
)
RUNNING = EngineState(running=True)


@dataclass
class Failed:
    log: str
    state: EngineState = field(default_factory=lambda: EngineState(running=False, exit_code=1))
    reason: str = "exited"
    message: str = ""


def boot(log: str, engine: str = "vllm", **more: Any) -> tuple[Outcome, Evidence]:
    others = more.pop("others_hold_memory", None)
    return classify_boot(load_engine(engine), Failed(log, **more), others_hold_memory=others)


def probe(log: str = "", engine: str = "vllm", **more: Any) -> tuple[Outcome, Evidence]:
    asked: dict[str, Any] = {
        "http_status": None,
        "http_body": "",
        "stream_error": None,
        "client_error": None,
        "state": RUNNING,
        **more,
    }
    return classify_probe(load_engine(engine), log=log, **asked)


def test_the_corpus_is_classified() -> None:
    """Every labelled case, strictly: the misses are those that are known, no more and no fewer."""
    cases = list(read_cases(CORPUS))
    missed = {case["id"] for case in cases if classify_case(case)[0] != case["expected"]}
    assert len(cases) == 148
    assert missed == KNOWN_MISSES


def test_every_kind_of_outcome_is_in_the_corpus() -> None:
    """The rate means something only where all kinds are asked for."""
    expected = Counter(case["expected"] for case in read_cases(CORPUS))
    assert len(expected) >= 14 and min(expected.values()) >= 4


def test_evidence_stays_within_its_bounds() -> None:
    """At most twelve lines of at most 500 characters, and a rule, for every case."""
    for case in read_cases(CORPUS):
        _, proof = classify_case(case)
        assert proof.rule
        assert len(proof.lines) <= 12 and all(len(line) <= 500 for line in proof.lines)


def test_a_broken_corpus_names_its_line(tmp_path: Path) -> None:
    """Which line, and what it should have been."""
    path = tmp_path / "cases.jsonl"
    path.write_text('{"phase": "boot", "log": ""}\n{oops\n', encoding="utf-8")
    with pytest.raises(Exception, match=r"cases\.jsonl, line 2"):
        list(read_cases(path))


def test_admission_carries_the_engines_own_figures() -> None:
    """What was needed, what there was, and the length that it thinks would fit."""
    outcome, proof = boot(ADMISSION)
    assert outcome is Outcome.ADMISSION_REJECTED
    assert proof.facts["kv_needed_gib"] == 3.31
    assert proof.facts["kv_available_gib"] == 2.19
    assert proof.facts["estimated_max_model_len"] == 111456


def test_memory_texts_mean_what_their_phase_says() -> None:
    """The same line is oom_boot while booting and oom_probe while serving; units come out as named."""
    assert boot(OOM)[0] is Outcome.OOM_BOOT
    outcome, proof = probe(OOM, http_status=500)
    assert outcome is Outcome.OOM_PROBE
    assert proof.facts["oom_alloc_mib"] == pytest.approx(1.74 * 1024)
    assert proof.facts["oom_free_mib"] == 605.88


def test_echoes_never_decide() -> None:
    """The API server's last words name no cause; the earlier line does."""
    echo = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n"
    assert boot(echo + OOM + echo)[1].rule == "t.oom"
    assert boot(echo)[0] is Outcome.ENGINE_CRASHED


def test_the_earliest_cause_of_all_ranks_decides() -> None:
    """A peer's memory text in the teardown is no cause."""
    crash = (
        "(Worker_TP0 pid=1) torch.AcceleratorError: CUDA error: an illegal memory access was encountered\n"
    )
    late = "(Worker_TP1 pid=2) torch.AcceleratorError: CUDA error: out of memory\n"
    assert probe(crash + late, http_status=500)[0] is Outcome.ENGINE_CRASHED
    assert probe(late + crash, http_status=500)[0] is Outcome.OOM_PROBE


def test_a_former_run_in_the_same_log_is_not_ours() -> None:
    """Only what follows the last start counts."""
    assert boot(BANNER + OOM + BANNER + ADMISSION)[0] is Outcome.ADMISSION_REJECTED


def test_a_failed_patch_before_the_start_still_counts() -> None:
    """Patch scripts speak before the engine's banner."""
    log = "[patch] anchor text not found in core.py\n" + BANNER + "RuntimeError: whatever\n"
    assert boot(log)[0] is Outcome.PATCH_FAILED


def test_a_retry_that_went_well_is_harmless() -> None:
    """llama.cpp tries again without pipeline parallelism; what failed then is what counts."""
    fail = "alloc_buffer: allocating 15872.01 MiB on device 1: cudaMalloc failed: out of memory\n"
    retry = "sched_reserve: compute buffer allocation failed, retrying without pipeline parallelism\n"
    assert boot(fail + retry, "llamacpp")[0] is Outcome.ENGINE_CRASHED
    outcome, proof = boot(fail + retry + fail.replace("15872", "7936"), "llamacpp")
    assert outcome is Outcome.OOM_BOOT
    assert proof.facts["oom_alloc_mib"] == 7936.01


@pytest.mark.parametrize(
    ("others", "outcome"), [(True, Outcome.INFRA), (False, Outcome.OOM_BOOT), (None, Outcome.OOM_BOOT)]
)
def test_free_memory_below_what_is_asked(others: bool | None, outcome: Outcome) -> None:
    """Trouble where others hold memory, else more than this machine has. Unknown: nearly all was free."""
    found, proof = boot(BUSY, others_hold_memory=others)
    assert found is outcome
    assert bool(proof.facts.get("above_machine_limit")) is (outcome is Outcome.OOM_BOOT)


def test_free_memory_with_half_the_card_taken_is_trouble() -> None:
    """Nobody said who holds it, but somebody does."""
    assert boot(BUSY.replace("22.76", "4.18"))[0] is Outcome.INFRA


@pytest.mark.parametrize("code", [137, 0, 1])
def test_our_own_limit_is_a_limit_of_the_candidate(code: int) -> None:
    """The container's mark decides, whatever the exit status: a child may have been the one killed."""
    state = EngineState(running=False, exit_code=code, oom_killed=True)
    assert boot("", state=state)[0] is Outcome.HOST_OOM_KILLED
    assert probe("", client_error="empty_reply", state=state)[0] is Outcome.HOST_OOM_KILLED


def test_the_whole_machine_running_out_is_trouble() -> None:
    """The global killer says nothing about the candidate."""
    log = (
        "[Thu Oct 8] Out of memory: Killed process 28914 (llama-server) total-vm:2kB, anon-rss:121048512kB\n"
    )
    outcome, proof = boot(log, "llamacpp", state=EngineState(running=False, exit_code=137))
    assert outcome is Outcome.INFRA
    assert proof.facts["whole_machine"] is True


def test_a_kill_without_a_word_is_trouble() -> None:
    """Neither our limit nor we: somebody's kill moves no bracket."""
    state = EngineState(running=False, exit_code=-9)
    assert probe("", client_error="connection_reset", state=state)[0] is Outcome.INFRA


def test_our_own_stop_is_an_abort() -> None:
    """137 after we asked it to stop."""
    state = EngineState(running=False, exit_code=137, stopped_by_us=True)
    assert boot("", state=state)[0] is Outcome.ABORTED
    assert boot("", reason="aborted")[0] is Outcome.ABORTED


def test_the_daemons_words_decide_where_the_engine_never_spoke() -> None:
    """From the log or from the error that the daemon returned."""
    assert boot("docker: Error response from daemon: could not select device driver\n")[0] is Outcome.INFRA
    message = "Bind for 0.0.0.0:8020 failed: port is already allocated"
    assert boot("", reason="start", message=message)[0] is Outcome.INFRA
    assert boot("", reason="start", message="something new")[0] is Outcome.INFRA
    assert boot(BANNER + "no such host\n" + OOM)[0] is Outcome.OOM_BOOT


@pytest.mark.parametrize(
    ("lines", "outcome"),
    [
        (("45", "77"), Outcome.TIMEOUT_CLIENT),
        (("45", "45"), Outcome.HANG),
        ((), Outcome.HANG),
    ],
)
def test_a_boot_at_its_deadline(lines: tuple[str, ...], outcome: Outcome) -> None:
    """Loading went on, or stood still."""
    log = "".join(f"Loading safetensors checkpoint shards:  {n}% Completed | 4/22\n" for n in lines)
    assert boot(BANNER + log, reason="deadline", state=RUNNING)[0] is outcome


def test_a_silent_boot_is_a_hang() -> None:
    """No line and no memory change for as long as was allowed."""
    assert boot(BANNER, reason="silence", state=RUNNING)[0] is Outcome.HANG


def test_what_the_watcher_saw_outweighs_the_log() -> None:
    """At the deadline: counters that moved, or did not."""
    assert probe(client_error="timeout", context={"progressing": True})[0] is Outcome.TIMEOUT_CLIENT
    assert probe(client_error="timeout", context={"progressing": False})[0] is Outcome.HANG
    assert probe(client_error="silence")[0] is Outcome.HANG


@pytest.mark.parametrize(
    ("status", "body", "outcome"),
    [
        (
            400,
            "This model's maximum context length is 16384 tokens. However, your request has",
            Outcome.CONTEXT_EXCEEDED,
        ),
        (
            400,
            "The decoder prompt (length 9) is longer than the maximum model length of 8",
            Outcome.CONTEXT_EXCEEDED,
        ),
        (400, "tool choice requires a parser", Outcome.CONFIG_ERROR),
        (404, "The model `x` does not exist.", Outcome.CONFIG_ERROR),
        (429, "too many", Outcome.INFRA),
        (500, "Internal Server Error", Outcome.ENGINE_CRASHED),
        (503, "unhealthy", Outcome.HANG),
    ],
)
def test_http_verdicts(status: int, body: str, outcome: Outcome) -> None:
    """What the status and the body say alone."""
    assert probe(http_status=status, http_body=body)[0] is outcome


def test_llamacpps_500_for_a_full_context() -> None:
    """A status of 500 that is no crash."""
    body = '{"error": {"code": 500, "message": "Context size has been exceeded.", "type": "server_error"}}'
    assert probe(engine="llamacpp", http_status=500, http_body=body)[0] is Outcome.CONTEXT_EXCEEDED


def test_ready_without_its_gpu_is_trouble() -> None:
    """A healthy server on the CPU measures something else; without a wish for a GPU it is fine."""
    log = "ggml_cuda_init: failed to initialize CUDA: no CUDA-capable device is detected\nlistening on http://x\n"
    llama = load_engine("llamacpp")
    assert classify_ready(llama, log, wants_gpu=True)[0] is Outcome.INFRA
    assert classify_ready(llama, log, wants_gpu=False)[0] is Outcome.PASS


def test_boot_facts_are_each_read_on_their_own() -> None:
    """Pool in GiB, tokens and concurrency; the smallest rank counts; nothing is computed from another."""
    log = (
        BANNER
        + "(Worker_TP0) INFO Model loading took 9.02 GiB memory and 45.1 seconds\n"
        + "(Worker_TP0) INFO Available KV cache memory: 9.77 GiB\n"
        + "(Worker_TP1) INFO Available KV cache memory: 8.11 GiB\n"
        + "INFO GPU KV cache size: 187,432 tokens, Maximum concurrency for 131,072 tokens per request: 1.43x"
    )
    facts = boot_facts(load_engine("vllm"), log)
    assert facts.number("weights_gib") == 9.02
    assert facts.number("kv_cache_gib") == 8.11
    assert facts.number("kv_cache_tokens") == 187432
    assert facts.number("max_concurrency") == 1.43
    assert facts.number("context_tokens") == 131072
    assert facts.number("graph_gib") is None


def test_llamacpp_buffers_are_summed() -> None:
    """Per device, as printed."""
    log = "CUDA0 KV buffer size =  3519.00 MiB\nCUDA1 KV buffer size =    81.00 MiB\n"
    assert boot_facts(load_engine("llamacpp"), log).number("kv_buffer_mib") == 3600


def hostile(kind: str) -> str:
    rng = random.Random(7)
    return {
        "one line": "x" * 20_000_000,
        "noise": "".join(rng.choices("abcdef :[](){}'\"\n", k=4_000_000)),
        "half a match": ("ValueError: " + "a" * 180 + "\n") * 20_000,
        "empty lines": "\n" * 3_000_000,
        "bytes": b"\xff\xfe\x00\x80".decode("utf-8", "replace") * 500_000,
        "escapes": "\x1b[" + "9;" * 2_000_000,
    }[kind]


@pytest.mark.parametrize("kind", ["one line", "noise", "half a match", "empty lines", "bytes", "escapes"])
@pytest.mark.timeout(60)
def test_hostile_logs_are_read_in_bounded_time(kind: str) -> None:
    """Nothing in them is a cause, and the last line still is one."""
    log = hostile(kind)
    assert boot(log)[0] is Outcome.ENGINE_CRASHED
    assert boot(log + "\n" + OOM)[0] is Outcome.OOM_BOOT


def test_only_the_end_of_a_huge_log_is_read() -> None:
    """A cause 5 MiB before the end is not looked for; the end is."""
    assert boot(OOM + "INFO nothing\n" * 500_000)[0] is Outcome.ENGINE_CRASHED


def test_a_container_that_somebody_removed_is_trouble() -> None:
    """Removed behind our back: nothing crashed, and the candidate is not blamed."""
    outcome, proof = classify_probe(
        load_engine("llamacpp"),
        http_status=None,
        http_body="",
        stream_error=None,
        client_error="connection_reset",
        state=EngineState(
            running=False, status="removed", error="the container is gone: somebody removed it"
        ),
        log="srv  llama_server: listening on http://0.0.0.0:8080\n",
    )
    assert (outcome, proof.rule) == (Outcome.INFRA, "removed_by_somebody")
    assert "somebody removed it" in proof.lines[0]
