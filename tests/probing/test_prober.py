"""The prober against an engine whose every behaviour is chosen."""

from __future__ import annotations

import re
import threading
from dataclasses import replace
from typing import Any

import pytest

from llm_bisect.model import MemorySample, Outcome, ProbeRequest, ProbeResult, Progress
from llm_bisect.probing.prober import Prober
from llm_bisect.spaces.engine_files import load_engine

OOM = (
    "(EngineCore pid=1) ERROR 05-02 13:20:41 [core.py:1] EngineCore encountered a fatal error.\n"
    "(EngineCore pid=1) ERROR 05-02 13:20:41 [core.py:1] torch.OutOfMemoryError: CUDA out of memory. "
    "Tried to allocate 50.00 MiB. GPU 0 has a total capacity of 23.56 GiB of which 24.50 MiB is free. And\n"
)
DEAD = {"error": {"message": "EngineCore encountered an issue. See stack trace (above) for the root cause."}}


def probe(engine: Any, clock: Any, stop: threading.Event | None = None, **asked: Any) -> ProbeResult:
    """One probe with short patience."""
    on_progress = asked.pop("on_progress", None)
    asked = {
        "probe": "p1",
        "prompt_tokens": 2000,
        "salt": "salt",
        "deadline_s": 20.0,
        "silence_s": 20.0,
        **asked,
    }
    prober = Prober(load_engine("vllm"), liveness_s=3.0, idle_s=2.0, exit_wait_s=2.0)
    return prober.probe(
        engine, ProbeRequest(**asked), clock=clock, stop=stop or threading.Event(), on_progress=on_progress
    )


def stall(handler: Any) -> None:
    """Hold the connection until the client hangs up or the test ends."""
    handler.server.closing.wait(30)


def test_a_good_answer_passes_with_every_needle(engine: Any, server: Any, clock: Any) -> None:
    """Three needles found, and the prompt exactly as long as asked."""
    result = probe(engine, clock)
    assert result.outcome is Outcome.PASS
    assert [check.depth for check in result.recall if check.found] == [0.1, 0.5, 0.9]
    assert len(server.asked[0][0]) == 2000 == result.prompt_tokens
    assert result.cached_tokens == 0
    assert result.engine_alive
    assert result.first_token_s is not None and 0 < result.first_token_s <= result.wall_s
    assert all(len(prompt) <= 2000 for prompt, _ in server.asked)


def test_a_fresh_salt_changes_the_first_characters(engine: Any, server: Any, clock: Any) -> None:
    """Two probes share no prefix worth a cache block."""
    probe(engine, clock, salt="one", shape="prefill")
    probe(engine, clock, salt="two", shape="prefill")
    prompts = [prompt for prompt, tokens in server.asked if prompt != "Hello"]
    assert prompts[0][:16] != prompts[1][:16]


def test_prefill_asks_for_one_token_and_no_needle(engine: Any, server: Any, clock: Any) -> None:
    """The shape for models that recall nothing."""
    result = probe(engine, clock, shape="prefill")
    assert result.outcome is Outcome.PASS
    assert result.recall == ()
    assert server.asked[0][1] == 1
    assert "secret code" not in server.asked[0][0]


def test_an_error_chunk_inside_200_is_no_pass(engine: Any, server: Any, clock: Any) -> None:
    """The log, not the status, says what happened."""

    def behave(handler: Any, prompt: str, number: int) -> None:
        handler.start()
        handler.event({"choices": [{"text": " 4", "finish_reason": None}]})
        engine.dies(OOM, exit_code=0)
        handler.event(DEAD)
        handler.close_stream()

    server.behave = behave
    server.alive = lambda handler: handler.reply(500, DEAD)
    result = probe(engine, clock)
    assert result.outcome is Outcome.OOM_PROBE
    assert result.evidence.facts["oom_alloc_mib"] == 50
    assert not result.engine_alive


