"""The reaper: a child in its own session that stops our engines when bisect dies without a word.

It blocks on a pipe whose other end only bisect holds. `kill -9` closes that end; the reaper then stops
what it was told to guard (engine processes, containers, networks, cgroups of one boot) and exits. It
ignores the signals that a terminal sends, and exits at once when told that all is stopped.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

import llm_bisect
from llm_bisect.runners import procs

_START = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from llm_bisect.runners.reaper_child import main; raise SystemExit(main())"
)


@dataclass(frozen=True)
class Guarded:
    """One boot that must not outlive bisect."""

    kind: str  # process | docker
    study: str
    boot: str
    owner: str  # the bisect that started it: a later one may use the same names again
    cgroup: str = ""  # folder of the memory cgroup
    cgroup_version: int = 0
    socket: str = ""  # the daemon's unix socket


class Reaper:
    """Started with the first boot that it guards; one per runner."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._guarded: dict[str, Guarded] = {}

    @property
    def pid(self) -> int | None:
        """The child's pid while it runs."""
        return self._child.pid if self._child is not None and self._child.poll() is None else None

    @property
    def identity(self) -> str:
        """The child as `pid:start-ticks`; empty where none runs."""
        pid = self.pid
        found = procs.ProcessId.of(pid) if pid is not None else None
        return "" if found is None else str(found)

    def guard(self, item: Guarded) -> None:
        """From now on `item` is stopped when this process dies. Call before starting it."""
        with self._lock:
            self._guarded[item.boot] = item
            self._say({"guard": asdict(item)})

    def release(self, boot: str) -> None:
        """The boot is stopped and removed already."""
        with self._lock:
            if self._guarded.pop(boot, None) is not None:
                self._say({"release": boot})

    def close(self) -> None:
        """Let the child go; it stops nothing that was released before."""
        with self._lock:
            child, self._child = self._child, None
            self._guarded.clear()
        if child is None:
            return
        with contextlib.suppress(OSError):
            if child.stdin is not None:
                child.stdin.write(b'{"done": true}\n')
                child.stdin.close()
        try:
            child.wait(timeout=5)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()

    def _say(self, message: dict[str, object]) -> None:
        if self._child is not None and self._send(self._child, message):
            return
        # first use, or somebody killed it: a new one learns all that is to be guarded
        if self._child is not None:
            self._child.wait()
        self._child = _start()
        for item in self._guarded.values():
            self._send(self._child, {"guard": asdict(item)})

    @staticmethod
    def _send(child: subprocess.Popen[bytes], message: dict[str, object]) -> bool:
        if child.poll() is not None or child.stdin is None:
            return False
        try:
            child.stdin.write(json.dumps(message).encode() + b"\n")
            child.stdin.flush()
        except OSError:
            return False
        return True


def _start() -> subprocess.Popen[bytes]:
    root = str(Path(llm_bisect.__file__).resolve().parents[1])
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _START, root],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
    )
