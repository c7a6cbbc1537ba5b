"""Which profiles are trusted: local files and packaged ones are; what was downloaded is shown once.

A file counts as downloaded when it carries a download mark (as browsers and `wget --xattr` set it), lies in
the user's download folder, or belongs to another user.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import tempfile
from pathlib import Path
from typing import Any

from llm_bisect.model import EnvironmentProblem
from llm_bisect.spaces.profile import Profile

_MARKS = ("user.xdg.origin.url", "user.xdg.referrer.url", "com.apple.quarantine")


def needs_trust(profile: Profile) -> str | None:
    """Why this profile must be shown and accepted before it starts anything; None where it need not be."""
    files = _files(profile)
    reason = next((r for f in files if (r := _downloaded(f)) is not None), None)
    return None if reason is None or _digest(files) in _accepted() else reason


def summary(profile: Profile) -> list[str]:
    """What the profile would start, for a person to read: images, commands, mounts, privileges, network."""
    from llm_bisect.spaces.apply import resolve_launch

    lines: list[str] = []
    for runner in profile.launches:
        launch = resolve_launch(profile, runner, {})
        lines.append(f"{runner}: {launch.image or 'no image'}")
        lines.append(f"  command: {shlex.join((*(launch.entrypoint or ()), *launch.command))}")
        lines += [
            f"  mount: {m.source} → {m.target}{'' if m.read_only else ' (writable)'}" for m in launch.mounts
        ]
        if launch.privileged:
            lines.append("  PRIVILEGED: the container may do anything to this machine")
        if launch.network_mode:
            lines.append(f"  network: {launch.network_mode}")
    return lines


def accept(profile: Profile) -> None:
    """Remember the content of these files as accepted. Raises EnvironmentProblem."""
    path = _store()
    known = sorted({*_accepted(), _digest(_files(profile))})
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump({"accepted": known}, file)
        Path(file.name).replace(path)
    except OSError as error:
        raise EnvironmentProblem(f"{path}: {error.strerror}", hint="check your state folder") from error


def _files(profile: Profile) -> list[Path]:
    composes = [Path(str(launch["compose"])) for launch in profile.launches.values() if launch.get("compose")]
    return [p for p in (profile.path, *composes) if p is not None and p.is_file()]


def _downloaded(path: Path) -> str | None:
    try:
        marks = [m for m in os.listxattr(path) if m in _MARKS]
    except (OSError, AttributeError):
        marks = []
    if marks:
        return f"it was downloaded ({marks[0]})"
    import platformdirs

    downloads = Path(platformdirs.user_downloads_dir())
    if downloads != Path.home() and downloads in path.resolve().parents:
        return "it lies in the download folder"
    owner = path.stat().st_uid
    return None if owner in (0, os.geteuid()) else f"{path.name} belongs to another user (uid {owner})"


def _digest(files: list[Path]) -> str:
    return hashlib.sha256(b"\0".join(f.read_bytes() for f in files)).hexdigest()


def _store() -> Path:
    import platformdirs

    return Path(platformdirs.user_state_dir("llm-bisect")) / "trusted.json"


def _accepted() -> set[str]:
    try:
        data: Any = json.loads(_store().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return set()
    found = data.get("accepted") if isinstance(data, dict) else None
    return {str(d) for d in found} if isinstance(found, list) else set()
