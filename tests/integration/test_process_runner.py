"""The process runner with a real llama-server: boots, limits, crashes, adoption."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

import llm_bisect
from llm_bisect.model import EnvironmentProblem, Launch, UsageProblem
from llm_bisect.runners import cgroup, procs
from llm_bisect.runners.process_runner import ProcessRunner
from llm_bisect.runners.protocol import BootFailure, BootOrder, Engine

pytestmark = [pytest.mark.llama, pytest.mark.serial]

needs_cgroup = pytest.mark.skipif(
    not cgroup.available(), reason="no memory cgroup can be made here (root, or a delegated one)"
)
FLAGS = ("-np", "1", "-fit", "off", "--cache-ram", "0", "-lv", "4", "--host", "127.0.0.1")
COMMAND = (
    "llama-server", "-m", "{model}", "--port", "{port}", "-c", "32768", "-fa", "off", "-ub", "2048", *FLAGS,
)  # fmt: skip


@pytest.fixture
def runner(llama_server: Path) -> Iterator[ProcessRunner]:
    """A process runner; all that it booted is stopped at the end."""
    one = ProcessRunner()
    yield one
    one.close()


@pytest.fixture
def launch() -> Launch:
    """The tiny model, without a limit."""
    return Launch("process", "llamacpp", COMMAND, model_path="builtin:tiny-llama")


@pytest.fixture
def order(tmp_path: Path, launch: Launch, request: pytest.FixtureRequest) -> Callable[..., BootOrder]:
    """Makes boot orders of a study named after the test."""

    def make(boot: str = "b1", launch: Launch = launch, **more: Any) -> BootOrder:
        study = f"{request.node.name}-{os.getpid()}"
        return BootOrder(study, boot, launch, tmp_path / "side" / f"{boot}.log", **more)

    return make


def complete(engine: Engine, tokens: int) -> int:
    """Send a prompt of so many tokens (one a byte); the HTTP status, 0 where the connection broke."""
    body = {"prompt": "a" * tokens, "n_predict": 1, "cache_prompt": False}
    try:
        return httpx.post(f"{engine.base_url}/completion", json=body, timeout=120).status_code
    except httpx.HTTPError:
        return 0


def groups() -> list[str]:
    """Memory cgroups of ours that exist."""
    # groups of others come and go while one looks: os.walk passes over what has gone
    walked = os.walk("/sys/fs/cgroup")
    return [
        str(Path(at, name)) for at, names, _ in walked for name in names if name.startswith("llm-bisect-")
    ]


def eventually(check: Callable[[], bool], within_s: float = 30.0) -> bool:
    """Wait until `check` holds."""
    deadline = time.monotonic() + within_s
    while not check():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_boot_serve_and_stop(runner: ProcessRunner, order: Callable[..., BootOrder]) -> None:
    """An engine boots in its own session, serves, logs into the file, and is gone after stop."""
    one = order()
    runner.preflight(one.launch)
    engine = runner.boot(one, threading.Event())
    pids = [identity.pid for identity, _ in procs.find(one.study)]
    assert pids
    assert os.getsid(pids[0]) != os.getsid(0)
    assert complete(engine, 1000) == 200
    assert "n_ctx" in engine.log_text()
    mark = engine.log_mark()
    assert engine.log_text(mark) == ""
    complete(engine, 10)
    assert engine.log_text(mark) == one.log_path.read_text()[mark:] != ""
    assert engine.memory() is None
    engine.stop()
    engine.stop()
    assert engine.state().stopped_by_us
    assert list(procs.find(one.study)) == []


@needs_cgroup
def test_cgroup_kills_and_is_seen(
    runner: ProcessRunner, order: Callable[..., BootOrder], launch: Launch
) -> None:
    """Under a limit the ceiling is real: 3,000 tokens pass in 256 MiB, 6,000 are killed by the kernel."""
    engine = runner.boot(order(launch=replace(launch, memory_limit_mib=256)), threading.Event())
    sample = engine.memory()
    assert sample is not None
    assert (sample.source, sample.total_mib) == ("cgroup", 256)
    assert complete(engine, 3000) == 200
    after = engine.memory()
    assert after is not None
    assert after.free_mib < sample.free_mib
    assert complete(engine, 6000) == 0
    assert eventually(lambda: not engine.state().running)
    assert (engine.state().exit_code, engine.state().oom_killed) == (-9, True)
    engine.stop()
    assert engine.state().oom_killed
    assert eventually(lambda: groups() == [])


@needs_cgroup
def test_boot_killed_by_its_limit(
    runner: ProcessRunner, order: Callable[..., BootOrder], launch: Launch
) -> None:
    """A KV cache larger than the limit is killed while booting."""
    big = replace(launch, command=(*COMMAND, "-c", "131072"), memory_limit_mib=64)
    with pytest.raises(BootFailure) as caught:
        runner.boot(order(launch=big), threading.Event())
    assert (caught.value.reason, caught.value.state.exit_code) == ("exited", -9)
    assert caught.value.state.oom_killed
    assert eventually(lambda: groups() == [])


def test_limit_without_cgroup_is_said_before(
    runner: ProcessRunner, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no cgroup can be made, preflight says so and starts nothing."""
    monkeypatch.setattr(cgroup, "_mount", lambda version: None)
    with pytest.raises(EnvironmentProblem, match="memory cgroup"):
        runner.preflight(replace(launch, memory_limit_mib=256))


