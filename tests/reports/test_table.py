"""The answer on one screen: the three kinds of axes, every status, widths, and text that others wrote."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from llm_bisect.reports.answers import answer_object
from llm_bisect.reports.table import answer_lines

Run = Callable[..., Any]


def shown(state: Any) -> str:
    lines = answer_lines(answer_object(state))
    assert max(map(len, lines)) <= 100
    assert len(lines) <= 40
    return "\n".join(lines)


def test_the_seed_answer(run_study: Run, mem_util_plan: Run, card: Run) -> None:
    """Bracket, point with its boots and margin, longest prompt, cost, and the next command."""
    text = shown(run_study(mem_util_plan(), card()))
    for line in (
        "mem-util 0.945 passes 60,000 tokens, 0.95 fails (oom_probe): bound by memory",
        "0.93 passes here: 3/3 boots at 60,000 tokens, lowest free 402 MiB (thin)",
        "longest prompt at 0.93: 73,200 passes (1 boot), 75,000 fails (oom_probe): bound by memory",
        "cost: 10 boots, 14 probes, 3:04 h",
        "next: bisect export long-text-ceiling --to compose",
    ):
        assert line in text.splitlines()
    assert "recommended" not in text and "SIMULATED" not in text


def test_recommended_needs_a_margin(run_study: Run, mem_util_plan: Run, card: Run) -> None:
    """The word stands only where at least 1,024 MiB were free."""
    text = shown(run_study(mem_util_plan(), card(2_000)))
    assert "recommended 0.945: 3/3 boots at 60,000 tokens, lowest free 2,058 MiB (comfortable)" in text


def test_simulated_is_said_first(run_study: Run, mem_util_plan: Run, card: Run) -> None:
    """The first line says so in capitals."""
    text = shown(run_study(mem_util_plan(), card(), simulated=True, runner="simulated"))
    assert text.startswith("SIMULATED")


def test_a_spent_budget(run_study: Run, mem_util_plan: Run, card: Run) -> None:
    """The bracket so far, the unconfirmed point, and how to go on."""
    text = shown(run_study(mem_util_plan(), card(), stop_after=5))
    assert "mem-util 0.945 passes 60,000 tokens, 0.955 fails" in text
    assert "UNCONFIRMED 0.93: 1/1 boots at 60,000 tokens" in text
    assert "next: bisect resume long-text-ceiling" in text
    assert "--include-unconfirmed" in text


def test_no_feasible_point(run_study: Run, mem_util_plan: Run, card: Run) -> None:
    """The reason and the last outcome are told, nothing is recommended."""
    text = shown(run_study(mem_util_plan(), card(admitted_from=0.99)))
    assert "no-feasible-point" in text and "admission_rejected" in text
    assert "nothing to recommend" in text and "export" not in text


def test_nothing_known_yet(run_study: Run, mem_util_plan: Run, card: Run) -> None:
    """Before the first probe there is a screen, too."""
    assert "nothing is known yet" in shown(run_study(mem_util_plan(), card(), stop_after=0))


def test_the_prompt_axis(run_study: Run, mem_util_plan: Run, card: Run) -> None:
    """Token counts on both ends."""
    plan = mem_util_plan(axis="prompt", kind="prompt", own=None, points=())
    text = shown(run_study(plan, card()))
    assert "longest prompt: 73,200 tokens pass, 75,000 fail (oom_probe): bound by memory" in text
    assert "60,000 tokens passes here: 3/3 boots at 60,000 tokens" in text


def test_choices(run_study: Run, mem_util_plan: Run, card: Run) -> None:
    """Each choice with its longest prompt, one that does not boot with its outcome."""

    def truth(values: Mapping[str, Any], prompt: int) -> Any:
        good = values["kv-dtype"] == "fp8"
        return card()({}, prompt) if good else ("config_error", "boot", None, {})

    plan = mem_util_plan(axis="kv-dtype", kind="choices", own="fp8", points=("auto", "fp8"))
    text = shown(run_study(plan, truth))
    assert "kv-dtype auto: does not boot (config_error)" in text
    assert "kv-dtype fp8: longest prompt 73,200 passes" in text
    assert "fp8 passes here: 3/3 boots" in text


@pytest.mark.parametrize("hostile", ["\x1b[2Jgone", "a\nb", "x" * 5_000, "\u202eevil"])
def test_text_of_others_stays_text(hostile: str, run_study: Run, mem_util_plan: Run, card: Run) -> None:
    """Warnings come from logs: no control character reaches the terminal, no line gets too long."""
    obj = copy.deepcopy(answer_object(run_study(mem_util_plan(), card())))
    obj["warnings"] += [hostile] * 12
    lines = answer_lines(obj)
    assert max(map(len, lines)) <= 100
    assert all(c.isprintable() for line in lines for c in line)
    assert any("more: bisect status" in line for line in lines)
