"""Why each probe was asked, what it moved, and what each outcome means for the question: plain text."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llm_bisect.journal.state import State, Trial
from llm_bisect.model import BOUND_OF, Bound, Outcome, Phase, Trend
from llm_bisect.reports.words import duration, one_line, plural, value_text, values_text
from llm_bisect.search.ceiling import bracket_text, length_text, line_of
from llm_bisect.search.observe import NEEDS_REPEAT, candidate
from llm_bisect.search.plan import Plan

WIDTH = 100
MOST_EVIDENCE_LINES = 2


def explain_lines(state: State) -> list[str]:
    """Every probe in order, then the table of outcomes, then the command that asks it again.

    `state.opened` must not be empty.
    """
    plan = Plan.from_json(state.opened["plan"])
    lines = []
    if state.opened["simulated"]:
        lines.append("SIMULATED: a model of a rig answered; no engine and no GPU was used")
    lines += _wrap(
        f"{state.opened['study']}: how far can {plan.axis} go, target {plan.target_tokens:,} tokens, "
        f"{plural(plan.confirm, 'confirming boot')}, margin {plan.margin_mib:,.0f} MiB; "
        f"status {state.status or 'interrupted'}" + (f" ({one_line(state.why)})" if state.why else "")
    )
    for n, trial in enumerate(state.trials, 1):
        lines += ["", *_trial(state, plan, n, trial)]
    if state.pending is not None:
        p = state.pending
        lines += ["", *_wrap(f"{p.probe} {values_text(p.values)}, {p.prompt_tokens:,} tokens: not finished")]
        lines += _wrap(f"asked: {one_line(p.reason)}", "  ")
    for found in state.contradictions:
        lines += ["", *_wrap(f"contradiction: {one_line(found['text'])}")]
    lines += ["", *_wrap(f"What an outcome means for {plan.axis}:"), *outcome_table(plan)]
    lines += ["", "The same question again, as a study of its own:"]
    return [*lines, f"  {ceiling_command(state.opened)}"]


def _trial(state: State, plan: Plan, n: int, trial: Trial) -> list[str]:
    asked = f"{values_text(trial.values)}, {trial.prompt_tokens:,} tokens"
    seen = f"{trial.probe} {trial.boot or 'no boot'}: {asked}"
    what = f"{trial.outcome.value}" + (" (boot)" if trial.phase is Phase.BOOT else "")
    parts = [f"{seen}: {what}"]
    if trial.wall_s:
        parts.append(duration(trial.wall_s))
    if trial.min_free_mib is not None:
        parts.append(f"lowest free {trial.min_free_mib:,.0f} MiB")
    if trial.outcome is not Outcome.PASS and trial.tokens_processed:
        parts.append(f"{trial.tokens_processed:,} tokens processed")
    lines = _wrap(", ".join(parts))
    lines += _wrap(f"asked: {one_line(trial.reason)}", "  ")
    if trial.amended is not None:
        was = trial.body.get("outcome", "?")
        lines += _wrap(f"amended by a person, was {was}: {one_line(trial.amended)}", "  ")
    lines += [row for text in moved(state, plan, n) for row in _wrap(text, "  ")]
    evidence: Mapping[str, Any] = trial.body.get("evidence") or {}
    if evidence.get("rule"):
        others = evidence.get("considered") or ()
        told = f" (also matched, did not decide: {', '.join(map(str, others))})" if others else ""
        lines += _wrap(f"evidence: {one_line(evidence['rule'])}{told}", "  ")
    lines += [
        row
        for text in list(evidence.get("lines") or ())[:MOST_EVIDENCE_LINES]
        for row in _wrap(f"| {one_line(text)}", "    ")
    ]
    return lines


def moved(state: State, plan: Plan, n: int) -> list[str]:
    """What the n-th trial (from 1) moved: brackets before → after, or why it moved nothing."""
    trial = state.trials[n - 1]
    before, after = _prefix(state, n - 1, trial), _prefix(state, n, trial)
    found = []
    if plan.kind == "ordered":
        a, b = line_of(before, plan), line_of(after, plan)
        if bracket_text(a) != bracket_text(b):
            found.append(f"moved {plan.axis}: {bracket_text(a)} → {bracket_text(b)}")
        if new := sorted(set(b.holes) - set(a.holes)):
            found.append(f"set aside: {', '.join(value_text(b.points[i]) for i in new)} is unusable")
        if a.recommended != b.recommended:
            best = [
                value_text(x.points[x.recommended]) if x.recommended is not None else "none" for x in (a, b)
            ]
            found.append(f"moved the farthest value with the margin: {best[0]} → {best[1]}")
    own_before, own_after = candidate(before, trial.values), candidate(after, trial.values)
    lengths = [c.lengths(plan) for c in (own_before, own_after)]
    if len({(b.lo, b.hi) for b in lengths}) > 1:  # the cap may have become known as well
        told = " → ".join(length_text(b) for b in lengths)
        found.append(f"moved the longest prompt there: {told}")
    boots = [c.boots_passed(trial.prompt_tokens) for c in (own_before, own_after)]
    if boots[0] != boots[1]:
        told = plural(boots[1], "boot")
        found.append(f"{told} passed {trial.prompt_tokens:,} tokens at these values (was {boots[0]})")
    free_mib = trial.min_free_mib
    if trial.outcome is Outcome.PASS and free_mib is not None and free_mib < plan.margin_mib:
        found.append(f"passes, but {free_mib:,.0f} MiB is less than the margin of {plan.margin_mib:,.0f} MiB")
    if found:
        return found
    if trial.outcome.is_trouble:
        return ["moved nothing: it says nothing about the candidate"]
    if trial.outcome in NEEDS_REPEAT:
        return ["moved nothing yet: it counts when it is seen again on a fresh boot"]
    return ["moved nothing: it agrees with what was known"]


def _prefix(state: State, n: int, trial: Trial) -> State:
    """The state as it was after n trials; older observations count where they still did."""
    is_old = trial.seq <= state.reverify_from
    return replace(state, trials=state.trials[:n], reverify_from=0 if is_old else state.reverify_from)


def outcome_table(plan: Plan) -> list[str]:
    """What each outcome moves for this question."""
    rows = [("pass", _pass_meaning(plan))]
    for bound in Bound:
        outcomes = [o.value for o, b in BOUND_OF.items() if b is bound]
        rows.append((", ".join(outcomes), f"{bound.value}: {_meaning(plan, bound)}"))
    rows.append(
        (", ".join(o.value for o in Outcome if o.is_trouble), "nothing: asked again, or the study pauses")
    )
    lines: list[str] = []
    for names, meaning in rows:
        lines += textwrap.wrap(f"{names}: {meaning}", WIDTH, initial_indent="  ", subsequent_indent="      ")
    twice = " and ".join(sorted(o.value for o in NEEDS_REPEAT))
    return [*lines, f"  ({twice} count when seen twice, on fresh boots)"]


def _pass_meaning(plan: Plan) -> str:
    if plan.kind == "ordered":
        return f"raises the last pass of {plan.axis}, and the longest prompt at that value"
    return "raises the longest prompt" + ("" if plan.kind == "prompt" else " of that choice")


def _meaning(plan: Plan, bound: Bound) -> str:
    if plan.kind != "ordered":
        where = "" if plan.kind == "prompt" else " of that choice; no order of choices is assumed"
        if bound in (Bound.ADMISSION, Bound.UNUSABLE):
            return f"a boot that fails ends the search for the longest prompt{where}"
        return f"lowers the first failing prompt{where}"
    if bound is Bound.UNUSABLE:
        return f"speaks of that one value of {plan.axis} only, and sets it aside"
    trend = plan.trends.get(bound, Trend.UNKNOWN)
    higher_passes = trend is Trend.RISES
    if trend in (Trend.RISES, Trend.FALLS):
        easier = "more" if higher_passes else "less"
        known = f"a higher value passes {easier} easily"
    else:
        known = "no known order, so the safe side"
        higher_passes = plan.prefer == "low"
    return f"{known}: forbids it and all {'lower' if higher_passes else 'higher'} values"


def ceiling_command(opened: Mapping[str, Any]) -> str:
    """The command line that asks a study's question again under another name."""
    q: Mapping[str, Any] = opened.get("question") or {}
    plan = opened["plan"]
    words = ["bisect", "ceiling", "--profile", str(q.get("profile") or opened["profile"])]
    words += [
        "--axis",
        str(plan["axis"]),
        "--prompt",
        str(plan["target_tokens"]),
        "--runner",
        opened["runner"],
    ]
    for name, text in sorted((q.get("sets") or {}).items()):
        words += ["--set", f"{name}={text}"]
    words += ["--confirm", str(plan["confirm"])]
    if q.get("tolerance") is not None:
        words += ["--tolerance", str(q["tolerance"])]
    if q.get("reserve_mib") is not None:
        words += ["--reserve-mib", f"{q['reserve_mib']:g}"]
    for gpu in q.get("gpus") or ():
        words += ["--gpu", str(gpu)]
    if q.get("allow_pull"):
        words.append("--allow-pull")
    words += ["--seed", str(opened.get("seed", 0)), "--study", f"{opened['study']}-again"]
    return shlex.join(words)


def _wrap(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=indent + "    ", break_on_hyphens=False
    )
