"""The Docker runner with a real llama-server, in a daemon that the tests start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import docker
import httpx
import pytest

import llm_bisect
from llm_bisect.model import ComposeRef, EnvironmentProblem, Launch, Mount, UsageProblem
from llm_bisect.runners import compose_up
from llm_bisect.runners.docker_runner import DockerRunner
from llm_bisect.runners.protocol import BootFailure, BootOrder, Engine
from llm_bisect.spaces.compose import compose_command

pytestmark = [pytest.mark.docker, pytest.mark.llama]

FLAGS = ("-np", "1", "-fit", "off", "--cache-ram", "0", "-lv", "4", "--host", "0.0.0.0", "--port", "8080")  # noqa: S104
TIGHT = ("-c", "32768", "-fa", "off", "-ub", "2048")


@pytest.fixture
def runner(docker_host: Any, tiny_image: str) -> Iterator[DockerRunner]:
    """A Docker runner on the tests' daemon; all that it booted is stopped at the end."""
    one = DockerRunner()
    yield one
    one.close()


@pytest.fixture
def launch(tiny_image: str) -> Launch:
    """A plain image launch of the tiny model under a memory limit."""
    return Launch(
        "docker",
        "llamacpp",
        ("-m", "{model}", *TIGHT, *FLAGS),
        image=tiny_image,
        model_path="builtin:tiny-llama",
        memory_limit_mib=256,
        container_port=8080,
    )


@pytest.fixture
def order(tmp_path: Path, launch: Launch, request: pytest.FixtureRequest) -> Callable[..., BootOrder]:
    """Makes boot orders of a study named after the test."""

    def make(boot: str = "b1", launch: Launch = launch, **more: Any) -> BootOrder:
        return BootOrder(
            f"study/{request.node.name}", boot, launch, tmp_path / "side" / f"{boot}.log", **more
        )

    return make


def complete(engine: Engine, tokens: int) -> int:
    """Send a prompt of so many tokens (one a byte); the HTTP status, 0 where the connection broke."""
    try:
        return httpx.post(
            f"{engine.base_url}/completion",
            json={"prompt": "a" * tokens, "n_predict": 1, "cache_prompt": False},
            timeout=120,
        ).status_code
    except httpx.HTTPError:
        return 0


def ours(client: docker.DockerClient) -> list[Any]:
    """Containers and networks with a label of ours."""
    chosen: dict[str, Any] = {"label": "llm-bisect.study"}
    containers = client.containers.list(all=True, ignore_removed=True, filters=chosen)
    return [*containers, *client.networks.list(filters=chosen)]


def test_boot_serve_and_stop_leave_nothing(
    runner: DockerRunner, order: Callable[..., BootOrder], docker_host: Any
) -> None:
    """An engine boots, its log streams to the file, its memory is seen, and stopping removes everything."""
    one = order()
    runner.preflight(one.launch)
    engine = runner.boot(one, threading.Event())
    assert engine.state().running
    assert complete(engine, 1000) == 200
    sample = engine.memory()
    assert sample is not None
    assert (sample.source, sample.total_mib) == ("cgroup", 256)
    assert 0 < sample.free_mib < 250
    mark = engine.log_mark()
    assert "n_ctx" in engine.log_text()
    complete(engine, 500)
    assert engine.log_text(mark)
    assert engine.log_text() == one.log_path.read_text()
    container = ours(docker_host.client)[0]
    assert container.name == "bisect-study-test-boot-serve-and-stop-leave-b1"
    assert container.attrs["HostConfig"]["RestartPolicy"]["Name"] in ("no", "")
    assert container.attrs["HostConfig"]["PortBindings"]["8080/tcp"][0]["HostIp"] == "127.0.0.1"
    assert container.attrs["HostConfig"]["MemorySwap"] == container.attrs["HostConfig"]["Memory"] == 256 << 20
    assert "LLAMA_OFFLINE=1" in container.attrs["Config"]["Env"]
    engine.stop()
    engine.stop()
    assert engine.state().stopped_by_us
    assert ours(docker_host.client) == []


def test_memory_limit_kills_and_is_seen(
    runner: DockerRunner, order: Callable[..., BootOrder], docker_host: Any
) -> None:
    """Past its ceiling the container is really OOM-killed, and the state says so at once."""
    engine = runner.boot(order(), threading.Event())
    assert complete(engine, 6000) == 0
    state = engine.state()
    assert (state.running, state.exit_code, state.oom_killed) == (False, 137, True)
    engine.stop()
    assert engine.state() == state
    assert ours(docker_host.client) == []


