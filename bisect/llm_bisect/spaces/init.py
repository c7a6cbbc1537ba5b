"""A profile from a compose file: what `bisect init` writes, and what a bare compose file stands for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from llm_bisect.model.secrets import is_secret_name, mask_secrets
from llm_bisect.spaces.init_find import Found, FoundAxis, FoundToggle, look
from llm_bisect.spaces.node import Loader
from llm_bisect.spaces.reading import text_of
from llm_bisect.spaces.yaml_text import as_json, one_line

_FILE_STEMS = ("compose", "docker-compose")
_DEFAULT_TARGET_TOKENS = 8_000
_START_TOKENS = 8_000
_MARGIN_MIB = 400
_PLAIN = re.compile(r"[A-Za-z0-9_./$][A-Za-z0-9_./$ =+-]*")


def profile_from_compose(file: Path, service: str | None = None) -> str:
    """The YAML of a profile for the compose file's engine, with comments; `load_profile` reads it.

    The axes are the engine's knobs that the file sets or has a variable for, with grids around their own
    values. Raises UsageProblem (no engine found, several, or a file that Compose refuses) and
    EnvironmentProblem.
    """
    path = file.expanduser().absolute()
    found = look(str(path), service)
    return "\n".join(one_line(line) for line in _lines(path, found)) + "\n"


def _lines(path: Path, found: Found) -> Iterator[str]:
    name = _name(path)
    axis = next((a.axis.name for a in found.axes if not a.axis.choices), "prompt")
    yield f"# Made from {path.name}: read it, and correct what you know better."
    yield f"#   bisect ceiling --profile {name} --axis {axis} --dry-run"
    yield f"profile: {_scalar(name)}"
    yield f"engine: {_scalar(found.engine.name)}"
    yield "launch:"
    yield f"  compose: {_scalar(str(path))} # read through Docker Compose, never edited"
    yield f"  service: {_scalar(found.service.name)}"
    yield from _probe(found)
    if found.engine.needs_gpu or found.service.wants_gpu:
        yield f"margin_mib: {_MARGIN_MIB} # free VRAM that a recommended point leaves at its worst moment"
    axes = [line for one in found.axes if one.reachable for line in _axis(one)]
    yield from (["axes:", *axes] if axes else ["# axes: none of the engine's knobs is set in this file"])
    for one in found.axes:
        if not one.reachable:
            name = (one.axis.variables or (one.axis.name.upper().replace("-", "_"),))[0]
            yield f"# {one.axis.name} is fixed inside a script: write ${{{name}:-{one.own}}} there to vary it"
    if found.toggles:
        yield "toggles: # what can be left out; add requires: [other] and conflicts: [other] where you know"
        yield from (line for one in found.toggles for line in _toggle(one))
    yield from _others(found)


def _name(path: Path) -> str:
    """As the file is called; a `compose.yml` is called after its folder."""
    stem = path.stem if path.stem not in _FILE_STEMS else path.parent.name
    stem = re.sub(r"^docker-compose[.-]", "", stem)
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-.") or "profile"


def _probe(found: Found) -> Iterator[str]:
    context = next((a.value for a in found.axes if a.axis.name == "max-model-len"), None)
    target = _DEFAULT_TARGET_TOKENS
    why = "the declared context is not known here"
    if isinstance(context, int) and context >= 3:
        third = context // 3
        target = third // 1_000 * 1_000 or third
        why = f"a third of the {context:,} declared"
    start = min(_START_TOKENS, target)
    yield f"probe: {{shape: needle, target: {target}, start: {start}, max_tokens: 30, deadline: 25m}} # {why}"


def _axis(one: FoundAxis) -> Iterator[str]:
    own = "not set in the file" if one.own is None else f"the file has {mask_secrets(one.own)}"
    yield f"  {_scalar(one.axis.name)}: # {own}"
    if one.variable is not None:
        yield f"    apply: {{variable: {_scalar(one.variable)}}}"
    if one.axis.choices:
        yield from _choices(one)
        return
    yield f"    grid: {grid_around(one)}"


def _choices(one: FoundAxis) -> Iterator[str]:
    choices = dict(one.axis.choices)
    if one.own is not None and one.value is None:
        choices = {_own_label(one.own): _own_payload(one.own), **choices}
    yield "    choices:"
    for label, payload in choices.items():
        written = "null" if payload is None else _payload(payload)
        yield f"      {_scalar(str(label))}: {written}"


def _own_label(text: str) -> str:
    return text if re.fullmatch(r"[\w.-]{1,40}", text) else "own"


def _own_payload(text: str) -> object:
    """JSON as a mapping where YAML gives back the same (it has no NaN, and reads 1e-5 as text)."""
    try:
        payload = json.loads(text) if text.startswith("{") else text
        return payload if yaml.load(_payload(payload), Loader=Loader) == payload else text  # noqa: S506
    except (ValueError, RecursionError, yaml.YAMLError):
        return text


def _payload(payload: object) -> str:
    return as_json(payload) if isinstance(payload, dict | list) else _scalar(text_of(payload))


def grid_around(one: FoundAxis) -> str:
    """A grid in YAML around the file's own value: fine steps for shares, halves and doubles for sizes."""
    own = one.value if isinstance(one.value, int | float) else None
    if one.axis.unit == "fraction":
        return _shares(float(own) if own is not None else 0.9)
    if own is None or own < 1:
        return f"{{values: {[2048, 4096, 8192] if one.axis.unit == 'tokens' else [1, 2, 4, 8]}}}"
    if one.axis.name == "max-model-len" or own > 1_000_000:
        return _lengths(int(own))
    low = max(1, int(own) // 2)
    return f"{{values: {sorted({low, int(own), int(own) * 2, int(own) * 4})}}}"


def _shares(own: float) -> str:
    low = min(0.85, round(own - 0.05, 2)) if own > 0.1 else round(own / 2, 3)
    high = max(0.98, own) if own > 0.5 else round(own + 0.1, 2)
    return f"{{low: {low:g}, high: {high:g}, step: 0.005}}"


def _lengths(own: int) -> str:
    """Seven lengths from half to one and a half, in whole Ki where the own is, else in round thousands."""
    shares = (0.5, 0.625, 0.75, 0.875, 1, 1.25, 1.5)
    unit = 1024 if own % 1024 == 0 and own % 1000 else 5000 if own >= 50_000 else 1000 if own >= 8000 else 1
    points = {max(unit, round(own * s / unit) * unit) for s in shares} | {own}
    return f"{{values: {sorted(points)}}}"


def _toggle(one: FoundToggle) -> Iterator[str]:
    if one.env is not None:
        yield f"  {_scalar(one.name)}: {{apply: {{env: {_scalar(one.env)}}}}}"
    else:
        yield f"  {_scalar(one.name)}:"
        yield f"    apply: {{mount: {_scalar(str(one.mount))}, target: {_scalar(str(one.target))}}}"


def _others(found: Found) -> Iterator[str]:
    if not found.others:
        return
    yield "# Variables that are no knob known here (an axis with apply: {variable: NAME} makes one of it):"
    for name, variable in found.others.items():
        default = "***" if is_secret_name(name) and variable.default else variable.default
        said = "required" if variable.required else f"default {default}" if default else "no default"
        yield f"#   {name}: {mask_secrets(said)}"


def _scalar(text: str) -> str:
    """Text as YAML, in quotes where it would be read as anything else."""
    try:
        is_plain = _PLAIN.fullmatch(text) is not None and yaml.load(text, Loader=Loader) == text  # noqa: S506
    except (yaml.YAMLError, ValueError):
        is_plain = False
    return text if is_plain else as_json(text)
