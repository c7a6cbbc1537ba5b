"""`bisect status` and `bisect explain`: reading journals, also while a study runs."""

from __future__ import annotations

import json
import os
from pathlib import Path

from llm_bisect.cli.errors import Exit
from llm_bisect.cli.live import where
from llm_bisect.journal.locate import find_study, journals_dir, list_studies
from llm_bisect.journal.state import State, fold
from llm_bisect.journal.store import holder_pid, read_journal
from llm_bisect.model import BisectError, EnvironmentProblem
from llm_bisect.reports.answers import answer_object, cost
from llm_bisect.reports.explain import explain_lines
from llm_bisect.reports.table import answer_lines
from llm_bisect.search.plan import Plan


def run_status(study: str | None, journals: str | None, json_output: bool) -> int:
    """One study in full, or a line for each. Raises UsageProblem and EnvironmentProblem."""
    folder = journals_dir(journals, os.environ, Path.cwd())
    if study is None:
        return _all_studies(folder, json_output)
    path = find_study(study, folder)
    state = fold(read_journal(path))
    if not state.opened:
        raise EnvironmentProblem(f"{path} holds no question yet", hint="run the command that began it again")
    pid = holder_pid(path)
    answer = answer_object(state)
    if pid is not None:
        answer["status"] = "running"
    if json_output:
        print(json.dumps({**answer, "running_pid": pid}, ensure_ascii=False))
        return Exit.ANSWERED
    if pid is not None:
        print(f"running (pid {pid}): {where(state, Plan.from_json(state.opened['plan']))}")
        if state.pending is not None:
            print(
                f"now {state.pending.probe}: {state.pending.prompt_tokens:,} tokens; {state.pending.reason}"
            )
    print("\n".join(answer_lines(answer)))
    return Exit.ANSWERED


def _all_studies(folder: Path, json_output: bool) -> int:
    rows: list[dict[str, object]] = []
    for path in list_studies(folder):
        try:
            state = fold(read_journal(path))
            rows.append({"study": path.stem, "status": _status(path, state), "cost": cost(state)})
        except BisectError as problem:
            rows.append({"study": path.stem, "status": f"unreadable: {problem.message}", "cost": {}})
    if json_output:
        print(json.dumps({"schema": "llm-bisect/studies/1", "journals": str(folder), "studies": rows}))
        return Exit.ANSWERED
    if not rows:
        print(f"no studies in {folder}")
    width = max((len(str(r["study"])) for r in rows), default=0)
    for row in rows:
        print(f"{row['study']:<{width}}  {row['status']}")
    return Exit.ANSWERED


def _status(path: Path, state: State) -> str:
    if (pid := holder_pid(path)) is not None:
        return f"running (pid {pid})"
    return state.status or "interrupted (a crash; resume continues it)"


def run_explain(study: str, journals: str | None) -> int:
    """Every probe with its reason. Raises UsageProblem and EnvironmentProblem."""
    path = find_study(study, journals_dir(journals, os.environ, Path.cwd()))
    state = fold(read_journal(path))
    if not state.opened:
        raise EnvironmentProblem(f"{path} holds no question yet", hint="run the command that began it again")
    print("\n".join(explain_lines(state)))
    return Exit.ANSWERED
