"""Which profiles are trusted: local files and packaged ones are; what was downloaded is shown once.

A file counts as downloaded when it carries a download mark (as browsers and `wget --xattr` set it), lies in
the user's download folder, or belongs to another user (under sudo, its caller is no other).
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llm_bisect.model import EnvironmentProblem, Launch
from llm_bisect.model.secrets import mask_secrets
from llm_bisect.spaces.compose import ComposeService, read_services
from llm_bisect.spaces.launches import base_launch
from llm_bisect.spaces.profile import Profile
from llm_bisect.spaces.yaml_limits import compose_files, content

_MARKS = ("user.xdg.origin.url", "user.xdg.referrer.url", "com.apple.quarantine")
_SOCKETS = ("docker.sock", "containerd.sock", "podman.sock")


def needs_trust(profile: Profile) -> str | None:
    """Why this profile must be shown and accepted before it starts anything; None where it need not be. What
    its compose file includes or extends counts as a part of it. Raises UsageProblem."""
    files = _files(profile)
    reason = next((r for f in files if (r := _downloaded(f)) is not None), None)
    return None if reason is None or _digest(files) in _accepted() else reason


def summary(profile: Profile) -> list[str]:
    """What the profile would start, for a person to read: images, commands, mounts, privileges, network;
    the services that it depends on, too. Without secrets. Raises UsageProblem, EnvironmentProblem."""
    lines: list[str] = []
    for runner in profile.launches:
        if runner == "simulated":
            continue  # starts nothing of the profile's
        launch = base_launch(profile, runner, {}).launch
        if launch.compose is None:
            lines += [f"{runner}: {launch.image or 'a process of this user, no container'}", *_launch(launch)]
            continue
        services = read_services(launch.compose.file, {})
        for name in _started(services, launch.compose.service):
            lines += [f"{runner}: service {name}, image {services[name].image or 'built from the file'}"]
            lines += _service(services[name])
    return [str(mask_secrets(line)) for line in lines]


def accept(profile: Profile) -> None:
    """Remember the content of these files as accepted. Raises EnvironmentProblem."""
    path = _store()
    known = sorted({*_accepted(), _digest(_files(profile))})
    made: str | None = None
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            made = file.name  # mode 0600
            json.dump({"accepted": known}, file)
            file.flush()
            os.fsync(file.fileno())
        Path(made).replace(path)
    except OSError as error:
        if made is not None:
            Path(made).unlink(missing_ok=True)
        raise EnvironmentProblem(
            f"{path} cannot be written: {error.strerror}", hint="check the permissions of your state folder"
        ) from error


def _files(profile: Profile) -> list[Path]:
    composes = [Path(str(launch["compose"])) for launch in profile.launches.values() if launch.get("compose")]
    parts = [part for compose in composes for part in compose_files(compose)]
    return [p for p in dict.fromkeys((profile.path, *parts)) if p is not None and p.is_file()]


def _downloaded(path: Path) -> str | None:
    """Why this file counts as downloaded; None where it does not."""
    try:
        marks = [m for m in os.listxattr(path) if m in _MARKS]
    except (OSError, AttributeError):  # no such attributes here
        marks = []
    if marks:
        return f"{path.name} was downloaded (it carries the mark {marks[0]})"
    real = path.resolve()
    if any(folder in real.parents for folder in _packaged()):
        return None
    import platformdirs

    downloads = Path(platformdirs.user_downloads_dir()).resolve()
    if downloads != Path.home().resolve() and downloads in real.parents:
        return f"{path.name} lies in the download folder"
    owner = path.stat().st_uid
    if owner in (0, os.geteuid()) or (os.geteuid() == 0 and os.environ.get("SUDO_UID") == str(owner)):
        return None
    return f"{path.name} belongs to another user (uid {owner})"


def _packaged() -> list[Path]:
    """Folders of profiles that came with this program: as trusted as the program itself."""
    package = Path(__file__).resolve().parents[1]
    return [package / "_data" / "search_spaces", package.parents[1] / "search_spaces"]


def _digest(files: list[Path]) -> str:
    """Of the files' bytes, so that neither a copy nor another folder asks again, and every edit does."""
    parts = [hashlib.sha256(content(f)).hexdigest() for f in files]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _started(services: dict[str, ComposeService], name: str) -> list[str]:
    """The service and all that starts with it, itself first."""
    found: list[str] = []
    queue = [name]
    while queue:
        one = queue.pop(0)
        if one in services and one not in found:
            found.append(one)
            queue += services[one].depends_on
            mode = services[one].network_mode or ""
            queue += [mode.removeprefix("service:")] if mode.startswith("service:") else []
    return found


def _service(one: ComposeService) -> Iterator[str]:
    launch = Launch(
        "docker",
        "",
        one.command,
        one.env,
        entrypoint=one.entrypoint,
        mounts=one.mounts,
        ipc=one.ipc,
        privileged=one.privileged,
        network_mode=one.network_mode,
        wants_gpu=one.wants_gpu,
    )
    yield from _launch(launch)
    for power in one.powers:
        yield f"  POWER: {power}"


def _launch(launch: Launch) -> Iterator[str]:
    words = (*(launch.entrypoint or ()), *launch.command)
    yield f"  command: {shlex.join(words) or 'what the image says'}"
    if launch.env:
        yield f"  environment: {', '.join(sorted(launch.env))}"
    for mount in launch.mounts:
        access = "read-only" if mount.read_only else "WRITABLE"
        yield f"  mount: {mount.source} → {mount.target} ({access})"
        if mount.source.endswith(_SOCKETS):
            yield "  POWER: it may command the container daemon, and with it this machine"
    if launch.privileged:
        yield "  PRIVILEGED: the container may do anything to this machine"
    if launch.network_mode:
        yield f"  network: {launch.network_mode}"
    if launch.ipc:
        yield f"  ipc: {launch.ipc}"
    if launch.wants_gpu:
        yield "  GPU: yes"


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
