"""`bisect export`: write a recommended point out."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from llm_bisect.cli.errors import Exit
from llm_bisect.journal.locate import find_study, journals_dir
from llm_bisect.journal.state import fold
from llm_bisect.journal.store import read_journal
from llm_bisect.model import EnvironmentProblem, UsageProblem
from llm_bisect.opening import question_of
from llm_bisect.reports.export import FORMATS, export
from llm_bisect.spaces.load import load_profile


def run_export(
    study: str, to: str, output: Path | None, journals: str | None, include_unconfirmed: bool
) -> int:
    """Print or write it. Raises UsageProblem and EnvironmentProblem."""
    if to not in FORMATS:
        raise UsageProblem(f"--to {to!r} is no export format", hint=f"accepted: {', '.join(FORMATS)}")
    path = find_study(study, journals_dir(journals, os.environ, Path.cwd()))
    state = fold(read_journal(path))
    question = question_of(state)
    profile = load_profile(question.profile, runner=question.runner)
    text = export(state, profile, to, include_unconfirmed=include_unconfirmed)
    if output is None:
        print(text.rstrip("\n"))
        return Exit.ANSWERED
    try:
        output.write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8")
    except OSError as error:
        raise EnvironmentProblem(f"{output}: {error.strerror}", hint="give another --output") from error
    print(f"written: {output}", file=sys.stderr)
    return Exit.ANSWERED
