"""Running a study from the command line: signals, the view, and the answer at the end."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path
from types import FrameType

from llm_bisect.cli.diagnostics import diagnostics
from llm_bisect.cli.errors import STATUS_EXIT, Exit
from llm_bisect.cli.live import make_reporter
from llm_bisect.journal.state import State
from llm_bisect.model import UsageProblem
from llm_bisect.opening import Prepared, start
from llm_bisect.reports.answers import answer_object
from llm_bisect.reports.table import answer_lines
from llm_bisect.study import Budget


def run_study(
    prepared: Prepared, journals: Path, budget: Budget, *, reverify: bool, json_output: bool
) -> int:
    """Run or continue it, print its answer, and return the exit status."""
    stop = threading.Event()
    reporter = make_reporter(prepared.plan, simulated=prepared.runner == "simulated", quiet_live=json_output)
    try:
        with stop_on_signals(stop):
            driver, journal = start(prepared, journals, reporter, stop, budget, reverify=reverify)
            with journal, diagnostics(journal.side_dir, driver.study):
                try:
                    state = driver.state if driver.state.closed is not None else driver.run()
                finally:
                    driver.runner.close()
    finally:
        reporter.close()
    return print_answer(state, json_output=json_output)


def print_answer(state: State, *, json_output: bool) -> int:
    """The answer on standard output: one JSON object, or one screen."""
    answer = answer_object(state)
    if json_output:
        print(json.dumps(answer, ensure_ascii=False))
    else:
        print("\n".join(answer_lines(answer)))
    return STATUS_EXIT.get(answer["status"], Exit.FAILED)


@contextmanager
def stop_on_signals(stop: threading.Event) -> Iterator[None]:
    """First SIGINT or SIGTERM: abort the probe, stop the engine, free the GPU. Second: end at once.

    SIGHUP does not end a study: a closed terminal is no answer.
    """

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        if stop.is_set():
            if sys.stderr.isatty():
                with suppress(OSError):
                    os.write(sys.stderr.fileno(), b"\x1b[?25h")  # the live view hides the cursor
            os._exit(Exit.INTERRUPTED)  # the reaper child stops the engine
        stop.set()
        text = b"\nstopping: the engine is being stopped; once more ends at once (the journal is whole)\n"
        try:
            os.write(sys.stderr.fileno(), text)
        except OSError:
            return

    before = {s: signal.signal(s, on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
    before[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def until_epoch_s(text: str | None, now: datetime | None = None) -> float | None:
    """`07:00`: the next time that local clocks show it, also across a change of the clocks. As an epoch.

    A time that a night in spring leaves out is read by the clock before the change or, where that is over,
    by the one after it.
    Raises UsageProblem.
    """
    if text is None:
        return None
    now = now or datetime.now().astimezone()
    try:
        wanted = datetime.strptime(text.strip(), "%H:%M")
    except ValueError:
        raise UsageProblem(f"--until {text!r} is not a local time", hint="e.g. --until 07:00") from None
    today = now.replace(tzinfo=None, hour=wanted.hour, minute=wanted.minute, second=0, microsecond=0)
    days = (today, today + timedelta(days=1))
    # fold: the hour that comes twice when summer time ends
    moments = sorted(day.replace(fold=fold).astimezone() for day in days for fold in (0, 1))
    return next(m for m in moments if m > now).timestamp()
