"""`explain`: every probe with what it moved, the table of outcomes, and the command that asks again."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from llm_bisect.model import Outcome
from llm_bisect.reports.explain import explain_lines, moved
from llm_bisect.search.plan import Plan

Run = Callable[..., Any]


def test_every_probe_is_told_with_what_it_moved(run_study: Run, mem_util_plan: Run, card: Run) -> None:
    """Ids, boots and reasons of all probes; the bracket before and after."""
    state = run_study(mem_util_plan(), card())
    text = "\n".join(explain_lines(state))
    for trial in state.trials:
        assert f"\n{trial.probe} {trial.boot}: " in text
        assert trial.reason in " ".join(text.split())
    assert "moved mem-util: 0.93 passes, no failure yet → 0.93 passes, 0.955 fails" in text
    assert "| torch.OutOfMemoryError: CUDA out of memory | tried 50 MiB" in text


def test_what_moves_and_what_does_not(run_study: Run, mem_util_plan: Run, card: Run) -> None:
    """Trouble moves nothing; a single crash moves nothing yet; a thin pass says so."""
    plan = mem_util_plan()
    state = run_study(plan, card())
    n = next(i for i, t in enumerate(state.trials, 1) if t.outcome is Outcome.OOM_PROBE)
    assert any("0.955 fails" in line for line in moved(state, plan, n))

    def with_outcome(outcome: Outcome) -> Any:
        trials = list(state.trials)
        trials[n - 1] = dataclasses.replace(trials[n - 1], outcome=outcome)
        return dataclasses.replace(state, trials=tuple(trials))

    assert moved(with_outcome(Outcome.INFRA), plan, n) == [
        "moved nothing: it says nothing about the candidate"
    ]
    assert "on a fresh boot" in moved(with_outcome(Outcome.ENGINE_CRASHED), plan, n)[0]
    thin = next(i for i, t in enumerate(state.trials, 1) if t.values == {"mem-util": 0.935})
    assert any("less than the margin of 400 MiB" in line for line in moved(state, plan, thin))


def test_the_table_follows_the_trends(run_study: Run, mem_util_plan: Run, card: Run) -> None:
    """Admission and memory close opposite sides of mem-util; trouble closes none."""
    text = " ".join(" ".join(explain_lines(run_study(mem_util_plan(), card()))).split())
    assert (
        "oom_boot, oom_probe, host_oom_killed: memory: a higher value passes less easily: "
        "forbids it and all higher values" in text
    )
    assert (
        "admission_rejected: admission: a higher value passes more easily: forbids it and all lower" in text
    )
    assert "infra, void, aborted: nothing" in text
    low = " ".join(explain_lines(run_study(mem_util_plan(prefer="low", trends={}), card(), stop_after=3)))
    assert "no known order, so the safe side: forbids it and all lower values" in " ".join(low.split())


def test_all_kinds_and_unfinished_studies(run_study: Run, mem_util_plan: Run, card: Run) -> None:
    """Prompt and choices studies, and a study without a probe, are explained, too."""
    prompt = run_study(mem_util_plan(axis="prompt", kind="prompt", own=None, points=()), card())
    assert any("moved the longest prompt" in line for line in explain_lines(prompt))

    def truth(values: Mapping[str, Any], n: int) -> Any:
        return card()({}, n)

    plan = mem_util_plan(axis="kv", kind="choices", own="a", points=("a", "b"))
    assert any("no order of" in line for line in explain_lines(run_study(plan, truth)))
    assert explain_lines(run_study(mem_util_plan(), card(), stop_after=0, simulated=True))[0].startswith(
        "SIM"
    )


def test_the_command_asks_the_same_question(run_study: Run, mem_util_plan: Run, card: Run) -> None:
    """Everything that the question holds is on the command line, quoted."""
    plan: Plan = mem_util_plan(fixed={"ubatch": 4128})
    question = {"profile": "my profile.yml", "sets": {"ubatch": "4128"}, "tolerance": "3%", "gpus": ["1"]}
    state = run_study(plan, card(), question=question)
    words = shlex.split(explain_lines(state)[-1])
    assert words[:2] == ["bisect", "ceiling"]
    for pair in (
        ["--profile", "my profile.yml"],
        ["--set", "ubatch=4128"],
        ["--prompt", "60000"],
        ["--tolerance", "3%"],
        ["--gpu", "1"],
        ["--seed", "7"],
    ):
        i = words.index(pair[0])
        assert words[i : i + 2] == pair


def test_an_amended_outcome_is_told(run_study: Run, mem_util_plan: Run, card: Run) -> None:
    """What a person changed, from what, and why."""
    state = run_study(mem_util_plan(), card())
    first = dataclasses.replace(state.trials[0], outcome=Outcome.VOID, amended="the GPU was\nbusy")
    state = dataclasses.replace(state, trials=(first, *state.trials[1:]))
    assert "  amended by a person, was pass: the GPU was busy" in explain_lines(state)
