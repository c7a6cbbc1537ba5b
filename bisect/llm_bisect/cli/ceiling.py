"""`bisect ceiling`: from what was typed to a study."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from llm_bisect.cli.run import run_study, until_epoch_s
from llm_bisect.journal.locate import journals_dir
from llm_bisect.model import UsageProblem
from llm_bisect.opening import Prepared, Question, budget_from, prepare
from llm_bisect.spaces.trust import accept, needs_trust, summary
from llm_bisect.spaces.units import parse_tokens


def run_ceiling(
    *,
    profile: str,
    axis: str,
    prompt: str | None,
    runner: str | None,
    set_values: list[str],
    study: str | None,
    journals: str | None,
    confirm: int,
    tolerance: str | None,
    gpus: tuple[str, ...],
    allow_pull: bool,
    reserve_mib: float | None,
    until: str | None,
    max_hours: float | None,
    max_boots: int | None,
    seed: int,
    dry_run: bool,
    reverify: bool,
    trust: bool,
    json_output: bool,
) -> int:
    """Returns the exit status. Raises UsageProblem and EnvironmentProblem."""
    question = Question(
        profile=_lasting_name(profile),
        axis=axis,
        runner=runner,
        study=study,
        target_tokens=_tokens("--prompt", prompt) if prompt is not None else None,
        sets=parse_sets(set_values),
        confirm=confirm,
        tolerance=tolerance,
        gpus=gpus,
        allow_pull=allow_pull,
        reserve_mib=reserve_mib,
        seed=seed,
    )
    until_s = until_epoch_s(until)
    prepared = prepare(question)
    ask_for_trust(prepared, accepted=trust)
    folder = journals_dir(journals, os.environ, Path.cwd())
    budget = budget_from(max_boots, max_hours, until_s)
    if dry_run:
        from llm_bisect.cli.dry_run import print_plan

        return print_plan(prepared, folder, budget, json_output=json_output)
    return run_study(prepared, folder, budget, reverify=reverify, json_output=json_output)


def parse_sets(texts: list[str]) -> dict[str, str]:
    """`AXIS=VALUE` pairs. Raises UsageProblem."""
    sets: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name or not value:
            raise UsageProblem(f"--set {text!r} is not AXIS=VALUE", hint="e.g. --set max-model-len=200k")
        sets[name] = value
    return sets


def _tokens(option: str, text: str) -> int:
    try:
        return parse_tokens(text)
    except UsageProblem as problem:
        raise UsageProblem(f"{option} {problem.message}", hint=problem.hint) from None


def _lasting_name(profile: str) -> str:
    """A path is kept absolute, so that `resume` finds it from any folder."""
    path = Path(profile).expanduser()
    looks_like_path = "/" in profile or path.suffix in (".yml", ".yaml")
    return str(path.resolve()) if looks_like_path and path.exists() else profile


def ask_for_trust(prepared: Prepared, *, accepted: bool) -> None:
    """A downloaded profile is shown and accepted once, before the night. Raises UsageProblem."""
    reason = needs_trust(prepared.profile)
    if reason is None:
        return
    shown = summary(prepared.profile)
    if not accepted:
        print(f"{prepared.profile.path}: {reason}. It would start:", file=sys.stderr)
        print("\n".join(f"  {line}" for line in shown), file=sys.stderr)
        if not sys.stdin.isatty():
            raise UsageProblem(
                "this profile is not trusted yet", hint="read what it starts, then give --trust"
            )
        if input("Start this? [y/N] ").strip().lower() not in ("y", "yes"):
            raise UsageProblem("not started", hint="nothing was changed")
    accept(prepared.profile)
