"""What a study will cost: the policy itself, run on invented outcomes for many possible ceilings.

Used for `--dry-run` and the expected time left. Nothing of it is ever told as a result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from llm_bisect.journal import events as kinds
from llm_bisect.journal.state import State, fold, values_key
from llm_bisect.model import AxisValue, Outcome, Phase, Values
from llm_bisect.search.ceiling import decide
from llm_bisect.search.observe import ordered_points
from llm_bisect.search.plan import Done, Plan

MAX_ASKS = 400


@dataclass(frozen=True)
class Prices:
    """Seconds of a boot and of a probe of the target length; a probe's time grows with length^1.4."""

    boot_s: float = 240.0
    target_s: float = 300.0

    def probe_s(self, prompt_tokens: int, target_tokens: int) -> float:
        return self.target_s * float((prompt_tokens / max(1, target_tokens)) ** 1.4)


@dataclass(frozen=True)
class Forecast:
    """What is left: means over possible truths, and the 90th percentile of the time."""

    boots: float
    probes: float
    expected_s: float
    p90_s: float
    worst_boots: int
    worst_probes: int


@dataclass(frozen=True)
class _Event:
    seq: int
    kind: str
    body: Mapping[str, Any]


def prices_of(state: State, plan: Plan) -> Prices:
    """Prices fitted to what this study has seen; the defaults of a 24 GB card otherwise."""
    default = Prices(target_s=min(300.0, plan.deadline_s))
    boots = [b.wall_s for b in state.boots.values() if b.outcome is Outcome.PASS and b.wall_s > 0]
    scaled = [
        t.wall_s * (plan.target_tokens / t.prompt_tokens) ** 1.4
        for t in state.trials
        if t.outcome is Outcome.PASS and t.wall_s > 0 and t.prompt_tokens >= plan.target_tokens / 8
    ]
    return Prices(
        fmean(boots) if boots else default.boot_s, fmean(scaled[-5:]) if scaled else default.target_s
    )


def forecast(state: State, plan: Plan) -> Forecast:
    """Runs the policy to its end for a spread of possible truths, from `state` on."""
    prices = prices_of(state, plan)
    runs = [_run(state, plan, prices, knee, length) for knee, length in _truths(state, plan)]
    seconds = sorted(run[2] for run in runs)
    return Forecast(
        fmean(run[0] for run in runs),
        fmean(run[1] for run in runs),
        fmean(seconds),
        seconds[min(len(seconds) - 1, int(0.9 * len(seconds)))],
        max(run[0] for run in runs),
        max(run[1] for run in runs),
    )


def _truths(state: State, plan: Plan) -> list[tuple[int, int]]:
    """Possible (last surviving index, longest prompt) pairs, spread over what is possible."""
    passed = max((t.prompt_tokens for t in state.observations if t.outcome is Outcome.PASS), default=0)
    lengths = [max(passed, int(plan.target_tokens * share)) for share in (1.05, 1.3, 1.8, 2.6)]
    if plan.kind != "ordered":
        return [(0, n) for n in lengths]
    points = ordered_points(plan)
    own = points.index(plan.own) if plan.own in points else 0
    knees = sorted(
        {own, (own + len(points)) // 2, own + 1, own + 2, len(points) - 1} & set(range(len(points)))
    )
    return [(knee, n) for knee in knees for n in lengths]


def _run(state: State, plan: Plan, prices: Prices, knee: int, length: int) -> tuple[int, int, float]:
    """(boots, probes, seconds) of the rest of the study if `knee` and `length` were the truth."""
    points: Sequence[AxisValue] = ordered_points(plan) if plan.kind == "ordered" else ()
    allowed = {values_key(plan.values_at(p)) for p in points[: knee + 1]}
    boots = probes = 0
    seconds = 0.0
    live: str | None = state.live_boot.key if state.live_boot else None
    seq = state.last_seq
    if state.pending is not None:
        state = fold([_Event(seq, kinds.PROBE_LOST, {"probe": state.pending.probe})], state)
    for _ in range(MAX_ASKS):
        ask = decide(state, plan)
        if isinstance(ask, Done):
            break
        key = values_key(ask.values)
        survives = (not points or key in allowed) and ask.prompt_tokens <= length
        happened: list[_Event] = []
        if ask.fresh or live != key:
            boots += 1
            seconds += prices.boot_s
            live = key
        probes += 1
        cost = prices.probe_s(min(ask.prompt_tokens, length), plan.target_tokens)
        seconds += min(cost, plan.deadline_s)
        happened = _events(seq, probes, boots, ask.values, ask.prompt_tokens, survives, length)
        seq += len(happened)
        state = fold(happened, state)
        if not survives:
            live = None
    return boots, probes, seconds


def _events(
    seq: int, n: int, boot: int, values: Values, prompt_tokens: int, survives: bool, length: int
) -> list[_Event]:
    probe, boot_id = f"foreseen-{n}", f"foreseen-boot-{boot}"
    outcome = Outcome.PASS if survives else Outcome.OOM_PROBE
    asked = {
        "probe": probe,
        "values": dict(values),
        "prompt_tokens": prompt_tokens,
        "purpose": "foreseen",
        "reason": "",
    }
    finished = {
        "probe": probe,
        "boot": boot_id,
        "phase": Phase.PROBE.value,
        "outcome": outcome.value,
        "tokens_processed": min(prompt_tokens, length),
    }
    return [
        _Event(seq + 1, kinds.PROBE_ASKED, asked),
        _Event(seq + 2, kinds.BOOT_STARTED, {"boot": boot_id, "values": dict(values), "candidate": ""}),
        _Event(seq + 3, kinds.BOOT_FINISHED, {"boot": boot_id, "outcome": "pass"}),
        _Event(seq + 4, kinds.PROBE_FINISHED, finished),
    ]
