"""The errors that a user may see. Each is one clear sentence; none is a traceback.

BisectError
├── UsageProblem          exit status 2: arguments, profile, search space
└── EnvironmentProblem    exit status 4: this machine cannot run it
"""

from __future__ import annotations


class BisectError(Exception):
    """What was wrong and where (`message`), and what to do about it (`hint`)."""

    exit_status = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageProblem(BisectError):
    """The user's arguments, profile or search space are wrong."""

    exit_status = 2


class EnvironmentProblem(BisectError):
    """The machine cannot run it: no Docker, no GPU, image missing, journal held, disk full, …"""

    exit_status = 4
