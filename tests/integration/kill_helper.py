"""Runs `bisect` and kills it with SIGKILL just before or just after the n-th event of a kind is written.

Usage: python kill_helper.py before|after KIND N ARG…   (the arguments of bisect follow)
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from typing import Any


def main() -> None:
    when, kind, n, *argv = sys.argv[1:]
    from llm_bisect.journal import store

    append = store.Journal.append
    left = [int(n)]

    def killing(self: store.Journal, event_kind: str, body: Mapping[str, Any]) -> store.Event:
        left[0] -= event_kind == kind
        due = event_kind == kind and left[0] == 0
        if due and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        event = append(self, event_kind, body)
        if due:
            os.kill(os.getpid(), signal.SIGKILL)
        return event

    store.Journal.append = killing  # type: ignore[method-assign]
    from llm_bisect.cli.app import app
    from llm_bisect.cli.errors import run

    sys.exit(run(app, argv))


if __name__ == "__main__":
    main()
