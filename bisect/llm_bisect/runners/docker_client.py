"""Speaking to the Docker daemon: connecting, what it can do, what is missing."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import docker
from docker import errors

from llm_bisect.model import EnvironmentProblem
from llm_bisect.runners import images

REACH_TIMEOUT_S = 60


def connect() -> docker.DockerClient:
    """A client of the daemon that `$DOCKER_HOST` or the current Docker context names.

    Raises EnvironmentProblem where none answers, or where it runs on another machine.
    """
    if (os.environ.get("DOCKER_HOST") or "unix://").split("://")[0] not in ("unix", "http+unix"):
        raise _far_away()
    try:
        client = docker.from_env(timeout=REACH_TIMEOUT_S)
        client.ping()
    except Exception as error:  # the SDK lets errors of requests and urllib3 through
        raise _unreachable(error) from error
    if not socket_path(client):
        client.close()
        raise _far_away()
    return client


def _far_away() -> EnvironmentProblem:
    return EnvironmentProblem(
        "the Docker daemon is reached over the network, and its ports and folders are not this machine's",
        hint="run bisect on that machine, or unset DOCKER_HOST and run docker context use default",
    )


def _unreachable(error: Exception) -> EnvironmentProblem:
    where = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock (or the current Docker context)"
    text = str(error)
    if "Permission denied" in text:
        return EnvironmentProblem(
            f"this user may not use the Docker daemon at {where}",
            hint="sudo usermod -aG docker $USER and log in again, or run bisect as root",
        )
    return EnvironmentProblem(
        f"Docker is not running: nothing answers at {where}",
        hint="start it (sudo systemctl start docker, or Docker Desktop), or use --runner process",
    )


def socket_path(client: docker.DockerClient) -> str:
    """Path of the daemon's unix socket; empty where it is reached in another way."""
    for adapter in client.api.adapters.values():
        path = getattr(adapter, "socket_path", None)
        if isinstance(path, str) and path:
            return path if path.startswith("/") else f"/{path}"
    return ""


@contextmanager
def daemon_errors(doing: str) -> Iterator[None]:
    """Turns what the SDK raises when the daemon is gone into an EnvironmentProblem."""
    try:
        yield
    except errors.DockerException as error:
        if isinstance(error, errors.APIError) and not error.is_server_error():
            raise
        raise EnvironmentProblem(f"the Docker daemon failed while {doing}: {error}", hint=_LOOK) from error
    except OSError as error:  # requests' errors are OSErrors
        raise EnvironmentProblem(f"the Docker daemon stopped answering while {doing}", hint=_LOOK) from error


_LOOK = "see that the daemon runs (docker info) and run the same command again"


def is_podman(client: docker.DockerClient) -> bool:
    """True where Podman's compatible socket answers: it drops GPU requests without a word."""
    components = client.version().get("Components") or []
    return any("podman" in str(part.get("Name", "")).lower() for part in components)


def has_swappiness(info: Mapping[str, Any]) -> bool:
    """True where the daemon takes `mem_swappiness` (cgroup v1 alone has it)."""
    return str(info.get("CgroupVersion", "1")) == "1"


def check_memory_limit(info: Mapping[str, Any]) -> None:
    """Raise EnvironmentProblem where this daemon cannot limit a container's memory."""
    if not info.get("MemoryLimit", True):
        raise EnvironmentProblem(
            "the launch sets a memory limit, and this Docker daemon cannot limit memory",
            hint="enable the memory cgroup (kernel argument cgroup_enable=memory), or take the limit out",
        )


def image_id(client: docker.DockerClient, image: str, *, allow_pull: bool) -> str:
    """Id of an image that the daemon has; empty where it is missing and may be pulled.

    Our own tiny image is made where it is missing. Raises EnvironmentProblem.
    """
    if image == images.TINY_IMAGE:
        return images.ensure_tiny_image(client)
    try:
        return str(client.images.get(image).id)
    except errors.ImageNotFound as error:
        if allow_pull:
            return ""
        raise EnvironmentProblem(
            f"the image {image} is not on this machine (its size is not known before it is pulled)",
            hint=f"docker pull {image}, or run again with --allow-pull",
        ) from error


def image_identity(client: docker.DockerClient, image: str) -> str:
    """What the image is, the same wherever and whenever it was put there; `missing` where it is not.

    An image from a registry has its digest. One made here is told by its layers and configuration, since its
    id changes with the time of the making.
    """
    try:
        attrs = client.images.get(image).attrs
    except errors.ImageNotFound:
        return "missing"
    digests = attrs.get("RepoDigests") or []
    if digests:
        return str(digests[0]).rpartition("@")[2]
    config = attrs.get("Config") or {}
    kept = {key: config.get(key) for key in ("Entrypoint", "Cmd", "Env", "WorkingDir", "User")}
    text = json.dumps([(attrs.get("RootFS") or {}).get("Layers"), kept], sort_keys=True)
    return f"layers {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def check_volumes(client: docker.DockerClient, volumes: Mapping[str, str]) -> None:
    """Raise EnvironmentProblem for a named volume (key → name) of the user's project that is missing."""
    for key, name in volumes.items():
        try:
            client.volumes.get(name)
        except errors.NotFound as error:
            raise EnvironmentProblem(
                f"the compose file's volume {key} ({name}) is not on this machine",
                hint=f"start your own project once (docker compose up -d), or: docker volume create {name}",
            ) from error


def check_shared_volumes(client: docker.DockerClient, volumes: Mapping[str, str]) -> None:
    """Raise EnvironmentProblem where a volume of a service that the engine depends on is in use elsewhere.

    Two servers on one data volume (a database started twice) may ruin it.
    """
    for key, name in volumes.items():
        for one in client.api.containers(filters={"volume": name}):
            holder = str((one.get("Names") or ["?"])[0]).lstrip("/")
            raise EnvironmentProblem(
                f"the compose file's volume {key} ({name}) belongs to a service that the engine depends on, "
                f"and the running container {holder} uses it",
                hint=f"docker stop {holder} (and start it again afterwards), or take it out of depends_on",
            )
