"""The ceiling policy against rigs whose truth is known: exactness, order of work, typed outcomes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from llm_bisect.journal import events as kinds
from llm_bisect.journal.state import State, fold, values_key
from llm_bisect.model import Bound, Outcome, Trend
from llm_bisect.search.answer import answer_of
from llm_bisect.search.ceiling import contradictions, decide
from llm_bisect.search.foresee import forecast
from llm_bisect.search.plan import Ask, Done, Plan

MEM_UTIL = {Bound.ADMISSION: Trend.RISES, Bound.MEMORY: Trend.FALLS}
GRID = tuple(round(0.85 + 0.005 * i, 3) for i in range(27))


@dataclass(frozen=True)
class Event:
    """An event as the fold reads it."""

    seq: int
    kind: str
    body: Mapping[str, Any]


@dataclass
class Rig:
    """A machine whose truth is a function of values, prompt and boot."""

    truth: Callable[[Mapping[str, Any], int, int], tuple[str, str, float | None, dict[str, Any]]]
    events: list[Event] = field(default_factory=list)
    asks: list[Ask] = field(default_factory=list)
    boots: int = 0
    live: str | None = None
    trouble: set[int] = field(default_factory=set)  # asks that end as infra instead

    def add(self, kind: str, **body: Any) -> None:
        self.events.append(Event(len(self.events) + 1, kind, body))

    def run(self, plan: Plan, limit: int = 120) -> tuple[State, Done]:
        if not self.events:
            self.add(kinds.STUDY_OPENED, plan=plan.to_json())
        while True:
            state = fold(self.events)
            step = decide(state, plan)
            if isinstance(step, Done):
                return state, step
            assert len(self.asks) < limit, "the policy does not end"
            self.carry_out(step)

    def carry_out(self, ask: Ask) -> None:
        self.asks.append(ask)
        probe = f"p{len(self.asks)}"
        asked = {"values": dict(ask.values), "prompt_tokens": ask.prompt_tokens, "purpose": ask.purpose}
        self.add(kinds.PROBE_ASKED, probe=probe, reason=ask.reason, **asked)
        if len(self.asks) in self.trouble:
            self.add(kinds.PROBE_FINISHED, probe=probe, boot=None, phase="boot", outcome="infra")
            return
        key = values_key(ask.values)
        booting = self.live != key or ask.fresh
        if booting:
            self.boots += 1
        outcome, phase, free_mib, facts = self.truth(ask.values, ask.prompt_tokens, self.boots)
        boot = f"b{self.boots}"
        if booting:
            self.add(kinds.BOOT_STARTED, boot=boot, values=dict(ask.values), candidate="c")
            ready = phase == "probe"
            self.add(kinds.BOOT_FINISHED, boot=boot, outcome="pass" if ready else outcome, facts=facts)
            self.live = key if ready else None
        evidence = {"facts": facts} if phase == "boot" else {}
        body = {"min_free_mib": free_mib, "evidence": evidence, "tokens_processed": facts.get("died_at")}
        self.add(kinds.PROBE_FINISHED, probe=probe, boot=boot, phase=phase, outcome=outcome, **body)
        if outcome != "pass":
            self.live = None


def mem_util_plan(**changes: Any) -> Plan:
    plan = {"axis": "mem-util", "kind": "ordered", "target_tokens": 60_000, "own": 0.93, "points": GRID}
    return Plan(**{**plan, "trends": MEM_UTIL, "margin_mib": 400.0, **changes})


def card(
    knee: float, *, admitted_from: float = 0.0, free_per_util: float = 23_000, per_token: float = 0.03
) -> Rig:
    """Survives 60,000 tokens up to `knee` of mem-util; refuses to boot below `admitted_from`."""

    def truth(
        values: Mapping[str, Any], prompt: int, _boot: int
    ) -> tuple[str, str, float | None, dict[str, Any]]:
        util = float(values["mem-util"])
        if util < admitted_from - 1e-9:
            return "admission_rejected", "boot", None, {}
        free_mib = (knee + 0.0025 - util) * free_per_util - (prompt - 60_000) * per_token
        if free_mib < 0:
            return "oom_probe", "probe", None, {"context_tokens": 180_000}
        return "pass", "probe", free_mib, {"context_tokens": 180_000}

    return Rig(truth)


def test_the_seed_question() -> None:
    """The seed study in one run: bracket, margin, three boots, and the longest prompt at the point."""
    rig = card(0.945)
    state, done = rig.run(mem_util_plan())
    answer = answer_of(state, mem_util_plan())
    assert done.status == "answered"
    assert (answer["last_pass"], answer["first_fail"], answer["fail_outcome"]) == (0.945, 0.95, "oom_probe")
    assert answer["recommended"] == 0.93  # 0.93 leaves 402 MiB, 0.935 leaves 287
    assert answer["bound_by"] == "memory"
    assert answer["confirmed"] == {
        "prompt_tokens": 60_000,
        "passes": 3,
        "boots": 3,
        "failure_rate_below_pct": 63,
    }
    ceiling = answer["prompt_ceiling"]
    truth = 60_000 + 402.5 / 0.03
    assert ceiling["last_pass"] <= truth < ceiling["first_fail"] <= ceiling["last_pass"] + 0.03 * truth


def test_the_users_own_values_come_first() -> None:
    """The first probe is a short one at the user's own value, the second the target."""
    rig = card(0.945)
    rig.run(mem_util_plan())
    first, second = rig.asks[:2]
    assert (first.values, first.prompt_tokens, first.purpose) == ({"mem-util": 0.93}, 8_000, "first")
    assert (second.values, second.prompt_tokens, second.purpose) == ({"mem-util": 0.93}, 60_000, "target")


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 26), st.integers(0, 26), st.integers(0, 26), st.sampled_from([0.0, 250.0, 400.0]))
def test_exact_on_every_monotone_rig(knee: int, low: int, own: int, margin: float) -> None:
    """For every knee, admission limit and own value the bracket is exact and the recommendation is the
    farthest value that keeps the margin."""
    plan = mem_util_plan(own=GRID[own], margin_mib=margin)
    rig = card(GRID[knee], admitted_from=GRID[low])
    state, done = rig.run(plan)
    answer = answer_of(state, plan)
    if low > knee:
        assert done.status == "no-feasible-point"
        assert answer["last_pass"] is None and answer["recommended"] is None
        return
    assert answer["last_pass"] == GRID[knee]
    assert answer["first_fail"] == (GRID[knee + 1] if knee < 26 else None)
    fit = [g for g in GRID[low : knee + 1] if (GRID[knee] + 0.0025 - g) * 23_000 >= margin]
    assert answer["recommended"] == (fit[-1] if fit else None)
    searched = [a for a in rig.asks if a.purpose in ("search", "target")]
    assert len(searched) <= 6
    if answer["recommended"] is not None:
        assert answer["confirmed"]["passes"] == answer["confirmed"]["boots"] == 3


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 26), st.sets(st.integers(1, 30), max_size=6))
def test_trouble_never_changes_the_answer(knee: int, trouble: set[int]) -> None:
    """Probes that end as infra cost time and nothing else."""
    plan = mem_util_plan()
    calm, _ = card(GRID[knee]).run(plan)
    rig = card(GRID[knee])
    rig.trouble = trouble
    troubled, _ = rig.run(plan)
    assert answer_of(troubled, plan) == answer_of(calm, plan)


