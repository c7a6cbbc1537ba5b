"""One engine that runs in a container of ours."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import docker
from docker import errors

from llm_bisect.model import EngineState, EnvironmentProblem, MemorySample
from llm_bisect.runners import cgroup, docker_client, engine_api, procs
from llm_bisect.runners.docker_log import LogFollower
from llm_bisect.runners.logfile import LogFile
from llm_bisect.runners.vram import Vram

_NOTICE_S = 1.0  # the daemon learns of an exit, and of an OOM kill, a little later than its client


@dataclass
class DockerEngine:
    """A container with both labels of ours, and the other services that were started for it."""

    study: str
    boot: str
    base_url: str
    api_key: str | None
    client: docker.DockerClient
    container: str  # id
    log: LogFile
    follower: LogFollower
    limit_mib: int | None
    vram: Vram | None
    on_stopped: Callable[[str], None]
    warm_caches: Mapping[str, bool]  # target of a redirected mount → it held something before this boot

    def __post_init__(self) -> None:
        self._stopping = threading.Lock()
        self._last: EngineState | None = None
        self._ended = False
        self._group: cgroup.MemoryGroup | None = None
        self._pid = 0
        self._kills_seen = 0
        with contextlib.suppress(errors.DockerException, OSError):
            pid = int(self._inspect().get("State", {}).get("Pid") or 0)
            # a daemon in another machine (Docker Desktop) has pids that mean something else here
            self._group = cgroup.of_process(pid, must_contain=self.container) if pid else None
            self._pid = pid if self._group is not None else 0

    def log_text(self, since: int = 0) -> str:
        if self._ended:
            self.follower.join(2.0)  # the last words may still be on their way
        return self.log.text(since)

    def log_mark(self) -> int:
        return self.log.mark()

    def state(self) -> EngineState:
        """State now; after `stop` the state in which it was stopped."""
        if self._last is not None:
            return self._last
        try:
            return self._look()
        except (errors.DockerException, OSError) as error:
            return EngineState(
                running=False, status="unknown", error=f"the Docker daemon does not answer: {error}"
            )

    def memory(self) -> MemorySample | None:
        if self.vram is not None:
            return self.vram.sample()
        return self._group.sample() if self._group is not None else None

    def activity(self) -> tuple[object, ...]:
        """Changes while the engine works: log, memory in steps of 1 MiB, bytes read from disks."""
        used = self._group.usage_bytes() if self._group is not None else None
        free = self.vram.sample() if self.vram is not None else None
        return (
            self.log.size_bytes(),
            None if used is None else used >> 20,
            None if free is None else round(free.free_mib),
            procs.disk_reads_bytes(self._pid) if self._pid else 0,
        )

    def stop(self, timeout_s: float = 20.0) -> None:
        """Stop and remove the container and all that was started with it.

        Raises EnvironmentProblem where the daemon does not answer; the reaper then keeps watch.
        """
        with self._stopping:
            if self._last is not None:
                return
            try:
                before = self._look()
                if before.running:
                    with contextlib.suppress(errors.NotFound):
                        self.client.api.stop(self.container, timeout=max(1, round(timeout_s)))
                after = self._look()
                self.follower.join(5.0)
                self.follower.close()
                engine_api.remove_until_gone(docker_client.socket_path(self.client), self.study, self.boot)
            except (errors.DockerException, engine_api.DaemonGone, OSError) as error:
                raise EnvironmentProblem(
                    f"the container of boot {self.boot} could not be stopped: {error}",
                    hint="see that the Docker daemon runs; bisect resume removes the container",
                ) from error
            self._last = replace(after, stopped_by_us=before.running)
            if self.vram is not None:
                self.vram.wait_settled()
            self.on_stopped(self.boot)

    def _look(self) -> EngineState:
        try:
            state = self._inspect()["State"]
        except errors.NotFound:
            self._ended = True
            return EngineState(
                running=False, status="removed", error="the container is gone: somebody removed it"
            )
        deadline = time.monotonic() + _NOTICE_S
        while self._is_late(state) and time.monotonic() < deadline:
            time.sleep(0.02)
            state = self._inspect()["State"]
        self._kills_seen = self._group.oom_kills() if self._group is not None else 0
        running = bool(state.get("Running"))
        self._ended = not running
        return EngineState(
            running=running,
            exit_code=None if running else int(state.get("ExitCode", 0)),
            oom_killed=bool(state.get("OOMKilled")),
            status=str(state.get("Status", "")),
            error=str(state.get("Error", "")),
        )

    def _is_late(self, state: Mapping[str, Any]) -> bool:
        """True where what the daemon says and what the kernel shows do not agree yet."""
        if not state.get("Running"):
            limited = self.limit_mib is not None and not self._ended
            return limited and state.get("ExitCode") == 137 and not state.get("OOMKilled")
        if self._pid and procs.start_ticks(self._pid) is None:
            return True
        return self._group is not None and self._group.oom_kills() > self._kills_seen

    def _inspect(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.client.api.inspect_container(self.container)
        return found
