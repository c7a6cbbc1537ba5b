"""The compose override of one candidate, as a pure function: nothing here reads or starts anything.

The base stays the user's. What the override changes, and why: labels (ours only: a base's labels make
proxies, updaters and healers act on the candidate), container name and restart policy, the published port
(`!override`, since Compose appends ports), networks (one of ours: an alias on a shared network would
receive live traffic), named volumes (external, under the names of the user's own project), binds (those
that can be written are redirected or made read-only), GPUs, and what the candidate's values set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import yaml

from llm_bisect.model import ComposeRef, Launch, UsageProblem
from llm_bisect.runners import launching
from llm_bisect.runners.binds import BindUse
from llm_bisect.spaces.compose_tags import Override, Reset, add_compose_tags

NETWORK = "llm-bisect"


@dataclass(frozen=True)
class Ours:
    """What this boot adds of its own."""

    project: str  # Compose project, container name and network name
    labels: Mapping[str, str]
    host_port: int
    port_flags: Sequence[str] = ("--port",)
    offline_env: Mapping[str, str] = field(default_factory=dict)
    gpus: Sequence[str] = ()
    binds: Mapping[str, Mapping[str, BindUse]] = field(default_factory=dict)  # service → target → use
    swappiness: bool = False  # the daemon takes mem_swappiness (cgroup v1)


def ref_of(launch: Launch) -> ComposeRef:
    """The launch's compose file. Raises ValueError where it has none."""
    if launch.compose is None:
        raise ValueError("the launch has no compose file")
    return launch.compose


def service_of(base: Mapping[str, Any], launch: Launch) -> Mapping[str, Any]:
    """The launch's service in `docker compose config`. Raises UsageProblem naming those that exist."""
    services = base.get("services") or {}
    if ref_of(launch).service not in services:
        raise UsageProblem(
            f"{ref_of(launch).file} has no service {ref_of(launch).service!r}",
            hint=f"services there: {', '.join(sorted(services))}",
        )
    found: Mapping[str, Any] = services[ref_of(launch).service]
    return found


def needed(base: Mapping[str, Any], service: str) -> list[str]:
    """The service and all that it depends on, sorted, itself first."""
    services = base.get("services") or {}
    seen: set[str] = set()
    queue = [service]
    while queue:
        name = queue.pop()
        if name in seen or name not in services:
            continue
        seen.add(name)
        one = services[name]
        queue += list(one.get("depends_on") or {})
        queue += [str(link).partition(":")[0] for link in one.get("links") or []]
        mode = str(one.get("network_mode") or "")
        if mode.startswith("service:"):
            queue.append(mode.removeprefix("service:"))
    return [service, *sorted(seen - {service})]


def named_volumes(base: Mapping[str, Any], services: Sequence[str]) -> dict[str, str]:
    """Key → the volume's name in the user's own project, for the named volumes that `services` mount."""
    declared = base.get("volumes") or {}
    used = {
        str(volume["source"])
        for name in services
        for volume in base["services"][name].get("volumes") or []
        if volume.get("type") == "volume" and volume.get("source")
    }
    return {key: str((declared.get(key) or {}).get("name") or key) for key in sorted(used)}


def image_of(base: Mapping[str, Any], service: str, launch: Launch) -> str:
    """The image that the service runs; one built by the user's project has the project's name for it."""
    own = base["services"][service].get("image")
    if service == ref_of(launch).service and launch.image:
        return launch.image
    return str(own) if own else f"{ref_of(launch).project}-{service}"


def uses_host_network(service: Mapping[str, Any]) -> bool:
    """True for `network_mode: host`. Raises UsageProblem for modes whose port cannot be ours."""
    mode = str(service.get("network_mode") or "")
    if mode == "none" or mode.startswith(("service:", "container:")):
        raise UsageProblem(
            f"the service's network_mode {mode!r} leaves no way to reach the engine on a port of our own",
            hint="use the default network, bridge or host in the compose file",
        )
    return mode == "host"


def build(base: Mapping[str, Any], launch: Launch, ours: Ours) -> dict[str, Any]:
    """The override for `base` (the JSON of `docker compose config` of the user's own project).

    Raises UsageProblem where the compose file and the launch cannot be made ours.
    """
    main = ref_of(launch).service
    service_of(base, launch)
    services = needed(base, main)
    result: dict[str, Any] = {"services": {}}
    networked = False
    for name in services:
        service = base["services"][name]
        changed = _common(base, name, launch, ours)
        if not service.get("network_mode"):
            changed["networks"] = Override({NETWORK: {"aliases": [name]}})
            networked = True
        if name == main:
            changed.update(_main(service, launch, ours, changed))
        result["services"][name] = changed
    if networked:
        result["networks"] = {NETWORK: {"name": ours.project, "labels": _labels(ours)}}
    volumes = named_volumes(base, services)
    if volumes:
        result["volumes"] = {
            key: Override({"external": True, "name": _escape(name)}) for key, name in volumes.items()
        }
    return result


def _labels(ours: Ours) -> dict[str, str]:
    return {key: _escape(value) for key, value in ours.labels.items()}


