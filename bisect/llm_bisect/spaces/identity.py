"""Which launches are one candidate: the hash of what an engine really gets."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from llm_bisect.model import Launch, Mount
from llm_bisect.spaces.argv import normalised

SMALL_BYTES = 8 << 20  # a mount up to this size counts by its content, a larger one by size and head
_HEAD_BYTES = 1 << 20
_OFFLINE = frozenset({"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE", "LLAMA_OFFLINE"})


def candidate_id(launch: Launch) -> str:
    """16 hex digits. Our own additions (port, labels, offline flags) and writable mounts are left out."""
    plain = {
        "engine": launch.engine,
        "runner": launch.runner,
        "command": normalised(launch.command),
        "entrypoint": launch.entrypoint,
        "env": {k: v for k, v in sorted(launch.env.items()) if k not in _OFFLINE},
        "image": launch.image,
        "mounts": sorted([m.target, _content(m)] for m in launch.mounts if m.read_only),
        "memory_limit_mib": launch.memory_limit_mib,
        "model": launch.model_path,
        "simulated": [launch.simulated.card, launch.simulated.model] if launch.simulated else None,
    }
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]


def _content(mount: Mount) -> str:
    """What a read-only mount brings: the hash of its files, or of their sizes and heads where it is large."""
    path = Path(mount.source)
    if mount.kind != "bind" or not path.exists():
        return mount.source
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    digest = hashlib.sha256()
    try:
        small = sum(p.stat().st_size for p in files) <= SMALL_BYTES
        for file in files:
            name = "" if path.is_file() else str(file.relative_to(path))
            digest.update(f"{name}\0{file.stat().st_size}\0".encode())
            with file.open("rb") as stream:
                digest.update(stream.read() if small else stream.read(_HEAD_BYTES))
    except OSError as error:
        return f"{mount.source} ({error.strerror})"
    return digest.hexdigest()
