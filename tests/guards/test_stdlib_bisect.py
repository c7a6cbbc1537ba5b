"""The folder `bisect/` must never hide the standard library's module of that name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

IMPORTS = """
import bisect, random, statistics, sysconfig, tempfile
from pathlib import Path
stdlib = Path(sysconfig.get_path("stdlib")).resolve()
for module in (bisect, random, statistics, tempfile):
    assert Path(module.__file__).resolve().parent == stdlib, (module.__name__, module.__file__)
assert bisect.bisect_left([1, 2, 3], 2) == 1
import optuna
print(bisect.__file__)
"""


def test_from_the_root_bisect_is_the_standard_librarys() -> None:
    """With the checkout's root on sys.path, `import bisect` finds the standard library's."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not Path(done.stdout.strip()).is_relative_to(ROOT / "bisect")


def test_the_source_folder_is_no_package() -> None:
    """`bisect/` holds the one import package and nothing that Python would import as `bisect`."""
    entries = {entry.name for entry in (ROOT / "bisect").iterdir()} - {"__pycache__"}
    assert entries == {"llm_bisect"}
    assert not (ROOT / "bisect.py").exists()


def test_no_other_top_level_folder_hides_a_module() -> None:
    """No folder of the root is a package, so none can hide a module that a dependency imports."""
    packages = [str(init.parent.relative_to(ROOT)) for init in ROOT.glob("*/__init__.py")]
    assert packages == []