def test_failed_boot_is_told(runner: ProcessRunner, order: Callable[..., BootOrder], launch: Launch) -> None:
    """An engine that exits while booting is a BootFailure with its log and its exit code."""
    with pytest.raises(BootFailure) as caught:
        runner.boot(order(launch=replace(launch, command=(*COMMAND, "-m", "/none.gguf"))), threading.Event())
    assert (caught.value.reason, caught.value.state.exit_code) == ("exited", 1)
    assert "none.gguf" in caught.value.log


def test_a_program_that_cannot_run(
    runner: ProcessRunner, order: Callable[..., BootOrder], launch: Launch, tmp_path: Path
) -> None:
    """A file that is no program fails at the start, with what the system said."""
    script = tmp_path / "llama-server"
    script.write_bytes(b"\x00\x01")
    script.chmod(0o755)
    with pytest.raises(BootFailure) as caught:
        runner.boot(order(launch=replace(launch, command=(str(script), "{port}"))), threading.Event())
    assert caught.value.reason == "start"
    assert "Exec format error" in caught.value.message


@pytest.mark.parametrize(
    ("limits", "reason"), [({"deadline_s": 1.5}, "deadline"), ({"silence_s": 1.0}, "silence")]
)
def test_boot_that_never_gets_ready(
    runner: ProcessRunner,
    order: Callable[..., BootOrder],
    launch: Launch,
    limits: dict[str, float],
    reason: str,
) -> None:
    """A server that never answers ends by the deadline, or sooner by its silence, and is killed."""
    one = order(launch=replace(launch, command=("sleep", "{port}")), **limits)
    with pytest.raises(BootFailure) as caught:
        runner.boot(one, threading.Event())
    assert caught.value.reason == reason
    assert list(procs.find(one.study)) == []


def test_stop_event_ends_a_boot(
    runner: ProcessRunner, order: Callable[..., BootOrder], launch: Launch
) -> None:
    """A boot in progress is given up when asked."""
    stop = threading.Event()
    threading.Timer(0.5, stop.set).start()
    with pytest.raises(BootFailure) as caught:
        runner.boot(order(launch=replace(launch, command=("sleep", "{port}"))), stop)
    assert caught.value.reason == "aborted"


def test_children_die_with_the_engine(
    runner: ProcessRunner, order: Callable[..., BootOrder], launch: Launch
) -> None:
    """A grandchild in a session of its own that ignores TERM does not outlive the stop."""
    program = (
        "import os,signal,subprocess,sys,http.server\n"
        "subprocess.Popen([sys.executable,'-c','import signal,time;signal.signal(15,signal.SIG_IGN);"
        "time.sleep(600)'],start_new_session=True)\n"
        "class H(http.server.BaseHTTPRequestHandler):\n"
        "  def do_GET(self): self.send_response(200);self.end_headers()\n"
        "http.server.HTTPServer(('127.0.0.1',int(sys.argv[1])),H).serve_forever()\n"
    )
    one = order(launch=replace(launch, command=(sys.executable, "-c", program, "{port}")))
    engine = runner.boot(one, threading.Event())
    assert len(list(procs.find(one.study))) == 2
    engine.stop(timeout_s=1.0)
    assert list(procs.find(one.study)) == []


CRASH = """
import json, sys, threading
from pathlib import Path
from llm_bisect.model import Launch
from llm_bisect.runners.process_runner import ProcessRunner
from llm_bisect.runners.protocol import BootOrder
log, study, limit, *command = sys.argv[1:]
launch = Launch("process", "llamacpp", tuple(command), model_path="builtin:tiny-llama",
    memory_limit_mib=int(limit) or None)
runner = ProcessRunner()
engine = runner.boot(BootOrder(study, "b1", launch, Path(log)), threading.Event())
print(engine.base_url, runner._reaper.pid, flush=True)
threading.Event().wait()
"""


