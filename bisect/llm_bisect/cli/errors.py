"""How the command line ends: exit status, and one clear sentence instead of a traceback."""

from __future__ import annotations

import json
import os
import sys
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from llm_bisect.model.errors import BisectError, EnvironmentProblem

if TYPE_CHECKING:
    import typer


class Exit(IntEnum):
    """Exit status of every command."""

    ANSWERED = 0
    FAILED = 1  # a fault of bisect itself
    USAGE = 2  # arguments, profile or search space
    NO_ANSWER = 3  # no feasible point, or the budget is spent
    ENVIRONMENT = 4  # this machine cannot run it
    INTERRUPTED = 130  # stopped; the same command continues


STATUS_EXIT = {
    "answered": Exit.ANSWERED,
    "no-feasible-point": Exit.NO_ANSWER,
    "budget-spent": Exit.NO_ANSWER,
    "environment": Exit.ENVIRONMENT,
    "interrupted": Exit.INTERRUPTED,
}


def run(app: typer.Typer, argv: list[str]) -> int:
    """Run the app; returns the exit status and prints what went wrong."""
    try:
        result = app(argv, standalone_mode=False)
        return int(result) if isinstance(result, int) else Exit.ANSWERED
    except BisectError as problem:
        _tell(problem.message, problem.hint)
        if "--json" in argv:
            print(json.dumps(_error_object(problem, argv), ensure_ascii=False))
        return problem.exit_status
    except KeyboardInterrupt:
        _tell("interrupted", None)
        return Exit.INTERRUPTED
    except BrokenPipeError:
        # The reader of our output is gone: nothing is left to say.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.FAILED
    except Exception as error:
        if hasattr(error, "exit_code") and hasattr(error, "show"):  # typer's own usage errors
            error.show()
            return int(error.exit_code)
        if type(error).__name__ == "Exit":
            return int(getattr(error, "exit_code", 0))
        if type(error).__name__ == "Abort":
            return Exit.INTERRUPTED
        if os.environ.get("BISECT_DEBUG"):
            raise
        _tell(
            f"a fault in bisect itself: {type(error).__name__}: {error}",
            "nothing recorded is lost; BISECT_DEBUG=1 shows where, please report it",
        )
        return Exit.FAILED


def _error_object(problem: BisectError, argv: list[str]) -> dict[str, Any]:
    status = "environment" if isinstance(problem, EnvironmentProblem) else "usage"
    return {
        "schema": "llm-bisect/answer/1",
        "command": next((a for a in argv if not a.startswith("-")), ""),
        "status": status,
        "answer": {},
        "candidates": [],
        "warnings": [],
        "cost": {"boots": 0, "probes": 0, "seconds": 0.0},
        "error": {"message": problem.message, "hint": problem.hint},
    }


def _tell(message: str, hint: str | None) -> None:
    red, plain = (
        ("\x1b[31m", "\x1b[0m") if sys.stderr.isatty() and not os.environ.get("NO_COLOR") else ("", "")
    )
    try:
        print(f"{red}bisect: {message}{plain}", file=sys.stderr)
        if hint:
            print(f"  {hint}", file=sys.stderr)
    except OSError:
        pass  # the terminal is gone
