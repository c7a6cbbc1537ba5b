"""Waiting for an engine to become ready: by health, deadline, silence, exit or a stop."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass

import httpx

from llm_bisect.runners.protocol import Clock

_FIRST_POLL_S, _LAST_POLL_S = 0.05, 1.0
_LOOK_FOR_ACTIVITY_S = 1.0


@dataclass
class NotReady(Exception):
    """Why it did not become ready: exited | deadline | silence | aborted."""

    reason: str
    message: str = ""


@dataclass(frozen=True)
class Watched:
    """An engine that boots. `activity` gives any value that changes while it works."""

    health_url: str
    running: Callable[[], bool]
    activity: Callable[[], object]


def wait_ready(
    watched: Watched, *, clock: Clock, deadline_s: float, silence_s: float, stop: threading.Event
) -> float:
    """Seconds until the health endpoint answered 200. Raises NotReady."""
    started = clock.now_s()
    last_change, last_look, seen = started, started - _LOOK_FOR_ACTIVITY_S, object()
    poll_s = _FIRST_POLL_S
    with httpx.Client(timeout=5.0, trust_env=False) as client:
        while True:
            if stop.is_set():
                raise NotReady("aborted", "stopped while booting")
            if not watched.running():
                raise NotReady("exited")
            # asked after the look at the process: another server on that port is not taken for it
            if _healthy(client, watched.health_url) and watched.running():
                return clock.now_s() - started
            now = clock.now_s()
            if now - last_look >= min(_LOOK_FOR_ACTIVITY_S, silence_s / 4):
                last_look, before, seen = now, seen, watched.activity()
                if seen != before:
                    last_change = now
            if now - started > deadline_s:
                raise NotReady("deadline", f"not ready after {deadline_s:.0f} s")
            if now - last_change > silence_s:
                raise NotReady("silence", f"no log line, memory change or disk read for {silence_s:.0f} s")
            clock.sleep(poll_s, stop)
            poll_s = min(_LAST_POLL_S, poll_s * 1.3)


def is_healthy(health_url: str) -> bool:
    """True where the health endpoint answers 200 now."""
    with httpx.Client(timeout=5.0, trust_env=False) as client:
        return _healthy(client, health_url)


def _healthy(client: httpx.Client, url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return client.get(url).status_code == 200
    return False