def test_failed_boot_is_removed_and_told(
    runner: DockerRunner, order: Callable[..., BootOrder], launch: Launch, docker_host: Any
) -> None:
    """An engine that exits while booting is a BootFailure with its log and exit code, and is gone."""
    broken = replace(launch, command=("-m", "/models/none.gguf", *FLAGS))
    with pytest.raises(BootFailure) as caught:
        runner.boot(order(launch=broken), threading.Event())
    assert caught.value.reason == "exited"
    assert caught.value.state.exit_code == 1
    assert "none.gguf" in caught.value.log
    assert ours(docker_host.client) == []


def test_boot_killed_by_its_limit(
    runner: DockerRunner, order: Callable[..., BootOrder], launch: Launch
) -> None:
    """A KV cache larger than the limit is killed while booting."""
    big = replace(
        launch, command=("-m", "{model}", "-c", "131072", "-fa", "on", *FLAGS), memory_limit_mib=128
    )
    with pytest.raises(BootFailure) as caught:
        runner.boot(order(launch=big), threading.Event())
    assert (caught.value.reason, caught.value.state.exit_code, caught.value.state.oom_killed) == (
        "exited",
        137,
        True,
    )


def test_gpu_that_the_daemon_cannot_give_leaves_no_container(
    runner: DockerRunner, order: Callable[..., BootOrder], launch: Launch, docker_host: Any
) -> None:
    """A start that the daemon refuses leaves a container in state `created`: it is removed."""
    with pytest.raises(BootFailure) as caught:
        runner.boot(order(launch=replace(launch, wants_gpu=True)), threading.Event())
    assert caught.value.reason == "start"
    assert "could not select device driver" in caught.value.message
    assert ours(docker_host.client) == []


def test_stop_event_ends_a_boot(
    runner: DockerRunner, order: Callable[..., BootOrder], launch: Launch, docker_host: Any
) -> None:
    """A boot in progress is given up when asked, and leaves nothing."""
    stop = threading.Event()
    waits = replace(launch, command=("-m", "{model}", *TIGHT, *FLAGS[:-1], "8081"))
    threading.Timer(1.0, stop.set).start()
    with pytest.raises(BootFailure) as caught:
        runner.boot(order(launch=waits), stop)
    assert caught.value.reason == "aborted"
    assert caught.value.state.stopped_by_us
    assert ours(docker_host.client) == []


@pytest.mark.parametrize(
    ("limits", "reason"), [({"deadline_s": 1.5}, "deadline"), ({"silence_s": 1.5}, "silence")]
)
def test_boot_that_never_gets_ready(
    runner: DockerRunner,
    order: Callable[..., BootOrder],
    launch: Launch,
    limits: dict[str, float],
    reason: str,
) -> None:
    """A server that listens elsewhere ends by the deadline, or sooner by its silence."""
    deaf = replace(launch, command=("-m", "{model}", *TIGHT, *FLAGS[:-1], "8081"))
    with pytest.raises(BootFailure) as caught:
        runner.boot(order(launch=deaf, **limits), threading.Event())
    assert caught.value.reason == reason


def test_missing_image_says_how_to_get_it(runner: DockerRunner, launch: Launch) -> None:
    """A missing image is an environment problem with the command that pulls it."""
    with pytest.raises(EnvironmentProblem, match="no/such:image") as caught:
        runner.preflight(replace(launch, image="no/such:image"))
    assert "docker pull no/such:image" in str(caught.value.hint)


def test_daemon_down(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, launch: Launch) -> None:
    """Without a daemon it says so, in one sentence and with what to do."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(EnvironmentProblem, match="Docker is not running") as caught:
        DockerRunner().preflight(launch)
    assert caught.value.exit_status == 4
    assert caught.value.hint


def test_adopt_keeps_the_living_boot_and_removes_the_rest(
    runner: DockerRunner, order: Callable[..., BootOrder], docker_host: Any
) -> None:
    """Of what a crashed run left, the asked boot is an engine again; its others go, strangers stay."""
    study = order().study
    crashed = DockerRunner()
    kept = crashed.boot(order("keep"), threading.Event())
    crashed.boot(order("drop"), threading.Event())
    stranger = docker_host.client.containers.create("llm-bisect/llama-server:tiny", labels={"mine": "1"})
    other = docker_host.client.containers.create(
        "llm-bisect/llama-server:tiny", labels={"llm-bisect.study": "another", "llm-bisect.boot": "b"}
    )
    try:
        adopted = runner.adopt(study, "keep")
        assert adopted is not None
        assert adopted.base_url == kept.base_url
        assert adopted.state().running
        assert complete(adopted, 200) == 200
        assert "n_ctx" in adopted.log_text()
        names = {one.name for one in docker_host.client.containers.list(all=True)}
        assert {stranger.name, other.name} <= names
        assert not any(name.endswith("-drop") for name in names)
        assert runner.adopt(study, None) is None, "an engine in use is left alone"
        assert adopted.state().running
        adopted.stop()
        assert docker_host.ours(f"llm-bisect.study={study}") == []
    finally:
        stranger.remove(force=True)
        other.remove(force=True)
        crashed.close()


CRASH = """
import os, sys, threading
from pathlib import Path
from llm_bisect.model import Launch
from llm_bisect.runners.docker_runner import DockerRunner
from llm_bisect.runners.protocol import BootOrder
launch = Launch("docker", "llamacpp", tuple(sys.argv[2:]), image="llm-bisect/llama-server:tiny",
    model_path="builtin:tiny-llama", memory_limit_mib=256, container_port=8080)
