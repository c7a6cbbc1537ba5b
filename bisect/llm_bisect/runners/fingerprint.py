"""What results depend on. `memory.` keys re-verify brackets, `time.` mark timings, `note.` are only said."""

from __future__ import annotations

import functools
import hashlib
import platform
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import docker

from llm_bisect.model import EnvironmentProblem, Launch, Mount
from llm_bisect.runners import binds, compose_up, docker_client, executables, launching, override
from llm_bisect.runners.vram import gpu_fingerprint

_HEADER_BYTES = 1 << 20


def machine_fingerprint(launch: Launch) -> dict[str, str]:
    """Kernel, model and, where the launch wants one, GPU and driver."""
    found = {"note.kernel": platform.release(), "note.machine": platform.machine()}
    if "microsoft" in platform.release().lower():
        found["note.wsl"] = "yes"
    model = launching.model_file(launch)
    if model is not None:
        found["memory.model"] = model_identity(model)
    if launch.wants_gpu:
        found.update(gpu_fingerprint())
    return found


def process_fingerprint(launch: Launch) -> dict[str, str]:
    """The program's content and what it says of its version."""
    try:
        program = executables.resolve(launch.command[0])
    except (EnvironmentProblem, IndexError):
        return {}
    found = {"memory.program": program_identity(program)}
    version = _version(program)
    if version:
        found["memory.engine"] = version
    return found


def docker_fingerprint(client: docker.DockerClient, launch: Launch) -> dict[str, str]:
    """Image, mounted patches, Docker and Compose."""
    found = {}
    with docker_client.daemon_errors("reading its version"):
        version = client.version()
        found["note.docker"] = f"{version.get('Version')} (API {version.get('ApiVersion')})"
    mounts: tuple[Mount, ...] = launch.mounts
    image = launch.image
    if launch.compose is not None:
        found["note.compose"] = compose_up.compose_version()
        base = compose_up.read_base(launch)
        mounts = (*_mounts_of(override.service_of(base, launch)), *launch.compose.adds_mounts)
        image = override.image_of(base, launch.compose.service, launch)
    if image is not None:
        found["memory.image"] = docker_client.image_identity(client, image)
    patches = binds.content_hashes(mount for mount in mounts if mount.source != launch.model_path)
    if patches:
        text = "\n".join(f"{target} {content}" for target, content in sorted(patches.items()))
        found["memory.patches"] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return found


def model_identity(path: Path) -> str:
    """Size and a hash of the head of each weight file: reading 20 GB would take minutes."""
    files = [path] if path.is_file() else sorted(_weight_files(path))
    digest = hashlib.sha256()
    size = 0
    for one in files:
        size += one.stat().st_size
        digest.update(f"{one.name}\0{one.stat().st_size}\0".encode())
        with one.open("rb") as file:
            digest.update(file.read(_HEADER_BYTES))
    return f"{size} bytes, {digest.hexdigest()[:16]}"


def _weight_files(folder: Path) -> Iterable[Path]:
    endings = (".safetensors", ".gguf", ".bin", ".json", ".model", ".pt")
    return (one for one in folder.rglob("*") if one.is_file() and one.suffix in endings)


@functools.cache
def program_identity(program: Path) -> str:
    """Hash of the program and of the libraries beside it (a launcher of 14 KB says nothing by itself)."""
    digest = hashlib.sha256()
    beside = sorted(program.resolve().parent.glob("lib*.so*")) if program.name == "llama-server" else []
    for one in [program.resolve(), *beside]:
        if one.is_symlink():
            continue
        digest.update(f"{one.name}\0{one.stat().st_size}\0".encode())
        with one.open("rb") as file:
            digest.update(file.read(_HEADER_BYTES))
    return digest.hexdigest()[:16]


@functools.cache
def _version(program: Path) -> str:
    try:
        done = subprocess.run(
            [str(program), "--version"], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if "version" in line.lower()]
    return lines[0][:120] if lines else ""


def _mounts_of(service: Mapping[str, Any]) -> tuple[Mount, ...]:
    from llm_bisect.runners.docker_start import mounts_of

    return mounts_of(service)
