"""`bisect resume` and `bisect stop`."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from llm_bisect.cli.errors import Exit
from llm_bisect.cli.run import run_study, until_epoch_s
from llm_bisect.journal.locate import find_study, journals_dir
from llm_bisect.journal.state import fold
from llm_bisect.journal.store import holder_pid, read_journal
from llm_bisect.model import EnvironmentProblem
from llm_bisect.opening import budget_from, prepare, question_of

STOP_WITHIN_S = 35.0


def run_resume(
    study: str,
    journals: str | None,
    until: str | None,
    max_hours: float | None,
    max_boots: int | None,
    reverify: bool,
    json_output: bool,
) -> int:
    """Go on with the question that the journal holds. Raises UsageProblem and EnvironmentProblem."""
    path = find_study(study, journals_dir(journals, os.environ, Path.cwd()))
    question = question_of(fold(read_journal(path)))
    budget = budget_from(max_boots, max_hours, until_epoch_s(until))
    return run_study(prepare(question), path.parent, budget, reverify=reverify, json_output=json_output)


def run_stop(study: str, journals: str | None) -> int:
    """Ask the process that holds the journal to stop, and wait; reap what a dead one left behind."""
    path = find_study(study, journals_dir(journals, os.environ, Path.cwd()))
    pid = holder_pid(path)
    if pid is None:
        return _reap(path)
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        return _reap(path)  # it ended just now
    except PermissionError:
        raise EnvironmentProblem(
            f"{path.stem} (pid {pid}) belongs to another user", hint="stop it as that user"
        ) from None
    deadline_s = time.monotonic() + STOP_WITHIN_S
    while time.monotonic() < deadline_s:
        if holder_pid(path) != pid:
            print(f"{path.stem} is stopped; its journal is whole: bisect resume {path.stem}", file=sys.stderr)
            return Exit.ANSWERED
        time.sleep(0.1)
    raise EnvironmentProblem(
        f"{path.stem} (pid {pid}) did not stop within {STOP_WITHIN_S:.0f} s",
        hint=f"kill -9 {pid}; its engine is reaped",
    )


def _reap(path: Path) -> int:
    from llm_bisect.runners.make import make_runner

    state = fold(read_journal(path))
    if state.opened:
        runner = make_runner(state.opened["runner"])
        try:
            runner.adopt(state.opened["study"], None)
        finally:
            runner.close()
    print(f"{path.stem} is not running; nothing of it is left behind", file=sys.stderr)
    return Exit.ANSWERED
