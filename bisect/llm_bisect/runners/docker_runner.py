"""Engines in Docker containers, from a compose file that stays the user's or from a plain image."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import docker
from docker import errors

from llm_bisect.model import EngineState, EnvironmentProblem, Launch, Mount, UsageProblem
from llm_bisect.runners import (
    compose_up,
    docker_client,
    docker_start,
    engine_api,
    launching,
    override,
    procs,
)
from llm_bisect.runners.docker_engine import DockerEngine
from llm_bisect.runners.docker_log import LogFollower
from llm_bisect.runners.fingerprint import docker_fingerprint, machine_fingerprint
from llm_bisect.runners.logfile import LogFile
from llm_bisect.runners.protocol import BootFailure, BootOrder, Clock, Engine
from llm_bisect.runners.readiness import NotReady, Watched, is_healthy, wait_ready
from llm_bisect.runners.realclock import RealClock
from llm_bisect.runners.reaper import Guarded, Reaper
from llm_bisect.runners.vram import Vram, check_gpus
from llm_bisect.spaces.engine_files import load_engine

_REAPER_S = 30.0


class DockerRunner:
    """Touches only containers and networks that carry its own labels and the study's name."""

    name = "docker"
    simulated = False

    def __init__(self) -> None:
        self.clock: Clock = RealClock()
        self._reaper = Reaper()
        self._engines: dict[str, DockerEngine] = {}
        self._connected: docker.DockerClient | None = None

    def preflight(self, launch: Launch, *, gpus: Sequence[str] = (), allow_pull: bool = False) -> None:
        """Raise EnvironmentProblem with what is missing: daemon, Compose, image, volume, mount, model, GPU.

        Raises UsageProblem where the compose file cannot be started the way bisect has to.
        """
        client = self._client()
        if launch.wants_gpu and docker_client.is_podman(client):
            raise EnvironmentProblem(
                "Podman answers on Docker's socket, and it starts containers without the GPUs they ask for",
                hint="point DOCKER_HOST at a Docker daemon, or use --runner process",
            )
        if launch.memory_limit_mib is not None:
            docker_client.check_memory_limit(client.info())
        launch = docker_start.with_model(launch)
        if launch.compose is not None:
            self._preflight_compose(client, launch, allow_pull)
        elif launch.image is None:
            raise UsageProblem(
                "the docker launch names neither a compose file nor an image",
                hint="add `compose:` or `image:` to it",
            )
        else:
            docker_client.image_id(client, launch.image, allow_pull=allow_pull)
            if override.uses_host_network({"network_mode": launch.network_mode}):
                flags = load_engine(launch.engine).port_flags
                launching.with_port(launch.command, flags, 1, where="network_mode: host in the launch")
            _check_sources(launch.mounts, launch)
        if launch.wants_gpu:
            check_gpus(gpus)

    def boot(self, order: BootOrder, stop: threading.Event) -> Engine:
        """Start it and wait until it is ready. Raises BootFailure, EnvironmentProblem, UsageProblem."""
        client = self._client()
        order = replace(order, launch=docker_start.with_model(order.launch))
        engine_file = load_engine(order.launch.engine)
        vram = Vram(order.gpus) if order.launch.wants_gpu else None
        order.log_path.parent.mkdir(parents=True, exist_ok=True)
        order.log_path.write_bytes(b"")
        self._guard(client, order.study, order.boot, str(procs.me()))
        started = self.clock.now_s()
        try:
            with docker_client.daemon_errors("starting the container"):
                container = docker_start.start(client, order, engine_file, stop, self._reaper.identity)
        except docker_start.StartFailed as error:
            self._clean(client, order)
            reason = "aborted" if stop.is_set() else "start"
            state = EngineState(running=False, error=str(error), stopped_by_us=stop.is_set())
            raise BootFailure(state, "", reason, str(error), self.clock.now_s() - started) from None
        except BaseException:
            with contextlib.suppress(EnvironmentProblem):  # what went wrong first is what is told
                self._clean(client, order)
            raise
        try:
            engine = DockerEngine(
                study=order.study,
                boot=order.boot,
                base_url=f"http://127.0.0.1:{container.port}",
                api_key=_api_key(client, container.container),
                client=client,
                container=container.container,
                log=LogFile(order.log_path),
                follower=LogFollower(client, container.container, order.log_path),
                limit_mib=order.launch.memory_limit_mib,
                vram=vram,
                on_stopped=self._forget,
                warm_caches=container.warm_caches,
            )
        except BaseException:
            self._clean(client, order)
            raise
        self._engines[order.boot] = engine
        watched = Watched(
            engine.base_url + engine_file.endpoints.get("health", "/health"),
            running=lambda: engine.state().running,
            activity=engine.activity,
        )
        try:
            wait_ready(
                watched, clock=self.clock, deadline_s=order.deadline_s, silence_s=order.silence_s, stop=stop
            )
        except NotReady as reason:
            engine.stop(timeout_s=5.0)
            raise BootFailure(
                engine.state(), engine.log.text(), reason.reason, reason.message, self.clock.now_s() - started
            ) from None
        except BaseException:
            engine.stop(timeout_s=2.0)
            raise
        return engine

    def adopt(self, study: str, boot: str | None) -> Engine | None:
        """Remove what a crashed run of `study` left, except a `boot` that is ready: returned as an engine.

        Containers whose bisect still runs (another one with a study of that name) are left alone.
        """
        client = self._client()
        label = f"{engine_api.STUDY_LABEL}={study}"
        kept: Engine | None = None
        leftover: set[str] = set()
        with docker_client.daemon_errors("looking for what a crash left"):
            found = client.api.containers(all=True, filters={"label": label})
            dead = [one["Labels"] for one in found if not _owner_lives(one["Labels"])]
            procs.wait_gone((_reaper_of(marks) for marks in dead), _REAPER_S)
            containers = client.api.containers(all=True, filters={"label": label})
            networks = client.api.networks(filters={"label": label})
        held: set[str] = set()
        for one in [*containers, *networks]:
            marks = one.get("Labels") or {}
            name = marks.get(engine_api.BOOT_LABEL, "")
            if name in self._engines or _owned_by_another(marks):
                held.add(name)
            elif name == boot and kept is None and one.get("State") == "running":
                kept = self._adopted(client, study, name, str(one["Id"]), marks)
                if kept is None:
                    leftover.add(name)
            else:
                leftover.add(name)
        leftover -= held | ({kept.boot} if kept is not None else set())
        for name in sorted(leftover):
            self._remove(client, study, name)
        return kept

    def fingerprint(self, launch: Launch) -> Mapping[str, str]:
        """Image, model, patches, GPU, driver, kernel and Docker."""
        found = {**machine_fingerprint(launch), **docker_fingerprint(self._client(), launch)}
        return dict(sorted(found.items()))

    def close(self) -> None:
        """Stop every engine of this runner, and its reaper."""
        left = False
        for engine in list(self._engines.values()):
            try:
                engine.stop(timeout_s=5.0)
            except EnvironmentProblem:
                left = True  # the reaper tries again, for a minute, when this process has ended
        if not left:
            self._reaper.close()
        if self._connected is not None:
            self._connected.close()
            self._connected = None

    def _client(self) -> docker.DockerClient:
        if self._connected is None:
            self._connected = docker_client.connect()
        else:
            try:
                self._connected.ping()
            except (errors.DockerException, OSError):
                self._connected = docker_client.connect()
        return self._connected

    def _preflight_compose(self, client: docker.DockerClient, launch: Launch, allow_pull: bool) -> None:
        ref = override.ref_of(launch)
        base = compose_up.read_base(launch)
        service = override.service_of(base, launch)
        services = override.needed(base, ref.service)
        for name in services:
            docker_client.image_id(client, override.image_of(base, name, launch), allow_pull=allow_pull)
            _check_sources(docker_start.mounts_of(base["services"][name]), launch)
        docker_client.check_volumes(client, override.named_volumes(base, services))
        docker_client.check_shared_volumes(client, override.named_volumes(base, services[1:]))
        if override.uses_host_network(service):
            flags = load_engine(launch.engine).port_flags
            launching.with_port(launch.command, flags, 1, where=f"network_mode: host in {ref.file}")

    def _adopted(
        self, client: docker.DockerClient, study: str, boot: str, container: str, marks: Mapping[str, str]
    ) -> DockerEngine | None:
        try:
            spec = json.loads(marks[engine_api.SPEC_LABEL])
            base_url = f"http://127.0.0.1:{int(spec['port'])}"
            path = Path(spec["log"])
            if marks[engine_api.MACHINE_LABEL] != procs.machine_boot_id() or not path.parent.is_dir():
                return None
            if not is_healthy(base_url + spec["health"]):
                return None
            vram = Vram(spec["gpus"]) if spec["gpus"] is not None else None
            limit = spec["limit_mib"]
        except (KeyError, ValueError, TypeError, EnvironmentProblem):
            return None
        self._guard(client, study, boot, marks.get(engine_api.OWNER_LABEL, ""))
        engine = DockerEngine(
            study=study,
            boot=boot,
            base_url=base_url,
            api_key=_api_key(client, container),
            client=client,
            container=container,
            log=LogFile(path),
            follower=LogFollower(client, container, path),
            limit_mib=limit,
            vram=vram,
            on_stopped=self._forget,
            warm_caches={},
        )
        self._engines[boot] = engine
        return engine

    def _guard(self, client: docker.DockerClient, study: str, boot: str, owner: str) -> None:
        self._reaper.guard(Guarded("docker", study, boot, owner, socket=docker_client.socket_path(client)))

    def _forget(self, boot: str) -> None:
        self._engines.pop(boot, None)
        self._reaper.release(boot)

    def _clean(self, client: docker.DockerClient, order: BootOrder) -> None:
        """A failed start leaves a container in state `created`, and perhaps what it depends on."""
        self._remove(client, order.study, order.boot)
        self._reaper.release(order.boot)

    def _remove(self, client: docker.DockerClient, study: str, boot: str) -> None:
        try:
            engine_api.remove_until_gone(docker_client.socket_path(client), study, boot)
        except engine_api.DaemonGone as error:
            raise EnvironmentProblem(
                f"the container of boot {boot} could not be removed: the Docker daemon does not answer",
                hint="start Docker again and run the same command: it removes what is left",
            ) from error