runner = DockerRunner()
engine = runner.boot(BootOrder("crash", "b1", launch, Path(sys.argv[1])), threading.Event())
print(engine.base_url, runner._reaper.pid, flush=True)
threading.Event().wait()
"""


def crash(docker_host: Any, log: Path) -> tuple[subprocess.Popen[str], str, int]:
    """A bisect that has booted an engine, and waits to be killed."""
    root = str(Path(llm_bisect.__file__).parents[1])
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CRASH), str(log), "-m", "{model}", *TIGHT, *FLAGS],
        env={**docker_host.env, "PYTHONPATH": root},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    url, reaper = child.stdout.readline().split()
    return child, url, int(reaper)


def eventually(check: Callable[[], bool], within_s: float = 30.0) -> bool:
    """Wait until `check` holds."""
    deadline = time.monotonic() + within_s
    while not check():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def test_kill_9_stops_the_container(docker_host: Any, tiny_image: str, tmp_path: Path) -> None:
    """The reaper removes the container of a bisect that was killed, though signals reached it before."""
    child, _, reaper = crash(docker_host, tmp_path / "b1.log")
    assert len(docker_host.client.containers.list(filters={"label": "llm-bisect.study=crash"})) == 1
    for sig in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        os.kill(reaper, sig)
    child.kill()
    child.wait()
    assert eventually(lambda: ours(docker_host.client) == [])


def test_crash_of_bisect_and_reaper_is_adopted(
    docker_host: Any, runner: DockerRunner, tiny_image: str, tmp_path: Path
) -> None:
    """Where the reaper died too, the next run finds the engine by its labels and goes on with it."""
    child, url, reaper = crash(docker_host, tmp_path / "b1.log")
    os.kill(reaper, signal.SIGKILL)
    child.kill()
    child.wait()
    adopted = runner.adopt("crash", "b1")
    assert adopted is not None
    assert adopted.base_url == url
    assert complete(adopted, 100) == 200
    adopted.stop()
    assert ours(docker_host.client) == []


def compose_launch(tmp_path: Path, service: str = "llm", **ref: Any) -> Launch:
    """A compose launch of the file in `tmp_path`."""
    return Launch(
        "docker",
        "llamacpp",
        ("-m", "/models/model.gguf", *TIGHT, *FLAGS),
        compose=ComposeRef(str(tmp_path / "compose.yml"), service, "user", **ref),
        container_port=8080,
        model_path="builtin:tiny-llama",
        memory_limit_mib=256,
    )


COMPOSE = """
services:
  llm:
    image: llm-bisect/llama-server:tiny
    container_name: live
    restart: unless-stopped
    command: [-m, /models/model.gguf, -c, "32768", -fa, "off", -ub, "2048", -np, "1", --cache-ram, "0",
      -fit, "off", --host, "0.0.0.0", --port, "8080"]
    labels: [traefik.enable=true]
    environment: ["WHERE=${WHERE:-base}", DROP=me]
    ports: ["127.0.0.1:%(port)d:8080"]
    volumes:
      - hf:/named
      - fixed:/fixed
      - ./rw:/rw
      - ./triton_cache:/root/.triton
      - ./never_made_cache:/root/.cache/vllm
      - %(model)s:/models/model.gguf:ro
    depends_on: [side]
  side:
    image: llm-bisect/llama-server:tiny
    command: [--version]
    ports: ["127.0.0.1:%(port)d:1"]
  other:
    image: no/such:image
volumes:
  hf: {}
  fixed: {name: the-fixed-name}
