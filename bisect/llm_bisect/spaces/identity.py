"""Which launches are one candidate: the hash of what an engine really gets."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from llm_bisect.model import Launch, Mount, UsageProblem
from llm_bisect.model.secrets import is_secret_name
from llm_bisect.spaces.argv import normalised, tidy
from llm_bisect.spaces.engine_files import load_engine

SMALL_BYTES = 8 << 20  # a mount up to this size counts by its content, a larger one by sizes and heads
_HEAD_BYTES = 1 << 20
_MOST_HEADS = 2_000  # a folder with more files counts by their names and sizes
_MOST_FILES = 50_000  # one with more yet (somebody mounts a whole system) by its place alone
_PORT = "--port"
# What bisect itself sets in a candidate that may not download.
_OFFLINE = frozenset(
    {
        "HF_HUB_OFFLINE",
        "TRANSFORMERS_OFFLINE",
        "HF_DATASETS_OFFLINE",
        "LLAMA_OFFLINE",
        "LLAMA_ARG_OFFLINE",
        "VLLM_NO_USAGE_STATS",
        "DO_NOT_TRACK",
    }
)


def candidate_id(launch: Launch) -> str:
    """16 hex digits: alike for launches that start the same engine, however they are spelled.

    Read-only mounts and the weights count by content (large ones by sizes and first MiB), wherever they lie.
    Ports, offline flags, secrets and writable mounts are left out.
    """
    aliases, ports, offline = _engine_words(launch.engine)
    plain = {
        "engine": launch.engine,
        "runner": launch.runner,
        "command": _argv(launch.command, aliases, ports),
        "entrypoint": None if launch.entrypoint is None else _argv(launch.entrypoint, aliases, ports),
        "env": {k: v for k, v in launch.env.items() if k not in offline and not is_secret_name(k)},
        "image": launch.image,
        "mounts": sorted([m.target.rstrip("/"), _mounted(m)] for m in launch.mounts if m.read_only),
        "working_dir": launch.working_dir,
        "ipc": launch.ipc,
        "shm_size_mib": launch.shm_size_mib,
        "privileged": launch.privileged,
        "memory_limit_mib": launch.memory_limit_mib,
        "model": _weights(launch.model_path),
        "simulated": [launch.simulated.card, launch.simulated.model] if launch.simulated else None,
    }
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]


def _engine_words(engine: str) -> tuple[dict[str, str], frozenset[str], frozenset[str]]:
    """(spelling of a flag → the one to write, flags of the port, variables of ours)."""
    try:
        found = load_engine(engine)
    except UsageProblem:  # a description given by path, say: its own spellings are unknown here
        return {}, frozenset({_PORT}), _OFFLINE
    aliases = {
        tidy(spelling): tidy(spellings[0])
        for axis in found.axes.values()
        for spellings in (axis.flags, *axis.also_flags)
        for spelling in spellings
    }
    return aliases, frozenset({_PORT, *found.port_flags}), _OFFLINE | set(found.offline_env)


def _argv(words: Sequence[str], aliases: dict[str, str], ports: frozenset[str]) -> list[list[str]]:
    units = normalised(words, aliases)
    return [
        [unit[0], "***"] if unit and is_secret_name(unit[0]) and len(unit) > 1 else unit
        for unit in units
        if not unit or unit[0] not in ports
    ]


def _mounted(mount: Mount) -> str:
    path = Path(mount.source)
    return content_hash(path) if mount.kind == "bind" and path.exists() else mount.source


def _weights(model: str | None) -> str | None:
    if model is None or model.startswith("builtin:"):
        return model
    path = Path(model).expanduser()
    return content_hash(path) if path.exists() else model


def content_hash(path: Path) -> str:
    """What a file or folder holds: the hash of its files, or of their sizes and first MiB where it is large.

    Very large folders count by their files' sizes or by their place; devices, pipes and sockets by theirs.
    Byte-code caches and version control are no content: they change without anybody's doing.
    """
    digest = hashlib.sha256()
    try:
        files = sorted(islice(_files(path), _MOST_FILES + 1)) if path.is_dir() else [path]
        if len(files) > _MOST_FILES:
            return f"{path} (more than {_MOST_FILES} files)"
        states = [(file, file.stat()) for file in files]
        if not path.is_dir() and not path.is_file():
            return f"{path} (no regular file)"  # a device or pipe: reading it may never end
        head = None if sum(s.st_size for _, s in states) <= SMALL_BYTES else _HEAD_BYTES
        head = head if head is None or len(files) <= _MOST_HEADS else 0
        for file, state in states:
            name = "" if file == path else str(file.relative_to(path))
            digest.update(f"{name}\0{state.st_size}\0".encode())
            digest.update(_file_hash(file, state.st_size, state.st_mtime_ns, head))
    except OSError as error:
        return f"{path} ({error.strerror})"
    return digest.hexdigest()


def _files(folder: Path) -> Iterator[Path]:
    for one in folder.rglob("*"):
        if not {"__pycache__", ".git"} & set(one.relative_to(folder).parts) and one.is_file():
            yield one


@functools.lru_cache(maxsize=8192)
def _file_hash(file: Path, _size: int, _mtime_ns: int, limit: int | None) -> bytes:
    """Cached: the same weights are looked at before every boot of a night."""
    with file.open("rb") as stream:
        return hashlib.sha256(stream.read() if limit is None else stream.read(limit)).digest()
