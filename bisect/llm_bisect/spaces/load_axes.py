"""Axes and toggles of a profile: grids, choices, how each is applied, and which way it is monotone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from llm_bisect.model import AxisValue, Bound, Trend, UsageProblem
from llm_bisect.spaces.engines import EngineAxis, EngineDescription
from llm_bisect.spaces.load_launches import beside
from llm_bisect.spaces.node import Node, shown
from llm_bisect.spaces.profile import Apply, Axis
from llm_bisect.spaces.units import grid, parse_tokens

_AXIS_KEYS = (
    "apply",
    "grid",
    "choices",
    "prefer",
    "unit",
    "admission",
    "survival",
    "time",
    "recall",
    "context",
)
_APPLY_KEYS = ("variable", "flag", "env", "json_flag", "mount", "target", "image")
_WAYS = ("variable", "flag", "env", "json_flag", "mount", "image")
_TOGGLE_KEYS = ("apply", "target", "requires", "conflicts")
_GRID_KEYS = ("low", "high", "step", "values")
_BOUND_KEYS = {
    "admission": Bound.ADMISSION,
    "survival": Bound.MEMORY,
    "time": Bound.TIME,
    "recall": Bound.RECALL,
    "context": Bound.CONTEXT,
}


def read_axes(root: Node, engine: EngineDescription) -> dict[str, Axis]:
    """The axes of the profile's `axes`. Raises UsageProblem."""
    return {name: _axis(node, name, engine) for name, node in root.mappings("axes").items()}


def read_toggles(root: Node, axes: Mapping[str, Axis]) -> dict[str, Axis]:
    """The toggles of the profile's `toggles`, as unordered axes with the values on and off."""
    nodes = root.mappings("toggles")
    toggles = {}
    for name, node in nodes.items():
        if name in axes or name == "prompt":
            raise node.problem("", f"there is an axis {name!r} already", "Give the toggle another name.")
        node.only(_TOGGLE_KEYS)
        apply = _apply(node, None)
        for key in ("requires", "conflicts"):
            for other in node.strings(key):
                if other not in nodes or other == name:
                    raise node.problem(
                        key, f"there is no other toggle {other!r}", f"Toggles: {', '.join(nodes)}."
                    )
        toggles[name] = Axis(
            name,
            "choices",
            apply,
            ("on", "off"),
            toggle=True,
            requires=node.strings("requires"),
            conflicts=node.strings("conflicts"),
        )
    return toggles


def _axis(node: Node, name: str, engine: EngineDescription) -> Axis:
    if name == "prompt":
        raise node.problem(
            "", "the axis prompt is always there", "Set probe.target and probe.max_prompt instead."
        )
    known = engine.axes.get(name)
    if known is None and node.get("apply") is None:
        raise node.problem(
            "",
            f"{engine.title} has no axis of this name, so it needs `apply`",
            f"Known: {', '.join(engine.axes)}.",
        )
    node.only(_AXIS_KEYS)
    if (node.get("grid") is None) == (node.get("choices") is None):
        raise node.problem(
            "", "an axis needs either a grid or choices", "grid: {low: 0.85, high: 0.98, step: 0.005}"
        )
    apply = _apply(node, known)
    if node.get("choices") is not None:
        labels = _choices(node, known)
        return Axis(name, "choices", apply, tuple(labels), payloads=labels)
    unit = known.unit if known else None
    if node.get("unit") is not None:
        unit = node.choice("unit", ("tokens", "fraction"))
    values, step = _grid(node, unit)
    return Axis(
        name,
        "ordered",
        apply,
        values,
        unit=unit,
        step=step,
        prefer=node.choice("prefer", ("high", "low"), known.prefer if known else "high"),
        trends=_trends(node, known),
    )


def _trends(node: Node, known: EngineAxis | None) -> dict[Bound, Trend]:
    """The engine's own trends, with what the profile says on top."""
    trends = dict(known.trends) if known else {}
    for key, bound in _BOUND_KEYS.items():
        if node.get(key) is not None:
            trends[bound] = node.enum(key, Trend)
    return trends


