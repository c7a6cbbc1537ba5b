"""The recorded reference study: read, folded and replayed for ever."""

from __future__ import annotations

from pathlib import Path

from llm_bisect.journal import events as kinds
from llm_bisect.journal.state import fold
from llm_bisect.journal.store import read_journal
from llm_bisect.search.answer import answer_of
from llm_bisect.search.ceiling import decide
from llm_bisect.search.plan import Ask, Done, Plan

PATH = Path(__file__).resolve().parents[2] / "journals" / "reference" / "long-text-mem-util.jsonl"


def test_every_ask_is_asked_again() -> None:
    """Before each recorded ask the policy, given the events so far, asks just that; at the end it is done."""
    events = read_journal(PATH)
    plan = Plan.from_json(events[0].body["plan"])
    asked = 0
    for n, event in enumerate(events):
        step = decide(fold(events[:n]), plan)
        if event.kind == kinds.PROBE_ASKED:
            assert isinstance(step, Ask)
            assert dict(step.values) == event.body["values"]
            assert step.prompt_tokens == event.body["prompt_tokens"]
            assert (step.purpose, step.fresh) == (event.body["purpose"], event.body["fresh"])
            asked += 1
        if event.kind == kinds.STUDY_CLOSED:
            assert step == Done(event.body["status"], event.body["why"])
    assert asked == 13


def test_its_answer() -> None:
    """The figures that the study printed."""
    events = read_journal(PATH)
    state = fold(events)
    answer = answer_of(state, Plan.from_json(events[0].body["plan"]))
    assert (answer["last_pass"], answer["first_fail"], answer["fail_outcome"]) == (0.945, 0.95, "oom_probe")
    assert (answer["recommended"], answer["min_free_mib"], answer["bound_by"]) == (0.93, 471, "memory")
    assert answer["confirmed"]["passes"] == answer["confirmed"]["boots"] == 3
    assert (answer["prompt_ceiling"]["last_pass"], answer["prompt_ceiling"]["first_fail"]) == (74_304, 76_500)


def test_folding_in_parts_is_folding_at_once() -> None:
    """The fold is associative: any cut gives the same state."""
    events = read_journal(PATH)
    whole = fold(events)
    for cut in range(len(events)):
        assert fold(events[cut:], fold(events[:cut])) == whole
