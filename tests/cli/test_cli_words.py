"""Small parts of the command line: local times, pairs, tolerances, durations."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from llm_bisect.cli.ceiling import parse_sets
from llm_bisect.cli.run import until_epoch_s
from llm_bisect.model import UsageProblem
from llm_bisect.opening import budget_from, parse_tolerance
from llm_bisect.reports.words import duration

ASK = """
import sys, time
from datetime import datetime
time.tzset()
from llm_bisect.cli.run import until_epoch_s
now = datetime.fromisoformat(sys.argv[1]).astimezone()
print(datetime.fromtimestamp(until_epoch_s(sys.argv[2], now)).astimezone().isoformat())
"""


def until(now: str, text: str, zone: str = "Europe/Berlin") -> str:
    """The moment that --until means there, asked at `now`."""
    done = subprocess.run(
        [sys.executable, "-c", ASK, now, text],
        env={**os.environ, "TZ": zone, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("now", "text", "moment"),
    [
        ("2026-06-01T23:00:00+02:00", "07:00", "2026-06-02T07:00:00+02:00"),
        ("2026-06-01T05:00:00+02:00", "7:00", "2026-06-01T07:00:00+02:00"),
        ("2026-06-01T07:00:00+02:00", "07:00", "2026-06-02T07:00:00+02:00"),
        # the night in which summer time begins: 8 hours of the clock are 7
        ("2026-03-28T23:00:00+01:00", "07:00", "2026-03-29T07:00:00+02:00"),
        # a time that this night leaves out: by the clock before the change, later by the one after it
        ("2026-03-28T23:00:00+01:00", "02:30", "2026-03-29T01:30:00+01:00"),
        ("2026-03-29T01:45:00+01:00", "02:30", "2026-03-29T03:30:00+02:00"),
        # the night in which it ends: 8 hours of the clock are 9
        ("2026-10-24T23:00:00+02:00", "07:00", "2026-10-25T07:00:00+01:00"),
        # the hour that comes twice: the next time that clocks show it
        ("2026-10-25T01:30:00+02:00", "02:30", "2026-10-25T02:30:00+02:00"),
        ("2026-10-25T02:40:00+02:00", "02:30", "2026-10-25T02:30:00+01:00"),
        ("2026-10-25T02:10:00+01:00", "02:30", "2026-10-25T02:30:00+01:00"),
        ("2026-10-25T02:40:00+01:00", "02:30", "2026-10-26T02:30:00+01:00"),
    ],
)
def test_until_is_the_next_time_that_clocks_show_it(now: str, text: str, moment: str) -> None:
    """Also across a change of the clocks, where a day has 23 or 25 hours."""
    assert until(now, text) == moment


@pytest.mark.parametrize("text", ["25:00", "7", "07:60", "", "tomorrow", "07:00:00", "-1:00"])
def test_no_local_time(text: str) -> None:
    """Anything that no clock shows is refused, by name."""
    with pytest.raises(UsageProblem, match="--until"):
        until_epoch_s(text)


def test_no_limit_by_time() -> None:
    """Without --until there is no moment, and without limits no budget."""
    assert until_epoch_s(None) is None
    budget = budget_from(None, None, None)
    assert (budget.max_boots, budget.limit_s) == (None, None)
    assert budget_from(3, 2.0, None).limit_s == 7200
    assert (budget_from(None, 2.0, 0.0).limit_s or 0) < 0, "the earlier of both counts"


@pytest.mark.parametrize("hours", [float("nan"), float("inf")])
def test_hours_that_are_no_number(hours: float) -> None:
    """They would make a budget that never ends, or always."""
    with pytest.raises(UsageProblem, match="--max-hours"):
        budget_from(None, hours, None)


def test_pairs() -> None:
    """AXIS=VALUE; the value may hold an equals sign; the last of two counts."""
    assert parse_sets([]) == {}
    assert parse_sets(["a=1", "b=x=y", "a=2"]) == {"a": "2", "b": "x=y"}
    for text in ("a", "=1", "a=", "="):
        with pytest.raises(UsageProblem, match="AXIS=VALUE"):
            parse_sets([text])


def test_tolerances() -> None:
    """A share of the prompt, or tokens."""
    assert parse_tolerance("3%") == (0.03, 1)
    assert parse_tolerance("0.5%") == (0.005, 1)
    assert parse_tolerance("1k") == (0.0, 1000)
    for text in ("0%", "100%", "-3%", "x%", "%", "nan%", "many", "0", ""):
        with pytest.raises(UsageProblem, match="--tolerance"):
            parse_tolerance(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (252, "4 min 12 s"),
        (3599.6, "1 h 00 min"),
        (7500, "2 h 05 min"),
        (90_000, "25 h 00 min"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    """Rounded once, so that no `60 s` and no `60 min` is shown."""
    assert duration(seconds) == text
