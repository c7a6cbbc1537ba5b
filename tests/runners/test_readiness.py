"""Waiting for an engine: each way in which it ends."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from llm_bisect.runners.readiness import NotReady, Watched, is_healthy, wait_ready


class SteppingClock:
    """A clock on which sleeping takes no time."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def now_s(self) -> float:
        return self.time_s

    def sleep(self, seconds: float, stop: threading.Event | None = None) -> None:
        self.time_s += seconds


@pytest.fixture
def health() -> Iterator[tuple[str, list[int]]]:
    """A health endpoint and the statuses that it answers with, the last one for ever."""
    statuses = [200]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(statuses.pop(0) if len(statuses) > 1 else statuses[0])
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/health", statuses
    server.shutdown()
    server.server_close()


def wait(watched: Watched, *, deadline_s: float = 100, silence_s: float = 50) -> float:
    """Wait on a stepping clock."""
    return wait_ready(
        watched, clock=SteppingClock(), deadline_s=deadline_s, silence_s=silence_s, stop=threading.Event()
    )


def test_ready_after_loading(health: tuple[str, list[int]]) -> None:
    """503 while loading is waited out."""
    url, statuses = health
    statuses[:] = [503, 503, 200]
    assert wait(Watched(url, lambda: True, lambda: 0)) > 0
    assert is_healthy(url)


def test_exit_is_seen_though_the_port_answers(health: tuple[str, list[int]]) -> None:
    """Somebody else's server on the port is not taken for an engine that is gone."""
    with pytest.raises(NotReady) as caught:
        wait(Watched(health[0], lambda: False, lambda: 0))
    assert caught.value.reason == "exited"


def test_silence_ends_it_before_the_deadline(health: tuple[str, list[int]]) -> None:
    """Nothing changes for `silence_s`: given up."""
    health[1][:] = [503]
    with pytest.raises(NotReady) as caught:
        wait(Watched(health[0], lambda: True, lambda: "same"), silence_s=10)
    assert caught.value.reason == "silence"


def test_activity_is_no_silence(health: tuple[str, list[int]]) -> None:
    """A slow boot that works lives to its deadline."""
    health[1][:] = [503]
    counter = itertools.count()
    with pytest.raises(NotReady) as caught:
        wait(Watched(health[0], lambda: True, lambda: next(counter)), silence_s=10, deadline_s=60)
    assert caught.value.reason == "deadline"


def test_stop_is_obeyed(health: tuple[str, list[int]]) -> None:
    """A set stop event ends it at once."""
    stop = threading.Event()
    stop.set()
    with pytest.raises(NotReady) as caught:
        wait_ready(
            Watched(health[0], lambda: True, lambda: 0),
            clock=SteppingClock(),
            deadline_s=9,
            silence_s=9,
            stop=stop,
        )
    assert caught.value.reason == "aborted"


def test_nothing_listens() -> None:
    """A port without a server is not healthy."""
    assert not is_healthy("http://127.0.0.1:9/health")
