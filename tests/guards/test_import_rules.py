"""Which room may import which: the contracts in pyproject.toml hold, cover every room, and can fail."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "bisect" / "llm_bisect"

# What a room may import of the others. Modules between the rooms (the driver and its helpers) may import
# every room but cli; cli may import all.
MAY_IMPORT = {
    "model": set(),
    "spaces": {"model"},
    "journal": {"model", "spaces"},
    "runners": {"model", "spaces"},
    "probing": {"model", "spaces", "runners"},
    "search": {"model", "spaces", "journal"},
    "reports": {"model", "spaces", "journal", "search"},
}
OPEN_TO_ALL = {"_version"}
WITHOUT_RULES = {"__init__", "__main__", "_version", "cli"}

LINT = "from importlinter.cli import lint_imports_command; lint_imports_command()"


def _top_level() -> set[str]:
    return {
        entry.stem
        for entry in PACKAGE.iterdir()
        if entry.suffix == ".py" or (entry.is_dir() and (entry / "__init__.py").exists())
    }


def _imported(source: str, package: str) -> set[str]:
    """Full names of the modules that `source`, a module in `package`, imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                above = parts[: len(parts) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            found.add(base)
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


def _rooms_imported(source: str, package: str, known: set[str]) -> set[str]:
    rooms = set()
    for name in _imported(source, package):
        parts = name.split(".")
        if parts[0] == "llm_bisect" and len(parts) > 1 and parts[1] in known:
            rooms.add(parts[1])
    return rooms


def _lint(folder: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(folder / "bisect"), "NO_COLOR": "1", "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-c", LINT, "--no-cache"],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )


def _copy(folder: Path) -> Path:
    shutil.copytree(PACKAGE, folder / "bisect/llm_bisect", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def test_every_room_imports_only_what_it_may() -> None:
    """Each import in each room's files, lazy and type-only ones too, is of a room that it may know."""
    known = _top_level()
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        inside = path.relative_to(PACKAGE)
        room = inside.parts[0].removesuffix(".py")
        if room in WITHOUT_RULES:
            continue
        package = ".".join(["llm_bisect", *inside.parts[:-1]])
        allowed = MAY_IMPORT.get(room, known - {"cli"}) | {room} | OPEN_TO_ALL
        for other in sorted(_rooms_imported(path.read_text(encoding="utf-8"), package, known) - allowed):
            wrong.append(f"{inside} imports llm_bisect.{other}")
    assert wrong == []


@pytest.mark.parametrize(
    ("source", "rooms"),
    [
        ("import llm_bisect.search.plan", {"search"}),
        ("from llm_bisect import search", {"search"}),
        ("def f():\n    from llm_bisect.cli.app import app", {"cli"}),
        ("from ..runners import protocol", {"runners"}),
        ("from .. import runners", {"runners"}),
        ("from . import events", set()),
        ("import json, llm_bisect", set()),
    ],
)
def test_imports_are_seen_in_every_form(source: str, rooms: set[str]) -> None:
    """The reader of imports sees absolute, relative and lazy ones."""
    assert _rooms_imported(source, "llm_bisect.journal", _top_level()) - {"journal"} == rooms


def test_every_room_has_rules() -> None:
    """A new room or module must be given its rules here, and its layer in pyproject.toml."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    layered = {
        name.strip().strip("()").strip().removeprefix("llm_bisect.")
        for layer in layers
        for name in layer.replace(":", "|").split("|")
    }
    known = _top_level() - {"__init__", "__main__", "_version"}
    assert layered == known
    packages = {name for name in known if (PACKAGE / name).is_dir()}
    assert packages == set(MAY_IMPORT) | {"cli"}


def test_the_contracts_hold() -> None:
    """The contracts of pyproject.toml, which follow chains of imports too, hold for the package as it is."""
    done = _lint(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


@pytest.mark.parametrize(
    ("module", "offence"),
    [
        ("model/errors.py", "import llm_bisect.spaces"),
        ("journal/events.py", "import llm_bisect.search"),
        ("runners/protocol.py", "import llm_bisect.journal"),
        ("probing/__init__.py", "import llm_bisect.search"),
        ("reports/__init__.py", "import llm_bisect.probing"),
        ("search/plan.py", "import random"),
        ("study.py", "import llm_bisect.cli"),
    ],
)
def test_the_contracts_can_fail(module: str, offence: str, tmp_path: Path) -> None:
    """One wrong import in a copy of the package breaks a contract, so the green run above means something."""
    copy = _copy(tmp_path)
    target = copy / "bisect/llm_bisect" / module
    target.write_text(target.read_text(encoding="utf-8") + f"\n{offence}\n", encoding="utf-8")
    done = _lint(copy)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "BROKEN" in done.stdout
