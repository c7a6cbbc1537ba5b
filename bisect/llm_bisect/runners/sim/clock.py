"""The clock of the simulated rig: seconds that its engines have lived through.

It stands still while no engine works, whatever this machine does meanwhile: a stalled machine ages
nothing. Only `sleep` moves it then.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol

from llm_bisect.runners.sim.state import Snapshot

_LONGEST_WAIT_S = 1.0  # real seconds


class Ticking(Protocol):
    """Whatever shows an engine's own time."""

    def snapshot(self) -> Snapshot | None: ...


class VirtualClock:
    """Seconds of the rig since the runner was made. Never goes backwards."""

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self._lock = threading.Lock()
        self._engine: Ticking | None = None
        self._shift_s = 0.0  # what is added to the engine's own time
        self._now_s = 0.0

    def attach(self, engine: Ticking, own_s: float) -> None:
        """From now on this engine drives the clock; its own time is `own_s` now."""
        with self._lock:
            self._read()
            self._engine, self._shift_s = engine, self._now_s - own_s

    def detach(self, engine: Ticking) -> None:
        """The engine is gone: its last moment is kept."""
        with self._lock:
            if self._engine is engine:
                self._read()
                self._engine = None

    def now_s(self) -> float:
        """Seconds so far."""
        with self._lock:
            return self._read()

    def sleep(self, seconds: float, stop: threading.Event | None = None) -> None:
        """Where no engine works, `seconds` pass at once; else wait as long as they take there (at most one
        real second)."""
        if seconds <= 0 or (stop is not None and stop.is_set()):
            return
        with self._lock:
            state = self._engine.snapshot() if self._engine is not None else None
            if state is None or (state.ready and not state.running):
                self._read()
                self._shift_s += seconds
                self._now_s += seconds
                return
        real_s = min(seconds / self.scale, _LONGEST_WAIT_S)
        if stop is not None:
            stop.wait(real_s)
        else:
            time.sleep(real_s)

    def _read(self) -> float:
        state = self._engine.snapshot() if self._engine is not None else None
        if state is not None:
            self._now_s = max(self._now_s, self._shift_s + state.virtual_s)
        return self._now_s
