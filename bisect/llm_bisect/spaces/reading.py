"""Which value an axis has in a launch, and what is written for a value."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import PurePosixPath

from llm_bisect.model import AxisValue, Launch
from llm_bisect.spaces.argv import find_flag
from llm_bisect.spaces.launches import words_of
from llm_bisect.spaces.profile import Axis

ON_TEXTS = ("1", "true", "on", "yes")
_OFF_TEXTS = ("", "0", "false", "off", "no")
_AMOUNT = re.compile(r"(?P<number>\d{1,15}(?:\.\d{1,15})?)(?P<unit>[kKmMgG]?)")
# As engines read lengths: small letters are decimal, capitals binary.
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}

VariableValue = Callable[[str], str | None]
"""What a Compose variable is now; None where it has no value or the file does not offer it."""


def read_axis(one: Axis, launch: Launch, variable: VariableValue = lambda name: None) -> AxisValue:
    """The axis's value in a launch; None where it is not set or is none of the choices.

    What the engine gets decides. Compose variables are looked at only where that says nothing, since a
    script may put them into flags that cannot be read from outside.
    """
    seen = _seen(one, launch)
    if one.toggle:
        if seen is None:
            seen = next((v for name in one.apply.variable if (v := variable(name)) is not None), None)
        return "off" if seen is None or seen.strip().lower() in _OFF_TEXTS else "on"
    value = _as_value(one, seen)
    if value is None or (seen is None and one.kind == "choices"):
        for name in one.apply.variable:
            text = variable(name)
            if text is not None and (found := _as_value(one, text)) is not None:
                return found
    return value


def payload_of(one: Axis, value: AxisValue) -> object:
    """What is written for a value: a choice's payload (None: the flag is left out), else the value itself."""
    return one.payloads.get(str(value)) if one.kind == "choices" and not one.toggle else value


def text_of(payload: object) -> str:
    """A payload as a word of an argv or an environment."""
    if isinstance(payload, dict | list):
        return json.dumps(payload, separators=(",", ":"))
    return str(payload).lower() if isinstance(payload, bool) else str(payload)


def mount_target(one: Axis, launch: Launch) -> str | None:
    """Where a mounted file goes: as the profile says, else where the launch has a file of that name."""
    if one.apply.mount_target or not one.apply.mount:
        return one.apply.mount_target
    name = PurePosixPath(one.apply.mount).name
    return next((m.target for m in launch.mounts if PurePosixPath(m.source).name == name), None)


def flags_of(one: Axis) -> tuple[str, ...]:
    """Spellings of the axis's flag, the one to write first; empty where it has none."""
    return one.apply.flag or ((one.apply.json_flag,) if one.apply.json_flag else ())


def _seen(one: Axis, launch: Launch) -> str | None:
    """The text that the launch has for the axis; None where it has none."""
    apply = one.apply
    if apply.mount:
        target = mount_target(one, launch)
        return "on" if any(m.target == target for m in launch.mounts) else None
    if flags := flags_of(one):
        found = find_flag(words_of(launch), flags, launch.env)
        if found is not None:
            for also in apply.also_flags:  # half of the pair is another setting than the axis's
                if find_flag(words_of(launch), also, launch.env) != found:
                    return f"{found}, but not for {also[0]}"
            return "on" if one.toggle and found.lower() not in _OFF_TEXTS[1:] else found
    if apply.env and apply.env in launch.env:
        return launch.env[apply.env]
    return launch.image if apply.image else None


def _as_value(one: Axis, text: str | None) -> AxisValue:
    if one.kind == "choices":
        return next((label for label in one.values if _same(payload_of(one, label), text)), None)
    if text is None:
        return None
    if one.unit == "tokens":
        return _amount(text)
    try:
        number = float(text)
    except ValueError:
        return None
    if number != number or number in (float("inf"), float("-inf")):
        return None
    return int(number) if number.is_integer() and all(isinstance(v, int) for v in one.values) else number


def _amount(text: str) -> int | None:
    """A length as the engine reads it; None for 0, `auto` and the like: the engine's own choice."""
    found = _AMOUNT.fullmatch(text.strip().replace("_", ""))
    return (int(float(found["number"]) * _UNITS[found["unit"]]) or None) if found else None


def _same(payload: object, text: str | None) -> bool:
    if payload is None or text is None:
        return payload is None and text is None
    if isinstance(payload, dict | list):
        try:
            return bool(json.loads(text) == payload)
        except (ValueError, RecursionError):
            return False
    return text_of(payload) == text or _number(text_of(payload)) == _number(text) is not None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
