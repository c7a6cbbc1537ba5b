"""Starting a container for one boot: through Compose, or through the SDK for a plain image."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import docker
from docker import errors, types

from llm_bisect.model import EnvironmentProblem, Launch, Mount, UsageProblem
from llm_bisect.runners import binds, compose_up, docker_client, engine_api, launching, override, ports, procs
from llm_bisect.runners.binds import BindUse
from llm_bisect.runners.protocol import BootOrder
from llm_bisect.spaces.engines import EngineDescription

MODEL_TARGET = "/models/model.gguf"
_TRIES = 3
_PORT_TAKEN = re.compile(r"port is already allocated|address already in use", re.IGNORECASE)


class StartFailed(Exception):
    """The daemon or Compose did not start it; the text is what they said."""


@dataclass(frozen=True)
class Started:
    """A container that was started."""

    container: str  # id
    port: int  # on 127.0.0.1
    warm_caches: Mapping[str, bool]


def with_model(launch: Launch) -> Launch:
    """The launch with its model mounted where the command asks for `{model}`, or where it is a built-in one.

    Raises EnvironmentProblem where the model is missing.
    """
    model = launching.model_file(launch)
    asks = any("{model}" in word for word in launch.command)
    builtin = launch.model_path is not None and str(model) != launch.model_path and model is not None
    if model is None or not (asks or (builtin and str(launch.model_path).startswith("builtin:"))):
        command = launching.fill(launch.command, port=launch.container_port, model=None)
        return replace(launch, command=command)
    target = MODEL_TARGET if model.is_file() else "/models/model"
    command = launching.fill(launch.command, port=launch.container_port, model=target)
    mount = Mount(str(model), target, read_only=True)
    if launch.compose is None:
        return replace(launch, command=command, mounts=(*launch.mounts, mount), model_path=str(model))
    ref = replace(launch.compose, adds_mounts=(*launch.compose.adds_mounts, mount))
    return replace(launch, command=command, compose=ref, model_path=str(model))


def project_name(study: str, boot: str) -> str:
    """`bisect-<study>-<boot>` in the letters that Compose allows, at most 60 of them."""
    slug = re.sub(r"[^a-z0-9]+", "-", study.lower()).strip("-")[:36].strip("-") or "study"
    tail = re.sub(r"[^a-z0-9]+", "-", boot.lower()).strip("-")[-16:].strip("-") or "boot"
    return f"bisect-{slug}-{tail}"


def labels(order: BootOrder, spec: Mapping[str, object]) -> dict[str, str]:
    """Whose container it is: study, boot, the process that owns it, this start of the machine."""
    return {
        engine_api.STUDY_LABEL: order.study,
        engine_api.BOOT_LABEL: order.boot,
        engine_api.OWNER_LABEL: str(procs.me()),
        engine_api.MACHINE_LABEL: procs.machine_boot_id(),
        engine_api.SPEC_LABEL: json.dumps(spec, sort_keys=True),
    }


def start(
    client: docker.DockerClient,
    order: BootOrder,
    engine: EngineDescription,
    stop: threading.Event,
    reaper: str,
) -> Started:
    """Start the order's launch (its model is mounted already: `with_model`).

    Raises StartFailed, EnvironmentProblem, UsageProblem. What a failed try left is removed before the next.
    """
    doing = _start_compose if order.launch.compose is not None else _start_plain
    for attempt in range(_TRIES):
        try:
            return doing(client, order, engine, ports.free_port(), stop, reaper)
        except StartFailed as error:
            if attempt + 1 == _TRIES or not _PORT_TAKEN.search(str(error)) or stop.is_set():
                raise
            engine_api.remove_until_gone(docker_client.socket_path(client), order.study, order.boot)
    raise AssertionError("unreachable")


def _spec(order: BootOrder, engine: EngineDescription, port: int, reaper: str) -> dict[str, object]:
    """What adopting the engine later takes. No secret is in it."""
    return {
        "port": port,
        "log": str(order.log_path.absolute()),
        "health": engine.endpoints.get("health", "/health"),
        "gpus": list(order.gpus) if order.launch.wants_gpu else None,
        "limit_mib": order.launch.memory_limit_mib,
        "reaper": reaper,
    }


def _start_compose(
    client: docker.DockerClient,
    order: BootOrder,
    engine: EngineDescription,
    port: int,
    stop: threading.Event,
    reaper: str,
) -> Started:
    launch = order.launch
    ref = override.ref_of(launch)
    base = compose_up.read_base(launch)
    service = override.service_of(base, launch)
    image = docker_client.image_id(
        client, override.image_of(base, ref.service, launch), allow_pull=order.allow_pull
    )
    uses = {
        name: binds.plan(
            mounts_of(base["services"][name]),
            launch,
            binds.folder_key(image, (*mounts_of(service), *ref.adds_mounts)),
            environment=base["services"][name].get("environment") or {},
            allow_pull=order.allow_pull,
        )
        for name in override.needed(base, ref.service)
    }
    project = project_name(order.study, order.boot)
    ours = override.Ours(
        project=project,
        labels=labels(order, _spec(order, engine, port, reaper)),
        host_port=port,
        port_flags=engine.port_flags,
        offline_env={} if order.allow_pull else engine.offline_env,
        gpus=order.gpus,
        binds=uses,
        swappiness=docker_client.has_swappiness(client.info()),
    )
    path = order.log_path.parent / f"{order.boot}.override.yml"
    path.write_text(override.to_yaml(override.build(base, launch, ours)))
    try:
        compose_up.up(
            launch,
            path,
            project,
            allow_pull=order.allow_pull,
            marks={
                procs.STUDY_VARIABLE: order.study,
                procs.BOOT_VARIABLE: order.boot,
                procs.OWNER_VARIABLE: str(procs.me()),
            },
            docker_host=f"unix://{docker_client.socket_path(client)}",
            deadline_s=order.deadline_s,
            stop=stop,
        )
    except compose_up.ComposeFailed as error:
        raise StartFailed(str(error)) from error
    try:
        container = str(client.api.inspect_container(project)["Id"])
    except errors.NotFound as error:
        raise StartFailed("Compose ended well, and its container is not there") from error
    return Started(container, port, _warm(uses.get(ref.service, {})))


def _start_plain(
    client: docker.DockerClient,
    order: BootOrder,
    engine: EngineDescription,
    port: int,
    stop: threading.Event,
    reaper: str,
) -> Started:
    launch = order.launch
    if launch.image is None:
        raise UsageProblem(
            "the docker launch names neither a compose file nor an image",
            hint="add `compose:` or `image:` to it",
        )
    image = docker_client.image_id(client, launch.image, allow_pull=order.allow_pull)
    if not image:
        try:
            image = str(client.images.pull(*_repository_and_tag(launch.image)).id)
        except errors.APIError as error:
            raise StartFailed(f"pulling {launch.image}: {error.explanation or error}") from error
    uses = binds.plan(
        launch.mounts,
        launch,
        binds.folder_key(image, launch.mounts),
        environment=launch.env,
        allow_pull=order.allow_pull,
    )
    host = launch.network_mode == "host"
    override.uses_host_network({"network_mode": launch.network_mode})
    command = launch.command
    if host:
        command = launching.with_port(
            command, engine.port_flags, port, where="network_mode: host in the launch"
        )
    env = {**launch.env, **({} if order.allow_pull else engine.offline_env)}
    arguments: dict[str, Any] = {
        "name": project_name(order.study, order.boot),
        "labels": labels(order, _spec(order, engine, port, reaper)),
        "environment": env,
        "mounts": [_mount(mount, uses) for mount in launch.mounts],
        "init": True,
        "restart_policy": {"Name": "no"},
        "privileged": launch.privileged,
        "log_config": types.LogConfig(type="json-file"),
    }
    if not host:
        arguments["ports"] = {f"{launch.container_port}/tcp": ("127.0.0.1", port)}
    optional = {
        "entrypoint": None if launch.entrypoint is None else list(launch.entrypoint),
        "working_dir": launch.working_dir,
        "ipc_mode": launch.ipc,
        "network_mode": launch.network_mode,
        "shm_size": None if launch.shm_size_mib is None else f"{launch.shm_size_mib}m",
    }
    arguments.update({key: value for key, value in optional.items() if value is not None})
    if launch.memory_limit_mib is not None:
        arguments["mem_limit"] = arguments["memswap_limit"] = f"{launch.memory_limit_mib}m"
        if docker_client.has_swappiness(client.info()):
            arguments["mem_swappiness"] = 0
    if launch.wants_gpu:
        chosen = {"device_ids": list(order.gpus)} if order.gpus else {"count": -1}
        arguments["device_requests"] = [types.DeviceRequest(capabilities=[["gpu"]], **chosen)]
    try:
        # create and start: `run` would pull a missing image
        container = client.containers.create(image, list(command), **arguments)
        container.start()
    except errors.ImageNotFound as error:
        raise EnvironmentProblem(
            f"the image {launch.image} is gone", hint=f"docker pull {launch.image}"
        ) from error
    except errors.APIError as error:
        raise StartFailed(str(error.explanation or error)) from error
    return Started(str(container.id), port, _warm(uses))


def mounts_of(service: Mapping[str, Any]) -> tuple[Mount, ...]:
    """The mounts of a service as `docker compose config` gives them."""
    return tuple(
        Mount(
            source=str(one.get("source") or "").replace("$$", "$"),
            target=str(one["target"]).replace("$$", "$"),
            read_only=bool(one.get("read_only")),
            kind=str(one.get("type") or "volume"),
        )
        for one in service.get("volumes") or []
    )


def _mount(mount: Mount, uses: Mapping[str, BindUse]) -> types.Mount:
    use = uses.get(mount.target.rstrip("/") or "/", BindUse())
    read_only = mount.read_only or use.read_only
    if mount.kind == "tmpfs":
        return types.Mount(mount.target, None, type="tmpfs", read_only=read_only)
    kind: Literal["volume", "bind"] = "volume" if mount.kind == "volume" else "bind"
    return types.Mount(mount.target, use.source or mount.source, type=kind, read_only=read_only)


def _warm(uses: Mapping[str, BindUse]) -> dict[str, bool]:
    return {target: use.warm for target, use in uses.items() if use.source is not None}


def _repository_and_tag(image: str) -> tuple[str, str]:
    name, colon, tag = image.rpartition(":")
    return (name, tag) if colon and "/" not in tag else (image, "latest")
