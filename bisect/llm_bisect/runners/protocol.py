"""One protocol for every runner: Docker containers, processes, and the simulated engine.

A runner boots and stops engines and says what state they are in. It never decides what to try next and
never says what an outcome means: a failed boot comes back as raw facts (`BootFailure`), which the
classifier in `probing` reads.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from llm_bisect.model import EngineState, Launch, MemorySample


class Clock(Protocol):
    """Seconds. Real runners use the monotonic clock; the simulated one the engine's virtual time."""

    def now_s(self) -> float: ...

    def sleep(self, seconds: float, stop: threading.Event | None = None) -> None:
        """Wait `seconds` of this clock, or until `stop` is set."""
        ...


class Engine(Protocol):
    """A running engine that belongs to us."""

    boot: str  # boot id
    base_url: str  # http://127.0.0.1:PORT
    api_key: str | None  # taken from the launch where it sets one; never journalled

    def log_text(self, since: int = 0) -> str:
        """The log from character `since` on (decoded with errors replaced)."""
        ...

    def log_mark(self) -> int:
        """A mark for `log_text`: the log's length now."""
        ...

    def state(self) -> EngineState: ...

    def memory(self) -> MemorySample | None:
        """Free memory now, or None where this machine has no telemetry for it."""
        ...

    def stop(self, timeout_s: float = 20.0) -> None:
        """Stop and remove it, and wait until its memory is given back. Safe to call twice."""
        ...


@dataclass
class BootFailure(Exception):
    """A boot that did not become ready. The engine has been removed already; its last words are here."""

    state: EngineState
    log: str
    reason: str  # exited | deadline | silence | start | aborted
    message: str = ""  # what the daemon or the operating system said
    wall_s: float = 0.0


@dataclass(frozen=True)
class BootOrder:
    """Everything a runner needs to start one boot."""

    study: str
    boot: str
    launch: Launch
    log_path: Path  # the whole log is streamed here
    deadline_s: float = 3600.0
    silence_s: float = 300.0  # no log line and no memory change for this long: given up
    gpus: Sequence[str] = ()  # indices or UUIDs; empty: as the launch says
    allow_pull: bool = False


class Runner(Protocol):
    name: str  # docker | process | simulated
    simulated: bool

    @property
    def clock(self) -> Clock: ...

    def preflight(self, launch: Launch, *, gpus: Sequence[str] = (), allow_pull: bool = False) -> None:
        """Raise EnvironmentProblem with what is missing and what to do; start nothing."""
        ...

    def boot(self, order: BootOrder, stop: threading.Event) -> Engine:
        """Start it and wait until it is ready. Raises BootFailure."""
        ...

    def adopt(self, study: str, boot: str | None) -> Engine | None:
        """Reap all that a crashed run of `study` left behind, except `boot` where it still lives and is
        ready: that one is returned as an engine."""
        ...

    def fingerprint(self, launch: Launch) -> Mapping[str, str]:
        """What the results depend on: gpu, driver, image digest, engine version, kernel, …
        Keys start with their class: `memory.` (bears on memory) or `time.` or `note.`."""
        ...

    def close(self) -> None: ...
