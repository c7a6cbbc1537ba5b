"""The command line: one thin module per command. Heavy imports happen inside the commands."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the `bisect` script."""
    from llm_bisect.cli.app import app
    from llm_bisect.cli.errors import run

    sys.exit(run(app, sys.argv[1:]))
