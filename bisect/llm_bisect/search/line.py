"""One line of points in order of preference, with failures that close it from both sides.

Index 0 is the least and index n-1 the most preferred point. A failure either forbids this point and all
beyond it (`beyond`, such as memory on mem-util) or this point and all before it (`short`, such as
admission on mem-util), or speaks of this one point only (`holes`: it does not boot for a reason of its
own). Classes of failures are told apart before they come here; they are never merged into one verdict.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Bracket:
    """`lo` passed (or None), `hi` is the first that failed beyond it (n: none seen), `floor` the last
    that failed as too short (-1: none seen). `crossed`: a pass lies beyond a failure, or a failure of
    one side beyond a failure of the other; then `lo` is the last pass of the safe side."""

    lo: int | None
    hi: int
    floor: int
    crossed: tuple[int, int] | None = None


def bracket(n: int, passes: Collection[int], beyond: Collection[int], short: Collection[int]) -> Bracket:
    """The bracket that the observations leave. A point that both passed and failed counts as failed."""
    hi = min(beyond, default=n)
    safe = [i for i in passes if i < hi and i not in short]
    lo = max(safe, default=None)
    floor = max((i for i in short if i < (hi if lo is None else lo)), default=-1)
    passed_beyond = [i for i in passes if i > hi]
    short_beyond = [i for i in short if lo is not None and i > lo]
    crossed = None
    if passed_beyond:
        crossed = (hi, min(passed_beyond))
    elif short_beyond and lo is not None:
        crossed = (lo, min(short_beyond))
    return Bracket(lo, hi, floor, crossed)


def next_point(b: Bracket, holes: Collection[int] = ()) -> int | None:
    """The middle of what is still open beyond the last pass, or None when the bracket is closed.

    Without a pass, what is open lies between the two kinds of failure.
    """
    start = b.floor if b.lo is None else b.lo
    is_open = [i for i in range(start + 1, b.hi) if i not in holes]
    return is_open[(len(is_open) - 1) // 2] if is_open else None