def crash(study: str, log: Path) -> tuple[subprocess.Popen[str], str, int]:
    """A bisect that has booted an engine (in a cgroup, where that is allowed), and waits to be killed."""
    limit = "256" if cgroup.available() else "0"
    child = subprocess.Popen(
        [sys.executable, "-c", CRASH, str(log), study, limit, *COMMAND],
        env={**os.environ, "PYTHONPATH": str(Path(llm_bisect.__file__).parents[1])},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    url, reaper = child.stdout.readline().split()
    return child, url, int(reaper)


def test_kill_9_stops_the_engine(llama_server: Path, tmp_path: Path) -> None:
    """The reaper kills the engine of a bisect that was killed, and its cgroup, though signals reached it."""
    study = f"killed-{os.getpid()}"
    child, _, reaper = crash(study, tmp_path / "b1.log")
    assert list(procs.find(study))
    for sig in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        os.kill(reaper, sig)
    child.kill()
    child.wait()
    assert eventually(lambda: not list(procs.find(study)) and groups() == [])


def test_crash_of_bisect_and_reaper_is_adopted(
    runner: ProcessRunner, llama_server: Path, tmp_path: Path
) -> None:
    """Where the reaper died too, the next run finds the engine by its environment and goes on with it."""
    study = f"adopted-{os.getpid()}"
    child, url, reaper = crash(study, tmp_path / "b1.log")
    assert runner.adopt(study, None) is None, "its bisect is alive: not ours to touch"
    assert list(procs.find(study))
    os.kill(reaper, signal.SIGKILL)
    child.kill()
    child.wait()
    adopted = runner.adopt(study, "b1")
    assert adopted is not None
    assert adopted.base_url == url
    assert complete(adopted, 100) == 200
    assert "n_ctx" in adopted.log_text()
    adopted.stop()
    assert list(procs.find(study)) == []
    assert eventually(lambda: groups() == [])


def test_leftovers_are_reaped_where_no_boot_is_asked_for(
    runner: ProcessRunner, llama_server: Path, tmp_path: Path
) -> None:
    """Another boot's engine of a crashed run is killed, with its cgroup."""
    study = f"reaped-{os.getpid()}"
    child, _, reaper = crash(study, tmp_path / "b1.log")
    os.kill(reaper, signal.SIGKILL)
    child.kill()
    child.wait()
    assert runner.adopt(study, "b2") is None
    assert list(procs.find(study)) == []
    assert eventually(lambda: groups() == [])


def test_reaper_leaves_with_its_runner(order: Callable[..., BootOrder], llama_server: Path) -> None:
    """After close no reaper stays, and a reaper that somebody killed is started again."""
    one = ProcessRunner()
    one.boot(order(), threading.Event()).stop()
    first = one._reaper.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    assert eventually(lambda: procs.start_ticks(first) is None)
    engine = one.boot(order("b2"), threading.Event())
    second = one._reaper.pid
    assert second not in (None, first)
    one.close()
    assert not engine.state().running
    assert procs.start_ticks(second or 0) is None


def test_preflight_names_what_is_missing(runner: ProcessRunner, launch: Launch) -> None:
    """Program, model and placeholder problems are told before anything starts."""
    with pytest.raises(EnvironmentProblem, match="no-such-engine"):
        runner.preflight(replace(launch, command=("no-such-engine",)))
    with pytest.raises(EnvironmentProblem, match=r"none\.gguf"):
        runner.preflight(replace(launch, model_path="/none.gguf"))
    with pytest.raises(UsageProblem, match="model"):
        runner.preflight(replace(launch, model_path=None))
    with pytest.raises(UsageProblem, match="no command"):
        runner.preflight(replace(launch, command=()))


def test_fingerprint_names_program_and_model(runner: ProcessRunner, launch: Launch) -> None:
    """Program and model are of the memory class."""
    found = runner.fingerprint(launch)
    assert found["memory.program"]
    assert "1585568 bytes" in found["memory.model"]


def test_recall_model_recalls(runner: ProcessRunner, order: Callable[..., BootOrder], launch: Launch) -> None:
    """The built-in recall model answers with what the prompt said, 4,000 tokens before."""
    engine = runner.boot(order(launch=replace(launch, model_path="builtin:recall")), threading.Event())
    filler = "The grass is green and the sky is blue today. " * 90
    prompt = f"The secret code is 48190. {filler}The secret code is"
    body = {"prompt": prompt, "n_predict": 7, "temperature": 0, "cache_prompt": False}
    answer = httpx.post(f"{engine.base_url}/completion", json=body, timeout=120).json()
    assert "48190" in answer["content"]
    assert answer["timings"]["prompt_n"] == len(prompt)
