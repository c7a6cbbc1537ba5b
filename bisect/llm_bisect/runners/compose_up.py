"""Running Docker Compose: finding it, reading a file through it, starting a candidate with it."""

from __future__ import annotations

import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llm_bisect.model import EnvironmentProblem, Launch
from llm_bisect.runners.override import ref_of
from llm_bisect.spaces.compose import compose_command, compose_environment, read_config

_POLL_S = 0.05


class ComposeFailed(Exception):
    """`docker compose up` did not start it; the text is what it printed last."""


def compose_version() -> str:
    """Version of Compose, empty where there is none."""
    try:
        return _version(compose_command())
    except EnvironmentProblem:
        return ""


def _version(argv: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            [*argv, "version", "--short"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    text = done.stdout.strip().lstrip("v")
    return text if done.returncode == 0 and not text.startswith(("0.", "1.")) else ""


def read_base(launch: Launch) -> Mapping[str, Any]:
    """The user's compose file as Compose resolves it for the user's own project and the launch's variables.

    Raises UsageProblem with Compose's words where it refuses the file, EnvironmentProblem where it hangs.
    """
    ref = ref_of(launch)
    return read_config(ref.file, ref.variables, project=ref.project)


def up(
    launch: Launch,
    override: Path,
    project: str,
    *,
    allow_pull: bool,
    marks: Mapping[str, str],
    docker_host: str,
    deadline_s: float,
    stop: threading.Event,
) -> None:
    """Start the launch's service and what it depends on. `marks` are variables that tell whose command it is.

    Raises ComposeFailed with the daemon's words, also where `stop` was set.
    """
    ref = ref_of(launch)
    argv = [
        *compose_command(),
        *("--ansi", "never", "--progress", "plain", "-p", project, "-f", ref.file, "-f", str(override)),
        *("up", "-d", "--no-build", "--pull", "missing" if allow_pull else "never", ref.service),
    ]
    unset = {name for name, value in ref.sets_env.items() if value is None}
    # a variable that the override leaves without a value would be passed on from here
    env = {n: v for n, v in compose_environment(ref.file, ref.variables).items() if n not in unset}
    env.update(marks)
    env["DOCKER_HOST"] = docker_host
    with tempfile.TemporaryFile() as out:
        child = subprocess.Popen(
            argv,
            cwd=Path(ref.file).parent,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        deadline = time.monotonic() + deadline_s
        while child.poll() is None:
            if stop.wait(_POLL_S) or time.monotonic() > deadline:
                child.terminate()
                try:
                    child.wait(timeout=5)
                except subprocess.TimeoutExpired:
                    child.kill()
                    child.wait()
                raise ComposeFailed(
                    "stopped while starting" if stop.is_set() else f"not started in {deadline_s:.0f} s"
                )
        out.seek(0)
        if child.returncode != 0:
            raise ComposeFailed(_last_words(out.read().decode(errors="replace"), lines=6))


def _last_words(text: str, lines: int = 3) -> str:
    return " ".join(line.strip() for line in text.strip().splitlines()[-lines:])[:1500]