def test_a_500_while_the_engine_lives_is_a_crash_of_the_request(engine: Any, server: Any, clock: Any) -> None:
    """The boot is kept: it answers afterwards."""
    server.behave = lambda handler, prompt, number: handler.reply(500, {"error": {"message": "Internal"}})
    result = probe(engine, clock)
    assert result.outcome is Outcome.ENGINE_CRASHED
    assert result.engine_alive
    assert result.http_status == 500


def test_a_refusal_of_the_length_is_context_exceeded(engine: Any, server: Any, clock: Any) -> None:
    """HTTP 400 with the engine's own words."""
    message = (
        "This model's maximum context length is 1024 tokens. However, your request has 2000 input tokens."
    )
    server.behave = lambda handler, prompt, number: handler.reply(400, {"error": {"message": message}})
    result = probe(engine, clock)
    assert result.outcome is Outcome.CONTEXT_EXCEEDED
    assert result.evidence.facts["context_tokens"] == 1024
    assert result.engine_alive


def test_a_closed_connection_is_read_from_the_log(engine: Any, server: Any, clock: Any) -> None:
    """The engine vanished in the middle of a request."""

    def behave(handler: Any, prompt: str, number: int) -> None:
        engine.dies(OOM, exit_code=1)
        handler.drop()

    server.behave = behave
    result = probe(engine, clock)
    assert result.outcome is Outcome.OOM_PROBE
    assert not result.engine_alive


def test_an_empty_reply_of_a_container_that_hit_its_limit(engine: Any, server: Any, clock: Any) -> None:
    """The state of the container says it, also with exit status 0."""

    def behave(handler: Any, prompt: str, number: int) -> None:
        engine.dies("", exit_code=0, oom_killed=True)
        handler.drop()

    server.behave = behave
    result = probe(engine, clock)
    assert result.outcome is Outcome.HOST_OOM_KILLED


def test_a_stream_that_breaks_off_is_no_pass(engine: Any, server: Any, clock: Any) -> None:
    """Text came, but never the end."""

    def behave(handler: Any, prompt: str, number: int) -> None:
        handler.start()
        handler.event({"choices": [{"text": " 12345.", "finish_reason": None}]})
        handler.drop()

    server.behave = behave
    result = probe(engine, clock)
    assert result.outcome is Outcome.ENGINE_CRASHED
    assert result.engine_alive


@pytest.mark.parametrize("kind", ["text", "binary", "json", "line"])
def test_garbage_is_no_pass(engine: Any, server: Any, clock: Any, kind: str) -> None:
    """A 200 that is no stream of ours: words, bytes, an unending line, JSON of another shape."""

    def behave(handler: Any, prompt: str, number: int) -> None:
        handler.start()
        if kind == "line":
            for _ in range(40):
                handler.chunk("data: " + "x" * 262144)
        else:
            handler.chunk(
                {"text": "<html>hello</html>\n", "binary": "\x00\xff\n" * 99, "json": "data: [1]\n\n"}[kind]
            )
        handler.wfile.write(b"0\r\n\r\n")

    server.behave = behave
    result = probe(engine, clock)
    assert result.outcome is Outcome.ENGINE_CRASHED
    assert all(len(line) <= 500 for line in result.evidence.lines)
    assert len(result.evidence.lines) <= 12


def test_never_answering_without_progress_is_a_hang(engine: Any, server: Any, clock: Any) -> None:
    """Counters that stand still for as long as silence is allowed."""
    server.behave = lambda handler, prompt, number: stall(handler)
    server.alive = lambda handler: stall(handler)
    server.metrics = lambda: "vllm:num_requests_running 1.0\nvllm:kv_cache_usage_perc 0.25\n"
    result = probe(engine, clock, deadline_s=30.0, silence_s=1.5)
    assert result.outcome is Outcome.HANG
    assert not result.engine_alive