def test_a_failing_confirmation_moves_the_recommendation() -> None:
    """0.93 passes once and dies on its second boot: the recommendation goes down, nothing is averaged."""
    seen: dict[str, int] = {}

    def truth(
        values: Mapping[str, Any], prompt: int, boot: int
    ) -> tuple[str, str, float | None, dict[str, Any]]:
        seen.setdefault(f"{values}{boot}", boot)
        boots_here = sum(k.startswith(str(values)) for k in seen)
        util = values["mem-util"]
        dies = util > 0.93 or (util == 0.93 and boots_here > 1)
        if dies or prompt > 70_000:
            return "oom_probe", "probe", None, {}
        return "pass", "probe", 900.0, {}

    plan = mem_util_plan()
    state, _ = Rig(truth).run(plan)
    answer = answer_of(state, plan)
    assert answer["recommended"] == 0.925
    assert answer["first_fail"] == 0.93
    assert answer["confirmed"]["passes"] == answer["confirmed"]["boots"] == 3


def test_admission_below_survival_gives_a_lower_limit() -> None:
    """Too low a value is refused at admission: that is a lower limit, not a failure beyond."""
    plan = mem_util_plan(own=0.87)
    state, _ = card(0.945, admitted_from=0.9).run(plan)
    answer = answer_of(state, plan)
    assert answer["last_pass"] == 0.945
    assert answer["lower_limit"] is not None and answer["lower_limit"] < 0.9
    assert answer["lower_limit_outcome"] == "admission_rejected"


