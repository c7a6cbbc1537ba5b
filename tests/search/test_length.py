"""The longest prompt: growth, halves, hints, friendly numbers."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from llm_bisect.search.length import SHORTEST_TOKENS, LengthBracket, length_bracket, next_length


def run_length(
    ceiling: int, first: int, cap: int | None, slack: int, hints: list[int]
) -> tuple[LengthBracket, list[int]]:
    """Search for `ceiling`; returns the closed bracket and the lengths asked."""
    passes: set[int] = set()
    fails: set[int] = set()
    asked: list[int] = []
    while True:
        b = length_bracket(passes, fails, cap)
        if b.is_closed(slack):
            return b, asked
        tokens, _ = next_length(b, first, slack, hints)
        assert tokens not in asked
        asked.append(tokens)
        (passes if tokens <= ceiling else fails).add(tokens)


@given(
    st.integers(SHORTEST_TOKENS, 1_000_000),
    st.integers(SHORTEST_TOKENS, 300_000),
    st.none() | st.integers(SHORTEST_TOKENS, 400_000),
    st.integers(1, 4096),
    st.lists(st.integers(1, 500_000), max_size=3),
)
def test_the_bracket_always_holds_the_ceiling(
    ceiling: int, first: int, cap: int | None, slack: int, hints: list[int]
) -> None:
    """Whatever the hints say, the bracket closes around the truth within the slack, or at the cap."""
    b, asked = run_length(ceiling, first, cap, slack, hints)
    assert all(cap is None or tokens <= cap for tokens in asked)
    if b.lo is not None:
        assert b.lo <= ceiling
        assert b.hi is None or ceiling < b.hi <= b.lo + slack
    if b.hi is None:
        assert cap is not None and b.lo == cap <= ceiling
    assert len(asked) <= 2 * math.log2(max(ceiling, first) + 2) + 8 + len(hints)


def test_even_the_shortest_fails() -> None:
    """When nothing passes the search goes down and stops at the shortest prompt."""
    b, asked = run_length(0, 8000, None, 128, [])
    assert b.lo is None
    assert asked[-1] == SHORTEST_TOKENS


def test_a_right_hint_saves_probes() -> None:
    """Two hints around the ceiling close the bracket with two further probes."""
    passes, fails = {60_000}, {90_000}
    b = length_bracket(passes, fails, None)
    assert next_length(b, 60_000, 2000, [75_000, 76_500]) == (75_000, True)
    b = length_bracket(passes | {75_000}, fails, None)
    assert next_length(b, 60_000, 2000, [75_000, 76_500]) == (76_500, True)


def test_friendly_numbers() -> None:
    """Lengths are round where that costs nothing."""
    assert next_length(LengthBracket(60_000, 90_000, None), 1, 1024)[0] == 75_000
    assert next_length(LengthBracket(3_840, 3_968, None), 1, 64)[0] == 3_900
