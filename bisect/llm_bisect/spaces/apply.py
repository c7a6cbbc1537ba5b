"""From a profile and values to a launch: each value goes in the way that the launch itself offers.

In this order: a Compose variable that the file really interpolates, a flag, an environment variable, a
flag that takes JSON, a mount, the image.
"""

from __future__ import annotations

import difflib
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from llm_bisect.model import AxisValue, ComposeRef, Launch, Mount, SimulatedRef, UsageProblem, Values
from llm_bisect.spaces.argv import find_flag, has_flag, in_script, remove_flag, set_flag
from llm_bisect.spaces.compose import ComposeService, compose_variables, read_service
from llm_bisect.spaces.identity import candidate_id
from llm_bisect.spaces.load import axis as axis_of
from llm_bisect.spaces.profile import Axis, Profile

__all__ = ["candidate_id", "check_values", "describe_difference", "own_values", "resolve_launch"]

ON_TEXTS = ("1", "true", "on", "yes")


@dataclass
class _Draft:
    """A launch in the making, with what a compose override has to change for it."""

    launch: Launch
    service: ComposeService | None = None
    offered: frozenset[str] = frozenset()  # variables that the compose file interpolates
    variables: dict[str, str] = field(default_factory=dict)
    env: dict[str, str | None] = field(default_factory=dict)
    command_set: bool = False
    added: list[Mount] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    image_set: bool = False


def own_values(profile: Profile, runner: str) -> dict[str, AxisValue]:
    """What each axis is in the user's own launch; None where the launch does not set it."""
    launch = _base(profile, runner, {}).launch
    return {name: _read(one, launch) for name, one in profile.axes.items() if one.kind != "prompt"}


def resolve_launch(profile: Profile, runner: str, values: Values) -> Launch:
    """The effective launch with `values` applied; {} is the user's own. Raises UsageProblem."""
    check_values(profile, values)
    variables: dict[str, str] = {}
    draft = _base(profile, runner, {})
    rest: list[tuple[Axis, AxisValue]] = []
    for name, value in values.items():
        one = axis_of(profile, name)
        if _read(one, draft.launch) == value:
            continue  # the launch has it already: applying it would only change the spelling
        variable = next((v for v in one.apply.variable if v in draft.offered), None)
        if variable is not None and not one.toggle and _payload(one, value) is not None:
            variables[variable] = _text(_payload(one, value))
        else:
            rest.append((one, value))
    if variables:
        draft = _base(profile, runner, variables)
    for one, value in rest:
        _apply(draft, one, value)
    return _finish(draft)


def check_values(profile: Profile, values: Values) -> None:
    """Toggles that need or exclude each other. Raises UsageProblem."""
    on = {name for name, value in values.items() if profile.axes.get(name) and value == "on"}
    for name in sorted(on):
        one = profile.axes[name]
        missing = [r for r in one.requires if values.get(r) == "off"]
        clash = [c for c in one.conflicts if c in on]
        if missing:
            raise UsageProblem(f"toggle {name} needs {missing[0]}", hint=f"set {missing[0]} on, too")
        if clash:
            raise UsageProblem(
                f"toggles {name} and {clash[0]} exclude each other", hint="set one of them off"
            )


def describe_difference(own: Launch, candidate: Launch) -> list[str]:
    """What a candidate changes against the user's own launch, one line each; empty where nothing."""
    lines: list[str] = []
    if own.image != candidate.image:
        lines.append(f"image {own.image} → {candidate.image}")
    matcher = difflib.SequenceMatcher(None, own.command, candidate.command, autojunk=False)
    for tag, a, b, c, d in matcher.get_opcodes():
        if tag != "equal":
            before, after = own.command[a:b], candidate.command[c:d]
            named = own.command[a - 1] if a and own.command[a - 1].startswith("-") else "command"
            lines.append(f"{named}: {shlex.join(before) or 'nothing'} → {shlex.join(after) or 'nothing'}")
    for key in sorted({*own.env, *candidate.env}):
        before_env, after_env = own.env.get(key), candidate.env.get(key)
        if before_env != after_env:
            lines.append(f"environment {key}: {before_env or 'unset'} → {after_env or 'unset'}")
    had, has = ({m.target: m for m in one.mounts} for one in (own, candidate))
    lines += [f"mount {t}: taken out" for t in had if t not in has]
    lines += [f"mount {t}: {m.source}" for t, m in has.items() if had.get(t) != m]
    return lines


def _base(profile: Profile, runner: str, variables: Mapping[str, str]) -> _Draft:
    """The launch as written, with these Compose variables set."""
    if runner not in profile.launches:
        raise UsageProblem(
            f"profile {profile.name!r} has no launch for --runner {runner}",
            hint=f"it has: {', '.join(profile.launches)}",
        )
    raw: Mapping[str, Any] = profile.launches[runner]
    if runner == "process":
        return _Draft(_process(profile, raw))
    if runner == "simulated":
        draft = _docker(profile, profile.launches["docker"], variables)
        simulated = SimulatedRef(str(raw["card"]), str(raw["model"]))
        draft.launch = replace(draft.launch, runner="simulated", simulated=simulated, wants_gpu=False)
        return draft
    return _docker(profile, raw, variables)


