"""The answer of a `ceiling` study, from its state alone: the object that `--json` prints.

The contract of its keys is documented in docs/json.md; keys are added, never changed.
"""

from __future__ import annotations

from typing import Any

from llm_bisect.journal.state import State, Trial
from llm_bisect.model import AxisValue, margin_tier
from llm_bisect.search.ceiling import Line, best_choice, line_of
from llm_bisect.search.observe import Candidate, bound_of, candidate
from llm_bisect.search.plan import Plan

LEAST_RECOMMENDABLE_MIB = 1024  # below it a table says "passes here", not "recommended"


def answer_of(state: State, plan: Plan) -> dict[str, Any]:
    """The answer so far. Before the study is closed it is the best that is known."""
    if plan.kind == "prompt":
        return _prompt_answer(plan, candidate(state, plan.own_values))
    if plan.kind == "choices":
        return _choices_answer(state, plan)
    return _ordered_answer(plan, line_of(state, plan))


def _head(plan: Plan) -> dict[str, Any]:
    return {"axis": plan.axis, "target_prompt": plan.target_tokens, "workload": plan.workload}


def _ordered_answer(plan: Plan, line: Line) -> dict[str, Any]:
    target, b = plan.target_tokens, line.survives
    failed = _first_failed(line)
    failure = line.candidates[failed].failures_at(target)[0] if failed is not None else None
    lower = b.floor if b.floor >= 0 else None
    best = line.recommended
    chosen = line.candidates[best] if best is not None else None
    shipped = chosen is not None and _is_confirmed(plan, chosen, target)
    return {
        **_head(plan),
        "last_pass": line.points[b.lo] if b.lo is not None else None,
        "first_fail": line.points[failed] if failed is not None else None,
        "fail_outcome": failure.outcome.value if failure else None,
        "lower_limit": line.points[lower] if lower is not None else None,
        "lower_limit_outcome": _lower_outcome(line, target, lower),
        "recommended": line.points[best] if best is not None and shipped else None,
        "unconfirmed": line.points[best] if best is not None and not shipped else None,
        "bound_by": _bound(failure),
        **_margin(plan, chosen, target),
        "prompt_ceiling": _prompt_ceiling(plan, line.points[best], chosen)
        if best is not None and chosen is not None
        else None,
        "confirmed": _confirmed(plan, chosen, target),
        "non_monotone": _crossing(line),
        "unusable": [line.points[i] for i in line.holes],
    }


def _prompt_answer(plan: Plan, own: Candidate) -> dict[str, Any]:
    b = own.lengths(plan)
    wanted = own.lengths(plan, plan.margin_mib)
    failure = own.first_failure(b.hi) if b.hi is not None else own.boot_failure
    at_context = b.hi is None and b.lo is not None and b.cap is not None and b.lo >= b.cap
    shipped = wanted.lo is not None and own.boot_failure is None and _is_confirmed(plan, own, wanted.lo)
    return {
        **_head(plan),
        "last_pass": b.lo,
        "first_fail": b.hi,
        "fail_outcome": failure.outcome.value if failure else None,
        "lower_limit": None,
        "recommended": wanted.lo if shipped else None,
        "unconfirmed": wanted.lo if not shipped else None,
        "bound_by": own.cap_name(plan) if at_context else _bound(failure),
        **_margin(plan, own, wanted.lo or plan.target_tokens),
        "confirmed": _confirmed(plan, own, wanted.lo or plan.target_tokens),
    }


def _choices_answer(state: State, plan: Plan) -> dict[str, Any]:
    found = [candidate(state, plan.values_at(p)) for p in plan.points]
    best = best_choice(found, plan)
    target = plan.target_tokens
    shipped = best is not None and _is_confirmed(plan, best, target)
    label = plan.points[found.index(best)] if best is not None else None
    return {
        **_head(plan),
        "choices": [
            {
                "value": value,
                "prompt_ceiling": _prompt_ceiling(plan, value, c),
                "passes_target": bool(c.passes_at(target)) and not c.failures_at(target),
                "boot_outcome": c.boot_failure.outcome.value if c.boot_failure else None,
                **_margin(plan, c, target),
            }
            for value, c in zip(plan.points, found, strict=True)
        ],
        "recommended": label if shipped else None,
        "unconfirmed": label if not shipped else None,
        **_margin(plan, best, target),
        "confirmed": _confirmed(plan, best, target),
    }


def _first_failed(line: Line) -> int | None:
    """The least preferred point beyond the last pass that was seen to fail, for whatever reason."""
    b = line.survives
    start = b.floor if b.lo is None else b.lo
    failed = [i for i in (*line.holes, *([b.hi] if b.hi < len(line.points) else [])) if i > start]
    return min(failed, default=None)


def _lower_outcome(line: Line, target: int, lower: int | None) -> str | None:
    if lower is None:
        return None
    return line.candidates[lower].failures_at(target)[0].outcome.value


def _crossing(line: Line) -> dict[str, AxisValue] | None:
    """Where a pass lies beyond a failure: the answer is then the safe side only."""
    if line.survives.crossed is None:
        return None
    fails, passes = line.survives.crossed
    return {"fails": line.points[fails], "passes": line.points[passes]}


def _prompt_ceiling(plan: Plan, at: AxisValue, c: Candidate) -> dict[str, Any]:
    b = c.lengths(plan)
    failure = c.first_failure(b.hi) if b.hi is not None else (c.boot_failure if b.lo is None else None)
    at_context = b.hi is None and b.lo is not None and b.cap is not None and b.lo >= b.cap
    return {
        "at": at,
        "last_pass": b.lo,
        "first_fail": b.hi,
        "fail_outcome": failure.outcome.value if failure else None,
        "bound_by": c.cap_name(plan) if at_context else _bound(failure),
        "boots": c.boots_passed(b.lo) if b.lo is not None else 0,
    }


def _bound(failure: Trial | None) -> str | None:
    return bound_of(failure).value if failure is not None else None


def _margin(plan: Plan, c: Candidate | None, prompt_tokens: int) -> dict[str, Any]:
    free_mib = c.min_free_mib(prompt_tokens) if c is not None else None
    return {
        "min_free_mib": round(free_mib) if free_mib is not None else None,
        "margin_mib": round(free_mib) if free_mib is not None else None,
        "margin_tier": margin_tier(free_mib, plan.tiers_mib).value if free_mib is not None else None,
    }


def _confirmed(plan: Plan, c: Candidate | None, prompt_tokens: int) -> dict[str, int]:
    """k passes of k boots, and the failure rate that this still allows at 95 %, in per cent."""
    passes = c.boots_passed(prompt_tokens) if c is not None else 0
    boots = c.boots_judged(prompt_tokens) if c is not None else 0
    still = {"failure_rate_below_pct": round(100 * (1 - 0.05 ** (1 / passes)))} if 0 < passes == boots else {}
    return {"prompt_tokens": prompt_tokens, "passes": passes, "boots": boots, **still}


def _is_confirmed(plan: Plan, c: Candidate, prompt_tokens: int) -> bool:
    return c.boots_passed(prompt_tokens) >= plan.confirm and not c.failures_at(prompt_tokens)
