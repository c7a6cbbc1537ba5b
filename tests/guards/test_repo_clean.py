"""What is published speaks of the project alone: no path of the machine it was written on, no left-over."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Written apart, so that this file does not find itself.
MACHINE_PATHS = re.compile(
    "|".join([r"/wor" + r"k/", r"/tmp/" + r"v(?![\w-])", r"/tmp/bri" + "ef", r"/opt/py" + "pi"])
)
BACKSTAGE = re.compile(r"\bsha" + r"red/(?:design|seeds|reference|corpus|tools)\b")
LEFT_OVERS = re.compile(r"(?:\.orig|\.rej|\.bak|\.swp|~|\.pyc|\.gguf|\.log\.gz)$")


def _files() -> list[Path]:
    """Files that are in git, or would be with `git add .`."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: which files are published is not known")
    command = [
        "git",
        "-c",
        f"safe.directory={ROOT}",
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def _matches(pattern: re.Pattern[str]) -> list[str]:
    found = []
    for path in _files():
        text = path.read_bytes().decode("utf-8", errors="replace")
        for number, line in enumerate(text.splitlines(), 1):
            if pattern.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}")
    return found


def test_no_path_of_a_machine_is_published() -> None:
    """No published file names a folder of the machine that it was written on."""
    assert _matches(MACHINE_PATHS) == []


def test_nothing_refers_to_what_is_not_published() -> None:
    """No published file refers to documents that a reader of the repository does not have."""
    assert _matches(BACKSTAGE) == []


def test_no_left_over_and_no_large_file_is_published() -> None:
    """No editor's or merge's left-over, compiled file or model is published, and nothing over 1 MiB."""
    files = _files()
    assert files
    assert [str(path.relative_to(ROOT)) for path in files if LEFT_OVERS.search(path.name)] == []
    assert [str(path.relative_to(ROOT)) for path in files if path.stat().st_size > 2**20] == []


def test_journals_of_users_are_never_published() -> None:
    """In `journals/` git sees only the reference studies and the rule that keeps the rest out."""
    seen = {
        path.relative_to(ROOT / "journals").parts[0]
        for path in _files()
        if path.is_relative_to(ROOT / "journals")
    }
    assert seen <= {".gitignore", "reference"}
    assert ".gitignore" in seen


def test_the_patterns_would_see_an_offence() -> None:
    """The patterns find what they are for, and leave like-named paths alone."""
    assert MACHINE_PATHS.search("see /wor" + "k/main") and MACHINE_PATHS.search("/tmp/" + "v/bin/python")
    assert not MACHINE_PATHS.search("/workspace/model /tmp/" + "vllm")
    assert BACKSTAGE.search("sha" + "red/design/rulings.md")