def test_no_margin_anywhere_gives_null_with_the_reason() -> None:
    """Nothing keeps the margin: recommended is null and the reason is told."""
    plan = mem_util_plan(margin_mib=50_000.0)
    state, done = card(0.945).run(plan)
    assert answer_of(state, plan)["recommended"] is None
    assert "margin" in done.why


def test_without_telemetry_the_farthest_confirmed_value_is_recommended() -> None:
    """No free-memory figures: margin null, the farthest value that passes is confirmed and recommended."""

    def truth(
        values: Mapping[str, Any], prompt: int, _boot: int
    ) -> tuple[str, str, float | None, dict[str, Any]]:
        ok = values["mem-util"] <= 0.94 and prompt <= 70_000
        return ("pass" if ok else "oom_probe"), "probe", None, {}

    plan = mem_util_plan()
    state, _ = Rig(truth).run(plan)
    answer = answer_of(state, plan)
    assert answer["recommended"] == 0.94
    assert answer["margin_mib"] is None and answer["margin_tier"] is None


def test_a_time_out_closes_the_time_bracket_only() -> None:
    """The prompt axis ends by time: bound_by says so and no memory failure is claimed."""

    def truth(
        _values: Mapping[str, Any], prompt: int, _boot: int
    ) -> tuple[str, str, float | None, dict[str, Any]]:
        if prompt > 84_000:
            return "timeout_client", "probe", None, {"died_at": 84_200}
        return "pass", "probe", 1500.0, {"context_tokens": 200_000}

    plan = Plan(axis="prompt", kind="prompt", target_tokens=60_000)
    rig = Rig(truth)
    state, _ = rig.run(plan)
    answer = answer_of(state, plan)
    assert answer["bound_by"] == "time" and answer["fail_outcome"] == "timeout_client"
    assert answer["last_pass"] <= 84_000 < answer["first_fail"] <= answer["last_pass"] * 1.03
    assert answer["recommended"] == answer["last_pass"]
    assert answer["confirmed"]["boots"] == 3


def test_the_context_ends_the_line() -> None:
    """A prompt as long as the context allows passes: the ceiling is bound by context, nothing failed."""
    plan = Plan(axis="prompt", kind="prompt", target_tokens=8_000, max_tokens=30)
    truth = lambda _v, _p, _b: ("pass", "probe", 5_000.0, {"context_tokens": 32_768})  # noqa: E731
    state, _ = Rig(truth).run(plan)
    answer = answer_of(state, plan)
    assert answer["bound_by"] == "context"
    assert answer["last_pass"] == 32_768 - 30 - 64 and answer["first_fail"] is None


