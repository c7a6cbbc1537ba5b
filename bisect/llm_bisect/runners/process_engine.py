"""One engine that runs as a process of this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from llm_bisect.model import EngineState, MemorySample
from llm_bisect.runners import procs
from llm_bisect.runners.cgroup import MemoryGroup
from llm_bisect.runners.logfile import LogFile
from llm_bisect.runners.vram import Vram

_NOTICE_S = 1.0


@dataclass
class ProcessEngine:
    """A child in its own session (or an adopted one, whose exit code nobody can read any more)."""

    study: str
    boot: str
    base_url: str
    api_key: str | None
    log: LogFile
    identity: procs.ProcessId
    child: subprocess.Popen[bytes] | None
    group: MemoryGroup | None
    vram: Vram | None
    on_stopped: Callable[[str], None]

    def __post_init__(self) -> None:
        self._stopping = threading.Lock()
        self._last: EngineState | None = None
        self._kills_seen = 0

    def log_text(self, since: int = 0) -> str:
        return self.log.text(since)

    def log_mark(self) -> int:
        return self.log.mark()

    def state(self) -> EngineState:
        """State now; after `stop` the state in which it was stopped."""
        return self._last if self._last is not None else self._look()

    def memory(self) -> MemorySample | None:
        if self.vram is not None:
            return self.vram.sample()
        return self.group.sample() if self.group is not None else None

    def activity(self) -> tuple[object, ...]:
        """Changes while the engine works: log, memory in steps of 1 MiB, bytes read from disks."""
        memory = self.memory()
        return (
            self.log.size_bytes(),
            None if memory is None else round(memory.free_mib),
            procs.disk_reads_bytes(self.identity.pid),
        )

    def stop(self, timeout_s: float = 20.0) -> None:
        """End it and all its children: asked first, killed after `timeout_s` seconds."""
        with self._stopping:
            if self._last is not None:
                return
            before = self._look()
            if before.running:
                self._signal(signal.SIGTERM)
                self._wait(timeout_s)
                self._signal(signal.SIGKILL)
                self._wait(5.0)
            procs.kill_all(self.study, self.boot)
            after = self._look()
            self._last = replace(after, stopped_by_us=before.running)
            if self.group is not None:
                self.group.kill_and_remove()
            if self.vram is not None:
                self.vram.wait_settled()
            self.on_stopped(self.boot)

    def _look(self) -> EngineState:
        code = None
        if self.child is not None:
            code = self.child.poll()
            running = code is None
        else:
            running = self.identity.alive
        kills = self.group.oom_kills() if self.group is not None else 0
        if running and kills > self._kills_seen:
            # its client sees the connection closed a moment before it can be waited for
            self._kills_seen = kills
            deadline = time.monotonic() + _NOTICE_S
            while running and time.monotonic() < deadline:
                time.sleep(0.02)
                code = self.child.poll() if self.child is not None else None
                running = code is None if self.child is not None else self.identity.alive
        return EngineState(
            running=running, exit_code=code, oom_killed=kills > 0, status="running" if running else "exited"
        )

    def _signal(self, sig: signal.Signals) -> None:
        # it leads its own session, so its group has its number; gone leader: only that very process
        if self.identity.alive or self.child is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.identity.pid, sig)

    def _wait(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self._look().running and time.monotonic() < deadline:
            time.sleep(0.02)