def _common(base: Mapping[str, Any], name: str, launch: Launch, ours: Ours) -> dict[str, Any]:
    """What holds for the service itself and for those that it depends on."""
    service = base["services"][name]
    is_main = name == ref_of(launch).service
    changed: dict[str, Any] = {
        "image": _escape(image_of(base, name, launch)),
        "container_name": ours.project if is_main else f"{ours.project}-{name}",
        "restart": "no",
        "labels": Override(_labels(ours)),
        "ports": Override([]),
    }
    if service.get("build"):
        changed["build"] = Reset()
    if service.get("logging"):
        changed["logging"] = Override({"driver": "json-file"})  # one that can be read back
    if service.get("scale"):
        changed["scale"] = 1
    deploy = service.get("deploy") or {}
    if deploy.get("restart_policy"):
        changed.setdefault("deploy", {})["restart_policy"] = Reset()
    if deploy.get("replicas"):
        changed.setdefault("deploy", {})["replicas"] = 1
    volumes = _volumes(service, launch if is_main else None, ours.binds.get(name, {}))
    if volumes or service.get("volumes"):
        changed["volumes"] = Override(volumes)
    return changed


def _main(
    service: Mapping[str, Any], launch: Launch, ours: Ours, changed: Mapping[str, Any]
) -> dict[str, Any]:
    """What holds for the engine's own service."""
    found: dict[str, Any] = {"init": True}
    command: Sequence[str] | None = launch.command if ref_of(launch).sets_command else None
    if uses_host_network(service):
        command = launching.with_port(
            launch.command,
            ours.port_flags,
            ours.host_port,
            where=f"network_mode: host in {ref_of(launch).file}",
        )
    else:
        found["ports"] = Override([f"127.0.0.1:{ours.host_port}:{launch.container_port}"])
    if command is not None:
        found["command"] = [_escape(word) for word in command]
    env: dict[str, str | None] = {**ref_of(launch).sets_env, **ours.offline_env}
    deploy: dict[str, Any] = dict(changed.get("deploy") or {})
    if ours.gpus and launch.wants_gpu:
        found.update(_gpus(service, ours.gpus, deploy, env, launch))
    if launch.memory_limit_mib is not None:
        found["mem_limit"] = found["memswap_limit"] = f"{launch.memory_limit_mib}m"
        if ours.swappiness:
            found["mem_swappiness"] = 0
        limits = ((service.get("deploy") or {}).get("resources") or {}).get("limits") or {}
        if limits.get("memory"):  # Compose refuses two limits that differ
            deploy.setdefault("resources", {})["limits"] = {"memory": f"{launch.memory_limit_mib}m"}
    if env:
        # null: the variable is not passed on, whichever way the base writes its environment
        found["environment"] = {key: None if value is None else _escape(value) for key, value in env.items()}
    if deploy:
        found["deploy"] = deploy
    return found


def _gpus(
    service: Mapping[str, Any],
    gpus: Sequence[str],
    deploy: dict[str, Any],
    env: dict[str, str | None],
    launch: Launch,
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    reserved = ((service.get("deploy") or {}).get("resources") or {}).get("reservations") or {}
    devices = reserved.get("devices") or []
    if service.get("runtime") == "nvidia" and not devices and not service.get("gpus"):
        env["NVIDIA_VISIBLE_DEVICES"] = ",".join(gpus)
    else:
        capabilities = next((device.get("capabilities") for device in devices), None) or ["gpu"]
        device = {"driver": "nvidia", "device_ids": list(gpus), "capabilities": list(capabilities)}
        deploy.setdefault("resources", {})["reservations"] = {"devices": Override([device])}
        if service.get("gpus"):
            found["gpus"] = Reset()
    if "CUDA_VISIBLE_DEVICES" in {**launch.env, **(service.get("environment") or {})}:
        # the container numbers what it is given from 0
        env["CUDA_VISIBLE_DEVICES"] = ",".join(str(index) for index in range(len(gpus)))
    return found


def _volumes(
    service: Mapping[str, Any], launch: Launch | None, binds: Mapping[str, BindUse]
) -> list[dict[str, Any]]:
    """The base's mounts (strings there are escaped already), changed as `binds` says, and the values' own."""
    ref = ref_of(launch) if launch is not None else None
    dropped = {_tidy(target) for target in ref.drops_mount_targets} if ref is not None else set()
    added = ref.adds_mounts if ref is not None else ()
    replaced = {_tidy(mount.target) for mount in added}
    result: list[dict[str, Any]] = []
    for volume in service.get("volumes") or []:
        target = _tidy(str(volume.get("target")))
        if target in dropped or target in replaced:
            continue
        one = {key: value for key, value in volume.items() if value not in ({}, None)}
        use = binds.get(target)
        if use is not None:
            if use.source is not None:
                one["source"] = _escape(use.source)
            if use.read_only:
                one["read_only"] = True
        result.append(_not_made(one))
    for mount in added:
        one = {"type": mount.kind, "source": _escape(mount.source), "target": _escape(mount.target)}
        if mount.kind == "tmpfs":
            del one["source"]
        result.append(_not_made({**one, "read_only": True} if mount.read_only else one))
    return result


def _not_made(volume: dict[str, Any]) -> dict[str, Any]:
    """A missing source is an error: Docker would make it, as a folder, in the user's checkout."""
    if volume["type"] == "bind":
        volume["bind"] = {**(volume.get("bind") or {}), "create_host_path": False}
    return volume


def to_yaml(override: Mapping[str, Any]) -> str:
    """The override as a compose file."""
    head = (
        "# Generated by llm-bisect for one candidate; the compose file that it is laid over stays as it is.\n"
    )
    return head + yaml.dump(override, Dumper=_Dumper, sort_keys=False, width=4096)


def _tidy(target: str) -> str:
    return str(PurePosixPath(target))


def _escape(text: str) -> str:
    """Compose would read a `$` as the start of a variable."""
    return text.replace("$", "$$")


class _Dumper(yaml.SafeDumper):
    """Quotes every string (what looks like a number to one YAML reader does not to another)."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _string(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"')


_Dumper.add_representer(str, _string)
add_compose_tags(_Dumper)