def test_a_single_crash_is_asked_again_before_it_counts() -> None:
    """One crash is a flake until it is seen twice."""
    crashed: list[int] = []

    def truth(
        values: Mapping[str, Any], prompt: int, boot: int
    ) -> tuple[str, str, float | None, dict[str, Any]]:
        if values["mem-util"] == 0.955 and not crashed:
            crashed.append(boot)
            return "engine_crashed", "probe", None, {}
        ok = values["mem-util"] <= 0.96 and prompt <= 70_000
        return ("pass" if ok else "oom_probe"), "probe", 500.0 if ok else None, {}

    plan = mem_util_plan()
    rig = Rig(truth)
    state, _ = rig.run(plan)
    assert answer_of(state, plan)["last_pass"] == 0.96
    assert [a.values["mem-util"] for a in rig.asks if a.purpose == "repeat"] == [0.955]


def test_the_estimate_is_tried_and_not_believed() -> None:
    """Declared context: a refusal's estimate inside the bracket is booted next, and the search goes on."""

    def truth(
        values: Mapping[str, Any], prompt: int, _b: int
    ) -> tuple[str, str, float | None, dict[str, Any]]:
        declared = values["max-model-len"]
        if declared > 180_000:
            return "admission_rejected", "boot", None, {"estimated_max_model_len": 131_456}
        if prompt > 75_000:
            return "oom_probe", "probe", None, {}
        return "pass", "probe", 900.0, {"context_tokens": declared}

    points = tuple(range(100_000, 260_001, 10_000))
    trends = {Bound.ADMISSION: Trend.FALLS, Bound.MEMORY: Trend.FLAT}
    plan = Plan("max-model-len", "ordered", 60_000, own=110_000, points=points, trends=trends)
    rig = Rig(truth)
    state, _ = rig.run(plan)
    assert next(a.values["max-model-len"] for a in rig.asks if a.purpose == "hint") == 130_000
    assert answer_of(state, plan)["last_pass"] == 180_000
    assert any(c["kind"] == "estimate" for c in contradictions(state, plan))


def test_a_launch_that_cannot_boot_at_all_ends_at_once() -> None:
    """A configuration error of the user's own launch is no matter for a search."""
    truth = lambda _v, _p, _b: ("config_error", "boot", None, {})  # noqa: E731
    rig = Rig(truth)
    _, done = rig.run(mem_util_plan())
    assert done.status == "no-feasible-point" and "config_error" in done.why
    assert len(rig.asks) == 1


def test_unordered_choices_each_get_their_longest_prompt() -> None:
    """KV dtypes have no order: every one is booted and measured, the longest that passes is recommended."""
    ceilings = {"f16": 9_000, "q8_0": 17_000, "q4_0": 13_000, "bad": 0}

    def truth(
        values: Mapping[str, Any], prompt: int, _b: int
    ) -> tuple[str, str, float | None, dict[str, Any]]:
        if values["kv-dtype"] == "bad":
            return "config_error", "boot", None, {}
        ok = prompt <= ceilings[values["kv-dtype"]]
        return ("pass" if ok else "host_oom_killed"), "probe", None, {}

    plan = Plan("kv-dtype", "choices", 8_000, own="f16", points=tuple(ceilings), start_tokens=1_000)
    state, _ = Rig(truth).run(plan)
    answer = answer_of(state, plan)
    assert answer["recommended"] == "q8_0"
    for choice in answer["choices"]:
        ceiling = choice["prompt_ceiling"]
        if choice["value"] == "bad":
            assert ceiling["last_pass"] is None and choice["boot_outcome"] == "config_error"
        else:
            assert ceiling["last_pass"] <= ceilings[choice["value"]] < ceiling["first_fail"]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 26), st.integers(0, 400))
def test_the_same_prefix_always_leads_to_the_same_ask(knee: int, cut: int) -> None:
    """Replay: at every prefix that ends with a finished probe the policy asks what the live run asked."""
    plan = mem_util_plan()
    rig = card(GRID[knee])
    rig.run(plan)
    ends = [i + 1 for i, e in enumerate(rig.events) if e.kind == kinds.PROBE_FINISHED]
    n = cut % len(ends)
    again = decide(fold(rig.events[: ends[n]]), plan)
    if n + 1 < len(rig.asks):
        assert again == rig.asks[n + 1]
    else:
        assert isinstance(again, Done)


