"""The line of points: brackets from typed failures, and which point comes next."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llm_bisect.search.line import Bracket, bracket, next_point


def run_line(n: int, lowest: int, highest: int, start: int | None = None) -> tuple[Bracket, list[int]]:
    """Search a line where the points lowest..highest pass; returns the last bracket and what was asked."""
    passes: set[int] = set()
    beyond: set[int] = set()
    short: set[int] = set()
    asked: list[int] = []
    point = start
    while True:
        b = bracket(n, passes, beyond, short)
        point = point if point is not None else next_point(b)
        if point is None:
            return b, asked
        asked.append(point)
        (short if point < lowest else beyond if point > highest else passes).add(point)
        point = None


@given(st.data())
def test_it_finds_every_knee_exactly(data: st.DataObject) -> None:
    """For every interval of passing points the bracket ends at its upper end, by halves, none asked twice."""
    n = data.draw(st.integers(1, 200))
    lowest = data.draw(st.integers(0, n))
    highest = data.draw(st.integers(lowest - 1, n - 1))
    start = data.draw(st.none() | st.integers(0, n - 1))
    b, asked = run_line(n, lowest, highest, start)
    assert len(asked) == len(set(asked))
    assert b.crossed is None
    if highest < lowest:
        assert b.lo is None
    else:
        assert (b.lo, b.hi) == (highest, highest + 1)
    assert len(asked) <= n.bit_length() + 2


@given(st.integers(1, 60), st.data())
def test_observed_ends_only(n: int, data: st.DataObject) -> None:
    """`lo` is an observed pass and `hi` an observed failure (or the end), whatever was observed."""
    points = st.integers(0, n - 1)
    passes = data.draw(st.sets(points))
    beyond = data.draw(st.sets(points))
    short = data.draw(st.sets(points))
    b = bracket(n, passes, beyond, short)
    assert b.lo is None or (b.lo in passes and b.lo not in beyond and b.lo < b.hi)
    assert b.hi == n or b.hi in beyond
    assert b.floor == -1 or b.floor in short
    point = next_point(b)
    assert point is None or (b.lo if b.lo is not None else b.floor) < point < b.hi


def test_a_failed_confirmation_moves_the_pass_down() -> None:
    """A point that passed once and failed once counts as failed."""
    assert bracket(10, {3, 5}, {5, 8}, set()).lo == 3


def test_a_pass_beyond_a_failure_is_seen() -> None:
    """A non-monotone line keeps its safe side and says where it crosses."""
    b = bracket(10, {2, 6}, {4}, set())
    assert (b.lo, b.hi, b.crossed) == (2, 4, (4, 6))


def test_a_hole_is_stepped_around() -> None:
    """A point that cannot boot for a reason of its own closes nothing beyond it."""
    b = bracket(5, {1}, set(), set())
    assert next_point(b, {2, 3}) == 4
    assert next_point(bracket(5, {1, 4}, set(), set()), {2, 3}) is None