def _choices(node: Node, known: EngineAxis | None) -> dict[str, object]:
    """Labels and what is written for each; null leaves the flag out."""
    raw = node.get("choices")
    if isinstance(raw, list):
        raw = {str(label): (known.choices.get(str(label), label) if known else label) for label in raw}
    if not isinstance(raw, dict) or not raw:
        raise node.problem(
            "choices", f"{shown(raw)} holds no choices", "Write {label: value, …} or a list of labels."
        )
    return {str(label): payload for label, payload in raw.items()}


def _grid(node: Node, unit: str | None) -> tuple[tuple[AxisValue, ...], float | None]:
    """(ascending values, step or None)."""
    inner = node.mapping("grid")
    inner.only(_GRID_KEYS)
    try:
        if inner.get("values") is not None:
            values = inner.get("values")
            numbers = [_number(v, unit) for v in values] if isinstance(values, list) else []
            if not numbers or len(numbers) != len(set(numbers)):
                raise UsageProblem(
                    f"{shown(values)} is not a list of different values", hint="e.g. values: [512, 1024]"
                )
            _in_range(numbers, unit)
            return tuple(sorted(numbers)), None
        missing = [k for k in ("low", "high", "step") if inner.get(k) is None]
        if missing:
            raise UsageProblem(f"{', '.join(missing)} is missing", hint="low, high and step; or values")
        low, high, step = (_number(inner.get(k), unit) for k in ("low", "high", "step"))
        points = grid(low, high, step)
        if len(points) == 1 and low != high:
            raise UsageProblem(
                f"step {step} is larger than the range {low} to {high}", hint="take a smaller step"
            )
        _in_range(points, unit)
    except UsageProblem as problem:
        raise node.problem("grid", problem.message, problem.hint or "") from None
    return points, float(step)


def _in_range(values: Sequence[int | float], unit: str | None) -> None:
    beyond = next((v for v in values if not 0 < v <= 1), None) if unit == "fraction" else None
    if beyond is not None:
        raise UsageProblem(f"{beyond} is no share of the whole", hint="above 0, at most 1")


def _number(value: object, unit: str | None) -> int | float:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UsageProblem(f"{shown(value)} is no number", hint="write a number")
    if unit == "tokens":
        return parse_tokens(value)
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise UsageProblem(f"{shown(value)} is no number", hint="write a number") from None
    if not math.isfinite(value):
        raise UsageProblem(f"{shown(value)} is no finite number", hint="write a number")
    return value


def _apply(node: Node, known: EngineAxis | None) -> Apply:
    """How the profile says it is applied, else how the engine takes it."""
    given = node.mapping("apply")
    given.only(_APPLY_KEYS)
    if not given.data:
        if known is None:
            raise node.problem(
                "apply", "it is not said how this is applied", f"Accepted: {', '.join(_APPLY_KEYS)}."
            )
        return Apply(known.variables, known.flags, known.also_flags, env=known.env, json_flag=known.json_flag)
    if known is None and not any(given.get(way) is not None for way in _WAYS):
        raise given.problem("", "it is not said how this is applied", f"Accepted: {', '.join(_WAYS)}.")
    return Apply(
        variable=_one_or_more(given, "variable") or (known.variables if known else ()),
        flag=_one_or_more(given, "flag") or (known.flags if known else ()),
        also_flags=known.also_flags if known and given.get("flag") is None else (),
        env=given.optional_text("env") or (known.env if known else None),
        json_flag=given.optional_text("json_flag") or (known.json_flag if known else None),
        mount=beside(given, given.text("mount")) if given.get("mount") is not None else None,
        mount_target=given.optional_text("target") or node.optional_text("target"),
        image=given.flag("image", default=False),
    )


def _one_or_more(node: Node, key: str) -> tuple[str, ...]:
    return (node.text(key),) if isinstance(node.get(key), str) else node.strings(key)
