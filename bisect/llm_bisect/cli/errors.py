"""How the command line ends: exit status, and one clear sentence instead of a traceback."""

from __future__ import annotations

import errno
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
    """Run the app; returns the exit status and prints what went wrong: a sentence on standard error, and
    with `--json` one object on standard output, whatever it was."""
    try:
        result = app(argv, standalone_mode=False)
        return int(result) if isinstance(result, int) else Exit.ANSWERED
    except BisectError as problem:
        status = "environment" if isinstance(problem, EnvironmentProblem) else "usage"
        return _failed(argv, problem.exit_status, status, problem.message, problem.hint)
    except KeyboardInterrupt:
        return _failed(argv, Exit.INTERRUPTED, "interrupted", "interrupted", None)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.EPIPE, errno.EIO) and not error.filename:
            # The reader of our output, or the terminal, is gone: nothing is left to say.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return Exit.FAILED
        if hasattr(error, "exit_code") and hasattr(error, "show"):  # typer's own usage errors
            return _mistyped(error, argv)
        if type(error).__name__ == "Exit":
            return int(getattr(error, "exit_code", 0))
        if type(error).__name__ == "Abort":
            return Exit.INTERRUPTED
        if os.environ.get("BISECT_DEBUG"):
            raise
        hint = "nothing recorded is lost; BISECT_DEBUG=1 shows where, please report it"
        message = f"a fault in bisect itself: {type(error).__name__}: {error}"
        return _failed(argv, Exit.FAILED, "fault", message, hint)


def _mistyped(error: Any, argv: list[str]) -> int:
    """An option or command that there is not, or a value that it does not take."""
    if not argv or type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return int(error.exit_code)
    message = str(error.format_message())
    names = tuple(getattr(getattr(error, "param", None), "opts", ()))
    if (value := _typed(argv, *names)) is not None:
        message = f"{names[0]} {value!r}: {error.message}"
    message = message.strip().rstrip(".")
    context = getattr(error, "ctx", None)
    path = "bisect" if context is None or context.parent is None else f"bisect {context.info_name}"
    hint = f"{path} --help shows what may be typed"
    return _failed(argv, int(error.exit_code), "usage", message[:1].lower() + message[1:], hint)


def _failed(argv: list[str], code: int, status: str, message: str, hint: str | None) -> int:
    _tell(message, hint)
    if "--json" in argv:
        print(json.dumps(_error_object(argv, status, message, hint), ensure_ascii=False))
    return code


def _error_object(argv: list[str], status: str, message: str, hint: str | None) -> dict[str, Any]:
    """The common part of an answer, as far as it is known from what was typed, and the error."""
    runner = _typed(argv, "--runner")
    return {
        "schema": "llm-bisect/answer/1",
        "command": next((a for a in argv if not a.startswith("-")), ""),
        "study": _typed(argv, "--study"),
        "profile": _typed(argv, "--profile", "-p"),
        "runner": runner,
        "simulated": runner == "simulated",
        "status": status,
        "why": message,
        "answer": {},
        "candidates": [],
        "warnings": [],
        "cost": {"boots": 0, "probes": 0, "seconds": 0.0},
        "error": {"message": message, "hint": hint},
    }


def _typed(argv: list[str], *names: str) -> str | None:
    """The value of an option as it was typed, or None."""
    for word, following in zip(argv, [*argv[1:], None], strict=True):
        if word in names:
            return following
        name, equals, value = word.partition("=")
        if equals and name in names:
            return value
    return None


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
