"""What happened: the classifier of boots and probes.

Order of decision: the log is cut to the last start; what the container daemon said; the HTTP verdict; the
state of the kernel and the container; the earliest root cause of all processes (echoes never decide);
and, where the engine lives but did not answer, whether it progressed. The signatures themselves are data
(`runners/*.yml`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from llm_bisect.model import EngineState, Evidence, Outcome, Phase
from llm_bisect.model.evidence import Fact
from llm_bisect.probing.facts import boot_facts
from llm_bisect.probing.logs import (
    GENERIC,
    Log,
    Match,
    evidence,
    find,
    has_engine_line,
    is_ours,
    prepare,
    without_recovered,
)
from llm_bisect.spaces.engines import EngineDescription

__all__ = ["FailedBoot", "boot_facts", "classify_boot", "classify_probe", "classify_ready"]

_BODY_CHARS = 20_000
_NEARLY_ALL = 0.9  # of the card's memory free: nobody else holds a share that could explain a refusal
_SIGNALS = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 11: "SIGSEGV", 15: "SIGTERM"}
_OOM = {Phase.BOOT: Outcome.OOM_BOOT, Phase.PROBE: Outcome.OOM_PROBE}


class FailedBoot(Protocol):
    """What is read of a failed boot (runners.BootFailure has these)."""

    @property
    def state(self) -> EngineState: ...

    @property
    def log(self) -> str: ...

    @property
    def reason(self) -> str:
        """exited | deadline | silence | start | aborted"""
        ...

    @property
    def message(self) -> str: ...


@dataclass(frozen=True)
class _Reading:
    """A log and what was found in it."""

    log: Log
    roots: list[Match]
    echoes: list[Match]
    daemon: list[Match]
    host: list[Match]
    signs: list[Match]  # of life and of standstill, recovered or not

    @property
    def considered(self) -> list[str]:
        return [match.signature.id for match in (*self.roots, *self.echoes, *self.host)]


def classify_boot(
    engine: EngineDescription, failure: FailedBoot, *, others_hold_memory: bool | None = None
) -> tuple[Outcome, Evidence]:
    """Why a boot failed.

    others_hold_memory: another process holds accelerator memory, or the baseline rose (None: not known).
    It decides what a refusal to take memory means: `infra`, or `oom_boot` with the fact
    `above_machine_limit` (this machine has less than the value asks for).
    """
    if failure.reason == "aborted":
        return Outcome.ABORTED, evidence("aborted", [failure.message])
    said = "\n".join(part for part in (failure.message, failure.state.error) if part)
    reading = _read(engine, failure.log, Phase.BOOT, said)
    if reading.daemon:
        first = min(reading.daemon, key=lambda match: match.rank)
        return first.signature.outcome, _from(first, reading)
    killed = _killed_by_kernel(failure.state, reading)
    if killed is not None:
        return killed
    if reading.roots:
        return _decide(reading, Phase.BOOT, others_hold_memory)
    lines = [*said.splitlines()[-4:], *reading.log.tail(6)]
    if failure.reason == "start":
        return Outcome.INFRA, evidence("could_not_be_started", lines)
    if failure.reason in ("deadline", "silence"):
        moving = failure.reason == "deadline" and _progressed(reading)
        outcome = Outcome.TIMEOUT_CLIENT if moving else Outcome.HANG
        rule = "boot_deadline_while_progressing" if moving else f"boot_{failure.reason}_without_progress"
        return outcome, evidence(rule, lines, considered=reading.considered)
    return _from_exit(failure.state, reading, lines)


def classify_ready(engine: EngineDescription, log: str, *, wants_gpu: bool) -> tuple[Outcome, Evidence]:
    """A boot that answers its health check: `pass`, or `infra` where a GPU was wanted and is not used."""
    if wants_gpu:
        ready, start = prepare(engine, log)
        lost = [
            match
            for match in find(engine, ready, phase=Phase.BOOT, where=("log",))
            if match.signature.outcome is Outcome.INFRA and match.line_number >= start
        ]
        if lost:
            return Outcome.INFRA, evidence(
                lost[0].signature.id, [match.line for match in lost], lost[0].facts
            )
    return Outcome.PASS, evidence("ready")


def classify_probe(
    engine: EngineDescription,
    *,
    http_status: int | None,
    http_body: str,
    stream_error: str | None,
    client_error: str | None,
    state: EngineState,
    log: str,
    context: Mapping[str, object] | None = None,
) -> tuple[Outcome, Evidence]:
    """What one request's end means, recall and speed apart.

    client_error: timeout (the deadline passed) | silence | connection_reset | empty_reply | refused |
    garbage | aborted. context: `progressing` (bool: counters moved lately; without it the log is asked).
    """
    context = context or {}
    if client_error == "aborted":
        return Outcome.ABORTED, evidence("aborted")
    if http_status == 200 and stream_error is None and client_error is None:
        return Outcome.PASS, evidence("answered")
    body = http_body[:_BODY_CHARS] if stream_error is None else stream_error[:_BODY_CHARS]
    answer = _http_verdict(engine, http_status, body)
    if answer is not None:
        return answer
    reading = _read(engine, log, Phase.PROBE, state.error)
    killed = _killed_by_kernel(state, reading)
    if killed is not None:
        return killed
    if reading.roots:
        return _decide(reading, Phase.PROBE, None)
    lines = [*body.strip().splitlines()[-2:], *reading.log.tail(6)]
    if not state.running:
        return _from_exit(state, reading, lines)
    if client_error in ("timeout", "silence"):
        known = context.get("progressing")
        moving = known if isinstance(known, bool) else _progressed(reading)
        if client_error == "silence":
            moving = False
        rule = "deadline_while_progressing" if moving else "no_progress"
        outcome = Outcome.TIMEOUT_CLIENT if moving else Outcome.HANG
        return outcome, evidence(rule, lines, considered=reading.considered)
    stuck = any(match.signature.outcome is Outcome.HANG for match in reading.echoes)
    if stuck or http_status == 503:
        return Outcome.HANG, evidence("unhealthy_engine_alive", lines, considered=reading.considered)
    rule = reading.echoes[0].signature.id if reading.echoes else "request_failed_engine_alive"
    return Outcome.ENGINE_CRASHED, evidence(rule, lines, considered=reading.considered)


def _read(engine: EngineDescription, text: str, phase: Phase, said: str) -> _Reading:
    log, start = prepare(engine, text)
    matches = find(engine, log, phase=phase, where=("log", "host"))
    host = [match for match in matches if match.signature.where == "host"]
    killers = {id(match) for match in host if match.signature.outcome is Outcome.HOST_OOM_KILLED}
    causes = without_recovered([match for match in matches if id(match) not in killers])
    # before the last start only a patch can have failed; all else belongs to a former run
    causes = [
        match
        for match in causes
        if (match.line_number >= start or match.signature.outcome is Outcome.PATCH_FAILED)
        and not is_ours(match.line)
    ]
    daemon: list[Match] = []
    if phase is Phase.BOOT:
        spoken, _ = prepare(engine, said)
        daemon = find(engine, spoken, phase=phase, where=("daemon",)) if said else []
        if not daemon and not causes and not has_engine_line(engine, log):
            daemon = find(engine, log, phase=phase, where=("daemon",))
            matches += [match for match in daemon if match.signature.echo]
        daemon = [match for match in daemon if not match.signature.echo]
    return _Reading(
        log=log,
        roots=[match for match in causes if not match.signature.echo],
        echoes=[match for match in causes if match.signature.echo],
        daemon=daemon,
        host=host,
        signs=[match for match in matches if match.line_number >= start and _is_sign(match)],
    )


def _is_sign(match: Match) -> bool:
    return match.signature.echo and (
        match.signature.outcome in (Outcome.TIMEOUT_CLIENT, Outcome.HANG)
        or (match.signature.outcome is Outcome.PASS and match.signature.phase is Phase.PROBE)
    )


def _http_verdict(
    engine: EngineDescription, status: int | None, body: str
) -> tuple[Outcome, Evidence] | None:
    if status is None:
        return None
    facts: dict[str, Fact] = {}
    verdict = None
    for signature in engine.signatures:
        hit = signature.pattern.search(body) if signature.where == "http" else None
        if hit is None:
            continue
        for name in signature.facts:
            if hit.group(name) is not None and name not in facts:
                facts[name] = int(hit.group(name)) if hit.group(name).isdigit() else hit.group(name)
        if verdict is None and not signature.echo:
            verdict = signature
    if verdict is not None:
        return verdict.outcome, evidence(verdict.id, [body], facts)
    if status == 429:
        return Outcome.INFRA, evidence("http_429", [body])
    if 400 <= status < 500:
        return Outcome.CONFIG_ERROR, evidence(f"http_{status}", [body])
    return None


def _killed_by_kernel(state: EngineState, reading: _Reading) -> tuple[Outcome, Evidence] | None:
    """System memory ran out: our own limit is a limit of the candidate, the whole machine is trouble."""
    kills = [match for match in reading.host if match.signature.outcome is Outcome.HOST_OOM_KILLED]
    ours = [match for match in kills if match.signature.priority < 60]
    facts: dict[str, Fact] = {}
    for match in kills:
        facts = {**match.facts, **facts}
    if state.exit_code is not None:
        facts["exit_code"] = state.exit_code
    if state.oom_killed:
        lines = [
            f"state: killed for memory by its own limit, {_exit_text(state)}",
            *[match.line for match in kills],
        ]
    else:
        lines = [match.line for match in kills]
    if state.oom_killed or ours:
        rule = ours[0].signature.id if ours else "state_oom_killed"
        return Outcome.HOST_OOM_KILLED, evidence(rule, lines, facts, reading.considered)
    if kills:
        facts["whole_machine"] = True
        return Outcome.INFRA, evidence(kills[0].signature.id, lines, facts, reading.considered)
    return None


def _exit_text(state: EngineState) -> str:
    return (
        f"exit code {state.exit_code}"
        if state.exit_code is not None
        else f"status {state.status or 'unknown'}"
    )


def _decide(reading: _Reading, phase: Phase, others_hold_memory: bool | None) -> tuple[Outcome, Evidence]:
    """The earliest root cause, with the facts of all that say the same."""
    root = min(reading.roots, key=lambda match: match.rank)
    outcome = _by_phase(root.signature.outcome, phase)
    proof = _from(root, reading)
    facts: dict[str, Fact] = dict(root.facts)
    for match in reading.roots:
        if _by_phase(match.signature.outcome, phase) is outcome and match.line_number >= root.line_number:
            facts = {**match.facts, **facts}
    asked, free, total = (facts.get(f"{name}_gib") for name in ("requested", "startup_free", "startup_total"))
    if (
        outcome is Outcome.INFRA
        and asked is not None
        and isinstance(free, int | float)
        and isinstance(total, int | float)
    ):
        held = free < _NEARLY_ALL * total if others_hold_memory is None else others_hold_memory
        if not held:
            outcome = Outcome.OOM_BOOT
            facts["above_machine_limit"] = True
    if outcome is Outcome.HOST_OOM_KILLED:
        # a child was killed and nothing says that our own limit did it: no reading of the candidate
        outcome = Outcome.INFRA
        facts["killed_for_memory"] = True
    return outcome, replace(proof, facts=facts)


def _from(root: Match, reading: _Reading) -> Evidence:
    same = [match.line for match in reading.roots if match.signature.outcome is root.signature.outcome]
    echoes = [match.line for match in reading.echoes[:2]]
    considered = [one for one in reading.considered if one != root.signature.id]
    return evidence(root.signature.id, [root.line, *same[:5], *echoes], dict(root.facts), considered)


def _from_exit(state: EngineState, reading: _Reading, lines: list[str]) -> tuple[Outcome, Evidence]:
    """No cause is named: the exit status is all there is."""
    code = state.exit_code
    facts: dict[str, Fact] = {} if code is None else {"exit_code": code}
    signal = (
        -code if code is not None and code < 0 else code - 128 if code is not None and code > 128 else None
    )
    asked = state.stopped_by_us or any(match.signature.id == "h.event_stop" for match in reading.host)
    if asked and signal in (9, 15):
        return Outcome.ABORTED, evidence("stopped_on_request", lines, facts, reading.considered)
    if state.status == "removed" and not reading.echoes:
        return Outcome.INFRA, evidence("removed_by_somebody", [state.error or "the container is gone"], facts)
    if signal == 9 and not reading.echoes:
        # the kernel without our limit's mark, or someone's kill: neither says a thing of the candidate
        facts["killed_for_memory"] = True
        return Outcome.INFRA, evidence("killed_without_a_word", lines, facts, reading.considered)
    if signal in _SIGNALS:
        return Outcome.ENGINE_CRASHED, evidence(
            f"signal_{_SIGNALS[signal]}", lines, facts, reading.considered
        )
    if not reading.echoes and code == 125:
        return Outcome.INFRA, evidence("exit_125", lines, facts)
    if not reading.echoes and code in (2, 126, 127):
        return Outcome.CONFIG_ERROR, evidence(f"exit_{code}", lines, facts)
    rule = reading.echoes[0].signature.id if reading.echoes else "died_without_a_cause"
    return Outcome.ENGINE_CRASHED, evidence(rule, lines, facts, reading.considered)


def _progressed(reading: _Reading) -> bool:
    """True where the log shows that work went on: counters that differ, or a sign of life after we gave
    up."""
    signs = [match for match in reading.signs if match.signature.outcome is not Outcome.HANG]
    stuck = [match for match in reading.signs if match.signature.outcome is Outcome.HANG]
    counters = [match for match in signs if "progress" in match.facts]
    plain = [match for match in signs if "progress" not in match.facts]
    if len(counters) < 2:
        return (bool(plain) or bool(counters)) and len(stuck) < 2
    last = [match for match in counters if match.signature.id == counters[-1].signature.id][-2:]
    if len({str(match.facts["progress"]) for match in last}) > 1 or len(last) < 2:
        return not (len(stuck) >= 2 and stuck[-1].line_number > last[-1].line_number)
    # the counters stand still: only a stronger sign on their last line or after it counts
    return any(
        match.signature.priority < GENERIC and match.line_number >= last[-1].line_number for match in plain
    )


def _by_phase(outcome: Outcome, phase: Phase) -> Outcome:
    return _OOM[phase] if outcome in (Outcome.OOM_BOOT, Outcome.OOM_PROBE) else outcome
