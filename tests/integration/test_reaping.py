"""`kill -9` of bisect at any moment of a boot leaves no container, network, process or cgroup."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import llm_bisect
from llm_bisect.model import EnvironmentProblem
from llm_bisect.runners import cgroup, procs
from llm_bisect.spaces.compose import compose_command

pytestmark = [pytest.mark.llama, pytest.mark.slow, pytest.mark.serial]

BOOT = """
import sys, threading
from pathlib import Path
from llm_bisect.model import ComposeRef, Launch
from llm_bisect.runners.make import make_runner
from llm_bisect.runners.protocol import BootOrder
kind, study, log, compose = sys.argv[1:]
flags = ("-c", "32768", "-np", "1", "-fit", "off", "--cache-ram", "0")
if kind == "process":
    launch = Launch("process", "llamacpp", ("llama-server", "-m", "{model}", "--port", "{port}", *flags),
        model_path="builtin:tiny-llama", memory_limit_mib=int(compose) or None)
else:
    launch = Launch("docker", "llamacpp", ("-m", "{model}", "--port", "8080", "--host", "0.0.0.0", *flags),
        image="llm-bisect/llama-server:tiny", model_path="builtin:tiny-llama", container_port=8080,
        compose=ComposeRef(compose, "llm", "user", sets_command=True) if kind == "compose" else None)
runner = make_runner("process" if kind == "process" else "docker")
runner.preflight(launch)
print("now", flush=True)
runner.boot(BootOrder(study, study, launch, Path(log)), threading.Event())
threading.Event().wait()
"""

MOMENTS_S = (0.0, 0.03, 0.1, 0.25, 0.5, 1.0)


def killed_at(moment_s: float, arguments: list[str], env: dict[str, str]) -> None:
    """Boot in a bisect of its own, and kill that so many seconds after it began."""
    child = subprocess.Popen(
        [sys.executable, "-c", BOOT, *arguments],
        env={**env, "PYTHONPATH": str(Path(llm_bisect.__file__).parents[1])},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "now\n"
    time.sleep(moment_s)
    child.kill()
    child.wait()


def nothing_stays(left: Any, within_s: float = 30.0, quiet_s: float = 1.5) -> bool:
    """True once `left()` has been empty for `quiet_s` seconds without a break."""
    deadline = time.monotonic() + within_s
    clean_since = time.monotonic()
    while time.monotonic() < deadline:
        if left():
            clean_since = time.monotonic()
        if time.monotonic() - clean_since > quiet_s:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.docker
@pytest.mark.parametrize("kind", ["plain", "compose"])
def test_killed_while_docker_boots(kind: str, dockerd: Any, tiny_image: str, tmp_path: Path) -> None:
    """Whether Compose or the daemon was still at work: no container and no network of ours is left."""
    if kind == "compose":
        try:
            compose_command()
        except EnvironmentProblem as problem:
            pytest.skip(problem.message)
    base = tmp_path / "compose.yml"
    base.write_text(f"services: {{llm: {{image: '{tiny_image}'}}}}")
    study = f"moments-{kind}"
    chosen = {"label": f"llm-bisect.study={study}"}

    def left() -> list[object]:
        containers = dockerd.client.containers.list(all=True, ignore_removed=True, filters=chosen)
        return [*containers, *dockerd.client.networks.list(filters=chosen), *procs.find(study)]

    for moment_s in MOMENTS_S:
        killed_at(moment_s, [kind, study, str(tmp_path / "b.log"), str(base)], dockerd.env)
        assert nothing_stays(left), moment_s


def test_killed_while_a_process_boots(llama_server: Path, tmp_path: Path) -> None:
    """No process and no cgroup is left."""
    import os

    study = f"moments-process-{os.getpid()}"
    limit = "256" if cgroup.available() else "0"

    def left() -> list[object]:
        # groups of others come and go while one looks: os.walk passes over what has gone
        walked = os.walk("/sys/fs/cgroup")
        groups = [name for _, names, _ in walked for name in names if name.startswith(f"llm-bisect-{study}-")]
        return [*procs.find(study), *groups]

    for moment_s in MOMENTS_S:
        killed_at(moment_s, ["process", study, str(tmp_path / "b.log"), limit], dict(os.environ))
        assert nothing_stays(left), moment_s
