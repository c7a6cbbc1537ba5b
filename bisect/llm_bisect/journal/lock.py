"""The lock of a journal: one writer per file, by `flock`, which ends with its process however it ends."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from llm_bisect.model import EnvironmentProblem

_TRIES = 8
_PAUSE_S = 0.05


def take(fd: int, path: Path) -> None:
    """Take the write lock of the open journal. Raises EnvironmentProblem naming who holds it, and OSError."""
    for attempt in range(_TRIES):
        # Again: `holder_pid` touches the lock for a moment, and a killed writer's child may not be gone yet.
        if attempt:
            time.sleep(_PAUSE_S)
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
    pid = _pid_of_lock(os.fstat(fd))
    who = "another process (in another container, or on another machine)" if pid is None else f"process {pid}"
    ends = f"bisect stop {path.stem} ends it" if pid is not None else "end it there"
    raise EnvironmentProblem(
        f"study {path.stem!r} is running already: {who} holds {path}",
        hint=f"bisect status {path.stem} shows how far it is; {ends}, or give this one another --study name",
    )


def holder_pid(path: Path) -> int | None:
    """The process that writes this journal, or None where nobody does.

    Raises EnvironmentProblem where somebody does who cannot be seen from here, or where it cannot be read:
    "nobody" would then be wrong, and its engine could be taken for one that was left behind.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise EnvironmentProblem(
            f"{path} cannot be read: {error.strerror}", hint="check its owner"
        ) from error
    try:
        for _ in range(_TRIES):
            if (pid := _pid_of_lock(os.fstat(fd))) is not None:
                return pid
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return None
            except BlockingIOError:
                time.sleep(_PAUSE_S)
    finally:
        os.close(fd)
    raise EnvironmentProblem(
        f"{path} is held by a process that cannot be seen from here",
        hint="it runs in another container, on another machine or as another user: look there",
    )


def _pid_of_lock(wanted: os.stat_result) -> int | None:
    """The process whose write lock on this file the system lists, where it is seen to have it open."""
    try:
        table = Path("/proc/locks").read_text()
    except OSError:
        return None
    for line in table.splitlines():
        parts = line.split()
        # "1: FLOCK ADVISORY WRITE 29556 fe:00:2148487 0 EOF"; a waiting one has "->" second
        if len(parts) != 8 or parts[1] != "FLOCK" or parts[3] != "WRITE":
            continue
        pid, (major, minor, inode) = int(parts[4]), parts[5].split(":")
        if int(inode) != wanted.st_ino or pid <= 0:
            continue
        # Some file systems (overlay, btrfs) list another device than stat shows: the open file decides.
        same_device = os.makedev(int(major, 16), int(minor, 16)) == wanted.st_dev
        if _has_open(pid, wanted, unseen=same_device):
            return pid
    return None


def _has_open(pid: int, wanted: os.stat_result, *, unseen: bool) -> bool:
    """True where that process has the file open; `unseen` where we may not look into it."""
    folder = Path(f"/proc/{pid}/fd")
    try:
        for entry in folder.iterdir():
            try:
                if os.path.samestat(entry.stat(), wanted):
                    return True
            except FileNotFoundError:
                continue
    except PermissionError:
        return unseen
    except OSError:
        return False
    return False