@settings(max_examples=30, deadline=None)
@given(st.integers(5, 26), st.integers(1, 25))
def test_a_killed_probe_costs_at_most_one_repeat(knee: int, killed_after: int) -> None:
    """A probe lost in flight is asked again and the answer is the same."""
    plan = mem_util_plan()
    calm, _ = card(GRID[knee]).run(plan)
    rig = card(GRID[knee])
    rig.add(kinds.STUDY_OPENED, plan=plan.to_json())
    for n in range(200):
        step = decide(fold(rig.events), plan)
        if isinstance(step, Done):
            break
        if n == killed_after:
            asked = {
                "values": dict(step.values),
                "prompt_tokens": step.prompt_tokens,
                "purpose": step.purpose,
            }
            rig.add(kinds.PROBE_ASKED, probe="lost", reason="", **asked)
            rig.add(kinds.PROBE_LOST, probe="lost", why="killed")
            rig.live = None
            assert decide(fold(rig.events), plan) == step
        rig.carry_out(step)
    assert answer_of(fold(rig.events), plan) == answer_of(calm, plan)


def test_reverification_checks_both_ends_first() -> None:
    """After the machine changed old observations are hints: the old ends are asked before anything else."""
    plan = Plan(
        axis="prompt", kind="prompt", target_tokens=8_000, confirm=1, tolerance_tokens=200, tolerance=0.0
    )
    truth = lambda _v, p, _b: ("pass" if p <= 20_000 else "oom_probe", "probe", None, {})  # noqa: E731
    rig = Rig(truth)
    state, _ = rig.run(plan)
    answer = answer_of(state, plan)
    rig.add(kinds.REVERIFY, why="driver", differences=[])
    before = len(rig.asks)
    state, _ = rig.run(plan)
    asked = [a.prompt_tokens for a in rig.asks[before:]]
    assert set(asked) >= {answer["last_pass"], answer["first_fail"]}
    assert len(asked) <= 5
    assert answer_of(state, plan)["last_pass"] == answer["last_pass"]


def test_the_forecast_bounds_what_happens() -> None:
    """The forecast's worst case is not exceeded by a rig inside its assumptions."""
    plan = mem_util_plan()
    ahead = forecast(State(), plan)
    rig = card(0.945)
    rig.run(plan)
    assert ahead.boots <= ahead.worst_boots and ahead.expected_s <= ahead.p90_s * 1.5
    assert len(rig.asks) <= ahead.worst_probes + 3


def test_outcomes_all_have_a_place() -> None:
    """Every outcome is a pass, trouble, or speaks of a bound: none falls through."""
    from llm_bisect.model import BOUND_OF

    for outcome in Outcome:
        assert (outcome is Outcome.PASS) + outcome.is_trouble + (outcome in BOUND_OF) == 1


OUTCOMES = ["pass"] * 3 + [
    "oom_probe",
    "engine_crashed",
    "hang",
    "timeout_client",
    "recall_failed",
    "infra",
    "slow",
]


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from(["ordered", "prompt", "choices"]))
def test_it_ends_whatever_happens(data: st.DataObject, kind: str) -> None:
    """Any outcome at any ask, in any order: the policy comes to an end."""
    asks = iter(range(10_000))
    drawn = data.draw(st.lists(st.sampled_from(OUTCOMES), min_size=1, max_size=40))

    def truth(
        values: Mapping[str, Any], prompt: int, boot: int
    ) -> tuple[str, str, float | None, dict[str, Any]]:
        n = next(asks)
        # after a while every length has one fixed fate, as a real rig has
        outcome = drawn[n] if n < len(drawn) else ("pass" if prompt < 50_000 else "oom_probe")
        return outcome, "probe", 900.0 if outcome == "pass" else None, {"context_tokens": 100_000}

    plans = {
        "ordered": mem_util_plan(),
        "prompt": Plan("prompt", "prompt", 40_000),
        "choices": Plan("kv-dtype", "choices", 40_000, own="a", points=("a", "b", "c")),
    }
    state, done = Rig(truth).run(plans[kind], limit=400)
    assert done.status in ("answered", "no-feasible-point")
    answer_of(state, plans[kind])


