"""The driver: asks the policy, boots, probes, and appends what happened. It holds no state of its own.

`state = fold(journal)`, `ask = policy(state)`; every event is written and synced before the side effect
that it announces, so whatever kills this process costs at most the probe in flight.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from llm_bisect.journal import events as kinds
from llm_bisect.journal.state import Boot, State, fold, values_key
from llm_bisect.journal.store import Event, Journal
from llm_bisect.model import (
    BootFacts,
    EnvironmentProblem,
    Evidence,
    Launch,
    MemorySample,
    Outcome,
    Phase,
    ProbeRequest,
    ProbeResult,
    Progress,
    Values,
)
from llm_bisect.probing.classify import boot_facts, classify_boot, classify_ready
from llm_bisect.probing.prober import Prober
from llm_bisect.runners.protocol import BootFailure, BootOrder, Engine, Runner
from llm_bisect.search.plan import Ask, Done
from llm_bisect.spaces.apply import candidate_id
from llm_bisect.spaces.profile import Profile

FIRST_PATIENCE = 2  # tries before the very first fact: somebody still sits there
PATIENCE = 6  # tries in a row later, with growing pauses
BACKOFF_S = 20.0
LONGEST_BACKOFF_S = 600.0


class Reporter(Protocol):
    """What the person sees. Called after the journal has it."""

    def event(self, event: Event, state: State) -> None: ...
    def progress(
        self, ask: Ask, elapsed_s: float, progress: Progress, memory: MemorySample | None
    ) -> None: ...
    def notice(self, text: str) -> None: ...


@dataclass(frozen=True)
class Budget:
    """Limits of this run. `limit_s` counts on the runner's clock from the start of the run."""

    max_boots: int | None = None
    limit_s: float | None = None

    def spent(self, boots: int, elapsed_s: float, next_p90_s: float) -> str | None:
        """Why no further probe may start, or None. No probe starts whose 90th percentile ends later."""
        if self.max_boots is not None and boots >= self.max_boots:
            return f"{boots} of {self.max_boots} boots spent"
        if self.limit_s is not None and elapsed_s + next_p90_s > self.limit_s:
            left_min = max(0.0, self.limit_s - elapsed_s) / 60
            return f"{left_min:.0f} min are left and the next probe may take {next_p90_s / 60:.0f}"
        return None


