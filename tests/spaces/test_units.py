"""Amounts as people type them, and grids without rounding errors."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_bisect.model import UsageProblem
from llm_bisect.spaces.units import (
    MAX_TOKENS,
    grid,
    parse_duration_s,
    parse_mib,
    parse_tokens,
)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("60k", 60_000),
        ("180K", 180_000),
        ("1M", 1_000_000),
        ("1.5m", 1_500_000),
        ("60_000", 60_000),
        ("60,000", 60_000),
        ("64Ki", 65_536),
        ("64kib", 65_536),
        ("1MiB", 1_048_576),
        (4128, 4128),
        ("0.5k", 500),
        (" 8k ", 8_000),
        ("30 tokens", 30),
    ],
)
def test_tokens(text: str | int, tokens: int) -> None:
    """k is 1,000 and Ki is 1,024."""
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize(
    "text", ["", "k", "-5", "60kk", "1.0001k", "0", "1e5", "nan", "9999999m", "60 000", True, "٣k"]
)
def test_what_is_no_amount_of_tokens(text: str) -> None:
    """One sentence with what was typed and an example."""
    if text == "٣k":  # a digit is a digit in any script
        assert parse_tokens(text) == 3_000
        return
    with pytest.raises(UsageProblem, match="is not a number of tokens") as caught:
        parse_tokens(text)
    assert "60k" in (caught.value.hint or "")


@given(
    st.integers(1, 10**9), st.sampled_from([("", 1), ("k", 1_000), ("K", 1_000), ("Ki", 1_024), ("M", 10**6)])
)
def test_tokens_round_trip(number: int, unit: tuple[str, int]) -> None:
    """Whatever is printed with a unit is read back; too much is refused."""
    suffix, size = unit
    if number * size > MAX_TOKENS:
        with pytest.raises(UsageProblem):
            parse_tokens(f"{number}{suffix}")
    else:
        assert parse_tokens(f"{number}{suffix}") == number * size
        assert parse_tokens(f"{number:,}{suffix}") == parse_tokens(f"{number:_}{suffix}") == number * size


@given(st.integers(0, 700), st.integers(0, 59), st.integers(0, 59))
def test_durations_add_up(hours: int, minutes: int, seconds: int) -> None:
    """Hours, minutes and seconds in one text."""
    total = hours * 3600 + minutes * 60 + seconds
    text = f"{hours}h{minutes}m{seconds}s"
    if total:
        assert parse_duration_s(text) == total
    else:
        with pytest.raises(UsageProblem):
            parse_duration_s(text)


@given(st.text(max_size=12))
def test_any_text_is_read_or_refused(text: str) -> None:
    """Never another error than ours."""
    for parse in (parse_tokens, parse_duration_s, parse_mib):
        try:
            assert parse(text) >= 0
        except UsageProblem as problem:
            assert problem.hint


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("25m", 1500),
        ("90s", 90),
        ("1h30m", 5400),
        ("1500", 1500),
        (60, 60),
        ("1.5h", 5400),
        ("2min", 120),
        ("0.5", 0.5),
    ],
)
def test_durations(text: str | int, seconds: float) -> None:
    """Hours, minutes, seconds; a plain number is seconds."""
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "-5s", "0", "5d", "1m1h", True, "inf"])
def test_what_is_no_duration(text: str) -> None:
    """One sentence with an example."""
    with pytest.raises(UsageProblem, match="is not a duration"):
        parse_duration_s(text)


@pytest.mark.parametrize(
    ("text", "mib"),
    [("512m", 512), ("1.5g", 1536), (400, 400), ("400 MiB", 400), ("1024k", 1), ("1GiB", 1024)],
)
def test_memory(text: str | int, mib: float) -> None:
    """MiB, whatever unit it was typed in."""
    assert parse_mib(text) == mib


@pytest.mark.parametrize("text", ["", "much", "-1", "1p", True])
def test_what_is_no_memory(text: str) -> None:
    """One sentence with an example."""
    with pytest.raises(UsageProblem, match="is not an amount of memory"):
        parse_mib(text)


def test_a_grid_of_shares_has_no_rounding_errors() -> None:
    """0.85, 0.855, … 0.98: each value is the one that is written."""
    points = grid(0.85, 0.98, 0.005)
    assert len(points) == 27 and points[0] == 0.85 and points[16] == 0.93 and points[-1] == 0.98


def test_a_grid_of_whole_numbers_stays_whole() -> None:
    """Tokens are counted, not measured."""
    assert grid(100, 200, 50) == (100, 150, 200)
    assert all(isinstance(p, int) for p in grid("100", "200", 20))


@given(
    st.decimals(min_value=0, max_value=100, places=3),
    st.decimals(min_value=0, max_value=10, places=3),
    st.decimals(min_value=Decimal("0.01"), max_value=5, places=3),
)
def test_grids_are_exact(low: Decimal, span: Decimal, step: Decimal) -> None:
    """Every point is low plus a whole number of steps, in exact decimals, from low up to at most high."""
    points = grid(float(low), float(low + span), float(step))
    assert points == tuple(float(low + step * i) for i in range(len(points)))
    assert low + step * (len(points) - 1) <= low + span < low + step * len(points)


@pytest.mark.parametrize(
    ("low", "high", "step", "says"),
    [
        (0.98, 0.85, 0.005, "low 0.98 is above high 0.85"),
        (0, 1, 0, "step 0 is not positive"),
        (0, 1, -1, "step -1 is not positive"),
        (0, 1_000_000, 1, "more than 2000"),
        ("a", 1, 1, "needs numbers"),
        ("nan", 1, 1, "finite"),
    ],
)
def test_grids_that_are_none(low: object, high: object, step: object, says: str) -> None:
    """Each mistake has its own sentence."""
    with pytest.raises(UsageProblem, match=says):
        grid(low, high, step)  # type: ignore[arg-type]
