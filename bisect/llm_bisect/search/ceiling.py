"""The policy of `bisect ceiling`: the next probe, given all that has been observed.

Order of work: the user's own values first (a short probe, then the target), the bracket on the axis, the
farthest point with the margin, its confirmation on fresh boots, and the longest prompt at that point.
A confirmation is evidence like any other: one that fails moves the recommendation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llm_bisect.journal.state import State
from llm_bisect.model import AxisValue, Bound, Outcome, Trend
from llm_bisect.search.length import LengthBracket, next_length
from llm_bisect.search.line import Bracket, bracket, next_point
from llm_bisect.search.observe import Candidate, bound_of, candidate, length_hints, ordered_points
from llm_bisect.search.plan import Ask, Done, Plan

HOPELESS = frozenset({Outcome.CONFIG_ERROR, Outcome.MODEL_MISSING, Outcome.PATCH_FAILED})
"""Failures of the user's own launch that no value of the axis will mend."""


@dataclass(frozen=True)
class Line:
    """The ordered axis with its observations. Indices run from the least to the most preferred value."""

    points: tuple[AxisValue, ...]
    candidates: tuple[Candidate, ...]
    survives: Bracket  # the target prompt passes
    ships: Bracket  # … and leaves the margin
    holes: tuple[int, ...]

    @property
    def recommended(self) -> int | None:
        return self.ships.lo


def line_of(state: State, plan: Plan) -> Line:
    """The line as the observations leave it."""
    points = ordered_points(plan)
    found = tuple(candidate(state, plan.values_at(p)) for p in points)
    target = plan.target_tokens
    passes = [i for i, c in enumerate(found) if c.passes_at(target)]
    beyond: set[int] = set()
    short: set[int] = set()
    holes: set[int] = set()
    for i, c in enumerate(found):
        for failure in c.failures_at(target):
            bound = bound_of(failure)
            side = holes if bound is Bound.UNUSABLE else beyond if _is_beyond(plan, bound) else short
            side.add(i)
    safe = [i for i in passes if i not in holes]
    thin = {i for i in safe if not found[i].has_margin(target, plan.margin_mib)}
    thin_side = (beyond | thin, short) if _is_beyond(plan, Bound.MEMORY) else (beyond, short | thin)
    return Line(
        points,
        found,
        bracket(len(points), safe, beyond, short),
        bracket(len(points), [i for i in safe if i not in thin], *thin_side),
        tuple(sorted(holes)),
    )


def _is_beyond(plan: Plan, bound: Bound) -> bool:
    """True where failing this bound forbids the more preferred values, too (the default where no order is
    known: the safe side)."""
    trend = plan.trends.get(bound, Trend.UNKNOWN)
    if trend is Trend.FALLS:
        return plan.prefer == "high"
    if trend is Trend.RISES:
        return plan.prefer == "low"
    return True


def decide(state: State, plan: Plan) -> Ask | Done:
    """The next probe, or the end. Pure: the same state always gives the same answer."""
    if ask := _repeat(state, plan):
        return ask
    own = candidate(state, plan.own_values)
    if first := _first_fact(own, plan):
        return first
    if (failure := own.boot_failure) and failure.outcome in HOPELESS and not own.passes:
        return Done("no-feasible-point", f"your own values do not boot ({failure.outcome})")
    if plan.kind == "prompt":
        return _decide_prompt(state, plan, own)
    if plan.kind == "choices":
        return _decide_choices(state, plan)
    return _decide_ordered(state, plan)


def _repeat(state: State, plan: Plan) -> Ask | None:
    """A single crash or hang is asked again on a fresh boot before it means anything."""
    for trial in reversed(state.observations):
        again = candidate(state, trial.values).unrepeated
        if again is not None:
            reason = f"{again.outcome} once: asked again on a fresh boot before it counts"
            return Ask(again.values, again.prompt_tokens, "repeat", reason, fresh=True)
    return None


def _first_fact(own: Candidate, plan: Plan) -> Ask | None:
    """The user's own values: a short probe for a first fact within minutes, then the target."""
    start = min(plan.start_tokens, plan.target_tokens)
    if not own.trials:
        return Ask(own.values, start, "first", "your own values, a short prompt: the first fact")
    cap = own.context_tokens(plan)
    if plan.kind == "prompt" and cap is not None and cap < plan.target_tokens:
        return None  # the target does not fit: the search below begins with what does
    judged = own.passes_at(plan.target_tokens) or own.failures_at(plan.target_tokens)
    if not judged:
        return Ask(own.values, plan.target_tokens, "target", "your own values, the target prompt")
    return None


