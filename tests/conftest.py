"""Fixtures shared by all rooms: a Docker daemon of our own, the built-in models, a real llama-server, the
command line."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import docker
import pytest

from llm_bisect.runners import executables, images


def _module(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


dockerd_script = _module("llm_bisect_tests_dockerd", Path(__file__).with_name("dockerd.py"))


@dataclass(frozen=True)
class OwnDocker:
    """The session's daemon: its DOCKER_HOST, an environment for subprocesses, a client."""

    host: str
    folder: Path
    env: dict[str, str]
    client: docker.DockerClient

    def ours(self, label: str = "llm-bisect.study") -> list[Any]:
        """All containers with that label, whatever their state."""
        # one that goes while it is listed is no error
        return list(self.client.containers.list(all=True, ignore_removed=True, filters={"label": label}))


@pytest.fixture(scope="session", autouse=True)
def model_cache() -> Iterator[Path]:
    """The built-in models are made once a session, in a folder of the tests."""
    before = os.environ.get("LLM_BISECT_CACHE")
    folder = Path(tempfile.mkdtemp(prefix="llm-bisect-cache-"))
    os.environ["LLM_BISECT_CACHE"] = str(folder)
    yield folder
    if before is None:
        del os.environ["LLM_BISECT_CACHE"]
    else:
        os.environ["LLM_BISECT_CACHE"] = before
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def dockerd() -> Iterator[OwnDocker]:
    """A dockerd that the tests start and stop, also where one runs; skips where it cannot be started."""
    reason = dockerd_script.why_not()
    if reason is not None:
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="lbd-"))  # short: the path of a socket has 107 characters
    try:
        daemon = dockerd_script.start(folder)
    except RuntimeError as error:
        pytest.skip(str(error))
    client = docker.DockerClient(base_url=daemon.host)
    try:
        yield OwnDocker(daemon.host, folder, {**os.environ, "DOCKER_HOST": daemon.host}, client)
    finally:
        client.close()
        dockerd_script.stop(folder)


@pytest.fixture
def docker_host(dockerd: OwnDocker, monkeypatch: pytest.MonkeyPatch) -> OwnDocker:
    """As `dockerd`, with DOCKER_HOST set for this test's own process."""
    monkeypatch.setenv("DOCKER_HOST", dockerd.host)
    return dockerd


@pytest.fixture(scope="session")
def llama_server() -> Path:
    """The prebuilt llama-server, its pages warm: a cold page cache lowers a ceiling by about 2.5 %."""
    found = executables.packaged_llama_server()
    if found is None:
        pytest.skip(f"the prebuilt llama-server is not installed (pip install {executables.LLAMA_PACKAGE})")
    for one in found.resolve().parent.iterdir():
        if one.is_file() and not one.is_symlink():
            one.read_bytes()
    return found


@pytest.fixture(scope="session")
def tiny_image(dockerd: OwnDocker, llama_server: Path) -> str:
    """Our own image in the session's daemon; its name."""
    images.ensure_tiny_image(dockerd.client)
    return images.TINY_IMAGE


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