def _process(profile: Profile, raw: Mapping[str, Any]) -> Launch:
    return Launch(
        runner="process",
        engine=profile.engine.name,
        command=tuple(raw["command"]),
        env=dict(raw.get("env") or {}),
        container_port=profile.engine.port,
        wants_gpu=bool(raw.get("gpus")),
        memory_limit_mib=raw.get("memory_limit"),
        model_path=raw.get("model"),
    )


def _docker(profile: Profile, raw: Mapping[str, Any], variables: Mapping[str, str]) -> _Draft:
    if not raw.get("compose"):
        return _Draft(_image(profile, raw))
    file = str(raw["compose"])
    service = read_service(file, raw.get("service"), variables)
    launch = Launch(
        runner="docker",
        engine=profile.engine.name,
        command=service.command,
        env=service.env,
        image=service.image,
        entrypoint=service.entrypoint,
        mounts=service.mounts,
        working_dir=service.working_dir,
        container_port=_container_port(profile, service),
        ipc=service.ipc,
        shm_size_mib=service.shm_size_mib,
        privileged=service.privileged,
        network_mode=service.network_mode,
        wants_gpu=service.wants_gpu,
        memory_limit_mib=service.mem_limit_mib,
        compose=ComposeRef(file, service.name, service.project, dict(variables)),
        model_path=_weights(service),
        share_mounts=bool(raw.get("share_mounts")),
    )
    return _Draft(launch, service, frozenset(compose_variables(file)), dict(variables))


def _image(profile: Profile, raw: Mapping[str, Any]) -> Launch:
    return Launch(
        runner="docker",
        engine=profile.engine.name,
        command=tuple(raw.get("command") or ()),
        env=dict(raw.get("environment") or {}),
        image=raw["image"],
        entrypoint=tuple(raw["entrypoint"]) if raw.get("entrypoint") else None,
        mounts=tuple(_short_volume(v, profile) for v in raw.get("volumes") or ()),
        container_port=int(raw.get("port") or profile.engine.port),
        ipc=raw.get("ipc"),
        shm_size_mib=round(raw["shm_size"]) if raw.get("shm_size") else None,
        wants_gpu=bool(raw.get("gpus")),
        memory_limit_mib=raw.get("memory_limit"),
        model_path=raw.get("model"),
        share_mounts=bool(raw.get("share_mounts")),
    )


def _short_volume(text: str, profile: Profile) -> Mount:
    """`SOURCE:TARGET[:ro]`; a source with a slash is a path beside the profile, any other a named volume."""
    parts = text.split(":")
    if len(parts) not in (2, 3) or not parts[1].startswith("/"):
        raise UsageProblem(f"{text!r} is no volume", hint="SOURCE:/target or SOURCE:/target:ro")
    source, read_only = parts[0], len(parts) == 3 and "ro" in parts[2].split(",")
    if "/" not in source and not source.startswith((".", "~")):
        return Mount(source, parts[1], read_only, "volume")
    from pathlib import Path

    path = Path(source).expanduser()
    beside = profile.path.parent if profile.path is not None else Path.cwd()
    return Mount(str(path if path.is_absolute() else (beside / path).resolve()), parts[1], read_only)


def _container_port(profile: Profile, service: ComposeService) -> int:
    """The port that the engine listens on: its own flag, else the one that is published, else its default."""
    flag = find_flag((*(service.entrypoint or ()), *service.command), profile.engine.port_flags)
    if flag and flag.isdigit():
        return int(flag)
    return service.ports[0] if len(service.ports) == 1 else profile.engine.port


def _weights(service: ComposeService) -> str | None:
    """The host path of the weights, where a mount holds the path that --model names."""
    words = (*(service.entrypoint or ()), *service.command)
    named = find_flag(words, ("--model", "-m", "--model-path"))
    if not named:
        named = next((words[i + 1] for i, w in enumerate(words[:-1]) if w == "serve"), None)
    for mount in service.mounts:
        if named and mount.kind == "bind" and (named == mount.target or named.startswith(f"{mount.target}/")):
            return mount.source + named.removeprefix(mount.target)
    return None


def _words(launch: Launch) -> tuple[str, ...]:
    return (*(launch.entrypoint or ()), *launch.command)


