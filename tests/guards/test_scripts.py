"""The Makefile and its scripts: they parse, each target is explained, and the demo tells its failures."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_make_help_explains_every_target() -> None:
    """`make` alone lists each target that is meant for people, with a sentence."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    done = subprocess.run(["make", "-s"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    for target in phony[1].split():
        assert re.search(rf"^make {target}\s+\S", done.stdout, re.MULTILINE), target


@pytest.mark.parametrize(
    "script", [".ci/run", "scripts/setup.sh", "scripts/demo.sh", "scripts/docker_for_tests.sh"]
)
def test_each_script_is_executable_and_parses(script: str) -> None:
    """Each script can be run as a program, and bash finds no fault in its syntax."""
    assert os.access(ROOT / script, os.X_OK)
    done = subprocess.run(["bash", "-n", ROOT / script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _demo(folder: Path, script_of_bisect: str) -> subprocess.CompletedProcess[str]:
    """Run scripts/demo.sh in a folder of its own, with the given shell script in the place of `bisect`."""
    for name in ("scripts", ".venv/bin", ".cache/demo"):
        (folder / name).mkdir(parents=True)
    shutil.copy(ROOT / "scripts/demo.sh", folder / "scripts")
    (folder / ".cache/demo/old.jsonl").write_text("of the last run\n")
    command = folder / ".venv/bin/bisect"
    command.write_text(f"#!/bin/bash\n{script_of_bisect}\n")
    command.chmod(0o755)
    return subprocess.run(
        ["bash", folder / "scripts/demo.sh"], cwd="/", capture_output=True, text=True, check=False
    )


def test_the_demo_starts_from_fresh_journals_and_prints_each_command(tmp_path: Path) -> None:
    """The demo empties its own journal folder and prints each command as it was run."""
    done = _demo(tmp_path, 'ls "$BISECT_JOURNALS"; echo "ran: bisect $*"')
    assert done.returncode == 0, done.stderr
    assert "old.jsonl" not in done.stdout
    printed = re.findall(r"^\$ (bisect .*)$", done.stdout, re.MULTILINE)
    assert printed == re.findall(r"^ran: (.*)$", done.stdout, re.MULTILINE)
    assert len(printed) == 6


def test_the_demo_fails_where_one_step_fails(tmp_path: Path) -> None:
    """One failing step does not stop the others, but it is named and decides the exit status."""
    done = _demo(tmp_path, "[[ $* != *demo-200k* ]] || exit 3")
    assert done.returncode == 1
    assert len(re.findall(r"^\$ bisect ", done.stdout, re.MULTILINE)) == 6
    assert "1 of 6 steps failed" in done.stdout
    assert "FAILED with exit status 3" in done.stdout
