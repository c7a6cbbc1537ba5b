"""Where journals lie, and which file a study's name means."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path

from llm_bisect.model import EnvironmentProblem, UsageProblem

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,120}")


def journals_dir(option: str | None, env: Mapping[str, str], cwd: Path) -> Path:
    """--journals, else $BISECT_JOURNALS, else an existing ./journals, else the user's state folder.
    Raises EnvironmentProblem where that is no folder."""
    named = option or env.get("BISECT_JOURNALS")
    if named:
        folder = Path(named).expanduser()
        folder = folder if folder.is_absolute() else cwd / folder
    elif (cwd / "journals").is_dir():
        folder = cwd / "journals"
    else:
        import platformdirs

        folder = Path(platformdirs.user_state_dir("llm-bisect")) / "journals"
    blocked = next((p for p in (folder, *folder.parents) if p.exists()), folder)
    if blocked.exists() and not blocked.is_dir():
        raise EnvironmentProblem(f"{blocked} is not a folder", hint="--journals DIR names another")
    return folder


def study_path(study: str, folder: Path) -> Path:
    """The journal of a study by name (in `folder`) or by path (…/name.jsonl). Raises UsageProblem."""
    if study.endswith(".jsonl"):
        path = Path(study).expanduser()
        _check_name(path.stem, study)
        return path.absolute()
    _check_name(study, study)
    return folder / f"{study}.jsonl"


def find_study(study: str, folder: Path) -> Path:
    """The journal of a study that exists. Raises UsageProblem with the studies that do."""
    path = study_path(study, folder)
    if path.exists():
        return path
    known = [p.stem for p in list_studies(folder)]
    close = difflib.get_close_matches(study, known, n=1)
    if close:
        hint = f"did you mean {close[0]}?"
    elif known:
        hint = f"studies here: {', '.join(known[:8])}"
    else:
        hint = "there are no studies here; --journals DIR names another folder"
    raise UsageProblem(f"there is no study {study!r} ({path})", hint=hint)


def list_studies(folder: Path) -> list[Path]:
    """The journals in a folder, by name; none where there is no folder yet."""
    try:
        return sorted(p for p in folder.glob("*.jsonl") if p.is_file())
    except OSError as error:
        raise EnvironmentProblem(
            f"{folder}: {error.strerror}", hint="--journals DIR names another"
        ) from error


def _check_name(name: str, given: str) -> None:
    if _NAME.fullmatch(name) is None or ".." in name:
        raise UsageProblem(
            f"{given!r} is no name for a study",
            hint="letters, digits, dots, dashes and underscores, at most 121; or the path of a .jsonl file",
        )
