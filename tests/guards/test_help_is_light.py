"""`bisect --help` answers at once: heavy libraries are imported only by the commands that use them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {
    "docker", "httpx", "numpy", "optuna", "pydantic", "pynvml", "requests", "sqlalchemy", "structlog", "yaml",
}  # fmt: skip


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "bisect"), "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, "-X", "importtime", *arguments],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def _imported(importtime: str) -> set[str]:
    """Top-level names of what was imported, from the lines `import time: self | cumulative | name`."""
    lines = [line for line in importtime.splitlines() if line.startswith("import time:")]
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}


@pytest.mark.parametrize("arguments", [("--help",), ("--version",)])
def test_help_and_version_import_nothing_heavy(arguments: tuple[str, ...]) -> None:
    """Neither `--help` nor `--version` imports a library that only a study needs."""
    done = _run("-m", "llm_bisect", *arguments)
    assert done.returncode == 0, done.stderr
    assert "bisect" in done.stdout
    imported = _imported(done.stderr)
    assert {"llm_bisect", "typer"} <= imported
    assert imported & HEAVY == set()


def test_a_heavy_import_would_be_seen() -> None:
    """The reading of the import times finds a heavy library where one is imported."""
    assert _imported(_run("-c", "import yaml").stderr) & HEAVY == {"yaml"}


def test_help_names_the_commands_and_the_exit_status() -> None:
    """`--help` lists the commands of the product and says what its exit status means."""
    text = _run("-m", "llm_bisect", "--help").stdout
    for command in ("ceiling", "resume", "stop", "status", "explain", "doctor", "init", "export"):
        assert command in text
    assert "Exit status" in text