def _decide_ordered(state: State, plan: Plan) -> Ask | Done:
    line = line_of(state, plan)
    survives, ships = line.survives, line.ships

    def ask(i: int, purpose: str, reason: str, fresh: bool = False) -> Ask:
        return Ask(plan.values_at(line.points[i]), plan.target_tokens, purpose, reason, fresh)

    if (i := next_point(survives, line.holes)) is not None:
        hint = _admission_hint(state, plan, line)
        if hint is not None:
            return ask(hint, "hint", "the engine's own admission estimate, tried as a hint")
        return ask(i, "search", f"halves what is open: {bracket_text(line)}")
    if survives.lo is None:
        return Done("no-feasible-point", "no value of the axis passes the target prompt")
    wanted = Bracket(ships.lo, min(ships.hi, survives.lo + 1), ships.floor)
    if (i := next_point(wanted, line.holes)) is not None:
        return ask(i, "margin", f"passes, but is the margin of {plan.margin_mib:.0f} MiB kept?")
    best = line.recommended
    if best is None:
        return Done("answered", f"no value keeps the margin of {plan.margin_mib:.0f} MiB")
    chosen = line.candidates[best]
    done = chosen.boots_passed(plan.target_tokens)
    if done < plan.confirm:
        return ask(
            best, "confirm", f"confirmation on a fresh boot ({done + 1} of {plan.confirm})", fresh=True
        )
    return _longest_prompt(plan, chosen, _remembered(state, chosen)) or Done("answered")


def _admission_hint(state: State, plan: Plan, line: Line) -> int | None:
    """The farthest point that the engine's estimate admits, where that point is still open."""
    if plan.axis != "max-model-len":
        return None
    estimates = [
        float(t.facts["estimated_max_model_len"])
        for t in state.observations
        if t.outcome is Outcome.ADMISSION_REJECTED and "estimated_max_model_len" in t.facts
    ]
    start = line.survives.floor if line.survives.lo is None else line.survives.lo
    for estimate in reversed(estimates):
        admitted = [i for i, p in enumerate(line.points) if isinstance(p, int | float) and p <= estimate]
        i = max(admitted, default=-1)
        if start < i < line.survives.hi and i not in line.holes:
            return i
    return None


def _decide_choices(state: State, plan: Plan) -> Ask | Done:
    """Every choice with its longest prompt; no order is assumed."""
    found = [candidate(state, plan.values_at(p)) for p in plan.points]
    for c in found:
        if ask := _longest_prompt(plan, c, _remembered(state, c)):
            return ask
    best = best_choice(found, plan)
    if best is None:
        if not any(c.passes for c in found):
            return Done("no-feasible-point", "no choice passes any prompt")
        return Done("answered", "no choice passes the target prompt with the margin")
    done = best.boots_passed(plan.target_tokens)
    if done < plan.confirm:
        reason = f"confirmation on a fresh boot ({done + 1} of {plan.confirm})"
        return Ask(best.values, plan.target_tokens, "confirm", reason, fresh=True)
    return Done("answered")


def best_choice(found: list[Candidate], plan: Plan) -> Candidate | None:
    """The choice with the longest prompt among those that pass the target with the margin; ties go to the
    one with more free memory, then to the first."""
    target = plan.target_tokens
    fit = [
        c
        for c in found
        if c.passes_at(target) and not c.failures_at(target) and c.has_margin(target, plan.margin_mib)
    ]
    return max(fit, key=lambda c: (c.lengths(plan).lo or 0, c.min_free_mib(target) or 0.0), default=None)


