"""What a person sees while a study runs: one live view on a terminal, one plain line per event elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import Any

from llm_bisect.cli.diagnostics import note
from llm_bisect.journal import events as kinds
from llm_bisect.journal.state import State
from llm_bisect.journal.store import Event
from llm_bisect.model import MemorySample, Progress
from llm_bisect.reports.words import duration, message_of, plural, values_text
from llm_bisect.search.ceiling import bracket_text, length_text, line_of
from llm_bisect.search.foresee import forecast
from llm_bisect.search.observe import candidate
from llm_bisect.search.plan import Ask, Plan

HEARTBEAT_S = 60.0
REDRAW_S = 0.25
_TOLD = ("probe", "boot", "outcome", "purpose", "prompt_tokens", "why", "status", "wall_s")


def make_reporter(plan: Plan, *, simulated: bool, quiet_live: bool) -> PlainReporter:
    """The live view where standard error is a terminal, plain lines elsewhere."""
    interactive = sys.stderr.isatty() and not quiet_live and not os.environ.get("CI")
    return LiveReporter(plan, simulated) if interactive else PlainReporter(plan, simulated)


class PlainReporter:
    """One line per event on standard error, and one a minute while a probe runs."""

    def __init__(self, plan: Plan, simulated: bool) -> None:
        self.plan = plan
        self.mark = "[simulated] " if simulated else ""
        self._beat_at_s = time.monotonic()
        self.state = State()

    def line(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # a closed terminal does not end a study
            print(f"{self.mark}{text}", file=sys.stderr, flush=True)

    def notice(self, text: str) -> None:
        self.line(text)

    def event(self, event: Event, state: State) -> None:
        self.state = state
        note(event.kind, seq=event.seq, **{k: event.body[k] for k in _TOLD if k in event.body})
        if text := event_line(event, state, self.plan):
            self.line(text)
        self._beat_at_s = time.monotonic()

    def progress(self, ask: Ask, elapsed_s: float, progress: Progress, memory: MemorySample | None) -> None:
        if time.monotonic() - self._beat_at_s >= HEARTBEAT_S:
            self._beat_at_s = time.monotonic()
            self.line(progress_text(self.plan, ask, elapsed_s, progress, memory))

    def close(self) -> None: ...


class LiveReporter(PlainReporter):
    """Past events scroll by; below them the bracket, the running probe, and the time left."""

    def __init__(self, plan: Plan, simulated: bool) -> None:
        super().__init__(plan, simulated)
        from rich.console import Console
        from rich.live import Live

        self._console = Console(stderr=True, highlight=False)
        self._live = Live(console=self._console, refresh_per_second=4, transient=True)
        self._live.start()
        self._left = ""
        self._drawn_at_s = 0.0

    def line(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._console.print(f"{self.mark}{text}", markup=False)

    def event(self, event: Event, state: State) -> None:
        super().event(event, state)
        if event.kind in (kinds.PROBE_FINISHED, kinds.STUDY_RESUMED, kinds.FINGERPRINT):
            left = forecast(state, self.plan)
            self._left = (
                f"about {plural(round(left.probes), 'probe')}, {duration(left.expected_s)} left"
                if round(left.probes)
                else "nothing is left to ask"
            )
        self._draw(f"{what_now(event, state)}")

    def progress(self, ask: Ask, elapsed_s: float, progress: Progress, memory: MemorySample | None) -> None:
        if time.monotonic() - self._drawn_at_s >= REDRAW_S:
            self._draw(progress_text(self.plan, ask, elapsed_s, progress, memory))

    def _draw(self, now: str) -> None:
        from rich.text import Text

        self._drawn_at_s = time.monotonic()
        boots, probes = len(self.state.boots), len(self.state.trials)
        spent = f"{plural(boots, 'boot')}, {plural(probes, 'probe')}, {duration(self.state.seconds)}"
        rows = [f"  {where(self.state, self.plan)}", f"  {now}", f"  {spent} spent; {self._left}"]
        with contextlib.suppress(OSError, ValueError):
            self._live.update(Text("\n".join(rows)))

    def close(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._live.stop()


def where(state: State, plan: Plan) -> str:
    """The bracket at hand."""
    if not state.opened:
        return "nothing is known yet"
    if plan.kind == "ordered":
        line = line_of(state, plan)
        text = f"{plan.axis}: {bracket_text(line)}"
        if line.recommended is not None:
            chosen = line.candidates[line.recommended]
            text += (
                f"; longest prompt at {line.points[line.recommended]}: {length_text(chosen.lengths(plan))}"
            )
        return text
    found = [plan.own_values] if plan.kind == "prompt" else [plan.values_at(p) for p in plan.points]
    texts = []
    for values in found:
        label = f"{values[plan.axis]}: " if plan.axis in values else ""
        texts.append(label + length_text(candidate(state, values).lengths(plan)))
    return f"{plan.axis}: " + " · ".join(texts)


def what_now(event: Event, state: State) -> str:
    """What happens next, in a few words."""
    if event.kind == kinds.BOOT_STARTED:
        return f"booting {event.body['boot']} with {values_text(event.body['values'])}"
    if state.pending is not None:
        return f"{state.pending.probe}: {state.pending.prompt_tokens:,} tokens"
    return "deciding"


def event_line(event: Event, state: State, plan: Plan) -> str | None:
    """One line for an event, or None where it has nothing to tell."""
    body = event.body
    match event.kind:
        case kinds.STUDY_OPENED:
            return f"study {body['study']}: {plan.axis}, target {plan.target_tokens:,} tokens"
        case kinds.STUDY_RESUMED:
            found = "; ".join(body["found"])
            return "study continued" + (f": {found}" if found else "")
        case kinds.PROBE_ASKED:
            what = f"{body['prompt_tokens']:,} tokens at {values_text(body['values'])}"
            return f"{body['probe']} asks {what}: {body['reason']}"
        case kinds.BOOT_FINISHED:
            return _boot_line(body)
        case kinds.PROBE_FINISHED if state.trials:
            return _probe_line(body, state)
        case kinds.CONTRADICTION_SEEN:
            return f"contradiction: {body['text']}"
        case kinds.PROBE_LOST:
            return None  # told with `study continued`
        case kinds.REVERIFY:
            return f"both ends are checked again: {'; '.join(body['differences'])}"
        case kinds.STUDY_PAUSED:
            return f"paused ({body['status']}): {body['why']}"
    return None


def _boot_line(body: Any) -> str:
    if body["outcome"] != "pass":
        facts = body.get("evidence", {}).get("facts", {})
        estimate = facts.get("estimated_max_model_len")
        fits = f"; the engine estimates {estimate:,.0f} tokens" if isinstance(estimate, int | float) else ""
        lines = body.get("evidence", {}).get("lines") or [""]
        return (
            f"{body['boot']} {body['outcome']} after {duration(body['wall_s'])}{fits}: {message_of(lines[0])}"
        )
    facts = body.get("facts", {})
    parts = [f"{body['boot']} ready in {duration(body['wall_s'])}"]
    if "kv_cache_gib" in facts:
        parts.append(f"KV pool {facts['kv_cache_gib']} GiB")
    if "context_tokens" in facts:
        parts.append(f"context {facts['context_tokens']:,}")
    if body.get("free_mib") is not None:
        parts.append(f"{body['free_mib']:,.0f} MiB free")
    return ", ".join(parts)


def _probe_line(body: Any, state: State) -> str:
    trial = state.trials[-1]
    parts = [f"{body['probe']} {body['outcome']}: {trial.prompt_tokens:,} tokens"]
    if trial.wall_s:
        parts.append(duration(trial.wall_s))
    if trial.min_free_mib is not None:
        parts.append(f"lowest free {trial.min_free_mib:,.0f} MiB")
    if body["outcome"] != "pass" and trial.tokens_processed:
        parts.append(f"{trial.tokens_processed:,} tokens processed")
    evidence = body.get("evidence", {}).get("lines") or ()
    if body["outcome"] not in ("pass", "timeout_client", "aborted") and body["phase"] == "probe" and evidence:
        parts.append(message_of(evidence[0]))
    return ", ".join(parts)


def progress_text(
    plan: Plan, ask: Ask, elapsed_s: float, progress: Progress, memory: MemorySample | None
) -> str:
    """The running probe: how far, how long, how much memory."""
    done = (
        f"{progress.tokens:,} of {ask.prompt_tokens:,}"
        if progress.tokens is not None
        else f"{ask.prompt_tokens:,}"
    )
    free = f" · {memory.free_mib:,.0f} MiB free" if memory is not None else ""
    return f"{done} tokens · {duration(elapsed_s)} of at most {duration(plan.deadline_s)}{free}"
