"""`bisect init`: a profile from a compose file: its engine, knobs, toggles and patch files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from llm_bisect.model import UsageProblem
from llm_bisect.spaces.argv import find_flag
from llm_bisect.spaces.compose import ComposeService, Variable, compose_variables, read_service
from llm_bisect.spaces.engine_files import engine_names, load_engine
from llm_bisect.spaces.engines import EngineAxis, EngineDescription
from llm_bisect.spaces.units import parse_tokens

_TOGGLE = re.compile(r"(?:^|_)(?:ENABLE|DISABLE|USE)(?:_|$)")
_ON_OFF = ("0", "1", "true", "false", "on", "off")
_KNOB_VALUES = re.compile(r"-?\d+(?:\.\d+)?[kKmM]?")
_DEFAULT_CONTEXT_TOKENS = 32_768
_SHARES = {"low": 0.80, "high": 0.98, "step": 0.005}


def profile_from_compose(file: Path, service: str | None = None) -> str:
    """The YAML text of a profile for that service; it loads as it is. Raises UsageProblem."""
    path = Path(file).expanduser().absolute()
    found = read_service(str(path), service, {})
    engine = _engine_of(found)
    variables = compose_variables(str(path))
    axes = dict(_axes(found, engine))
    toggles = dict(_toggles(found, path))
    target = _target(found, engine)
    data: dict[str, Any] = {
        "profile": _name(path),
        "engine": engine.name,
        "launch": {"compose": str(path), "service": found.name},
        "probe": {"shape": "needle", "target": target, "start": min(8_000, target), "deadline": "25m"},
        "margin_mib": 400,
        "axes": axes,
    }
    if toggles:
        data["toggles"] = toggles
    head = [
        f"# Made from {path.name} by `bisect init`. That file is never edited; knobs are set",
        "# through its variables where it offers them, else by flag. Change what you like.",
        *_notes(engine, axes, variables),
    ]
    return "\n".join(head) + "\n" + yaml.safe_dump(data, sort_keys=False, width=110, allow_unicode=True)


def _name(path: Path) -> str:
    stem = path.stem.removeprefix("docker-compose").removeprefix("compose").strip(".-_")
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem or path.parent.name) or "served"


def _words(service: ComposeService) -> tuple[str, ...]:
    return (*(service.entrypoint or ()), *service.command)


def _engine_of(service: ComposeService) -> EngineDescription:
    """By image first, then by what the command runs. Raises UsageProblem where neither is known."""
    words = " ".join(_words(service))
    engines = [load_engine(name) for name in engine_names()]
    for engine in engines:
        if service.image and any(known in service.image for known in engine.images):
            return engine
    for engine in engines:
        if any(re.search(rf"(?:^|[\s/\"']){re.escape(e)}(?:$|[\s\"'])", words) for e in engine.executables):
            return engine
    raise UsageProblem(
        f"service {service.name!r} is no engine that bisect knows (image {service.image})",
        hint=f"engines: {', '.join(e.name for e in engines)}; write a profile with engine: yourself",
    )


def _axes(service: ComposeService, engine: EngineDescription) -> Iterator[tuple[str, dict[str, Any]]]:
    """The engine's axes that this service sets, each with a grid around its own value."""
    for axis in engine.axes.values():
        own = _own(service, axis)
        if axis.choices:
            if own is not None or axis.name in ("kv-dtype", "mtp"):
                yield axis.name, {"choices": _choices(axis, own)}
        elif own is not None and (grid := _grid(axis, own)):
            yield axis.name, {"grid": grid}


def _own(service: ComposeService, axis: EngineAxis) -> str | None:
    spellings = axis.flags or ((axis.json_flag,) if axis.json_flag else ())
    value = find_flag(_words(service), spellings) if spellings else None
    return value if value is not None else service.env.get(axis.env) if axis.env else None


def _choices(axis: EngineAxis, own: str | None) -> dict[str, Any]:
    known = {k: dict(v) if isinstance(v, Mapping) else v for k, v in axis.choices.items()}
    if own is not None and own not in [str(v) for v in known.values()] and not axis.json_flag:
        known[own] = own
    return known


def _grid(axis: EngineAxis, own: str) -> dict[str, Any] | None:
    """Around the user's own value: shares to 0.98, tokens from a half to double."""
    if _KNOB_VALUES.fullmatch(own) is None:
        return None
    if axis.unit == "fraction":
        return {**_SHARES, "low": min(_SHARES["low"], float(own))}
    if axis.unit == "tokens":
        value = parse_tokens(own)
        step = max(1, value // 8)
        return {"low": step * 4, "high": step * 16, "step": step}
    number = float(own)
    if not number.is_integer() or number < 1:
        return None
    return {"low": 1, "high": int(number) * 4, "step": 1}


def _toggles(service: ComposeService, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Environment switches, and single patch files that are mounted read-only."""
    for name, value in service.env.items():
        if _TOGGLE.search(name) and value.lower() in _ON_OFF:
            yield _slug(name), {"apply": {"env": name}}
    for mount in service.mounts:
        if mount.kind == "bind" and mount.read_only and mount.source.endswith((".py", ".patch")):
            source = Path(mount.source)
            shown = source.relative_to(path.parent) if path.parent in source.parents else source
            yield _slug(source.stem), {"apply": {"mount": str(path.parent / shown), "target": mount.target}}


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _target(service: ComposeService, engine: EngineDescription) -> int:
    """A third of the declared context: long enough to matter, short enough for a first evening."""
    axis = engine.axes.get("max-model-len")
    own = find_flag(_words(service), axis.flags) if axis else None
    try:
        context = parse_tokens(own) if own else _DEFAULT_CONTEXT_TOKENS
    except UsageProblem:
        context = _DEFAULT_CONTEXT_TOKENS
    return max(512, context // 3 // 1000 * 1000)


def _notes(
    engine: EngineDescription, axes: Mapping[str, object], variables: Mapping[str, Variable]
) -> list[str]:
    """Which variables the file offers: those that are knobs, and those that are something else."""
    knobs = {v: name for name, axis in engine.axes.items() for v in axis.variables}
    used = sorted(f"{v} ({knobs[v]})" for v in variables if v in knobs and knobs[v] in axes)
    other = sorted(v for v in variables if v not in knobs)
    lines = [f"# Knobs it offers as variables: {', '.join(used) or 'none'}."]
    if other:
        lines.append(f"# Other variables: {', '.join(other)}.")
    return lines
