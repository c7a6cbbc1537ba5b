"""Memory cgroups, v1 and v2: a limit of our own for a process, and reading one of a container."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from llm_bisect.model import EnvironmentProblem, MemorySample

MIB = 1 << 20
_PREFIX = "llm-bisect-"
_NEAR_BYTES = 4 * MIB  # the kernel charges in batches, and a huge page that does not fit is 2 MiB


@dataclass(frozen=True)
class MemoryGroup:
    """One memory cgroup. Every reading returns None where the file is gone or not readable."""

    folder: Path
    version: int

    def usage_bytes(self) -> int | None:
        name = "memory.current" if self.version == 2 else "memory.usage_in_bytes"
        return _number(self.folder / name)

    def limit_bytes(self) -> int | None:
        """The limit; None also where it is unlimited."""
        name = "memory.max" if self.version == 2 else "memory.limit_in_bytes"
        value = _number(self.folder / name)
        return None if value is None or value >= 1 << 60 else value

    def inactive_file_bytes(self) -> int:
        """File pages that the kernel drops before anybody dies: no use of ours."""
        stat = _table(self.folder / "memory.stat")
        return stat.get("total_inactive_file", stat.get("inactive_file", 0))

    def oom_kills(self) -> int:
        """How many processes the kernel has killed for this group's limit."""
        if self.version == 2:
            events = _table(self.folder / "memory.events")
            reached = events.get("oom", 0) > 0
        else:
            events = _table(self.folder / "memory.oom_control")
            highest = _number(self.folder / "memory.max_usage_in_bytes") or 0
            reached = highest >= (self.limit_bytes() or 0) - _NEAR_BYTES
        # the kernel counts kills for the whole machine's want here as well: those never met the limit
        return events.get("oom_kill", 0) if reached else 0

    def sample(self, limit_mib: float | None = None) -> MemorySample | None:
        """Limit minus usage, file pages that can be dropped not counted."""
        usage, limit = self.usage_bytes(), self.limit_bytes()
        if limit is None and limit_mib is not None:
            limit = int(limit_mib * MIB)
        if usage is None or limit is None:
            return None
        free = limit - usage + min(usage, self.inactive_file_bytes())
        return MemorySample(free_mib=max(0, free) / MIB, total_mib=limit / MIB, source="cgroup")

    @property
    def procs_file(self) -> Path:
        """Writing a pid here moves that process into the group."""
        return self.folder / "cgroup.procs"

    def pids(self) -> list[int]:
        try:
            return [int(line) for line in self.procs_file.read_text().split()]
        except (OSError, ValueError):
            return []

    def kill_and_remove(self, patience_s: float = 5.0) -> bool:
        """Kill what is in it and remove it. True where it is gone."""
        deadline = time.monotonic() + patience_s
        while self.folder.exists():
            for pid in self.pids():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(OSError):
                self.folder.rmdir()
                break
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True


def planned(name: str) -> MemoryGroup:
    """The group `llm-bisect-NAME` before it exists, so that a reaper can know of it first.

    Raises EnvironmentProblem where this user may not make one.
    """
    parent, version = _parent_or_problem()
    return MemoryGroup(parent / f"{_PREFIX}{name}", version)


def create(group: MemoryGroup, limit_mib: int) -> MemoryGroup:
    """Make a planned group; its memory and memory plus swap are limited to `limit_mib` MiB.

    Raises EnvironmentProblem where this user may not make one.
    """
    version = group.version
    limit = str(limit_mib * MIB)
    try:
        if group.folder.exists():
            group.kill_and_remove()
        group.folder.mkdir()
        if version == 2:
            (group.folder / "memory.max").write_text(limit)
            _write_if_there(group.folder / "memory.swap.max", "0")
        else:
            (group.folder / "memory.limit_in_bytes").write_text(limit)
            _write_if_there(group.folder / "memory.memsw.limit_in_bytes", limit)
            _write_if_there(group.folder / "memory.swappiness", "0")
    except OSError as error:
        with contextlib.suppress(OSError):
            group.folder.rmdir()
        raise _no_cgroup(f"{group.folder}: {error.strerror}") from error
    return group


def check() -> None:
    """Raise EnvironmentProblem where no memory cgroup can be made here."""
    _parent_or_problem()


def is_ours(folder: Path) -> bool:
    """True where the folder is a group that `create` made."""
    return folder.name.startswith(_PREFIX) and folder.is_dir()


def available() -> bool:
    """True where a memory cgroup can be made here."""
    try:
        check()
    except EnvironmentProblem:
        return False
    return True


def of_process(pid: int, must_contain: str = "") -> MemoryGroup | None:
    """The memory cgroup that a process is in; None where unknown, or where its path lacks `must_contain`."""
    for version in (1, 2):
        mount = _mount(version)
        path = _path_of(pid, version)
        if mount is None or path is None or must_contain not in path:
            continue
        folder = mount / path.lstrip("/")
        group = MemoryGroup(folder, version)
        if group.usage_bytes() is not None:
            return group
    return None


def _parent_or_problem() -> tuple[Path, int]:
    own = "self"
    mount, path = _mount(1), _path_of(own, 1)
    if mount is not None and path is not None:
        folder = mount / path.lstrip("/")
        folder = folder if folder.is_dir() else mount
        if os.access(folder, os.W_OK):
            return folder, 1
        raise _no_cgroup(f"{folder} is not writable for this user")
    mount, path = _mount(2), _path_of(own, 2)
    if mount is None or path is None:
        raise _no_cgroup("no memory cgroup controller is mounted")
    folder = mount / path.lstrip("/")
    # v2: a group with processes of its own may not have groups with controllers below it, so the
    # new one becomes a sibling, at the lowest ancestor that was delegated to us
    for ancestor in [folder] if folder == mount else folder.parents:
        if mount != ancestor and mount not in ancestor.parents:
            break
        may_move = os.access(ancestor, os.W_OK) and os.access(ancestor / "cgroup.procs", os.W_OK)
        if may_move and "memory" in _words(ancestor / "cgroup.subtree_control"):
            return ancestor, 2
    raise _no_cgroup("no cgroup with the memory controller is delegated to this user")


def _no_cgroup(why: str) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"the launch sets a memory limit, and this machine allows no memory cgroup for it: {why}",
        hint="run as root, run inside `systemd-run --user --scope -p Delegate=yes bash`, "
        "use --runner docker, or take memory_limit_mib out of the launch",
    )


def _mount(version: int) -> Path | None:
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        where = Path(left.split()[4])
        if version == 1 and kind == "cgroup" and "memory" in options.split(","):
            return where
        if version == 2 and kind == "cgroup2" and "memory" in _words(where / "cgroup.controllers"):
            return where
    return None


def _path_of(pid: int | str, version: int) -> str | None:
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if (version == 1 and "memory" in controllers.split(",")) or (version == 2 and number == "0"):
            return path
    return None


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _table(path: Path) -> dict[str, int]:
    try:
        rows = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdigit()}


def _write_if_there(path: Path, text: str) -> None:
    """Swap accounting is a choice of the kernel's: where it is off there is nothing to limit."""
    if path.exists():
        with contextlib.suppress(OSError):
            path.write_text(text)
