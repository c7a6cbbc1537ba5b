"""`bisect init`: a profile from a compose file."""

from __future__ import annotations

import sys
from pathlib import Path

from llm_bisect.cli.errors import Exit
from llm_bisect.model import EnvironmentProblem, UsageProblem
from llm_bisect.spaces.init import profile_from_compose
from llm_bisect.spaces.load import load_profile

COMPOSE_NAMES = ("compose.yaml", "compose.yml", "docker-compose.yml", "docker-compose.yaml")


def run_init(compose: Path | None, service: str | None, output: Path | None, force: bool) -> int:
    """Write the profile beside the caller. Raises UsageProblem and EnvironmentProblem."""
    source = compose or next((Path(n) for n in COMPOSE_NAMES if Path(n).is_file()), None)
    if source is None:
        raise UsageProblem("there is no compose file in this folder", hint="bisect init path/to/compose.yml")
    text = profile_from_compose(source, service)
    name = (
        source.stem.removeprefix("docker-compose.")
        if source.stem not in ("compose", "docker-compose")
        else ""
    )
    target = output or Path("search_spaces") / f"{name or source.resolve().parent.name}.yml"
    if target.exists() and not force:
        raise UsageProblem(
            f"{target} exists already", hint="--force overwrites it, --output names another file"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise EnvironmentProblem(f"{target}: {error.strerror}", hint="give another --output") from error
    print(f"written: {target}", file=sys.stderr)
    print(f"next: bisect doctor --profile {target}", file=sys.stderr)
    print(f"then: bisect ceiling --profile {target} --axis {_first_axis(target)} --dry-run", file=sys.stderr)
    return Exit.ANSWERED


def _first_axis(profile: Path) -> str:
    """The axis that most people push first, of those that the profile has."""
    axes = load_profile(str(profile)).axes
    return next((name for name in ("mem-util", "max-model-len") if name in axes), "prompt")