def test_never_answering_with_progress_is_our_deadline(engine: Any, server: Any, clock: Any) -> None:
    """KV usage rises until the deadline; how far it came is told, and the engine is idle again."""
    usage = [0.0]
    hung_up = threading.Event()

    def behave(handler: Any, prompt: str, number: int) -> None:
        handler.connection.settimeout(20)
        handler.connection.recv(1)  # returns when the client hangs up
        hung_up.set()

    def metrics() -> str:
        usage[0] += 0.01
        running = 0 if hung_up.is_set() else 1
        labels = 'block_size="16",num_gpu_blocks="1000"'
        return (
            f"vllm:num_requests_running {running}\nvllm:kv_cache_usage_perc {usage[0] if running else 0}\n"
            f"vllm:cache_config_info{{{labels}}} 1.0\n"
        )

    server.behave, server.metrics = behave, metrics
    seen: list[Progress] = []
    result = probe(
        engine,
        clock,
        deadline_s=2.0,
        silence_s=1.5,
        on_progress=lambda progress, memory: seen.append(progress),
    )
    assert result.outcome is Outcome.TIMEOUT_CLIENT
    assert result.engine_alive
    assert hung_up.is_set()
    assert result.tokens_processed is not None and 0 < result.tokens_processed <= 2000
    assert any(progress.tokens for progress in seen)


def test_a_slow_drip_is_caught_by_the_deadline(engine: Any, server: Any, clock: Any) -> None:
    """Bytes that never end do not keep a probe alive."""

    def behave(handler: Any, prompt: str, number: int) -> None:
        handler.start()
        while not handler.server.closing.wait(0.05):
            handler.event({"choices": [{"text": "z", "finish_reason": None}]})

    server.behave = behave
    result = probe(engine, clock, deadline_s=2.0)
    assert result.outcome is Outcome.TIMEOUT_CLIENT


def test_an_answer_in_the_grace_period_counts(engine: Any, server: Any, clock: Any) -> None:
    """The stream stays open a little longer; what was read completely is a pass."""

    def behave(handler: Any, prompt: str, number: int) -> None:
        if number == 1:
            handler.server.closing.wait(2.05)
        handler.answer(" ".join(code for code in re.findall(r"is (\d{5})\.", prompt)), prompt)

    server.behave = behave
    clock.pace = 10.0
    result = probe(engine, clock, deadline_s=20.0, silence_s=100.0)
    assert result.outcome is Outcome.PASS
    assert any("after the deadline" in note for note in result.notes)


def test_a_cached_prefix_is_void(engine: Any, server: Any, clock: Any) -> None:
    """A measurement of a cache measures nothing."""
    server.behave = lambda handler, prompt, number: handler.answer(" 1.", prompt, cached=1900)
    result = probe(engine, clock)
    assert result.outcome is Outcome.VOID
    assert result.evidence.rule == "cached_prefix"


def test_a_wrong_length_is_void(engine: Any, server: Any, clock: Any) -> None:
    """The engine counted other tokens than were sent: it truncated them."""
    server.behave = lambda handler, prompt, number: handler.answer(" 1.", prompt, counted=1500)
    result = probe(engine, clock)
    assert result.outcome is Outcome.VOID
    assert result.evidence.rule == "wrong_length"


def test_recall_lost_at_one_depth(engine: Any, server: Any, clock: Any) -> None:
    """One needle of three is answered wrongly, almost right."""
    from_server = server.behave

    def behave(handler: Any, prompt: str, number: int) -> None:
        if number == 2:
            handler.answer(" 99999999.", prompt, cached=1900)
        else:
            from_server(handler, prompt, number)

    server.behave = behave
    result = probe(engine, clock)
    assert result.outcome is Outcome.RECALL_FAILED
    assert [check.found for check in result.recall] == [True, False, True]
    assert result.engine_alive


def test_a_needle_in_the_reasoning_counts(engine: Any, server: Any, clock: Any) -> None:
    """Thinking models answer in another field."""

    def behave(handler: Any, prompt: str, number: int) -> None:
        codes = " ".join(re.findall(r"is (\d{5})\.", prompt))
        handler.start()
        handler.event({"choices": [{"delta": {"reasoning_content": codes}, "finish_reason": None}]})
        handler.event({"choices": [{"delta": {"content": ""}, "finish_reason": "length"}]})
        handler.close_stream()

    server.behave = behave
    assert probe(engine, clock).outcome is Outcome.PASS


