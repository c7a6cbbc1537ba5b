"""Modules stay short enough to read, and nothing is left for later."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LONGEST_LINES = 400
# Written apart, so that this file does not find itself.
LATER = re.compile(r"\b(?:" + "|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK"]) + r")\b")


def _files() -> list[Path]:
    found = [path for folder in ("bisect", "tests", "bench") for path in (ROOT / folder).rglob("*.py")]
    return sorted(found)


def test_no_module_of_the_package_is_longer_than_400_lines() -> None:
    """A module that grows past 400 lines is split by theme."""
    modules = sorted((ROOT / "bisect").rglob("*.py"))
    assert modules
    lengths = {str(m.relative_to(ROOT)): len(m.read_text(encoding="utf-8").splitlines()) for m in modules}
    assert {name: lines for name, lines in lengths.items() if lines > LONGEST_LINES} == {}


def test_nothing_is_left_for_later() -> None:
    """No marker of unfinished work is in the code, the tests, the benchmarks or the scripts."""
    paths = [*_files(), *sorted((ROOT / "scripts").glob("*.sh")), ROOT / "Makefile", ROOT / ".ci/run"]
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in paths
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if LATER.search(line)
    ]
    assert found == []


def test_the_marker_would_be_seen() -> None:
    """The pattern finds a marker in a comment, and not inside a longer word."""
    assert LATER.search("x = 1  # " + "TO" + "DO: later")
    assert not LATER.search("mktemp /x." + "XX" + "XX")


def test_tests_are_plain_modules_with_names_of_their_own() -> None:
    """No package among the tests, and no two test files with one name (import mode importlib)."""
    tests = sorted((ROOT / "tests").rglob("*.py"))
    assert [str(path.relative_to(ROOT)) for path in tests if path.name == "__init__.py"] == []
    names = [path.name for path in tests if path.name.startswith("test_")]
    assert sorted(names) == sorted(set(names))


def test_every_test_says_what_it_shows() -> None:
    """Each test function has a docstring."""
    import ast

    silent = [
        f"{path.relative_to(ROOT)}::{node.name}"
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and ast.get_docstring(node) is None
    ]
    assert silent == []
