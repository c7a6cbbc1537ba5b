"""`--dry-run`: the plan in clock times, and everything that would be started or written."""

from __future__ import annotations

import json
import shlex
from datetime import datetime, timedelta
from pathlib import Path

from llm_bisect.cli.errors import Exit
from llm_bisect.journal.locate import study_path
from llm_bisect.journal.state import State, fold
from llm_bisect.journal.store import read_journal
from llm_bisect.opening import Prepared, refuse_other_question
from llm_bisect.reports.words import duration, values_text
from llm_bisect.search.ceiling import decide
from llm_bisect.search.foresee import forecast, prices_of
from llm_bisect.search.plan import Done
from llm_bisect.spaces.apply import describe_difference, own_values, resolve_launch
from llm_bisect.study import Budget

SIMULATED = " (SIMULATED: no engine is booted)"


def print_plan(prepared: Prepared, journals: Path, budget: Budget, *, json_output: bool) -> int:
    """Print it; boot nothing, write nothing."""
    path = study_path(prepared.study, journals)
    state = fold(read_journal(path)) if path.exists() else State()
    refuse_other_question(prepared, state)
    plan = prepared.plan
    step = decide(state, plan)
    ahead = forecast(state, plan)
    now = datetime.now().astimezone()
    expected, p90 = (now + timedelta(seconds=s) for s in (ahead.expected_s, ahead.p90_s))
    prices = prices_of(state, plan)
    own = resolve_launch(prepared.profile, prepared.runner, {})
    differences = (
        []
        if isinstance(step, Done)
        else describe_difference(own, resolve_launch(prepared.profile, prepared.runner, step.values))
    )
    if json_output:
        print(
            json.dumps(
                {
                    "schema": "llm-bisect/plan/1",
                    "command": "ceiling",
                    "study": prepared.study,
                    "journal": str(path),
                    "runner": prepared.runner,
                    "simulated": prepared.runner == "simulated",
                    "own_values": own_values(prepared.profile, prepared.runner),
                    "first": None
                    if isinstance(step, Done)
                    else {
                        "values": dict(step.values),
                        "prompt_tokens": step.prompt_tokens,
                        "reason": step.reason,
                    },
                    "boots": {"expected": round(ahead.boots, 1), "worst": ahead.worst_boots},
                    "probes": {"expected": round(ahead.probes, 1), "worst": ahead.worst_probes},
                    "seconds": {"expected": round(ahead.expected_s), "p90": round(ahead.p90_s)},
                    "ends": {"expected": expected.isoformat(), "p90": p90.isoformat()},
                    "differences": differences,
                },
                ensure_ascii=False,
            )
        )
        return Exit.ANSWERED
    rows = [
        f"study      {prepared.study}" + (" (continues)" if state.opened else ""),
        f"question   how far can {plan.axis} go, target {plan.target_tokens:,} tokens"
        + (f", grid {plan.points[0]} to {plan.points[-1]}, {len(plan.points)} values" if plan.points else ""),
        f"runner     {prepared.runner}{SIMULATED if prepared.runner == 'simulated' else ''}",
    ]
    if isinstance(step, Done):
        rows.append(f"next       nothing: the study is {step.status}")
    else:
        rows.append(f"next       {step.prompt_tokens:,} tokens at {values_text(step.values)}: {step.reason}")
        rows.append(
            f"expected   {ahead.boots:.0f} boots, {ahead.probes:.0f} probes, {duration(ahead.expected_s)}: "
            f"done {expected:%a %H:%M}, 9 of 10 by {p90:%a %H:%M}"
        )
        rows.append(
            f"           {duration(prices.boot_s)} a boot, {duration(prices.target_s)} for the target prompt"
            + ("" if state.trials else " (assumed; the first boot measures them)")
        )
    if budget.limit_s is not None or budget.max_boots is not None:
        hours = f"{duration(max(0.0, budget.limit_s))}" if budget.limit_s is not None else "no time limit"
        boots = f"{budget.max_boots} boots" if budget.max_boots is not None else "no limit of boots"
        rows.append(f"budget     {hours}, {boots}")
    rows.append(f"writes     {path} and the folder {path.with_suffix('')}/ (logs); nothing else")
    rows.append(f"starts     {_starts(prepared)}")
    rows += [f"differs    {line}" for line in differences] or [
        "differs    nothing: your own launch comes first"
    ]
    print("\n".join(rows))
    return Exit.ANSWERED


def _starts(prepared: Prepared) -> str:
    own = prepared.own
    command = shlex.join(own.command)
    if prepared.runner == "docker":
        where = (
            f"compose service {own.compose.service} of {own.compose.file}" if own.compose else "a container"
        )
        return f"{where}, image {own.image}, port on loopback, restart off; {command}"
    return command