def test_follow_ups_stop_where_they_are_dear(engine: Any, server: Any, clock: Any) -> None:
    """An engine that computes the prompt again for each question is asked one more, not two."""

    def behave(handler: Any, prompt: str, number: int) -> None:
        handler.answer(" ".join(re.findall(r"is (\d{5})\.", prompt)), prompt, cached=0)

    server.behave = behave
    result = probe(engine, clock)
    assert result.outcome is Outcome.PASS
    assert len(result.recall) == 2
    assert any("not asked" in note for note in result.notes)


def test_without_a_prefix_cache_one_needle_is_asked(engine: Any, server: Any, clock: Any) -> None:
    """Which one depends on the salt, so that no depth is always spared."""
    server.metrics = lambda: 'vllm:cache_config_info{enable_prefix_caching="False"} 1\n'
    depths = {probe(engine, clock, salt=f"salt {number}").recall[0].depth for number in range(12)}
    assert depths == {0.1, 0.5, 0.9}


def test_slower_than_allowed(engine: Any, server: Any, clock: Any) -> None:
    """Right, and too late for the profile."""
    result = probe(engine, clock, slow_s=0.0)
    assert result.outcome is Outcome.SLOW
    assert all(check.found for check in result.recall)


def test_a_pass_after_which_nothing_answers_is_a_hang(engine: Any, server: Any, clock: Any) -> None:
    """Health endpoints stay 200 while an engine hangs; one token tells."""
    server.alive = stall
    result = probe(engine, clock)
    assert result.outcome is Outcome.HANG
    assert not result.engine_alive
    assert result.prompt_tokens == 2000


def test_a_death_after_the_answer_is_seen(engine: Any, server: Any, clock: Any) -> None:
    """The engine answered and died; it is not a pass."""

    def alive(handler: Any) -> None:
        engine.dies("Fatal Python error: Segmentation fault\n", exit_code=139)
        handler.drop()

    server.alive = alive
    result = probe(engine, clock)
    assert result.outcome is Outcome.ENGINE_CRASHED
    assert result.evidence.rule == "t.signal"


def test_stop_aborts_a_request(engine: Any, server: Any, clock: Any) -> None:
    """The stop event ends a probe in the middle; it says nothing about the candidate."""
    stop = threading.Event()
    server.behave = lambda handler, prompt, number: stall(handler)
    threading.Timer(0.5, stop.set).start()
    result = probe(engine, clock, stop)
    assert result.outcome is Outcome.ABORTED
    assert result.outcome.is_trouble


def test_stop_before_the_start_sends_nothing(engine: Any, server: Any, clock: Any) -> None:
    """A probe that is stopped already asks nothing."""
    stop = threading.Event()
    stop.set()
    assert probe(engine, clock, stop).outcome is Outcome.ABORTED
    assert server.asked == [] and server.tokenized == 0


def test_an_engine_that_is_gone_already(engine: Any, server: Any, clock: Any) -> None:
    """Connection refused before anything was asked: its last words decide."""
    engine.dies(OOM, exit_code=1)
    server.shutdown()
    server.server_close()
    result = probe(engine, clock)
    assert result.outcome is Outcome.OOM_PROBE
    assert not result.engine_alive


def test_without_a_tokenizer_nothing_exact_can_be_asked(engine: Any, server: Any, clock: Any) -> None:
    """An engine without /tokenize gives no length to trust."""
    about = load_engine("vllm")
    moved = replace(about, endpoints={**about.endpoints, "tokenize": "/nowhere"})
    request = ProbeRequest(probe="p", prompt_tokens=500, salt="s")
    result = Prober(moved).probe(engine, request, clock=clock, stop=threading.Event())
    assert result.outcome is Outcome.VOID
    assert result.evidence.rule == "no_tokenizer"
    assert result.engine_alive


