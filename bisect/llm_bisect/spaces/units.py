"""Amounts as people type them: `60k` tokens, `25m`, `512m` of memory, and grids without rounding errors."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

from llm_bisect.model import UsageProblem

MAX_TOKENS = 10**9
MAX_GRID_POINTS = 2_000

_TOKENS = re.compile(
    r"(?P<n>\d[\d_,]*(?:\.\d+)?)\s*(?:(?P<unit>ki|mi)b?|(?P<short>[km]))?(?:\s*tok(?:ens?)?)?", re.I
)
_TOKEN_UNITS = {"": 1, "k": 1_000, "m": 1_000_000, "ki": 1 << 10, "mi": 1 << 20}
_DURATION = re.compile(
    r"(?:(?P<h>\d+(?:\.\d+)?)h)?\s*(?:(?P<m>\d+(?:\.\d+)?)m(?:in)?)?\s*(?:(?P<s>\d+(?:\.\d+)?)s?)?", re.I
)
_MEMORY = re.compile(r"(?P<n>\d+(?:\.\d+)?)\s*(?P<unit>[kmgt]?)(?:i?b)?", re.I)
_MIB = {"": 1.0, "k": 1 / 1024, "m": 1.0, "g": 1024.0, "t": 1024.0 * 1024.0}


def parse_tokens(value: str | int | float) -> int:
    """`60k`, `180K`, `1M`, `60_000`, `64Ki` → tokens (k is 1,000, Ki is 1,024). Raises UsageProblem."""
    text = str(value).strip()
    found = _TOKENS.fullmatch(text)
    tokens = Decimal(0)
    if found is not None and not isinstance(value, bool):
        number = Decimal(found["n"].replace("_", "").replace(",", ""))
        tokens = number * _TOKEN_UNITS[(found["unit"] or found["short"] or "").lower()]
    if tokens < 1 or tokens > MAX_TOKENS or tokens != int(tokens):
        raise UsageProblem(
            f"{text!r} is not a number of tokens", hint="e.g. 60000, 60k, 1M (k is 1,000; 64Ki is 65,536)"
        )
    return int(tokens)


def parse_duration_s(value: str | int | float) -> float:
    """`25m`, `90s`, `1h30m`, `1500` (seconds) → seconds. Raises UsageProblem."""
    text = str(value).strip()
    found = _DURATION.fullmatch(text)
    seconds = 0.0
    if found is not None and text and not isinstance(value, bool):
        seconds = sum(float(found[unit] or 0) * size for unit, size in (("h", 3600), ("m", 60), ("s", 1)))
    if not 0 < seconds <= 30 * 86400:
        raise UsageProblem(f"{text!r} is not a duration", hint="e.g. 90s, 25m, 1h30m, or a number of seconds")
    return seconds


def parse_mib(value: str | int | float) -> float:
    """`512m`, `1.5g`, `400`, `400 MiB` → MiB (a plain number is MiB). Raises UsageProblem."""
    text = str(value).strip()
    found = _MEMORY.fullmatch(text)
    if found is None or isinstance(value, bool):
        raise UsageProblem(f"{text!r} is not an amount of memory", hint="e.g. 400, 512m, 1.5g")
    return float(found["n"]) * _MIB[found["unit"].lower()]


def grid(low: str | int | float, high: str | int | float, step: str | int | float) -> tuple[int | float, ...]:
    """low, low + step, … up to high, computed in decimals: 0.85, 0.855, … never 0.9300000001.

    Whole numbers stay whole. Raises UsageProblem: not numbers, low above high, step not positive, or more
    than 2,000 points.
    """
    try:
        first, last, width = (Decimal(str(v)) for v in (low, high, step))
    except InvalidOperation:
        raise UsageProblem(
            f"a grid needs numbers, not {low!r}, {high!r}, {step!r}", hint="low, high, step"
        ) from None
    if not all(v.is_finite() for v in (first, last, width)):
        raise UsageProblem("a grid needs finite numbers", hint="low, high, step")
    if first > last:
        raise UsageProblem(f"low {low} is above high {high}", hint="swap them")
    if width <= 0:
        raise UsageProblem(f"step {step} is not positive", hint="e.g. 0.005")
    if (last - first) / width > MAX_GRID_POINTS:
        raise UsageProblem(f"step {step} gives more than {MAX_GRID_POINTS} values", hint="take a larger step")
    count = int((last - first) / width)
    points = [first + width * i for i in range(count + 1)]
    whole = all(p == int(p) for p in points) and all(v == int(v) for v in (first, width))
    return tuple(int(p) if whole else float(p) for p in points)
