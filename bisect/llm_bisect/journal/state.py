"""The fold: from a journal's events to the state that the policies read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from llm_bisect.journal import events as kinds
from llm_bisect.model import Outcome, Phase, Values


class EventLike(Protocol):
    """What the fold needs of an event."""

    @property
    def seq(self) -> int: ...
    @property
    def kind(self) -> str: ...
    @property
    def body(self) -> Mapping[str, Any]: ...


def values_key(values: Values) -> str:
    """Canonical text of an assignment: two spellings of the same values have one key."""
    return json.dumps(dict(values), sort_keys=True, separators=(",", ":"), ensure_ascii=False)


@dataclass(frozen=True)
class Boot:
    """One start of a candidate. `outcome` is None until it is ready or has failed."""

    id: str
    key: str
    candidate: str
    outcome: Outcome | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    wall_s: float = 0.0
    free_mib: float | None = None
    ended: str | None = None  # why it ended; None while it may live

    @property
    def is_live(self) -> bool:
        return self.outcome is Outcome.PASS and self.ended is None


@dataclass(frozen=True)
class Trial:
    """One probe that was asked and has ended."""

    probe: str
    seq: int
    values: Values
    key: str
    prompt_tokens: int
    purpose: str
    reason: str
    boot: str | None
    phase: Phase
    outcome: Outcome
    min_free_mib: float | None = None
    tokens_processed: int | None = None
    wall_s: float = 0.0
    facts: Mapping[str, Any] = field(default_factory=dict)
    body: Mapping[str, Any] = field(default_factory=dict)
    amended: str | None = None  # why a person changed the outcome


@dataclass(frozen=True)
class Pending:
    """A probe that was asked and has not ended."""

    probe: str
    values: Values
    key: str
    prompt_tokens: int
    purpose: str
    reason: str
    boot: str | None = None


@dataclass(frozen=True)
class State:
    """All that a policy may know. Immutable; `fold` makes a new one per event."""

    opened: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    boots: Mapping[str, Boot] = field(default_factory=dict)
    trials: tuple[Trial, ...] = ()
    pending: Pending | None = None
    reverify_from: int = 0  # seq: observations before it are hints only
    contradictions: tuple[Mapping[str, Any], ...] = ()
    probes_asked: int = 0
    probes_lost: int = 0
    status: str | None = None  # status of the pause or the end; None while running
    why: str | None = None
    closed: Mapping[str, Any] | None = None
    last_seq: int = 0

    @property
    def observations(self) -> tuple[Trial, ...]:
        """Trials that may move a bracket: since the last re-verification, trouble left out."""
        return tuple(t for t in self.trials if t.seq > self.reverify_from and not t.outcome.is_trouble)

    @property
    def hints(self) -> tuple[Trial, ...]:
        """Trials from before the last re-verification: where to look first, never a verdict."""
        return tuple(t for t in self.trials if t.seq <= self.reverify_from and not t.outcome.is_trouble)

    @property
    def live_boot(self) -> Boot | None:
        """The boot that the journal believes to be alive."""
        return next((b for b in reversed(list(self.boots.values())) if b.is_live), None)

    @property
    def seconds(self) -> float:
        """Time spent in boots and probes so far."""
        booted = sum(boot.wall_s for boot in self.boots.values())
        return booted + sum(t.wall_s for t in self.trials if t.phase is Phase.PROBE)

    @property
    def trouble_in_a_row(self) -> int:
        """How many of the latest trials ended in trouble other than our own stop."""
        count = 0
        for trial in reversed(self.trials):
            if trial.outcome is Outcome.ABORTED:
                continue
            if not trial.outcome.is_trouble:
                break
            count += 1
        return count


def fold(events: Iterable[EventLike], state: State | None = None) -> State:
    """State after `events`, from `state` on (default: an empty one). Raises ValueError on an unknown kind."""
    state = state or State()
    for event in events:
        state = replace(_apply(state, event), last_seq=event.seq)
    return state


def _apply(state: State, event: EventLike) -> State:
    body = event.body
    match event.kind:
        case kinds.STUDY_OPENED:
            return replace(state, opened=body)
        case kinds.FINGERPRINT:
            return replace(state, fingerprint=body["items"])
        case kinds.PROBE_ASKED:
            pending = Pending(
                probe=body["probe"],
                values=body["values"],
                key=values_key(body["values"]),
                prompt_tokens=body["prompt_tokens"],
                purpose=body["purpose"],
                reason=body["reason"],
            )
            return replace(state, pending=pending, probes_asked=state.probes_asked + 1)
        case kinds.BOOT_STARTED:
            boot = Boot(id=body["boot"], key=values_key(body["values"]), candidate=body["candidate"])
            waiting = replace(state.pending, boot=boot.id) if state.pending else None
            return replace(state, boots={**state.boots, boot.id: boot}, pending=waiting)
        case kinds.BOOT_FINISHED:
            return _with_boot(
                state,
                body["boot"],
                outcome=Outcome(body["outcome"]),
                facts=body.get("facts", {}),
                warnings=tuple(body.get("warnings", ())),
                wall_s=body.get("wall_s", 0.0),
                free_mib=body.get("free_mib"),
                ended=None if body["outcome"] == Outcome.PASS else "did not become ready",
            )
        case kinds.PROBE_STARTED:
            return replace(
                state, pending=replace(state.pending, boot=body["boot"]) if state.pending else None
            )
        case kinds.PROBE_FINISHED:
            return _finish(state, event)
        case kinds.PROBE_LOST:
            return replace(state, pending=None, probes_lost=state.probes_lost + 1)
        case kinds.BOOT_ENDED:
            return _with_boot(state, body["boot"], ended=body["why"])
        case kinds.CONTRADICTION_SEEN:
            return replace(state, contradictions=(*state.contradictions, body))
        case kinds.VERDICT_AMENDED:
            outcome = Outcome(body["outcome"])
            trials = tuple(
                replace(t, outcome=outcome, amended=body["why"]) if t.probe == body["probe"] else t
                for t in state.trials
            )
            return replace(state, trials=trials, closed=None, status=None)
        case kinds.REVERIFY:
            return replace(state, reverify_from=event.seq, closed=None, status=None)
        case kinds.STUDY_PAUSED:
            return replace(state, status=body["status"], why=body.get("why"))
        case kinds.STUDY_RESUMED:
            return replace(state, status=None, why=None)
        case kinds.STUDY_CLOSED:
            return replace(state, status=body["status"], why=body.get("why"), closed=body)
    raise ValueError(f"unknown kind of event: {event.kind!r} (seq {event.seq})")


def _with_boot(state: State, boot_id: str, **changes: Any) -> State:
    boot = state.boots[boot_id]
    return replace(state, boots={**state.boots, boot_id: replace(boot, **changes)})


def _finish(state: State, event: EventLike) -> State:
    body, pending = event.body, state.pending
    if pending is None or pending.probe != body["probe"]:
        raise ValueError(f"probe {body['probe']!r} finished without having been asked (seq {event.seq})")
    boot = state.boots.get(body["boot"]) if body.get("boot") else None
    trial = Trial(
        probe=pending.probe,
        seq=event.seq,
        values=pending.values,
        key=pending.key,
        prompt_tokens=pending.prompt_tokens,
        purpose=pending.purpose,
        reason=pending.reason,
        boot=boot.id if boot else None,
        phase=Phase(body["phase"]),
        outcome=Outcome(body["outcome"]),
        min_free_mib=body.get("min_free_mib"),
        tokens_processed=body.get("tokens_processed"),
        wall_s=body.get("wall_s", 0.0),
        facts={**(boot.facts if boot else {}), **body.get("evidence", {}).get("facts", {})},
        body=body,
    )
    return replace(state, trials=(*state.trials, trial), pending=None)
