"""The user's own launch of a profile: what would be started if nothing were varied."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llm_bisect.model import ComposeRef, Launch, Mount, SimulatedRef, UsageProblem
from llm_bisect.spaces.argv import effective, find_flag
from llm_bisect.spaces.compose import ComposeService, Variable, compose_variables, read_service
from llm_bisect.spaces.profile import Profile

_MODEL_FLAGS = ("--model", "-m", "--model-path")


@dataclass(frozen=True)
class Base:
    """A launch as written, and the variables that its compose file offers."""

    launch: Launch
    offered: Mapping[str, Variable] = field(default_factory=dict)


def base_launch(profile: Profile, runner: str, variables: Mapping[str, str]) -> Base:
    """The profile's launch for `runner` with these Compose variables set. Raises UsageProblem,
    EnvironmentProblem."""
    if runner not in profile.launches:
        raise UsageProblem(
            f"profile {profile.name!r} has no launch for --runner {runner}",
            hint=f"it has: {', '.join(profile.launches)}",
        )
    raw: Mapping[str, Any] = profile.launches[runner]
    if runner == "process":
        return Base(_process(profile, raw))
    if runner == "simulated":
        if "docker" not in profile.launches:
            raise UsageProblem(
                f"profile {profile.name!r} has no docker launch for the simulated one to stand in for",
                hint="add launches.docker",
            )
        base = _docker(profile, profile.launches["docker"], variables)
        rig = SimulatedRef(str(raw["card"]), str(raw["model"]))
        return replace(base, launch=replace(base.launch, runner="simulated", simulated=rig, wants_gpu=False))
    return _docker(profile, raw, variables)


def words_of(launch: Launch) -> tuple[str, ...]:
    """Entrypoint and command in one."""
    return (*(launch.entrypoint or ()), *launch.command)


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


def _docker(profile: Profile, raw: Mapping[str, Any], variables: Mapping[str, str]) -> Base:
    if not raw.get("compose"):
        return Base(_image(profile, raw))
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
    return Base(launch, compose_variables(file))


def _image(profile: Profile, raw: Mapping[str, Any]) -> Launch:
    return Launch(
        runner="docker",
        engine=profile.engine.name,
        command=tuple(raw.get("command") or ()),
        env=dict(raw.get("environment") or {}),
        image=raw["image"],
        entrypoint=tuple(raw["entrypoint"]) if raw.get("entrypoint") else None,
        mounts=tuple(_volume(text, profile) for text in raw.get("volumes") or ()),
        container_port=int(raw.get("port") or profile.engine.port),
        ipc=raw.get("ipc"),
        shm_size_mib=round(raw["shm_size"]) if raw.get("shm_size") else None,
        wants_gpu=bool(raw.get("gpus")),
        memory_limit_mib=raw.get("memory_limit"),
        model_path=raw.get("model"),
        share_mounts=bool(raw.get("share_mounts")),
    )


def _volume(text: str, profile: Profile) -> Mount:
    """`SOURCE:TARGET[:ro]`; a source with a slash is a path beside the profile, any other a named volume."""
    parts = text.split(":")
    if len(parts) not in (2, 3) or not parts[0] or not parts[1].startswith("/"):
        where = profile.path.name if profile.path is not None else profile.name
        raise UsageProblem(
            f"{where}: launch.volumes: {text!r} is no volume",
            hint="write SOURCE:/target or SOURCE:/target:ro",
        )
    source, read_only = parts[0], len(parts) == 3 and "ro" in parts[2].split(",")
    if "/" not in source and not source.startswith((".", "~")):
        return Mount(source, parts[1], read_only, "volume")
    path = Path(source).expanduser()
    beside = profile.path.parent if profile.path is not None else Path.cwd()
    return Mount(str(path if path.is_absolute() else (beside / path).resolve()), parts[1], read_only)


def _container_port(profile: Profile, service: ComposeService) -> int:
    """The port that the engine listens on: its own flag, else the one that is published, else its default."""
    words = (*(service.entrypoint or ()), *service.command)
    flag = find_flag(words, profile.engine.port_flags, service.env)
    if flag and re.fullmatch(r"[0-9]{1,5}", flag):
        return int(flag)
    return service.ports[0] if len(set(service.ports)) == 1 else profile.engine.port


def _weights(service: ComposeService) -> str | None:
    """The host path of the weights, where a bind mount holds the path that the command names."""
    words = (*(service.entrypoint or ()), *service.command)
    named = find_flag(words, _MODEL_FLAGS, service.env)
    if not named:
        argv = effective(words, service.env)
        named = next((argv[i + 1] for i, w in enumerate(argv[:-1]) if w == "serve"), None)
    binds = sorted((m for m in service.mounts if m.kind == "bind"), key=lambda m: -len(m.target))
    for mount in binds:
        target = mount.target.rstrip("/")
        if named and (named == target or named.startswith(f"{target}/")):
            return mount.source.rstrip("/") + named.removeprefix(target)
    return None