def _decide_prompt(state: State, plan: Plan, own: Candidate) -> Ask | Done:
    remembered = _remembered(state, own)
    if ask := _longest_prompt(plan, own, remembered):
        return ask
    if not own.passes:
        why = own.boot_failure.outcome if own.boot_failure else "even the shortest prompt fails"
        return Done("no-feasible-point", str(why))
    if own.boot_failure is not None:
        return Done("answered", f"a later boot of the same values failed ({own.boot_failure.outcome})")
    wanted = own.lengths(plan, plan.margin_mib)
    if not wanted.is_closed(plan.slack_tokens(wanted.lo or 0)):
        tokens, _ = next_length(wanted, plan.target_tokens, plan.slack_tokens(wanted.lo or 0))
        reason = f"longest prompt that keeps the margin of {plan.margin_mib:.0f} MiB"
        return Ask(own.values, tokens, "margin", reason, fresh=True)
    if wanted.lo is None:
        mixed = own.lengths(plan).lo is None
        why = (
            "passes and failures mix at every length: boots or probes of these values differ"
            if mixed
            else f"no prompt keeps the margin of {plan.margin_mib:.0f} MiB"
        )
        return Done("answered", why)
    done = own.boots_passed(wanted.lo)
    if done < plan.confirm:
        reason = f"confirmation of {wanted.lo:,} tokens on a fresh boot ({done + 1} of {plan.confirm})"
        return Ask(own.values, wanted.lo, "confirm", reason, fresh=True)
    return Done("answered")


def _longest_prompt(plan: Plan, c: Candidate, remembered: tuple[int, ...]) -> Ask | None:
    """The next probe towards the candidate's longest prompt, or None when that bracket is closed."""
    if c.boot_failure is not None:
        return None
    b = c.lengths(plan)
    slack = plan.slack_tokens(b.lo or 0)
    if b.is_closed(slack):
        return None
    hints = length_hints(c, plan, b, remembered)
    tokens, by_hint = next_length(b, plan.target_tokens, slack, hints)
    if by_hint:
        return Ask(c.values, tokens, "hint", "where a failing probe had come to, tried as a hint")
    return Ask(c.values, tokens, "length", f"longest prompt: {length_text(b)}")


def _remembered(state: State, c: Candidate) -> tuple[int, ...]:
    """After a re-verification: the old ends of the bracket, as hints."""
    old = Candidate(c.values, tuple(t for t in state.hints if dict(t.values) == dict(c.values)))
    passed = max((t.prompt_tokens for t in old.passes), default=0)
    failed = min((t.prompt_tokens for t in old.failures if t.prompt_tokens > passed), default=0)
    return tuple(n for n in (passed, failed) if n)


def bracket_text(line: Line) -> str:
    """The bracket in words, such as "0.93 passes, 0.955 fails"."""
    b = line.survives
    low = f"{line.points[b.lo]} passes" if b.lo is not None else "no pass yet"
    if b.lo is None and b.floor >= 0:
        low = f"{line.points[b.floor]} is too low"
    high = f"{line.points[b.hi]} fails" if b.hi < len(line.points) else "no failure yet"
    return f"{low}, {high}"


def length_text(b: LengthBracket) -> str:
    """The prompt bracket in words, such as "60,000 passes, 90,000 fails"."""
    low = f"{b.lo:,} passes" if b.lo is not None else "no pass yet"
    if b.hi is None:
        return f"{low}, no failure yet" + (f" (at most {b.cap:,})" if b.cap else "")
    return f"{low}, {b.hi:,} fails"


def contradictions(state: State, plan: Plan) -> list[dict[str, Any]]:
    """What cannot all be true: a pass beyond a failure on one line, an engine's estimate below a pass."""
    if plan.kind != "ordered":
        return []
    line = line_of(state, plan)
    found: list[dict[str, Any]] = []
    if line.survives.crossed is not None:
        fails, passes = line.survives.crossed
        text = (
            f"{plan.axis} {line.points[passes]} passed although {line.points[fails]} failed: the axis is not "
            f"monotone here, or boots differ; only the safe side is used"
        )
        found.append({"text": text, "kind": "non_monotone"})
    if plan.axis == "max-model-len" and line.survives.lo is not None:
        passed = line.points[line.survives.lo]
        for trial in state.observations:
            estimate = trial.facts.get("estimated_max_model_len")
            if trial.outcome is not Outcome.ADMISSION_REJECTED or not isinstance(estimate, int | float):
                continue
            if isinstance(passed, int | float) and passed > estimate:
                text = (
                    f"the engine refused {plan.axis} {trial.values.get(plan.axis)} and estimates that "
                    f"at most {estimate:,.0f} fits, but {passed:,} was booted and served the target prompt: "
                    "the estimate is not believed"
                )
                found.append({"text": text, "kind": "estimate", "probe": trial.probe})
    return found
