"""Where profiles and engine descriptions are found by name."""

from __future__ import annotations

import difflib
from importlib import resources as importlib_resources
from pathlib import Path

from llm_bisect.model import UsageProblem

KINDS = ("search_spaces", "runners")
_SUFFIXES = (".yml", ".yaml")


def folders(kind: str) -> list[Path]:
    """The folders looked in, first wins: the working directory's, the user's configuration, the packaged
    data, and the checkout of an editable install."""
    import platformdirs

    user = Path(platformdirs.user_config_dir("llm-bisect")) / kind
    found = [Path.cwd() / kind, user, *shipped(kind)]
    return [f for f in dict.fromkeys(found) if f.is_dir()]


def shipped(kind: str) -> list[Path]:
    """The folders that came with the program: the packaged data, and the checkout of an editable install."""
    packaged = Path(str(importlib_resources.files("llm_bisect"))) / "_data" / kind
    checkout = Path(__file__).resolve().parents[3] / kind
    return [f for f in (packaged, checkout) if f.is_dir()]


def find(kind: str, name: str) -> Path:
    """The file that `name` means: a path given, else the first `name.yml` in `folders(kind)`.
    Raises UsageProblem naming what there is."""
    given = Path(name).expanduser()
    if "/" in name or given.suffix in _SUFFIXES:
        if given.is_file():
            return given.resolve()
        if given.is_absolute() or name.startswith("."):
            raise UsageProblem(f"{name}: there is no such file", hint="give a file that exists, or a name")
    stem = name.removesuffix(given.suffix) if given.suffix in _SUFFIXES else name
    for folder in folders(kind):
        for suffix in _SUFFIXES:
            path = folder / f"{stem}{suffix}"
            if path.is_file():
                return path
    known = names(kind)
    close = difflib.get_close_matches(name, known, n=1)
    what = "profile" if kind == "search_spaces" else "engine"
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise UsageProblem(f"there is no {what} {name!r}", hint=f"{hint}known: {', '.join(known) or 'none'}")


def names(kind: str) -> list[str]:
    """Every name that `find` knows, sorted."""
    return sorted({p.stem for f in folders(kind) for p in f.iterdir() if p.suffix in _SUFFIXES})
