"""Labelled cases: one engine's last words, and what a careful engineer said had happened.

A case is a JSON object: id, engine, phase (boot | probe), http_status, http_body, exit_code, oom_killed,
log, expected, also_ok and context (needle, client_error, elapsed_s, timeout_s, slow_after_s,
min_decode_tps, boot_timeout_s, stop_requested, container_running, silence_s). It lets anyone measure the
classifier on logs of their own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llm_bisect.model import EngineState, Evidence, Outcome, UsageProblem
from llm_bisect.probing.classify import classify_boot, classify_probe, classify_ready
from llm_bisect.spaces.engine_files import load_engine
from llm_bisect.spaces.engines import EngineDescription

_ENGINES = {
    "vllm": "vllm",
    "llama.cpp": "llamacpp",
    "llamacpp": "llamacpp",
    "sglang": "sglang",
    "docker": "vllm",
}
_CLOCK = re.compile(r"(?:\d\d-\d\d|\d{4}-\d\d-\d\d)[ T](?P<h>\d\d):(?P<m>\d\d):(?P<s>\d\d)")
_SINCE = re.compile(r"(?P<m>\d+)\.(?P<s>\d\d)\.(?P<ms>\d{3})\.\d{3} [IWED] ")
_DECODE = re.compile(
    r"(?:gen throughput \(token/s\): |(?<!prompt )eval time = [^\n]{0,120}?, +)(?P<tps>[\d.]+)"
)


@dataclass(frozen=True)
class _Failure:
    state: EngineState
    log: str
    reason: str
    message: str = ""


def read_cases(path: Path) -> Iterator[dict[str, Any]]:
    """The cases of a JSON Lines file, in order. Raises UsageProblem naming the line."""
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        if not line.strip():
            continue
        try:
            case = json.loads(line)
        except json.JSONDecodeError as error:
            raise UsageProblem(f"{path.name}, line {number}: not JSON.", hint="One case per line.") from error
        if not isinstance(case, dict) or "log" not in case or "phase" not in case:
            raise UsageProblem(f"{path.name}, line {number}: not a case.", hint="It needs `phase` and `log`.")
        yield case


def classify_case(case: Mapping[str, Any]) -> tuple[Outcome, Evidence]:
    """The outcome of one labelled case.

    A label says what happened, where the classifier says what it means: a kill that says nothing of the
    candidate (`infra`) is labelled `host_oom_killed`, a stop that someone asked for at a deadline
    (`aborted`) `timeout_client`.
    """
    engine = load_engine(_ENGINES.get(str(case.get("engine")), str(case.get("engine"))))
    outcome, proof = _boot(engine, case) if case["phase"] == "boot" else _probe(engine, case)
    if outcome is Outcome.INFRA and (
        proof.facts.get("whole_machine") or proof.facts.get("killed_for_memory")
    ):
        return Outcome.HOST_OOM_KILLED, proof
    return (Outcome.TIMEOUT_CLIENT if outcome is Outcome.ABORTED else outcome), proof


def _state(case: Mapping[str, Any]) -> EngineState:
    context = case.get("context") or {}
    return EngineState(
        running=bool(context.get("container_running", case.get("exit_code") is None)),
        exit_code=case.get("exit_code"),
        oom_killed=bool(case.get("oom_killed")),
        stopped_by_us=bool(context.get("stop_requested")),
    )


def _boot(engine: EngineDescription, case: Mapping[str, Any]) -> tuple[Outcome, Evidence]:
    context = case.get("context") or {}
    state = _state(case)
    if case.get("http_status") == 200 and state.running:
        return classify_ready(
            engine, case["log"], wants_gpu=engine.needs_gpu or bool(context.get("gpu_expected"))
        )
    elapsed, limit = context.get("elapsed_s"), context.get("boot_timeout_s")
    late = elapsed is not None and limit is not None and elapsed >= limit
    silent = late and limit is not None and context.get("silence_s", 0) > 0.5 * limit
    reason = "silence" if silent else "deadline" if late else "exited"
    return classify_boot(engine, _Failure(state, case["log"], reason), others_hold_memory=True)


def _probe(engine: EngineDescription, case: Mapping[str, Any]) -> tuple[Outcome, Evidence]:
    context = case.get("context") or {}
    body = case.get("http_body") or ""
    text, error = _answer(body)
    silent = _silent(engine, case)
    outcome, proof = classify_probe(
        engine,
        http_status=case.get("http_status"),
        http_body=body,
        stream_error=error if case.get("http_status") == 200 else None,
        client_error=context.get("client_error"),
        state=_state(case),
        log=case["log"],
        context={"progressing": False} if silent else {},
    )
    if outcome is Outcome.PASS:
        needle = context.get("needle")
        if needle and needle.lower() not in text.lower():
            return Outcome.RECALL_FAILED, proof
        slow_after, least = context.get("slow_after_s"), context.get("min_decode_tps")
        speeds = [float(found["tps"]) for found in _DECODE.finditer(case["log"])]
        if slow_after is not None and (context.get("elapsed_s") or 0) > slow_after:
            return Outcome.SLOW, proof
        if least is not None and speeds and speeds[-1] < least:
            return Outcome.SLOW, proof
    return outcome, proof


def _silent(engine: EngineDescription, case: Mapping[str, Any]) -> bool:
    """True where the last sign of progress is long past, by the times in the log."""
    context = case.get("context") or {}
    limit = float(context.get("timeout_s") or 300)
    if float(context.get("silence_s") or 0) > 0.4 * limit:
        return True
    counters = [one.pattern for one in engine.signatures if "progress" in one.facts and one.where == "log"]
    left = [
        one.pattern for one in engine.signatures if one.id.endswith((".aborted", ".cancelled"))
    ]  # we hung up there
    times: list[float] = []
    ended: float | None = None
    moved: float | None = None
    values: set[str] = set()
    for line in case["log"].splitlines():
        if (at := _time_s(line)) is None:
            continue
        times.append(at)
        if ended is None and any(pattern.search(line) for pattern in left):
            ended = at
        for pattern in counters:
            hit = pattern.search(line)
            if hit is not None and hit["progress"] not in values:
                values.add(hit["progress"])
                moved = at
    if moved is None:
        return False
    if ended is None:
        ended = max(times[-1], times[0] + float(context.get("elapsed_s") or 0))
    return ended - moved > max(120.0, 0.4 * limit)


def _time_s(line: str) -> float | None:
    """Seconds of the day, or since the start, that open a log line."""
    found = _CLOCK.search(line[:120])
    if found is not None:
        return int(found["h"]) * 3600 + int(found["m"]) * 60 + int(found["s"])
    found = _SINCE.match(line)
    return int(found["m"]) * 60 + int(found["s"]) + int(found["ms"]) / 1000 if found is not None else None


def _answer(body: str) -> tuple[str, str | None]:
    """Text of an answer (streamed or not) and the error inside it, if any."""
    chunks = [line[5:].strip() for line in body.splitlines() if line.startswith("data:")] or [body]
    text, error = [], None
    for chunk in chunks:
        try:
            data = json.loads(chunk)
        except json.JSONDecodeError:
            continue
        if not isinstance(data, dict):
            continue
        if data.get("error"):
            error = chunk
        for choice in data.get("choices") or ():
            part = choice.get("message") or choice.get("delta") or choice
            text += [part.get(key) or "" for key in ("content", "reasoning_content", "reasoning", "text")]
    return "".join(text), error