def _owner_lives(marks: Mapping[str, str]) -> bool:
    same_machine_start = marks.get(engine_api.MACHINE_LABEL, "") == procs.machine_boot_id()
    return same_machine_start and procs.owner_alive(marks.get(engine_api.OWNER_LABEL, ""))


def _owned_by_another(marks: Mapping[str, str]) -> bool:
    return _owner_lives(marks) and marks.get(engine_api.OWNER_LABEL, "") != str(procs.me())


def _reaper_of(marks: Mapping[str, str]) -> str:
    """The reaper that guards it: where it lives, what a crash left is about to go."""
    if marks.get(engine_api.MACHINE_LABEL, "") != procs.machine_boot_id():
        return ""
    try:
        return str(json.loads(marks.get(engine_api.SPEC_LABEL, ""))["reaper"])
    except (ValueError, KeyError, TypeError):
        return ""


def _api_key(client: docker.DockerClient, container: str) -> str | None:
    """The key that the container's own command or environment sets."""
    with contextlib.suppress(errors.DockerException, OSError):
        config = client.api.inspect_container(container)["Config"]
        pairs = (str(pair).partition("=") for pair in config.get("Env") or [])
        env = {key: value for key, _, value in pairs}
        return launching.api_key([*(config.get("Entrypoint") or []), *(config.get("Cmd") or [])], env)
    return None


def _check_sources(mounts: Sequence[Mount], launch: Launch) -> None:
    """Docker would make a missing source as an empty folder, in the user's checkout."""
    for mount in mounts:
        used = mount.read_only or launch.share_mounts  # others go to a folder of ours
        if mount.kind == "bind" and used and not Path(mount.source).exists():
            raise EnvironmentProblem(
                f"{mount.source}, which the launch mounts at {mount.target}, is not there",
                hint="get that file or folder, or correct the mount",
            )
