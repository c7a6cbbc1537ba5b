"""What a compose file offers a study: its engine, the knobs that are set there, and the toggles."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from llm_bisect.model import AxisValue, Launch, UsageProblem
from llm_bisect.spaces.argv import effective, find_flag, flag_variable, set_flag
from llm_bisect.spaces.compose import ComposeService, Variable, compose_variables, read_service, read_services
from llm_bisect.spaces.engine_files import engine_names, load_engine
from llm_bisect.spaces.engines import EngineAxis, EngineDescription
from llm_bisect.spaces.profile import Apply, Axis
from llm_bisect.spaces.reading import read_axis

_FIRST_MARK = 41_001  # stands for a value while looking where a variable goes: it is a valid port, too
_TOGGLE = re.compile(r"(?:^|.*_)ENABLED?_(?P<after>\w+)|(?P<before>\w+)_ENABLED?")
_SWITCHES = ("0", "1", "true", "false", "on", "off")


@dataclass(frozen=True)
class FoundAxis:
    """A knob of the engine that this file sets or offers. `variable` only where the engine's description does
    not know it."""

    axis: EngineAxis
    own: str | None  # as written; None: not set
    value: AxisValue  # as a number, or the label of a choice; None: not set, or none of the choices
    variable: str | None = None
    reachable: bool = True  # False: it stands inside a script that takes nothing from outside


@dataclass(frozen=True)
class FoundToggle:
    """An environment variable or a mounted file that can be left out."""

    name: str
    env: str | None = None
    mount: str | None = None
    target: str | None = None


@dataclass(frozen=True)
class Found:
    """All that was found in one service."""

    engine: EngineDescription
    service: ComposeService
    axes: tuple[FoundAxis, ...]
    toggles: tuple[FoundToggle, ...]
    others: Mapping[str, Variable] = field(default_factory=dict)  # variables that are no known knob


def look(file: str, service: str | None) -> Found:
    """What the file's service offers. Raises UsageProblem where not one service runs a known engine."""
    services = read_services(file, {})
    chosen, engine = _choose(file, services, service)
    variables = compose_variables(file)
    reach = _reach(file, chosen.name, variables, engine)
    axes = tuple(
        found
        for axis in engine.axes.values()
        if (found := _axis(axis, chosen, engine, variables, reach)) is not None
    )
    toggles = tuple(_toggles(chosen))
    used = {v for a in engine.axes.values() for v in a.variables} | {a.variable for a in axes}
    envs = {t.env for t in toggles}
    others = {n: v for n, v in variables.items() if n not in used and n not in envs}
    return Found(engine, chosen, axes, toggles, others)


def engine_of(service: ComposeService) -> EngineDescription | None:
    """The engine that the service runs, known by its command, else by its image; None for any other."""
    argv = effective((*(service.entrypoint or ()), *service.command), service.env)
    engines = [load_engine(name) for name in engine_names()]
    image = _repository(service.image or "")
    for engine in engines:
        if any(image == known or image.endswith(f"/{known}") for known in engine.images):
            return engine
    for engine in engines:
        if _runs(argv, engine.executables):
            return engine
    # an image of one's own: the engine's name in it
    plain = _letters(image)
    names = [e for e in engines if any(_letters(n) in plain for n in (e.name, e.title, *e.executables[:1]))]
    return names[0] if names else None