def _read(one: Axis, launch: Launch) -> AxisValue:
    """The axis's value in a launch; None where it is not set or is none of the choices."""
    apply = one.apply
    if one.toggle and apply.mount_target:
        return "on" if any(m.target == apply.mount_target for m in launch.mounts) else "off"
    if one.toggle and apply.env:
        return "on" if launch.env.get(apply.env, "").lower() in ON_TEXTS else "off"
    if one.toggle and apply.flag:
        return "on" if find_flag(_words(launch), apply.flag) is not None else "off"
    raw: str | None = None
    if apply.flag:
        raw = find_flag(_words(launch), apply.flag)
    if raw is None and apply.json_flag:
        raw = find_flag(_words(launch), (apply.json_flag,))
    if raw is None and apply.env:
        raw = launch.env.get(apply.env)
    if raw is None and apply.image:
        raw = launch.image
    return _as_value(one, raw)


def _as_value(one: Axis, raw: str | None) -> AxisValue:
    if one.kind == "choices":
        return next((label for label in one.values if _same(_payload(one, label), raw)), None)
    if raw is None:
        return None
    if one.unit == "tokens":
        from llm_bisect.spaces.units import parse_tokens

        try:
            return parse_tokens(raw)
        except UsageProblem:
            return None  # "auto" and the like: the engine's own choice
    try:
        number = float(raw)
    except ValueError:
        return None
    return int(number) if number.is_integer() and all(isinstance(v, int) for v in one.values) else number


def _same(payload: object, raw: str | None) -> bool:
    if payload is None or raw is None:
        return payload is None and raw is None
    if isinstance(payload, dict | list):
        try:
            return bool(json.loads(raw) == payload)
        except ValueError:
            return False
    return _text(payload) == raw


def _payload(one: Axis, value: AxisValue) -> object:
    """What is written for a value: a choice's payload, else the value itself."""
    return one.payloads.get(str(value)) if one.kind == "choices" and not one.toggle else value


def _text(payload: object) -> str:
    if isinstance(payload, dict | list):
        return json.dumps(payload, separators=(",", ":"))
    return str(payload)


def _apply(draft: _Draft, one: Axis, value: AxisValue) -> None:
    apply, payload = one.apply, _payload(one, value)
    on = value == "on" if one.toggle else payload is not None
    if apply.mount and apply.mount_target:
        _set_mount(draft, apply.mount, apply.mount_target, on=on)
    elif apply.flag or apply.json_flag:
        spellings = apply.flag or (str(apply.json_flag),)
        _set_flags(draft, one, spellings, _text(payload) if on and not one.toggle else None, on=on)
    elif apply.env:
        text = ("1" if on else "0") if one.toggle else _text(payload) if on else None
        _set_env(draft, apply.env, text)
    elif apply.image and on:
        draft.launch = replace(draft.launch, image=_text(payload))
        draft.image_set = True
    else:
        raise _unreachable(draft, one)


def _set_flags(draft: _Draft, one: Axis, spellings: tuple[str, ...], text: str | None, *, on: bool) -> None:
    words = draft.launch.command
    if in_script(_words(draft.launch), spellings) or has_flag(draft.launch.entrypoint or (), spellings):
        if one.apply.env:
            return _set_env(draft, one.apply.env, text)
        raise _unreachable(draft, one)
    for names in (spellings, *one.apply.also_flags):
        if not on:
            words = remove_flag(words, names)
        elif text is None:
            words = words if has_flag(words, names) else (*words, names[0])
        else:
            words = set_flag(words, names, text)
    draft.launch = replace(draft.launch, command=words)
    draft.command_set = True
    return None


def _set_env(draft: _Draft, name: str, text: str | None) -> None:
    env = {k: v for k, v in draft.launch.env.items() if k != name}
    draft.launch = replace(draft.launch, env=env if text is None else {**env, name: text})
    draft.env[name] = text


def _set_mount(draft: _Draft, source: str, target: str, *, on: bool) -> None:
    rest = tuple(m for m in draft.launch.mounts if m.target != target)
    if on:
        mount = Mount(source, target, read_only=True)
        draft.launch = replace(draft.launch, mounts=(*rest, mount))
        draft.added.append(mount)
    else:
        draft.launch = replace(draft.launch, mounts=rest)
        draft.dropped.append(target)


def _unreachable(draft: _Draft, one: Axis) -> UsageProblem:
    where = draft.launch.compose.file if draft.launch.compose else "the launch"
    flag = (one.apply.flag or (one.apply.json_flag or one.name,))[0]
    return UsageProblem(
        f"{where} offers no way to set axis {one.name!r}: {flag} stands inside a script",
        hint=f"write ${{{(one.apply.variable or (one.name.upper().replace('-', '_'),))[0]}:-…}} there, "
        "so that it can be set from outside",
    )


def _finish(draft: _Draft) -> Launch:
    if draft.launch.compose is None:
        return draft.launch
    compose = replace(
        draft.launch.compose,
        variables=dict(draft.variables),
        sets_command=draft.command_set,
        sets_env=dict(draft.env),
        adds_mounts=tuple(draft.added),
        drops_mount_targets=tuple(draft.dropped),
        sets_image=draft.image_set,
    )
    return replace(draft.launch, compose=compose)
