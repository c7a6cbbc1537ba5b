"""A point as environment lines, for a `.env` beside the compose file or for a process's environment."""

from __future__ import annotations

import re
from pathlib import Path

from llm_bisect.model import AxisValue, Launch
from llm_bisect.model.secrets import is_secret_name
from llm_bisect.reports.export_point import Point
from llm_bisect.reports.words import one_line, scrub, value_text
from llm_bisect.spaces.profile import Axis, Profile

_BARE = re.compile(r"[\w.,:/@%+=-]*", re.ASCII)


def env_lines(point: Point, profile: Profile, own: Launch, chosen: Launch) -> str:
    """KEY=VALUE for each value of the point that a variable reaches; a comment for each of the others."""
    title = "variables of the compose file" if chosen.compose else "environment of the engine"
    lines = [f"# {line}" for line in point.heading(title)]
    variables = dict(chosen.compose.variables) if chosen.compose is not None else {}
    if chosen.compose is None:
        variables = {k: v for k, v in chosen.env.items() if own.env.get(k) != v}
        lines += [f"# {k}: taken out of the environment" for k in own.env if k not in chosen.env]
    named: set[str] = set()
    for name, value in point.values.items():
        axis = profile.axes.get(name)
        reached = [k for k in _variables(axis) if k in variables]
        named |= set(reached)
        if not reached:
            lines.append(f"# {scrub(one_line(_elsewhere(name, value, axis, chosen)))}")
        lines += [_line(k, variables[k]) for k in reached]
    lines += [_line(k, v) for k, v in variables.items() if k not in named]
    return "\n".join(lines) + "\n"


def _variables(axis: Axis | None) -> list[str]:
    if axis is None:
        return []
    return [*axis.apply.variable, *([axis.apply.env] if axis.apply.env else [])]


def _elsewhere(name: str, value: AxisValue, axis: Axis | None, chosen: Launch) -> str:
    """Where a knob without a variable is set."""
    told = f"{name} {value_text(value)}: no variable reaches it"
    if axis is None:
        return told
    apply = axis.apply
    if apply.flag:
        return f"{told}; flag {apply.flag[0]}"
    if apply.json_flag:
        return f"{told}; flag {apply.json_flag} {_payload(apply.json_flag, chosen) or '(left out)'}"
    if apply.env:
        return f"{told}; environment of the container, {apply.env}={chosen.env.get(apply.env, '(not set)')}"
    if apply.mount:
        return f"{told}; mount {Path(apply.mount).name} at {apply.mount_target}"
    return f"{told}; image {chosen.image}" if apply.image else told


def _payload(flag: str, chosen: Launch) -> str | None:
    for n, argument in enumerate(chosen.command):
        if argument == flag and n + 1 < len(chosen.command):
            return chosen.command[n + 1]
        if argument.startswith(f"{flag}="):
            return argument.partition("=")[2]
    return None


def _line(key: str, value: str) -> str:
    if is_secret_name(key):
        return f"# {key}=(left out: a secret)"
    if _BARE.fullmatch(value):
        return f"{key}={value}"
    if "'" not in value and "\n" not in value:
        return f"{key}='{value}'"  # nothing is read inside
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$").replace("\n", "\\n")
    return f'{key}="{escaped}"'