def test_a_crash_whose_repeat_runs_out_of_memory_is_settled() -> None:
    """One crash, then out of memory at the same length: the memory failure counts, the crash does not, and
    it is not asked again for ever."""
    seen: list[int] = []

    def truth(_v: Mapping[str, Any], prompt: int, _b: int) -> tuple[str, str, float | None, dict[str, Any]]:
        if prompt > 10_000:
            seen.append(prompt)
            return ("engine_crashed" if len(seen) == 1 else "oom_probe"), "probe", None, {}
        return "pass", "probe", None, {}

    plan = Plan("prompt", "prompt", 8_000, confirm=1)
    state, _ = Rig(truth).run(plan)
    answer = answer_of(state, plan)
    assert answer["fail_outcome"] == "oom_probe" and answer["bound_by"] == "memory"
    assert seen.count(12_000) == 2


def test_two_flakes_at_two_lengths_are_not_one_failure() -> None:
    """A crash that its repeat cleared does not make another crash, elsewhere, count at once."""
    crashes = {12_000: 1, 18_000: 1}

    def truth(_v: Mapping[str, Any], prompt: int, _b: int) -> tuple[str, str, float | None, dict[str, Any]]:
        if crashes.get(prompt, 0):
            crashes[prompt] -= 1
            return "engine_crashed", "probe", None, {}
        return ("pass" if prompt <= 30_000 else "oom_probe"), "probe", None, {"context_tokens": 100_000}

    plan = Plan("prompt", "prompt", 8_000, confirm=1)
    state, _ = Rig(truth).run(plan)
    answer = answer_of(state, plan)
    assert 29_000 <= answer["last_pass"] <= 30_000 and answer["fail_outcome"] == "oom_probe"


def test_the_users_own_limit_is_named() -> None:
    """Where max_prompt ends the line it is not the context that binds."""
    plan = Plan("prompt", "prompt", 2_000, max_prompt_tokens=8_000, confirm=1)
    truth = lambda _v, _p, _b: ("pass", "probe", None, {"context_tokens": 32_768})  # noqa: E731
    state, _ = Rig(truth).run(plan)
    answer = answer_of(state, plan)
    assert (answer["last_pass"], answer["bound_by"]) == (8_000, "max_prompt")


def test_a_target_beyond_the_context_is_not_sent() -> None:
    """Axis prompt: once the context is known, no longer prompt is asked."""
    plan = Plan("prompt", "prompt", 500_000, confirm=1)
    truth = lambda _v, _p, _b: ("pass", "probe", None, {"context_tokens": 32_768})  # noqa: E731
    rig = Rig(truth)
    state, _ = rig.run(plan)
    assert max(a.prompt_tokens for a in rig.asks) < 32_768
    assert answer_of(state, plan)["bound_by"] == "context"


def test_a_margin_is_measured_on_a_boot_that_saw_nothing_longer() -> None:
    """Free memory stays where a boot's longest prompt left it: a shorter probe after it is asked afresh."""
    lowest: dict[int, float] = {}

    def truth(_v: Mapping[str, Any], prompt: int, boot: int) -> tuple[str, str, float | None, dict[str, Any]]:
        if prompt > 76_000:
            return "oom_probe", "probe", None, {"context_tokens": 180_000}
        lowest[boot] = min(lowest.get(boot, 1e9), 1_000 - prompt / 100)
        return "pass", "probe", lowest[boot], {"context_tokens": 180_000}

    plan = Plan("prompt", "prompt", 40_000, margin_mib=400.0)
    state, _ = Rig(truth).run(plan)
    answer = answer_of(state, plan)
    # 60,000 tokens leave 400 MiB
    assert 60_000 * 0.97 - 1_024 <= answer["recommended"] <= 60_000
    assert answer["min_free_mib"] >= 400 and answer["last_pass"] > 70_000
