"""The wheel is whole: installed in a fresh environment it runs from anywhere and finds its own data."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from llm_bisect import __version__

ROOT = Path(__file__).resolve().parents[2]


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built with the hatchling of this environment (nothing is downloaded)."""
    folder = tmp_path_factory.mktemp("wheel")
    _pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder), str(ROOT))
    (built,) = folder.glob("llm_bisect-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel in it; its dependencies are lent by the environment of the tests."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, with_pip=False, symlinks=True)
    _pip(
        "--python", str(folder / "bin/python"),
        "install", "--no-deps", "--no-index", "--no-compile", str(wheel),
    )  # fmt: skip
    (site,) = folder.glob("lib/python*/site-packages")
    # A folder named in a .pth file comes last on sys.path; .pth files in it (an editable install) count not.
    (site / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


def _run(command: list[str], home: Path) -> str:
    """Run it from `/`, with nothing of the checkout in the environment."""
    keep = {"PATH", "LANG", "LD_LIBRARY_PATH"}
    env = {key: value for key, value in os.environ.items() if key in keep} | {"HOME": str(home)}
    done = subprocess.run(
        command, cwd="/", env=env, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_holds_the_package_its_data_and_its_licence(wheel: Path) -> None:
    """Every source file, profile and engine is in the wheel, with the licence, and no test is."""
    names = set(zipfile.ZipFile(wheel).namelist())
    for path in (ROOT / "bisect/llm_bisect").rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            assert path.relative_to(ROOT / "bisect").as_posix() in names
    for folder in ("search_spaces", "runners"):
        for path in (ROOT / folder).rglob("*.yml"):
            assert f"llm_bisect/_data/{path.relative_to(ROOT).as_posix()}" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"llm_bisect"}
    assert not any(name.startswith("llm_bisect/tests") for name in names)


def test_the_installed_command_runs_from_anywhere(installed: Path, tmp_path: Path) -> None:
    """`bisect --version` of the fresh environment prints the version of the checkout."""
    printed = _run([str(installed / "bin/bisect"), "--version"], tmp_path)
    assert printed.strip() == f"bisect {__version__}"


@pytest.mark.parametrize("folder", ["search_spaces", "runners"])
def test_the_packaged_data_is_found_from_anywhere(folder: str, installed: Path, tmp_path: Path) -> None:
    """The resolver names every profile and engine of the checkout, out of the installed package."""
    program = (
        "import llm_bisect, sys\n"
        "from llm_bisect.spaces import resources\n"
        f"print(llm_bisect.__file__)\nprint(*resources.names({folder!r}), sep='\\n')\n"
    )
    where, *names = _run([str(installed / "bin/python"), "-c", program], tmp_path).split("\n")
    assert Path(where).is_relative_to(installed)
    expected = {path.stem for path in (ROOT / folder).glob("*.yml")}
    assert expected
    assert expected <= set(names)