"""


@pytest.fixture
def project(tmp_path: Path, docker_host: Any, tiny_image: str) -> Iterator[Path]:
    """A user's project, its volumes made, and its port in use by the live container."""
    from llm_bisect.runners.models import builtin_model
    from llm_bisect.runners.ports import free_port

    try:
        compose_command()
    except EnvironmentProblem as problem:
        pytest.skip(problem.message)
    folder = tmp_path / "checkout"
    (folder / "rw").mkdir(parents=True)
    (folder / "rw" / "kept.txt").write_text("mine")
    (folder / "triton_cache").mkdir()
    (folder / "compose.yml").write_text(COMPOSE % {"port": free_port(), "model": builtin_model("tiny-llama")})
    client = docker_host.client
    volumes = [client.volumes.create("user_hf"), client.volumes.create("the-fixed-name")]
    live = Launch("docker", "llamacpp", (), compose=ComposeRef(str(folder / "compose.yml"), "llm", "user"))
    port = compose_up.read_base(live)["services"]["llm"]["ports"][0]["published"]
    holder = client.containers.run(
        tiny_image,
        ["-m", "/m.gguf", "--host", "0.0.0.0", "--port", "8080"],  # noqa: S104
        name="live",
        detach=True,
        ports={"8080/tcp": ("127.0.0.1", int(port))},
        volumes={str(builtin_model("tiny-llama")): {"bind": "/m.gguf", "mode": "ro"}},
    )
    yield folder
    holder.remove(force=True)
    for volume in volumes:
        volume.remove()


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every path below with its bytes."""
    return {
        str(one.relative_to(folder)): one.read_bytes() if one.is_file() else None for one in folder.rglob("*")
    }


def test_compose_file_of_a_user_who_is_serving(
    project: Path, runner: DockerRunner, order: Callable[..., BootOrder], docker_host: Any
) -> None:
    """Beside the live container, on the same port in the file: booted, and checkout and volumes untouched."""
    client = docker_host.client
    before = tree(project)
    launch = compose_launch(project, variables={"WHERE": "candidate"}, sets_env={"DROP": None, "NEW": "$1"})
    runner.preflight(launch)
    one = order(launch=launch)
    engine = runner.boot(one, threading.Event())
    assert complete(engine, 1000) == 200
    container = client.containers.list(filters={"label": [f"llm-bisect.study={one.study}"]})[0]
    env = container.attrs["Config"]["Env"]
    assert {"WHERE=candidate", "NEW=$1", "LLAMA_OFFLINE=1"} <= set(env)
    assert not any(pair.startswith("DROP=") for pair in env)
    assert "traefik.enable" not in container.labels
    mounts = {one["Destination"]: one for one in container.attrs["Mounts"]}
    assert mounts["/named"]["Name"] == "user_hf"
    assert mounts["/fixed"]["Name"] == "the-fixed-name"
    for redirected in ("/rw", "/root/.triton", "/root/.cache/vllm"):
        assert not mounts[redirected]["Source"].startswith(str(project))
    assert (Path(mounts["/rw"]["Source"]) / "kept.txt").read_text() == "mine"
    assert container.attrs["HostConfig"]["Memory"] == container.attrs["HostConfig"]["MemorySwap"] == 256 << 20
    engine.stop()
    assert ours(client) == []
    assert tree(project) == before
    assert client.containers.get("live").status == "running"
    assert {"user_hf", "the-fixed-name"} == {one.name for one in client.volumes.list()}


def test_compose_candidate_with_its_own_command(
    project: Path, runner: DockerRunner, order: Callable[..., BootOrder]
) -> None:
    """A changed command reaches the engine, and its ceiling kills it as in a plain container."""
    launch = replace(compose_launch(project, sets_command=True), command=("-m", "{model}", *TIGHT, *FLAGS))
    engine = runner.boot(order(launch=launch), threading.Event())
    assert "n_ubatch" in engine.log_text()
    assert complete(engine, 6000) == 0
    assert engine.state().oom_killed
    engine.stop()


def test_shared_mounts_are_used_as_they_are(
    project: Path, runner: DockerRunner, order: Callable[..., BootOrder], docker_host: Any
) -> None:
    """With share_mounts the user's folders themselves are mounted."""
    (project / "never_made_cache").mkdir()
    launch = replace(compose_launch(project), share_mounts=True)
    engine = runner.boot(order(launch=launch), threading.Event())
    container = docker_host.client.containers.list(filters={"label": "llm-bisect.study"})[0]
    mounts = {one["Destination"]: one for one in container.attrs["Mounts"]}
    assert mounts["/rw"]["Source"] == str(project / "rw")
    engine.stop()


