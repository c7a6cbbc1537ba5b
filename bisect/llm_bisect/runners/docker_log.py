"""Following a container's log into a file, in a thread of its own."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import docker
from docker import errors

_AGAIN_S = 0.5


class LogFollower:
    """Copies the log from its start on. After a break it goes on where it was: Docker repeats its log byte
    for byte, so as many bytes are skipped as the file has."""

    def __init__(self, client: docker.DockerClient, container: str, path: Path) -> None:
        self._client = client
        self._container = container
        self._path = path
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"log-{container[:12]}", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait until the log has ended (the container is gone or has exited)."""
        self._thread.join(timeout_s)

    def close(self) -> None:
        """Do not start again after a break."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.is_set():
            # requests, urllib3 and sockets each have their own way to say that the daemon has gone away
            with contextlib.suppress(errors.DockerException, OSError, ValueError):
                self._copy()
            if not self._may_continue():
                return
            self._closed.wait(_AGAIN_S)

    def _copy(self) -> None:
        with self._path.open("ab") as out:
            skip = out.tell()
            stream = self._client.api.logs(
                self._container, stdout=True, stderr=True, stream=True, follow=True
            )
            for chunk in stream:
                new = chunk[skip:]
                skip = max(0, skip - len(chunk))
                if new:
                    out.write(new)
                    out.flush()

    def _may_continue(self) -> bool:
        try:
            return bool(self._client.api.inspect_container(self._container)["State"]["Running"])
        except errors.NotFound:
            return False
        except (errors.DockerException, OSError):
            return True  # the daemon is away for a moment