def _letters(name: str) -> str:
    """`llama.cpp`, `llama-cpp` and `llamacpp` are one name."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _choose(
    file: str, services: Mapping[str, ComposeService], name: str | None
) -> tuple[ComposeService, EngineDescription]:
    if name is not None:
        services = {name: read_service(file, name, {})}
    known = [(s, e) for s in services.values() if (e := engine_of(s)) is not None]
    if not known:
        what = f"service {name!r} of {file} runs" if name else f"no service of {file} runs"
        raise UsageProblem(
            f"{what} {'no' if name else 'an'} engine that bisect knows",
            hint=f"engines: {', '.join(engine_names())}; services: {', '.join(services)}",
        )
    if len(known) > 1:
        raise UsageProblem(
            f"{file} has several engines: {', '.join(s.name for s, _ in known)}",
            hint="name one: --service NAME",
        )
    return known[0]


def _repository(image: str) -> str:
    """`registry:5000/name/space:tag@sha256:…` → `registry:5000/name/space`."""
    image = image.partition("@")[0]
    head, slash, last = image.rpartition("/")
    return (head + slash + last.partition(":")[0]).lower()


def _runs(argv: Sequence[str], executables: Iterable[str]) -> bool:
    """True where the argv starts one of the programs or Python modules (before its first flag of its own)."""
    for word in argv:
        if word.startswith("-") and word not in ("-m", "--"):
            return False
        if PurePosixPath(word).name in executables:
            return True
    return False


def _axis(
    axis: EngineAxis,
    service: ComposeService,
    engine: EngineDescription,
    variables: Mapping[str, Variable],
    reach: Mapping[str, str],
) -> FoundAxis | None:
    """None where the file neither sets it nor offers a variable for it."""
    words = (*(service.entrypoint or ()), *service.command)
    own = find_flag(words, _spellings(axis), service.env)
    if own is None and axis.env:
        own = service.env.get(axis.env)
    offered = next((v for v in axis.variables if v in variables), None)
    variable = next((v for v, name in reach.items() if name == axis.name and v not in axis.variables), None)
    if own is None and offered is None:
        return None
    reachable = bool(offered or variable or _settable(axis, service))
    return FoundAxis(axis, own, _value(axis, service, engine), None if offered else variable, reachable)


def _settable(axis: EngineAxis, service: ComposeService) -> bool:
    """True where a flag that is added to the command, or a variable of the container, reaches the engine."""
    spellings, entrypoint = _spellings(axis), service.entrypoint or ()
    words = (*entrypoint, *service.command)
    if find_flag(words, spellings, service.env) is None:
        return True
    changed = set_flag(entrypoint, service.command, spellings, str(_FIRST_MARK))
    if find_flag((*entrypoint, *changed), spellings, service.env) == str(_FIRST_MARK):
        return True
    return flag_variable(words, spellings) in service.env


def _spellings(axis: EngineAxis) -> tuple[str, ...]:
    return axis.flags or ((axis.json_flag,) if axis.json_flag else ())


def _value(axis: EngineAxis, service: ComposeService, engine: EngineDescription) -> AxisValue:
    apply = Apply(axis.variables, axis.flags, axis.also_flags, env=axis.env, json_flag=axis.json_flag)
    kind = "choices" if axis.choices else "ordered"
    values: tuple[AxisValue, ...] = tuple(axis.choices) if axis.choices else (1,)
    one = Axis(axis.name, kind, apply, values, payloads=axis.choices, unit=axis.unit)
    launch = Launch("docker", engine.name, service.command, service.env, entrypoint=service.entrypoint)
    return read_axis(one, launch)


def _reach(
    file: str, service: str, variables: Mapping[str, Variable], engine: EngineDescription
) -> dict[str, str]:
    """Variable → the axis whose flag it fills: each is set to a mark, and the mark is looked for."""
    unknown = [n for n in variables if not any(n in a.variables for a in engine.axes.values())]
    marks = {name: str(_FIRST_MARK + i) for i, name in enumerate(unknown)}
    try:
        marked = [read_service(file, service, marks)]
    except UsageProblem:  # one of them must not be a number: look one by one
        marked = []
        for name, mark in marks.items():
            try:
                marked.append(read_service(file, service, {name: mark}))
            except UsageProblem:
                continue
    found = {}
    for one in marked:
        words = (*(one.entrypoint or ()), *one.command)
        for axis in engine.axes.values():
            value = find_flag(words, _spellings(axis), one.env)
            found.update({name: axis.name for name, mark in marks.items() if value == mark})
    return found


def _toggles(service: ComposeService) -> list[FoundToggle]:
    """Switches of the environment (`…_ENABLE_…` with 0 or 1) and read-only mounted Python files."""
    found: dict[str, FoundToggle] = {}
    for name, value in service.env.items():
        match = _TOGGLE.fullmatch(name)
        if match and value.strip().lower() in _SWITCHES:
            label = _label(match["after"] or match["before"], found)
            found[label] = FoundToggle(label, env=name)
    for mount in service.mounts:
        if mount.kind == "bind" and mount.read_only and mount.target.endswith(".py"):
            stem = PurePosixPath(mount.target).stem
            label = _label(stem.removeprefix("patch_") or stem, found)
            found[label] = FoundToggle(label, mount=mount.source, target=mount.target)
    return list(found.values())


def _label(text: str, taken: Mapping[str, object]) -> str:
    """A toggle's name: small letters and dashes, not taken yet."""
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "toggle"
    return next(n for n in (plain, *(f"{plain}-{i}" for i in range(2, 10_000))) if n not in taken)