def test_missing_volume_is_said_before_the_boot(project: Path, runner: DockerRunner) -> None:
    """A named volume that the user's project never made is no new, empty one: exit 4, with its full name."""
    text = (project / "compose.yml").read_text()
    (project / "compose.yml").write_text(text.replace("  hf: {}", "  hf: {name: gone}"))
    with pytest.raises(EnvironmentProblem, match="gone"):
        runner.preflight(compose_launch(project))


def test_image_of_a_dependency_is_looked_for(project: Path, runner: DockerRunner) -> None:
    """A missing image is named before the first boot, also where a dependency needs it."""
    text = (project / "compose.yml").read_text()
    (project / "compose.yml").write_text(text.replace("depends_on: [side]", "depends_on: [side, other]"))
    with pytest.raises(EnvironmentProblem, match="no/such:image"):
        runner.preflight(compose_launch(project))


def test_failed_compose_start_leaves_nothing(
    project: Path, runner: DockerRunner, order: Callable[..., BootOrder], docker_host: Any
) -> None:
    """What Compose made before the daemon refused is removed: container, dependency and network."""
    text = (project / "compose.yml").read_text()
    gpu = (
        "    deploy: {resources: {reservations: {devices: [{capabilities: [gpu], count: all}]}}}\n    labels:"
    )
    (project / "compose.yml").write_text(text.replace("    labels:", gpu, 1))
    with pytest.raises(BootFailure) as caught:
        runner.boot(order(launch=compose_launch(project)), threading.Event())
    assert caught.value.reason == "start"
    assert "could not select device driver" in caught.value.message
    assert ours(docker_host.client) == []
    assert docker_host.client.containers.get("live").status == "running"


def test_host_network_listens_on_a_port_of_ours(
    project: Path, runner: DockerRunner, order: Callable[..., BootOrder]
) -> None:
    """With network_mode: host the engine's own port flag is set: the file's port stays its user's."""
    text = (project / "compose.yml").read_text()
    lines = [line for line in text.splitlines() if "ports:" not in line]
    (project / "compose.yml").write_text(
        "\n".join(lines).replace("    labels:", "    network_mode: host\n    labels:", 1)
    )
    engine = runner.boot(order(launch=compose_launch(project)), threading.Event())
    assert not engine.base_url.endswith(":8080")
    assert complete(engine, 100) == 200
    engine.stop()


def test_wrong_compose_file_is_a_usage_problem(project: Path, runner: DockerRunner) -> None:
    """An unset required variable is told in Compose's own words."""
    text = (project / "compose.yml").read_text()
    (project / "compose.yml").write_text(text.replace("${WHERE:-base}", "${MODEL_DIR:?set it}"))
    with pytest.raises(UsageProblem, match="MODEL_DIR"):
        runner.preflight(compose_launch(project))


def test_missing_mount_is_said_before_the_boot(runner: DockerRunner, launch: Launch, tmp_path: Path) -> None:
    """A read-only bind whose source is missing is named."""
    with pytest.raises(EnvironmentProblem, match=r"patch\.py"):
        runner.preflight(
            replace(launch, mounts=(Mount(str(tmp_path / "patch.py"), "/p.py", read_only=True),))
        )


def test_fingerprint_names_what_memory_depends_on(runner: DockerRunner, launch: Launch) -> None:
    """Image and model are of the memory class; kernel and Docker are notes."""
    found = runner.fingerprint(launch)
    assert found["memory.image"].startswith("layers ")
    assert "bytes" in found["memory.model"]
    assert found["note.docker"]
    assert all(key.split(".")[0] in ("memory", "time", "note") for key in found)


@pytest.mark.parametrize("host", ["tcp://127.0.0.1:1", "ssh://rig"])
def test_daemon_of_another_machine_is_refused(
    monkeypatch: pytest.MonkeyPatch, launch: Launch, host: str
) -> None:
    """Ports and folders of a far daemon are not ours: exit 4 before anything is asked of it."""
    monkeypatch.setenv("DOCKER_HOST", host)
    with pytest.raises(EnvironmentProblem, match="over the network"):
        DockerRunner().preflight(launch)


def test_podman_gets_no_gpu_launch(
    runner: DockerRunner, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Podman would start it without its GPU and say nothing."""
    version = {"Components": [{"Name": "Podman Engine"}]}
    monkeypatch.setattr(docker.DockerClient, "version", lambda self: version)
    with pytest.raises(EnvironmentProblem, match="Podman"):
        runner.preflight(replace(launch, wants_gpu=True))
