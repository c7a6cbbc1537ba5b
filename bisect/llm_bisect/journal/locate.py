"""Where journals lie, and which file a study's name means. Makes nothing."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path

from llm_bisect.model import EnvironmentProblem, UsageProblem

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,120}")
_ENDING = ".jsonl"
_ELSEWHERE = "give another folder with --journals or $BISECT_JOURNALS"
_LISTED = 8


def journals_dir(option: str | None, env: Mapping[str, str], cwd: Path) -> Path:
    """`--journals`, else `$BISECT_JOURNALS`, else an existing `./journals`, else the user's state folder.

    The folder need not exist yet. Raises EnvironmentProblem where something else has its name or stands
    above it, and UsageProblem for a `~name` that is nobody's.
    """
    named = option or env.get("BISECT_JOURNALS")
    if named:
        folder = cwd / _expanded(named)
    elif (cwd / "journals").is_dir():
        folder = cwd / "journals"
    else:
        import platformdirs

        folder = platformdirs.user_state_path("llm-bisect", appauthor=False) / "journals"
    _nearest(folder)
    return folder


def check_writable(folder: Path) -> None:
    """Raise EnvironmentProblem where no journal could be made in this folder (it need not exist yet).

    Makes nothing, so a full disk is not seen.
    """
    nearest = _nearest(folder)
    if not os.access(nearest, os.W_OK | os.X_OK):
        missing = "" if nearest == folder else f", so {folder} cannot be made"
        raise EnvironmentProblem(f"{nearest} cannot be written{missing}", hint=_ELSEWHERE)


def study_path(study: str, folder: Path) -> Path:
    """The journal of a study, by name in `folder` or by path (`…/name.jsonl`); it need not exist yet.

    A bare `name.jsonl` is the file here, where there is one, else the one in `folder`. Raises UsageProblem
    for what is neither a name nor such a path, EnvironmentProblem where the folder cannot be looked into.
    """
    path = folder / f"{study}{_ENDING}"
    name = study
    if study.endswith(_ENDING):
        path = _expanded(study).absolute()
        name = path.name.removesuffix(_ENDING)
        if "/" not in study and not _exists(path):
            path = folder / study
    elif "/" in study:
        hint = "a name has no slash in it; a path ends in .jsonl"
        if _exists(_expanded(study).with_name(Path(study).name + _ENDING)):
            hint = f"did you mean {study}{_ENDING}?"
        raise UsageProblem(f"{study!r} is neither a study's name nor the path of a journal", hint=hint)
    if not NAME.fullmatch(name) or ".." in name:
        raise UsageProblem(
            f"{name!r} is no name for a study",
            hint="1 to 121 letters (a to z), digits, dots, dashes and underscores, a letter or digit first",
        )
    _nearest(path.parent)
    _exists(path)
    return path


def find_study(study: str, folder: Path) -> Path:
    """The journal of a study that exists. Raises UsageProblem with the names that are close, or are there."""
    path = study_path(study, folder)
    if _exists(path):
        return path
    known = [one.name.removesuffix(_ENDING) for one in list_studies(path.parent)]
    close = difflib.get_close_matches(path.name.removesuffix(_ENDING), known)
    if close:
        hint = f"did you mean {' or '.join(close)}?"
    elif known:
        more = f" and {len(known) - _LISTED} more" if len(known) > _LISTED else ""
        hint = f"studies there: {', '.join(known[:_LISTED])}{more}"
    else:
        hint = "there are no studies there; --journals DIR or $BISECT_JOURNALS names another folder"
    raise UsageProblem(f"there is no study {study!r} in {path.parent}", hint=hint)


def list_studies(folder: Path) -> list[Path]:
    """The journals in a folder, by name; none where there is no such folder. Raises EnvironmentProblem."""
    try:
        found = [one for one in folder.iterdir() if one.suffix == _ENDING and one.is_file()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise EnvironmentProblem(f"{folder} cannot be read: {error.strerror}", hint=_ELSEWHERE) from error
    return sorted(found)


def _expanded(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise UsageProblem(
            f"{text!r} begins with a home folder that is nobody's", hint="name it in full"
        ) from error


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:
        raise EnvironmentProblem(f"{path} cannot be looked at: {error.strerror}", hint=_ELSEWHERE) from error


def _nearest(folder: Path) -> Path:
    """The folder, or the nearest one above that exists. Raises EnvironmentProblem where that is no folder."""
    nearest = next(one for one in (folder, *folder.parents) if _exists(one))
    if not nearest.is_dir():
        raise EnvironmentProblem(f"{nearest} is not a folder: no journal fits into it", hint=_ELSEWHERE)
    return nearest
