"""What both real runners do to a launch: placeholders, the engine's port flag, its model, its key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from llm_bisect.model import EnvironmentProblem, Launch, UsageProblem
from llm_bisect.runners import models

_KEY_VARIABLES = ("VLLM_API_KEY", "LLAMA_API_KEY", "SGLANG_API_KEY")
_KEY_FLAGS = ("--api-key",)
_SHELLS = ("sh", "bash", "dash", "zsh", "ash")


def fill(command: Sequence[str], *, port: int, model: str | None) -> tuple[str, ...]:
    """The command with `{port}` and `{model}` filled in; other braces stay. Raises UsageProblem."""
    if model is None and any("{model}" in word for word in command):
        raise UsageProblem(
            "the launch's command uses {model}, and the launch names no model",
            hint="add `model:` to the launch (a path, builtin:tiny-llama or builtin:recall)",
        )
    return tuple(word.replace("{port}", str(port)).replace("{model}", model or "") for word in command)


def with_port(command: Sequence[str], flags: Sequence[str], port: int, *, where: str) -> tuple[str, ...]:
    """The command with the engine's own port flag set to `port`, added where it is not there yet.

    Raises UsageProblem where the command is a shell script's text, into which no flag can be added.
    """
    words = list(command)
    for index, word in enumerate(words):
        for flag in flags:
            if word == flag and index + 1 < len(words):
                words[index + 1] = str(port)
                return tuple(words)
            if flag.startswith("--") and word.startswith(f"{flag}="):
                words[index] = f"{flag}={port}"
                return tuple(words)
    if not words or not flags or Path(words[0]).name in _SHELLS:
        raise UsageProblem(
            f"{where}: the engine's port cannot be set, since its command takes no flag for it",
            hint="write the engine's arguments as the service's command, or publish a port instead of using "
            "network_mode: host",
        )
    return (*words, flags[0], str(port))


def model_file(launch: Launch) -> Path | None:
    """The weights on this host, made first where they are built in; None where the launch names none.

    Raises EnvironmentProblem where they are missing.
    """
    if launch.model_path is None:
        return None
    if launch.model_path.startswith(models.PREFIX):
        return models.builtin_model(launch.model_path.removeprefix(models.PREFIX))
    path = Path(launch.model_path).expanduser().absolute()
    if not path.exists():
        raise EnvironmentProblem(
            f"the launch's model {path} is not there",
            hint="download it first, or correct `model:` in the launch",
        )
    return path


def api_key(command: Sequence[str], env: Mapping[str, str]) -> str | None:
    """The key that the launch makes the engine ask for, if any."""
    for index, word in enumerate(command):
        for flag in _KEY_FLAGS:
            if word == flag and index + 1 < len(command):
                return command[index + 1].split(",")[0]
            if word.startswith(f"{flag}="):
                return word.partition("=")[2].split(",")[0]
    return next((env[name].split(",")[0] for name in _KEY_VARIABLES if env.get(name)), None)
