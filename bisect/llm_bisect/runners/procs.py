"""Processes of ours: who they are across pid reuse, and how a crashed run's ones are found again.

A child of the process runner carries `LLM_BISECT_STUDY` and `LLM_BISECT_BOOT` in its environment, and so
do its own children: they are the labels of the process runner.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

STUDY_VARIABLE = "LLM_BISECT_STUDY"
BOOT_VARIABLE = "LLM_BISECT_BOOT"
OWNER_VARIABLE = "LLM_BISECT_OWNER"
SPEC_VARIABLE = "LLM_BISECT_SPEC"


@dataclass(frozen=True)
class ProcessId:
    """A process, told apart from a later one with the same number by its start time."""

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """The process that has this number now; None where there is none (or only a zombie)."""
        ticks = start_ticks(pid)
        return None if ticks is None else cls(pid, ticks)

    @property
    def alive(self) -> bool:
        return start_ticks(self.pid) == self.start_ticks

    def __str__(self) -> str:
        return f"{self.pid}:{self.start_ticks}"


def me() -> ProcessId:
    """This process."""
    own = ProcessId.of(os.getpid())
    return own if own is not None else ProcessId(os.getpid(), 0)


def owner_alive(owner: str) -> bool:
    """True where the process written as `pid:start-ticks` still runs."""
    pid, _, ticks = owner.partition(":")
    if not (pid.isdigit() and ticks.isdigit()):
        return False
    return ProcessId(int(pid), int(ticks)).alive


def wait_gone(whom: Iterable[str], patience_s: float) -> None:
    """Wait until none of these processes (`pid:start-ticks`) runs any more, at most `patience_s`."""
    deadline = time.monotonic() + patience_s
    left = {one for one in whom if one}
    while any(owner_alive(one) for one in left) and time.monotonic() < deadline:
        time.sleep(0.05)


def start_ticks(pid: int) -> int | None:
    """Start time in clock ticks since the machine's boot; None where it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])


def machine_boot_id() -> str:
    """Changes with each start of the machine; empty where unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def environment(pid: int) -> Mapping[str, str]:
    """The environment that the process was started with; empty where it cannot be read."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (part.partition(b"=") for part in raw.split(b"\0") if b"=" in part)
    return {os.fsdecode(key): os.fsdecode(value) for key, _, value in pairs}


def find(
    study: str, boot: str | None = None, owner: str | None = None
) -> Iterator[tuple[ProcessId, Mapping[str, str]]]:
    """Live processes of the study (and boot, and owner), each with its environment; never this process."""
    wanted = {STUDY_VARIABLE: study, BOOT_VARIABLE: boot, OWNER_VARIABLE: owner}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        env = environment(int(entry.name))
        if any(value is not None and env.get(name) != value for name, value in wanted.items()):
            continue
        identity = ProcessId.of(int(entry.name))
        if identity is not None:
            yield identity, env


def kill_all(study: str, boot: str, owner: str | None = None, *, patience_s: float = 5.0) -> None:
    """Kill every process of this boot (and owner) and wait until none is left (at most `patience_s`)."""
    deadline = time.monotonic() + patience_s
    while True:
        left = list(find(study, boot, owner))
        if not left or time.monotonic() > deadline:
            return
        for identity, _ in left:
            send(identity, signal.SIGKILL)
        time.sleep(0.02)


def send(identity: ProcessId, sig: signal.Signals) -> None:
    """Send a signal to that very process, if it still runs."""
    if identity.alive:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(identity.pid, sig)


def children(pid: int) -> list[int]:
    """`pid` and all that descend from it, as far as they can be listed."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
                parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found, queue = [], [pid]
    while queue:
        current = queue.pop()
        found.append(current)
        queue.extend(parents.get(current, []))
    return found


def disk_reads_bytes(pid: int) -> int:
    """Bytes that the process and its children have read from disks so far; 0 where unknown."""
    total = 0
    for one in children(pid):
        with contextlib.suppress(OSError, IndexError, ValueError):
            for line in Path(f"/proc/{one}/io").read_text().splitlines():
                if line.startswith("read_bytes:"):
                    total += int(line.split()[1])
    return total