def test_a_tokenizer_with_a_limit_is_asked_in_parts(engine: Any, server: Any, clock: Any) -> None:
    """Some engines tokenise no more than their context holds."""
    server.tokenizes_up_to = 1500
    result = probe(engine, clock, prompt_tokens=2000)
    assert result.outcome is Outcome.PASS
    assert len(server.asked[0][0]) == 2000


def test_engines_are_probed_at_once(server: Any, engine: Any, clock: Any) -> None:
    """One prober, two boots, two threads: neither sees the other's."""
    prober = Prober(load_engine("vllm"), liveness_s=3.0)
    other = type(engine)(server)
    other.boot = "boot-2"
    results: list[ProbeResult] = []

    def run(one: Any, salt: str) -> None:
        request = ProbeRequest(probe=salt, prompt_tokens=1000, salt=salt, shape="prefill")
        results.append(prober.probe(one, request, clock=clock, stop=threading.Event()))

    server.behave = lambda handler, prompt, number: handler.answer("x", prompt)
    threads = [
        threading.Thread(target=run, args=(one, f"s{number}"))
        for number, one in enumerate((engine, other) * 3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [result.outcome for result in results] == [Outcome.PASS] * 6


def test_the_lowest_memory_of_a_probe_is_kept(engine: Any, server: Any, clock: Any) -> None:
    """Sampled while it ran, and how much others took meanwhile."""
    frees = [900.0, 300.0, 150.0, 700.0, 800.0]
    engine.samples = [
        MemorySample(free_mib=free, others_mib=100.0 + 10 * number) for number, free in enumerate(frees)
    ]

    def behave(handler: Any, prompt: str, number: int) -> None:
        handler.server.closing.wait(0.8)
        handler.answer("", prompt)

    server.behave = behave
    result = probe(engine, clock, shape="prefill")
    assert result.min_free_mib == 150.0
    assert result.others_grew_mib == 40.0
    assert result.memory_source == "nvml"


def test_the_api_key_goes_into_the_header(engine: Any, server: Any, clock: Any) -> None:
    """Taken from the engine, sent with every request, shown nowhere."""
    engine.api_key = "sk-secret"
    result = probe(engine, clock)
    assert {headers.get("Authorization") for headers in server.headers_seen} == {"Bearer sk-secret"}
    assert "sk-secret" not in repr(result)


def test_a_fast_clock_does_not_make_a_hang(engine: Any, server: Any, clock: Any) -> None:
    """Silence counts only where counters were looked at and stood still, whatever the clock's pace."""
    moved = [0]
    clock.pace = 2000.0

    def metrics() -> str:
        moved[0] += 1
        return f"vllm:num_requests_running 1.0\nvllm:kv_cache_usage_perc {moved[0] / 1e6}\n"

    def behave(handler: Any, prompt: str, number: int) -> None:
        handler.server.closing.wait(1.0)
        handler.answer("", prompt)

    server.metrics, server.behave = metrics, behave
    result = probe(engine, clock, shape="prefill", deadline_s=100_000.0, silence_s=300.0)
    assert result.outcome is Outcome.PASS
    assert result.wall_s > 1000


def test_no_progress_is_told_without_a_reader(engine: Any, server: Any, clock: Any) -> None:
    """Every progress that is told carries the prompt's length."""
    seen: list[Progress] = []
    probe(engine, clock, on_progress=lambda progress, memory: seen.append(progress))
    assert seen and {progress.total_tokens for progress in seen} == {2000}


def test_an_answer_of_nothing_is_void(engine: Any, server: Any, clock: Any) -> None:
    """200 and [DONE], without text or a count: nothing was measured."""

    def behave(handler: Any, prompt: str, number: int) -> None:
        handler.start()
        handler.chunk("data: [DONE]\n\n")
        handler.close_stream()

    server.behave = behave
    result = probe(engine, clock, shape="prefill")
    assert result.outcome is Outcome.VOID
    assert result.evidence.rule == "empty_answer"
