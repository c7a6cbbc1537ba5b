"""The clock of real runners: monotonic seconds."""

from __future__ import annotations

import threading
import time


class RealClock:
    """Seconds of the machine's monotonic clock."""

    def now_s(self) -> float:
        """Seconds since an arbitrary moment; never goes back."""
        return time.monotonic()

    def sleep(self, seconds: float, stop: threading.Event | None = None) -> None:
        """Wait `seconds`, or until `stop` is set."""
        if stop is None:
            time.sleep(max(0.0, seconds))
        else:
            stop.wait(max(0.0, seconds))