@dataclass
class Driver:
    """One run of a study, until it is answered, paused or stopped."""

    study: str
    profile: Profile
    journal: Journal
    runner: Runner
    prober: Prober
    policy: Callable[[State], Ask | Done]
    resolve: Callable[[Values], Launch]
    served: Callable[[Engine], Mapping[str, Any]]  # what a ready engine says of itself
    next_p90_s: Callable[[State, Ask], float]
    contradictions: Callable[[State], list[dict[str, Any]]]
    check_room: Callable[[], None]  # raises EnvironmentProblem where the disk is full
    reporter: Reporter
    stop: threading.Event
    budget: Budget = field(default_factory=Budget)
    gpus: tuple[str, ...] = ()
    allow_pull: bool = False
    engine: Engine | None = None  # adopted from a crashed run, or None
    state: State = field(default_factory=State)

    def __post_init__(self) -> None:
        self.state = fold(self.journal.events)
        self._boots_before = len(self.state.boots)
        self._events_before = len(self.journal.events)
        self._started_s = self.runner.clock.now_s()

    def open_with(self, opening: Mapping[str, Any] | None, fingerprint: Mapping[str, str]) -> None:
        """Write the first events of a new study."""
        if opening is not None:
            self._append(kinds.STUDY_OPENED, opening)
        self._append(kinds.FINGERPRINT, {"items": dict(fingerprint)})

    def reverify(self, differences: list[str], fingerprint: Mapping[str, str]) -> None:
        """From here on the older observations are hints only."""
        self._append(kinds.REVERIFY, {"why": "the environment changed", "differences": differences})
        self._append(kinds.FINGERPRINT, {"items": dict(fingerprint)})

    def take_up(self) -> None:
        """Go on after a pause or a crash: a probe in flight is lost, its boot is adopted or reaped."""
        if self.state.closed is not None:
            return
        found: list[str] = []
        if (pending := self.state.pending) is not None:
            self._append(kinds.PROBE_LOST, {"probe": pending.probe, "why": "bisect ended in mid-probe"})
            found.append(f"probe {pending.probe} was lost and is asked again")
        live = self.state.live_boot
        self.engine = self.runner.adopt(self.study, live.id if live else None)
        if live is not None and self.engine is None:
            self._append(kinds.BOOT_ENDED, {"boot": live.id, "why": "it did not outlive bisect"})
            found.append(f"boot {live.id} is gone")
        elif live is not None:
            found.append(f"boot {live.id} still lives and is used")
        self._append(kinds.STUDY_RESUMED, {"found": found})

    def run(self) -> State:
        """Work until the study ends or pauses. Always leaves no engine of ours behind.

        Raises EnvironmentProblem where the machine cannot even give the first fact.
        """
        try:
            while True:
                step = self.policy(self.state)
                if isinstance(step, Done):
                    self._end_boot("the study is answered")
                    self._append(kinds.STUDY_CLOSED, {"status": step.status, "why": step.why})
                    return self.state
                if pause := self._why_pause(step):
                    status, why = pause
                    self._end_boot(why)
                    self._append(kinds.STUDY_PAUSED, {"status": status, "why": why})
                    return self.state
                self._carry_out(step)
                self._note_contradictions()
                self._wait_out_trouble()
        finally:
            if self.engine is not None:
                self.engine.stop()
                self.engine = None

    def _why_pause(self, ask: Ask) -> tuple[str, str] | None:
        if self.stop.is_set():
            return "interrupted", "stopped on request"
        boots = len(self.state.boots) - self._boots_before
        needs_boot = self._usable_boot(ask) is None
        spent = self.budget.spent(
            boots if needs_boot else -1,
            self.runner.clock.now_s() - self._started_s,
            self.next_p90_s(self.state, ask) if self.budget.limit_s is not None else 0.0,
        )
        if spent:
            return "budget-spent", spent
        patience = PATIENCE if self.state.observations else FIRST_PATIENCE
        if self.state.trouble_in_a_row >= patience and not self._is_fresh_run:
            return "environment", self._latest_trouble()
        return None

    @property
    def _is_fresh_run(self) -> bool:
        """True until this run has finished a trial: trouble of an earlier run does not count against it."""
        return not any(e.kind == kinds.PROBE_FINISHED for e in self.journal.events[self._events_before :])

    def _latest_trouble(self) -> str:
        last = self.state.trials[-1]
        lines = last.body.get("evidence", {}).get("lines") or ()
        return f"{last.outcome}: {lines[0]}" if lines else f"{last.outcome} again and again"

    def _wait_out_trouble(self) -> None:
        """Trouble that may pass is waited out with growing pauses; a bracket never moves by it."""
        n = self.state.trouble_in_a_row
        if n == 0 or self.stop.is_set() or self.state.trials[-1].outcome is not Outcome.INFRA:
            return
        if n >= (PATIENCE if self.state.observations else FIRST_PATIENCE):
            return
        pause_s = min(LONGEST_BACKOFF_S, BACKOFF_S * 2 ** (n - 1))
        self.reporter.notice(f"{self._latest_trouble()}; trying again in {pause_s:.0f} s")
        self.runner.clock.sleep(pause_s, self.stop)

    def _carry_out(self, ask: Ask) -> None:
        probe = f"p{self.state.probes_asked + 1:04d}"
        asked = {
            "probe": probe,
            "values": dict(ask.values),
            "prompt_tokens": ask.prompt_tokens,
            "purpose": ask.purpose,
            "fresh": ask.fresh,
            "reason": ask.reason,
        }
        self._append(kinds.PROBE_ASKED, asked)
        boot = self._usable_boot(ask)
        if boot is None:
            boot = self._boot(probe, ask)
        if boot is not None and self.engine is not None:
            self._probe(probe, ask, boot, self.engine)

    def _note_contradictions(self) -> None:
        for found in self.contradictions(self.state):
            if found not in self.state.contradictions:
                self._append(kinds.CONTRADICTION_SEEN, found)

    def _usable_boot(self, ask: Ask) -> Boot | None:
        """The live boot, where it may serve this ask. A fresh boot is one that has given no verdict yet."""
        boot = self.state.live_boot
        if boot is None or self.engine is None or boot.key != values_key(ask.values):
            return None
        if ask.fresh and any(t.boot == boot.id for t in self.state.trials):
            return None
        return boot if self.engine.state().running else None

    def _boot(self, probe: str, ask: Ask) -> Boot | None:
        """Boot the candidate. A boot that fails is the probe's outcome; then there is nothing to probe."""
        self._end_boot("another candidate is next" if not ask.fresh else "a fresh boot is asked")
        self.check_room()
        launch = self.resolve(ask.values)
        boot_id = f"b{len(self.state.boots) + 1:03d}"
        started = {
            "boot": boot_id,
            "probe": probe,
            "values": dict(ask.values),
            "candidate": candidate_id(launch),
        }
        self._append(kinds.BOOT_STARTED, started)
        began_s = self.runner.clock.now_s()
        order = BootOrder(
            study=self.study,
            boot=boot_id,
            launch=launch,
            log_path=self.journal.side_dir / f"{boot_id}.log",
            deadline_s=self.profile.boot_deadline_s,
            silence_s=self.profile.boot_silence_s,
            gpus=self.gpus,
            allow_pull=self.allow_pull,
        )
        try:
            self.engine = self.runner.boot(order, self.stop)
        except BootFailure as failure:
            outcome, evidence = self._why_not_ready(failure)
            facts = boot_facts(self.profile.engine, failure.log)
            self._boot_failed(probe, boot_id, outcome, evidence, facts, self.runner.clock.now_s() - began_s)
            return None
        except EnvironmentProblem as problem:
            evidence = Evidence("environment", (problem.message,))
            wall_s = self.runner.clock.now_s() - began_s
            self._boot_failed(probe, boot_id, Outcome.INFRA, evidence, BootFacts(), wall_s)
            if not self.state.observations:
                raise
            return None
        log = self.engine.log_text()
        found = boot_facts(self.profile.engine, log)
        outcome, evidence = classify_ready(self.profile.engine, log, wants_gpu=launch.wants_gpu)
        if outcome is not Outcome.PASS:  # it answers, but not as asked: on the CPU, say
            self.engine.stop()
            self.engine = None
            self._boot_failed(probe, boot_id, outcome, evidence, found, self.runner.clock.now_s() - began_s)
            return None
        memory = self.engine.memory()
        caches: Mapping[str, bool] = getattr(self.engine, "warm_caches", {})
        finished = {
            "boot": boot_id,
            "outcome": Outcome.PASS.value,
            "facts": {
                **found.facts,
                **self.served(self.engine),
                **({"caches_warm": all(caches.values())} if caches else {}),
            },
            "warnings": list(found.warnings),
            "wall_s": round(self.runner.clock.now_s() - began_s, 3),
            "free_mib": round(memory.free_mib, 1) if memory else None,
        }
        self._append(kinds.BOOT_FINISHED, finished)
        return self.state.boots[boot_id]

    def _why_not_ready(self, failure: BootFailure) -> tuple[Outcome, Evidence]:
        """What ended the boot. An engine that cannot write its log looks like one that crashed: where the
        disk is full, that is told instead."""
        try:
            self.check_room()
        except EnvironmentProblem as problem:
            return Outcome.INFRA, Evidence("disk_full", (problem.message,))
        return classify_boot(self.profile.engine, failure)

    def _boot_failed(
        self, probe: str, boot: str, outcome: Outcome, evidence: Evidence, facts: BootFacts, wall_s: float
    ) -> None:
        body = {
            "boot": boot,
            "outcome": outcome.value,
            "facts": dict(facts.facts),
            "warnings": list(facts.warnings),
            "evidence": _plain(evidence),
            "wall_s": round(wall_s, 3),
        }
        self._append(kinds.BOOT_FINISHED, body)
        self._append(
            kinds.PROBE_FINISHED,
            {
                "probe": probe,
                "boot": boot,
                "phase": Phase.BOOT.value,
                "outcome": outcome.value,
                "evidence": _plain(evidence),
            },
        )

    def _probe(self, probe: str, ask: Ask, boot: Boot, engine: Engine) -> None:
        self._append(kinds.PROBE_STARTED, {"probe": probe, "boot": boot.id})
        spec = self.profile.probe
        request = ProbeRequest(
            probe=probe,
            prompt_tokens=ask.prompt_tokens,
            shape=spec.shape,
            max_tokens=spec.max_tokens,
            deadline_s=spec.deadline_s,
            silence_s=spec.silence_s,
            slow_s=spec.slow_s,
            depths=spec.depths,
            salt=f"{self.study}/{self.state.opened.get('seed', 0)}/{probe}/{boot.id}",
        )
        began_s = self.runner.clock.now_s()

        def seen(progress: Progress, memory: MemorySample | None) -> None:
            self.reporter.progress(ask, self.runner.clock.now_s() - began_s, progress, memory)

        result = self.prober.probe(engine, request, clock=self.runner.clock, stop=self.stop, on_progress=seen)
        self._append(kinds.PROBE_FINISHED, _finished(probe, boot, ask, result))
        if not result.engine_alive:
            self._end_boot(f"the engine is gone ({result.outcome})")

    def _end_boot(self, why: str) -> None:
        """Stop the live engine; the journal says so first."""
        if (boot := self.state.live_boot) is not None:
            self._append(kinds.BOOT_ENDED, {"boot": boot.id, "why": why})
        if self.engine is not None:
            engine, self.engine = self.engine, None
            engine.stop()

    def _append(self, kind: str, body: Mapping[str, Any]) -> None:
        event = self.journal.append(kind, body)
        self.state = fold([event], self.state)
        self.reporter.event(event, self.state)


def _finished(probe: str, boot: Boot, ask: Ask, result: ProbeResult) -> dict[str, Any]:
    """The body of a finished probe."""
    body: dict[str, Any] = {
        "probe": probe,
        "boot": boot.id,
        "phase": Phase.PROBE.value,
        "outcome": result.outcome.value,
        "asked_tokens": ask.prompt_tokens,
        "evidence": _plain(result.evidence),
    }
    for key, value in asdict(result).items():
        if key not in body and value not in (None, (), [], {}):
            body[key] = round(value, 3) if isinstance(value, float) else value
    return body


def _plain(evidence: Evidence) -> dict[str, Any]:
    return {
        "rule": evidence.rule,
        "lines": list(evidence.lines),
        "facts": dict(evidence.facts),
        "considered": list(evidence.considered),
    }
