"""The longest prompt: bisection on a line of tokens whose upper end may be unknown.

Growth by half until something fails, then halves. A hint (tokens processed when a probe died, an
engine's own estimate) says where to look next; only a probe moves the bracket.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

GROWTH = 1.5  # superlinear cost: the factor matters little between 1.3 and 2
SHORTEST_TOKENS = 64


@dataclass(frozen=True)
class LengthBracket:
    """`lo` tokens passed (None: nothing yet), `hi` tokens failed (None: nothing yet), `cap` is the longest
    prompt that may be asked (None: unknown)."""

    lo: int | None
    hi: int | None
    cap: int | None

    def is_closed(self, slack_tokens: int) -> bool:
        """True when it is as narrow as asked, or the cap itself passed, or even the shortest failed."""
        if self.hi is None:
            return self.lo is not None and self.cap is not None and self.lo >= self.cap
        if self.lo is None:
            return self.hi <= SHORTEST_TOKENS
        return self.hi - self.lo <= slack_tokens


def length_bracket(passes: Collection[int], fails: Collection[int], cap: int | None) -> LengthBracket:
    """A length that both passed and failed counts as failed; passes beyond the first failure are not used."""
    hi = min(fails, default=None)
    lo = max((p for p in passes if hi is None or p < hi), default=None)
    return LengthBracket(lo, hi, cap)


def next_length(
    b: LengthBracket, first: int, slack_tokens: int, hints: Sequence[int] = ()
) -> tuple[int, bool]:
    """The next length to ask and whether a hint chose it. Call it only while the bracket is open.

    `first` is asked when nothing is known. Lengths are rounded to friendly numbers where that stays
    strictly inside the bracket.
    """
    lo, hi, cap = b.lo, b.hi, b.cap
    for hint in hints:
        if (lo is None or hint > lo) and (hi is None or hint < hi) and (cap is None or hint <= cap):
            return hint, True
    if lo is None:
        if hi is not None:
            return max(SHORTEST_TOKENS, _round(hi // 2, hi // 16)), False
        return (first if cap is None else min(first, cap)), False
    if hi is None:
        grown = max(lo + slack_tokens, _round(math.ceil(lo * GROWTH), lo // 16))
        return (grown if cap is None else min(grown, cap)), False
    return _round((lo + hi) // 2, (hi - lo) // 16), False


def _round(tokens: int, leeway: int) -> int:
    """`tokens` moved by at most `leeway` to a multiple of a power of ten (times 1 or 5)."""
    step = 1
    for candidate in (5, 10, 50, 100, 500, 1000, 5000, 10000):
        if candidate // 2 > leeway:
            break
        step = candidate
    rounded = round(tokens / step) * step
    return rounded if abs(rounded - tokens) <= leeway else tokens
