"""Axis values as a person types them: `0.93`, `200k`, `off`."""

from __future__ import annotations

import math

from llm_bisect.model import AxisValue, UsageProblem
from llm_bisect.spaces.profile import Axis
from llm_bisect.spaces.units import parse_tokens


def parse_value(axis: Axis, text: str, *, where: str) -> AxisValue:
    """`text` as a value of `axis`. Raises UsageProblem naming `where` and the accepted values."""
    if axis.kind == "choices":
        if text not in axis.values:
            accepted = ", ".join(str(v) for v in axis.values)
            raise UsageProblem(
                f"{where}: {text!r} is no choice of axis {axis.name!r}", hint=f"accepted: {accepted}"
            )
        return text
    if axis.kind == "prompt":
        raise UsageProblem(
            f"{where}: the prompt's length is what is searched", hint="--prompt N sets the target"
        )
    if axis.unit == "tokens":
        return parse_tokens(text)
    try:
        number = float(text)
        if not math.isfinite(number):
            raise ValueError(text)
    except ValueError:
        raise UsageProblem(
            f"{where}: {text!r} is not a number", hint=f"axis {axis.name!r} takes numbers"
        ) from None
    return int(number) if number.is_integer() and all(isinstance(v, int) for v in axis.values) else number
