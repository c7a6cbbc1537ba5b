"""Studies for the reports: real policies on rigs whose truth is a function, folded from their events."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from llm_bisect.journal import events as kinds
from llm_bisect.journal.state import State, fold, values_key
from llm_bisect.model import Bound, Trend
from llm_bisect.search.ceiling import contradictions, decide
from llm_bisect.search.plan import Ask, Done, Plan

GRID = tuple(round(0.85 + 0.005 * i, 3) for i in range(27))
Truth = Callable[[Mapping[str, Any], int], tuple[str, str, float | None, dict[str, Any]]]


def mem_util_plan(**changes: Any) -> Plan:
    """The seed's question: mem-util at 60,000 tokens with a margin of 400 MiB."""
    trends = {Bound.ADMISSION: Trend.RISES, Bound.MEMORY: Trend.FALLS}
    plan = {"axis": "mem-util", "kind": "ordered", "target_tokens": 60_000, "own": 0.93, "points": GRID}
    return Plan(**{**plan, "trends": trends, "margin_mib": 400.0, **changes})


def card(spare_mib: float = 0.0, admitted_from: float = 0.0) -> Truth:
    """Survives 60,000 tokens up to 0.945; `spare_mib` is free beyond what the bare limit leaves."""

    def truth(values: Mapping[str, Any], prompt: int) -> tuple[str, str, float | None, dict[str, Any]]:
        util = float(values.get("mem-util", 0.93))
        facts = {"context_tokens": 180_000, "kv_cache_gib": 4.4, "kv_cache_tokens": 340_000}
        if util < admitted_from:
            return "admission_rejected", "boot", None, {}
        free_mib = (0.9475 - util) * 23_000 - (prompt - 60_000) * 0.03
        outcome = "pass" if free_mib > 0 else "oom_probe"
        return outcome, "probe", free_mib + spare_mib, facts

    return truth


def opening(plan: Plan, **changes: Any) -> dict[str, Any]:
    """The body of `study_opened`."""
    body = {
        "study": "long-text-ceiling",
        "command": "ceiling",
        "question": {"profile": "long-text", "axis": plan.axis, "sets": {}, "confirm": plan.confirm},
        "plan": plan.to_json(),
        "profile": "long-text",
        "runner": "docker",
        "simulated": False,
        "seed": 7,
        "version": "0.1.0",
    }
    return {**body, **changes}


def run_study(plan: Plan, truth: Truth, stop_after: int = 200, **changes: Any) -> State:
    """Asks until the policy is done, or until `stop_after` probes: then the budget is spent."""
    events = [SimpleNamespace(seq=1, kind=kinds.STUDY_OPENED, body=opening(plan, **changes))]

    def add(kind: str, **body: Any) -> None:
        events.append(SimpleNamespace(seq=len(events) + 1, kind=kind, body=body))

    asked = boots = 0
    live: str | None = None
    while True:
        state = fold(events)
        step = decide(state, plan)
        if isinstance(step, Done):
            add(kinds.STUDY_CLOSED, status=step.status, why=step.why)
            return fold(events)
        if asked == stop_after:
            add(kinds.STUDY_PAUSED, status="budget-spent", why=f"{boots} boots of {boots} are spent")
            return fold(events)
        asked += 1
        boots, live = _carry_out(step, f"p{asked:04d}", boots, live, truth, add)
        for found in contradictions(fold(events), plan):
            if found not in fold(events).contradictions:
                add(kinds.CONTRADICTION_SEEN, **found)


def _carry_out(
    ask: Ask, probe: str, boots: int, live: str | None, truth: Truth, add: Callable[..., None]
) -> tuple[int, str | None]:
    key = values_key(ask.values)
    asked = {"values": dict(ask.values), "prompt_tokens": ask.prompt_tokens, "purpose": ask.purpose}
    add(kinds.PROBE_ASKED, probe=probe, reason=ask.reason, **asked)
    outcome, phase, free_mib, facts = truth(ask.values, ask.prompt_tokens)
    if live != key or ask.fresh:
        boots += 1
        ready = "pass" if phase == "probe" else outcome
        add(kinds.BOOT_STARTED, boot=f"b{boots:03d}", values=dict(ask.values), candidate="c")
        add(kinds.BOOT_FINISHED, boot=f"b{boots:03d}", outcome=ready, facts=facts, wall_s=240.0)
        live = key if phase == "probe" else None
    lines = [] if outcome == "pass" else ["torch.OutOfMemoryError: CUDA out of memory | tried\n50 MiB"]
    add(
        kinds.PROBE_FINISHED,
        probe=probe,
        boot=f"b{boots:03d}",
        phase=phase,
        outcome=outcome,
        evidence={"rule": "oom" if lines else "answered", "lines": lines, "facts": {}, "considered": []},
        min_free_mib=free_mib,
        wall_s=ask.prompt_tokens / 100 if phase == "probe" else 0.0,
        tokens_processed=None if outcome == "pass" else ask.prompt_tokens // 2,
    )
    return boots, live if outcome == "pass" else None


@pytest.fixture(name="run_study")
def _run_study() -> Callable[..., State]:
    return run_study


@pytest.fixture(name="mem_util_plan")
def _mem_util_plan() -> Callable[..., Plan]:
    return mem_util_plan


@pytest.fixture(name="card")
def _card() -> Callable[..., Truth]:
    return card
