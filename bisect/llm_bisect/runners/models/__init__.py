"""Tiny models that bisect makes itself, for tests and the demo: `builtin:tiny-llama` and `builtin:recall`."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import platformdirs

from llm_bisect.model import EnvironmentProblem, UsageProblem

PREFIX = "builtin:"
NAMES = ("tiny-llama", "recall")
_VERSION = 1  # part of the file's name: raise it where the bytes change


def cache_folder() -> Path:
    """Where bisect keeps what it can make again: `$LLM_BISECT_CACHE`, else the user's cache folder."""
    chosen = os.environ.get("LLM_BISECT_CACHE")
    return Path(chosen) if chosen else Path(platformdirs.user_cache_dir("llm-bisect"))


def builtin_model(name: str) -> Path:
    """Path of a built-in model (GGUF), made on first use: about 0.3 s for tiny-llama, 5 s for recall.

    Raises UsageProblem for an unknown name, EnvironmentProblem where gguf or numpy is not installed or
    the cache folder cannot be written.
    """
    if name not in NAMES:
        raise UsageProblem(
            f"there is no built-in model {name!r}", hint=f"built-in models: {', '.join(NAMES)}"
        )
    folder = cache_folder() / "models"
    path = folder / f"{name}-{_VERSION}.gguf"
    if path.exists():
        return path
    make = _maker(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                with tempfile.TemporaryDirectory(dir=folder) as scratch:
                    made = Path(scratch) / path.name
                    make(made)
                    made.chmod(0o444)
                    made.rename(path)
    except OSError as error:
        raise EnvironmentProblem(
            f"the built-in model {name} cannot be written to {folder}: {error.strerror}",
            hint="set LLM_BISECT_CACHE to a folder that can be written",
        ) from error
    return path


def _maker(name: str) -> Callable[[Path], None]:
    try:
        from llm_bisect.runners.models import recall, tiny
    except ImportError as error:
        raise EnvironmentProblem(
            f"the built-in model {name} is made with gguf and numpy, and {error.name} is not installed",
            hint="pip install 'llm-bisect[demo]'",
        ) from error
    return {"tiny-llama": tiny.write, "recall": recall.write}[name]
