"""Running the real command line against real engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Ran:
    """One finished call of `bisect`."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The one JSON object on standard output."""
        found: dict[str, Any] = json.loads(self.out)
        return found


@pytest.fixture
def bisect_env(tmp_path: Path) -> dict[str, str]:
    """An environment whose journals and configuration are the test's own."""
    return {
        **os.environ,
        "BISECT_JOURNALS": str(tmp_path / "journals"),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "BISECT_DEBUG": "",
        "NO_COLOR": "1",
    }


@pytest.fixture
def bisect_cli(bisect_env: dict[str, str], tmp_path: Path) -> Callable[..., Ran]:
    """Runs `bisect ARG…` in a folder of the test's own."""

    def run(
        *argv: str, env: dict[str, str] | None = None, timeout_s: float = 300, cwd: Path | None = None
    ) -> Ran:
        done = subprocess.run(
            [sys.executable, "-m", "llm_bisect", *argv],
            env={**bisect_env, **(env or {})},
            cwd=cwd or tmp_path,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
        )
        return Ran(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def tiny_profile(tmp_path: Path) -> Callable[..., Path]:
    """Writes a variant of the shipped tiny-llama profile: flags replaced, another memory limit."""

    def make(name: str, flags: dict[str, str], *, memory_limit: str = "256m", **probe: Any) -> Path:
        data = yaml.safe_load((ROOT / "search_spaces" / "tiny-llama.yml").read_text(encoding="utf-8"))
        data["profile"] = name
        # YAML 1.1 reads the words on and off as booleans
        data["axes"].pop("flash-attn")
        for launch in data["launches"].values():
            launch["memory_limit"] = memory_limit
            launch["command"] = _with_flags([_word(w) for w in launch["command"]], flags)
        data["probe"].update(probe)
        path = tmp_path / f"{name}.yml"
        path.write_text(yaml.safe_dump(data), encoding="utf-8")
        return path

    return make


def _word(word: object) -> str:
    return {True: "on", False: "off"}.get(word, str(word)) if isinstance(word, bool) else str(word)


def _with_flags(command: Sequence[str], flags: dict[str, str]) -> list[str]:
    words = list(command)
    for flag, value in flags.items():
        words[words.index(flag) + 1] = value
    return words


def our_containers(docker_host: str) -> list[str]:
    """Names of all containers that carry our label."""
    import docker

    client = docker.DockerClient(base_url=docker_host)
    try:
        found = client.containers.list(all=True, filters={"label": "llm-bisect.study"})
        return [c.name or "" for c in found]
    finally:
        client.close()
