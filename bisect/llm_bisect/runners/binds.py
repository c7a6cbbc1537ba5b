"""Bind mounts that a candidate could write through: none may change the user's checkout or model folder.

Weights become read-only, caches go to folders of ours (kept between boots, keyed by image and patch
tree), and everything else is either a copy of ours (small folders) or read-only.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from llm_bisect.model import EnvironmentProblem, Launch, Mount
from llm_bisect.runners.models import cache_folder

_COPY_AT_MOST_BYTES = 64 << 20
_SMALL_BYTES = 8 << 20
_CACHE = re.compile(r"cache|triton|inductor|compile|torch|tmp|temp|logs?$|\.nv", re.IGNORECASE)
_WEIGHTS = re.compile(
    r"(^|[/_.-])(models?|weights|huggingface|hf|hub|gguf|checkpoints?|loras?)([/_.-]|$)", re.IGNORECASE
)
_SYSTEM = ("/dev", "/proc", "/sys", "/etc/localtime", "/etc/timezone")


@dataclass(frozen=True)
class BindUse:
    """How one mount is used: `source` of ours in place of the user's (None: as it is), read-only or not."""

    source: str | None = None
    read_only: bool = False
    warm: bool = False  # a redirected folder held something before this boot


def plan(
    mounts: Iterable[Mount],
    launch: Launch,
    key: str,
    *,
    environment: Mapping[str, str],
    allow_pull: bool = False,
) -> dict[str, BindUse]:
    """Target → use, for the mounts that are not used as they stand; makes the folders of ours.

    `key` (see `folder_key`) tells apart caches that must not be shared. Raises EnvironmentProblem where the
    cache folder cannot be written.
    """
    if launch.share_mounts:
        return {}
    uses = {}
    for mount in mounts:
        use = _use(mount, launch, key, environment, allow_pull)
        if use is not None:
            uses[str(PurePosixPath(mount.target))] = use
    return uses


def folder_key(image: str, mounts: Iterable[Mount]) -> str:
    """Key of the folders that writable binds go to: the image's digest and the read-only mounts' content."""
    digest = hashlib.sha256(image.encode())
    for target, content in sorted(content_hashes(mounts).items()):
        digest.update(f"\0{target}\0{content}".encode())
    return digest.hexdigest()[:16]


def content_hashes(mounts: Iterable[Mount]) -> dict[str, str]:
    """Target → hash of the content, for small binds (at most 8 MiB): patches, scripts, configurations."""
    found = {}
    for mount in mounts:
        if mount.kind != "bind" or not mount.read_only:
            continue
        content = _content_hash(Path(mount.source))
        if content is not None:
            found[mount.target] = content
    return found


def _use(
    mount: Mount, launch: Launch, key: str, environment: Mapping[str, str], allow_pull: bool
) -> BindUse | None:
    weights = _is_weights(mount, launch, environment)
    if mount.read_only or mount.kind == "tmpfs":
        return None
    if mount.kind == "volume":
        # a volume of the user's that holds weights; pulling has to be able to write there
        return BindUse(read_only=True) if weights and not allow_pull else None
    source = Path(mount.source)
    if str(source) == "/" or any(source.is_relative_to(system) for system in _SYSTEM):
        return None if str(source) != "/" else BindUse(read_only=True)
    if source.exists() and not source.is_dir():
        return BindUse(read_only=True)
    if weights:
        return None if allow_pull else BindUse(read_only=True)
    if not source.exists() or _CACHE.search(mount.target) or _CACHE.search(source.name):
        return _redirected(mount, key, copy=None)
    if _size_bytes(source, _COPY_AT_MOST_BYTES) <= _COPY_AT_MOST_BYTES:
        return _redirected(mount, key, copy=source)
    return BindUse(read_only=True)


def _is_weights(mount: Mount, launch: Launch, environment: Mapping[str, str]) -> bool:
    if mount.kind == "bind" and launch.model_path:
        model = Path(launch.model_path)
        source = Path(mount.source)
        if model == source or source in model.parents:
            return True
    target = str(PurePosixPath(mount.target))
    if re.search(r"cache/(vllm|triton|torch|flashinfer|nv)", target):
        return False
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_CACHE"):
        if environment.get(name, "").rstrip("/").startswith(target):
            return True
    # named in the command: --model /models/x, -m=/models/x.gguf
    inside = re.compile(rf"(^|[=:,\s\"']){re.escape(target)}(/|$|[\s\"',])")
    if any(inside.search(word) for word in launch.command):
        return True
    return _WEIGHTS.search(target) is not None


def _redirected(mount: Mount, key: str, copy: Path | None) -> BindUse:
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", mount.target).strip("_") or "root"
    folder = cache_folder() / "mounts" / key / name
    try:
        warm = folder.exists() and any(folder.iterdir())
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            scratch = Path(tempfile.mkdtemp(dir=folder.parent))
            scratch.chmod(0o755)
            if copy is not None:
                shutil.copytree(copy, scratch, symlinks=True, dirs_exist_ok=True)
            scratch.rename(folder)
            if copy is None and Path(mount.source).exists():
                shutil.copystat(mount.source, folder)
    except OSError as error:
        raise EnvironmentProblem(
            f"the folder {folder}, used in place of {mount.source}, cannot be made: {error.strerror}",
            hint="set LLM_BISECT_CACHE to a folder that can be written, or share_mounts: true in the profile",
        ) from error
    return BindUse(source=str(folder), warm=warm)


def _content_hash(path: Path) -> str | None:
    """Hash of a file's bytes or a folder's names and bytes; None where it is missing or not small."""
    if not path.exists() or _size_bytes(path, _SMALL_BYTES) > _SMALL_BYTES:
        return None
    digest = hashlib.sha256()
    files = [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file())
    for one in files:
        if "__pycache__" in one.parts or ".git" in one.parts:
            continue
        digest.update(f"{one.relative_to(path) if one != path else one.name}\0".encode())
        try:
            digest.update(one.read_bytes())
        except OSError:
            digest.update(b"unreadable")
    return digest.hexdigest()[:16]


def _size_bytes(path: Path, enough: int) -> int:
    """Size of a file or tree; counting ends once it is more than `enough`."""
    if not path.is_dir():
        return path.stat().st_size if path.is_file() else 0
    total = 0
    for count, one in enumerate(path.rglob("*")):
        if count > 20_000:
            return enough + 1
        if one.is_file() and not one.is_symlink():
            total += one.stat().st_size
        if total > enough:
            break
    return total
