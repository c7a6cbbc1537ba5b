"""Engines as plain processes: no container, no root; a memory cgroup where one is allowed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from llm_bisect.model import BisectError, EngineState, EnvironmentProblem, Launch, UsageProblem
from llm_bisect.runners import cgroup, executables, launching, ports, procs
from llm_bisect.runners.fingerprint import machine_fingerprint, process_fingerprint
from llm_bisect.runners.logfile import LogFile
from llm_bisect.runners.process_engine import ProcessEngine
from llm_bisect.runners.protocol import BootFailure, BootOrder, Clock, Engine
from llm_bisect.runners.readiness import NotReady, Watched, is_healthy, wait_ready
from llm_bisect.runners.realclock import RealClock
from llm_bisect.runners.reaper import Guarded, Reaper
from llm_bisect.runners.vram import Vram, check_gpus
from llm_bisect.spaces.engine_files import load_engine

# a process enters its cgroup itself, before the engine's first page is touched
_ENTER = "import os,sys; open(sys.argv[1],'w').write(str(os.getpid())); os.execv(sys.argv[2],sys.argv[2:])"

_REAPER_S = 30.0


class ProcessRunner:
    """Starts engines in sessions of their own, so that a Ctrl-C at the terminal does not reach them."""

    name = "process"
    simulated = False

    def __init__(self) -> None:
        self.clock: Clock = RealClock()
        self._reaper = Reaper()
        self._engines: dict[str, ProcessEngine] = {}

    def preflight(self, launch: Launch, *, gpus: Sequence[str] = (), allow_pull: bool = False) -> None:
        """Raise EnvironmentProblem where the program, the model, the memory cgroup or the GPU is missing."""
        if not launch.command:
            raise UsageProblem("the process launch has no command", hint="add `command: [llama-server, …]`")
        executables.resolve(launch.command[0])
        model = launching.model_file(launch)
        self._argv(launch, 1, model)
        if launch.memory_limit_mib is not None:
            cgroup.check()
        if launch.working_dir is not None and not Path(launch.working_dir).is_dir():
            raise EnvironmentProblem(f"the launch's working_dir {launch.working_dir} is not there")
        if launch.wants_gpu:
            check_gpus(gpus)

    def boot(self, order: BootOrder, stop: threading.Event) -> Engine:
        """Start the engine and wait until it is ready. Raises BootFailure, EnvironmentProblem."""
        launch = order.launch
        port = ports.free_port()
        model = launching.model_file(launch)
        argv = self._argv(launch, port, model)
        words = launching.fill(
            tuple(launch.env.values()), port=port, model=None if model is None else str(model)
        )
        launch_env = dict(zip(launch.env, words, strict=True))
        vram = Vram(order.gpus) if launch.wants_gpu else None
        group = None
        if launch.memory_limit_mib is not None:
            group = cgroup.planned(_slug(f"{order.boot}-{os.getpid()}"))
        # the reaper hears of the group before it exists: a kill in between leaves nothing
        self._reaper.guard(
            Guarded(
                "process",
                order.study,
                order.boot,
                str(procs.me()),
                cgroup=str(group.folder) if group else "",
                cgroup_version=group.version if group else 0,
            )
        )
        if group is not None and launch.memory_limit_mib is not None:
            try:
                cgroup.create(group, launch.memory_limit_mib)
            except EnvironmentProblem:
                self._forget(order.boot)
                raise
        health = load_engine(launch.engine).endpoints.get("health", "/health")
        spec = {
            "port": port,
            "log": str(order.log_path.absolute()),
            "health": health,
            "cgroup": str(group.folder) if group else "",
            "cgroup_version": group.version if group else 0,
            "gpus": list(order.gpus) if launch.wants_gpu else None,
            "reaper": self._reaper.identity,
        }
        env = {**self._environment(order, launch_env), procs.SPEC_VARIABLE: json.dumps(spec)}
        started = self.clock.now_s()
        order.log_path.parent.mkdir(parents=True, exist_ok=True)
        order.log_path.write_bytes(b"")
        log = LogFile(order.log_path)
        try:
            child = _start(argv, env, group, order.log_path, launch.working_dir)
        except OSError as error:
            self._forget(order.boot)
            if group is not None:
                group.kill_and_remove()
            raise BootFailure(
                EngineState(running=False, error=str(error)), "", "start", f"{argv[0]}: {error.strerror}"
            ) from error
        engine = ProcessEngine(
            study=order.study,
            boot=order.boot,
            base_url=f"http://127.0.0.1:{port}",
            api_key=launching.api_key(argv, env),
            log=log,
            identity=procs.ProcessId.of(child.pid) or procs.ProcessId(child.pid, 0),
            child=child,
            group=group,
            vram=vram,
            on_stopped=self._forget,
        )
        self._engines[order.boot] = engine
        watched = Watched(
            engine.base_url + health, running=lambda: engine.state().running, activity=engine.activity
        )
        try:
            wait_ready(
                watched, clock=self.clock, deadline_s=order.deadline_s, silence_s=order.silence_s, stop=stop
            )
        except NotReady as reason:
            engine.stop(timeout_s=5.0)
            raise BootFailure(
                engine.state(), log.text(), reason.reason, reason.message, self.clock.now_s() - started
            ) from None
        except BaseException:
            engine.stop(timeout_s=2.0)
            raise
        return engine

    def adopt(self, study: str, boot: str | None) -> Engine | None:
        """Stop what a crashed run of `study` left, except a `boot` that is ready: returned as an engine.

        Processes whose bisect still runs (another one with a study of that name) are left alone.
        """
        dead = [
            env for _, env in procs.find(study) if not procs.owner_alive(env.get(procs.OWNER_VARIABLE, ""))
        ]
        procs.wait_gone((_reaper_of(env) for env in dead), _REAPER_S)
        kept: Engine | None = None
        leaders: dict[str, dict[str, str]] = {}
        for identity, env in procs.find(study):
            owner = env.get(procs.OWNER_VARIABLE, "")
            name = env.get(procs.BOOT_VARIABLE, "")
            if name in self._engines or (owner != str(procs.me()) and procs.owner_alive(owner)):
                continue
            if name == boot and kept is None and _leads_session(identity.pid):
                kept = self._adopted(study, name, identity, env)
                if kept is not None:
                    continue
            leaders[name] = dict(env)
        for name, env in leaders.items():
            if kept is not None and name == kept.boot:
                continue
            procs.kill_all(study, name)
            group = _group_of(env)
            if group is not None:
                group.kill_and_remove()
        return kept

    def fingerprint(self, launch: Launch) -> Mapping[str, str]:
        """Program, model, GPU, driver and kernel."""
        found = {**machine_fingerprint(launch), **process_fingerprint(launch)}
        return dict(sorted(found.items()))

    def close(self) -> None:
        """Stop every engine of this runner, and its reaper."""
        for engine in list(self._engines.values()):
            engine.stop(timeout_s=5.0)
        self._reaper.close()

    def _forget(self, boot: str) -> None:
        self._engines.pop(boot, None)
        self._reaper.release(boot)

    def _argv(self, launch: Launch, port: int, model: Path | None) -> tuple[str, ...]:
        words = launching.fill(launch.command, port=port, model=None if model is None else str(model))
        if not any("{port}" in word for word in launch.command):
            flags = load_engine(launch.engine).port_flags
            words = launching.with_port(words, flags, port, where="the process launch")
        return (str(executables.resolve(words[0])), *words[1:])

    def _environment(self, order: BootOrder, launch_env: Mapping[str, str]) -> dict[str, str]:
        env = {**os.environ, **launch_env}
        if not order.allow_pull:
            env.update(load_engine(order.launch.engine).offline_env)
        if order.launch.wants_gpu and order.gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(order.gpus)
        env[procs.STUDY_VARIABLE] = order.study
        env[procs.BOOT_VARIABLE] = order.boot
        env[procs.OWNER_VARIABLE] = str(procs.me())
        return env

    def _adopted(
        self, study: str, boot: str, identity: procs.ProcessId, env: Mapping[str, str]
    ) -> ProcessEngine | None:
        try:
            spec = json.loads(env.get(procs.SPEC_VARIABLE, ""))
            base_url = f"http://127.0.0.1:{int(spec['port'])}"
            if not is_healthy(base_url + spec["health"]):
                return None
            vram = Vram(spec["gpus"]) if spec["gpus"] is not None else None
            log = LogFile(Path(spec["log"]))
        except (ValueError, KeyError, TypeError, BisectError):
            return None
        group = _group_of(env)
        command = Path(f"/proc/{identity.pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        engine = ProcessEngine(
            study,
            boot,
            base_url,
            launching.api_key(command, env),
            log,
            identity,
            None,
            group,
            vram,
            self._forget,
        )
        self._engines[boot] = engine
        guarded = Guarded(
            "process",
            study,
            boot,
            env.get(procs.OWNER_VARIABLE, ""),
            str(spec["cgroup"]),
            int(spec["cgroup_version"]),
        )
        self._reaper.guard(guarded)
        return engine


def _start(
    argv: Sequence[str],
    env: Mapping[str, str],
    group: cgroup.MemoryGroup | None,
    log_path: Path,
    folder: str | None,
) -> subprocess.Popen[bytes]:
    """The child writes its log by itself, so that it neither blocks nor dies with us."""
    words = list(argv)
    if group is not None:
        words = [sys.executable, "-I", "-S", "-c", _ENTER, str(group.procs_file), *words]
    with log_path.open("ab") as out:
        return subprocess.Popen(
            words,
            env=dict(env),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _group_of(env: Mapping[str, str]) -> cgroup.MemoryGroup | None:
    try:
        spec = json.loads(env.get(procs.SPEC_VARIABLE, ""))
        folder, version = str(spec["cgroup"]), int(spec["cgroup_version"])
    except (ValueError, KeyError, TypeError):
        return None
    # only ever a folder of ours, whatever the environment says
    return cgroup.MemoryGroup(Path(folder), version) if cgroup.is_ours(Path(folder)) else None


def _reaper_of(env: Mapping[str, str]) -> str:
    """The reaper that guards it: where it lives, what a crash left is about to go."""
    try:
        return str(json.loads(env.get(procs.SPEC_VARIABLE, ""))["reaper"])
    except (ValueError, KeyError, TypeError):
        return ""


def _leads_session(pid: int) -> bool:
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        return False


def _slug(text: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_.-]+", "-", text)
