"""A small profile on the simulated rig: a study of two boots and a few probes, in about three seconds."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from llm_bisect.journal.store import read_journal

COMMAND = [
    *("--model", "/models/qwen3.6-27b", "--served-model-name", "qwen3.6-27b", "--max-model-len", "180000"),
    *("--gpu-memory-utilization", "0.93", "--max-num-batched-tokens", "4128", "--max-num-seqs", "1"),
    *("--kv-cache-dtype", "turboquant_3bit_nc", "--enable-chunked-prefill", "--language-model-only"),
]


@pytest.fixture
def small_profile() -> dict[str, Any]:
    """Its data. Axis prompt: 8,000, 16,000 and 20,000 tokens pass; no longer one is asked."""
    return {
        "profile": "small",
        "engine": "vllm",
        "launches": {
            "docker": {"image": "vllm/vllm-openai:v0.0.1-not-here", "command": COMMAND},
            "simulated": {"card": "rtx3090", "model": "qwen3.6-27b-autoround-int4"},
        },
        "probe": {"shape": "prefill", "target": "16k", "start": "8k", "max_prompt": "20k", "max_tokens": 4},
        "axes": {"mem-util": {"grid": {"values": [0.92, 0.93, 0.94]}, "prefer": "high"}},
    }


@pytest.fixture
def bisect_env(bisect_env: dict[str, str]) -> dict[str, str]:
    """As everywhere, with the simulated rig's clock fast."""
    return {**bisect_env, "LLM_BISECT_SIM_SCALE": "20000", "DOCKER_HOST": "unix:///nowhere/docker.sock"}


@pytest.fixture
def sim_profile(tmp_path: Path, small_profile: dict[str, Any]) -> Callable[..., Path]:
    """Writes the small profile, with top-level keys replaced."""

    def make(name: str = "small", **replaced: Any) -> Path:
        data = {**small_profile, "profile": name, **replaced}
        path = tmp_path / f"{name}.yml"
        path.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
        return path

    return make


@pytest.fixture
def question(sim_profile: Callable[..., Path]) -> list[str]:
    """The arguments of a short simulated study called `s`."""
    return [
        *("ceiling", "--profile", str(sim_profile()), "--axis", "prompt", "--runner", "simulated"),
        *("--confirm", "1", "--study", "s"),
    ]


class Started:
    """A `bisect` that runs beside the test."""

    def __init__(self, argv: list[str], env: dict[str, str], cwd: Path, **options: Any) -> None:
        self.journal = Path(env["BISECT_JOURNALS"]) / "s.jsonl"
        self.child = subprocess.Popen(
            [sys.executable, "-m", "llm_bisect", *argv],
            **{
                "env": env,
                "cwd": cwd,
                "stdin": subprocess.DEVNULL,
                "stdout": subprocess.PIPE,
                "stderr": subprocess.PIPE,
                "text": True,
                **options,
            },
        )

    def wait_for(self, kind: str, timeout_s: float = 60.0) -> None:
        """Until the journal of study `s` holds an event of that kind."""
        ends_s = time.monotonic() + timeout_s
        while time.monotonic() < ends_s:
            if self.journal.exists() and any(e.kind == kind for e in read_journal(self.journal)):
                return
            assert self.child.poll() is None, f"it ended before {kind}: {self.finish()}"
            time.sleep(0.02)
        raise AssertionError(f"no {kind} within {timeout_s} s")

    def finish(self, timeout_s: float = 60.0) -> tuple[int, str, str]:
        """Exit status, standard output, standard error."""
        out, err = self.child.communicate(timeout=timeout_s)
        return self.child.returncode, out, err


@pytest.fixture
def start(bisect_env: dict[str, str], tmp_path: Path) -> Iterator[Callable[..., Started]]:
    """Starts `bisect ARG…` beside the test; whatever still runs at its end is killed."""
    running: list[Started] = []

    def begin(argv: list[str], env: dict[str, str] | None = None, **options: Any) -> Started:
        running.append(Started(argv, {**bisect_env, **(env or {})}, tmp_path, **options))
        return running[-1]

    yield begin
    for one in running:
        if one.child.poll() is None:
            one.child.kill()
        one.child.communicate()


@pytest.fixture
def engines_of() -> Callable[[Path], list[int]]:
    """Process ids of simulated engines whose logs lie in a folder of journals."""

    def look(folder: Path) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                except OSError:
                    continue
                if any(w.startswith(f"{folder}/") and w.endswith(".spec.json") for w in words):
                    found.append(int(entry.name))
        return found

    return look


@pytest.fixture
def leftovers(bisect_env: dict[str, str], engines_of: Callable[[Path], list[int]]) -> Callable[[], list[str]]:
    """What is left behind: files in the journals' folder, and engines of its studies."""

    def look() -> list[str]:
        folder = Path(bisect_env["BISECT_JOURNALS"])
        files = [str(p) for p in sorted(folder.rglob("*"))] if folder.is_dir() else []
        return [*files, *map(str, engines_of(folder))]

    return look
