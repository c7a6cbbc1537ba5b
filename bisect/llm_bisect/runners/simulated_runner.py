"""The simulated runner: a server process that stands in for vLLM on a card that is not there.

Nothing here is ever chosen by itself, and every answer that comes from it says that it is simulated.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import llm_bisect
from llm_bisect.model import EngineState, EnvironmentProblem, Launch, MemorySample, UsageProblem
from llm_bisect.runners import ports, procs
from llm_bisect.runners.logfile import LogFile
from llm_bisect.runners.protocol import BootFailure, BootOrder, Engine
from llm_bisect.runners.sim import physics, rig
from llm_bisect.runners.sim.clock import VirtualClock
from llm_bisect.runners.sim.settings import read_launch, relevant_env, without_key
from llm_bisect.runners.sim.state import SharedState, Snapshot

SCALE_VARIABLE = "LLM_BISECT_SIM_SCALE"
DEFAULT_SCALE = 3000.0
_HISTORY = "simulated-rig.json"
_START_S = 60.0  # real seconds for the process to show its first sign of life
_POLL_S = 0.005
_START = (
    "import sys; sys.path.insert(0, sys.argv[1]); from llm_bisect.runners.sim.server import main; "
    "import os; status = main(sys.argv[2:]); sys.stdout.flush(); os._exit(status)"
)


class SimulatedEngine:
    """One server process."""

    api_key: str | None = None

    def __init__(
        self,
        boot: str,
        port: int,
        child: subprocess.Popen[bytes],
        log: LogFile,
        shared: SharedState,
        on_stopped: Callable[[SimulatedEngine], None],
    ) -> None:
        self.boot, self.base_url = boot, f"http://127.0.0.1:{port}"
        self._port, self._child, self._log, self._shared = port, child, log, shared
        self._on_stopped = on_stopped
        self._stopping = threading.Lock()
        self._last: EngineState | None = None
        self._last_seen: Snapshot | None = None

    def log_text(self, since: int = 0) -> str:
        return self._log.text(since)

    def log_mark(self) -> int:
        return self._log.mark()

    def state(self) -> EngineState:
        if self._last is not None:
            return self._last
        code = self._child.poll()
        return EngineState(code is None, code, status="running" if code is None else "exited")

    def memory(self) -> MemorySample | None:
        """Free memory of the simulated card; None once the process is gone."""
        state = self.snapshot()
        if state is None or not self.state().running:
            return None
        return MemorySample(state.free_mib, state.total_mib, source="simulated", others_mib=0.0)

    def snapshot(self) -> Snapshot | None:
        """The rig now, or as it was last seen."""
        if self._last is None:
            self._last_seen = self._shared.read() or self._last_seen
        return self._last_seen

    def is_healthy(self) -> bool:
        """True where its health endpoint answers 200."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5.0)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def stop(self, timeout_s: float = 20.0) -> None:
        """End the process: asked first, killed after `timeout_s` real seconds."""
        with self._stopping:
            if self._last is not None:
                return
            ran = self._child.poll() is None
            if ran:
                self._child.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._child.wait(timeout_s)
            if self._child.poll() is None:
                self._child.kill()
            code = self._child.wait()
            self.snapshot()
            self._last = EngineState(False, code, stopped_by_us=ran, status="exited")
            self._on_stopped(self)
            if self._child.stdin is not None:
                with contextlib.suppress(OSError):
                    self._child.stdin.close()


class SimulatedRunner:
    """Boots simulated engines. `scale`: seconds of the rig in one real second."""

    name = "simulated"
    simulated = True

    def __init__(self, scale: float | None = None) -> None:
        self.scale = scale if scale is not None else _scale_from_environment()
        self.clock: VirtualClock = VirtualClock(self.scale)
        self._engines: list[SimulatedEngine] = []

    def preflight(self, launch: Launch, *, gpus: Sequence[str] = (), allow_pull: bool = False) -> None:
        """Raise UsageProblem where the launch names no card and model that are known."""
        self._rig(launch)

    def boot(self, order: BootOrder, stop: threading.Event) -> Engine:
        """Start it and wait until it is ready. Raises BootFailure, UsageProblem, EnvironmentProblem."""
        card, model = self._rig(order.launch)
        folder = order.log_path.parent
        history = _History(folder / _HISTORY, f"{card.name}/{model.name}")
        port = ports.free_port()
        began_s = self.clock.now_s()
        spec_path, state_path = _beside(order.log_path, ".spec.json"), _beside(order.log_path, ".state")
        env = relevant_env(order.launch.env)
        argv = without_key(order.launch.command)
        mounts = [path for one in order.launch.mounts for path in (one.source, one.target)]
        spec: dict[str, Any] = {
            "card": rig.plain(card),
            "model": rig.plain(model),
            "launch": {"argv": argv, "env": env, "mounts": mounts},
            "served": [asdict(one) for one in history.shapes],
            "scale": self.scale,
            "started_s": began_s,
            "state": str(state_path.absolute()),
            "dies_with_stdin": True,
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
            order.log_path.write_bytes(b"")
            spec_path.write_text(json.dumps(spec), encoding="utf-8")
            shared = SharedState(state_path, create=True)
        except OSError as error:
            raise EnvironmentProblem(
                f"{folder}: cannot be written: {error.strerror}", hint="--journals names another folder"
            ) from error
        child = _start(order, spec_path, port)
        engine = SimulatedEngine(order.boot, port, child, LogFile(order.log_path), shared, self._forget)
        self._engines.append(engine)
        self.clock.attach(engine, began_s)
        try:
            self._wait(engine, child, order, stop, began_s)
            settings = read_launch(argv, env, mounts)
            booted = physics.boot(card, model, settings, history.shapes)
            if booted.first_of_shape:
                history.remember(physics.shape_of(settings, booted.context_tokens))
        except BaseException:
            engine.stop(2.0)
            raise
        finally:
            # read by the server by now, and of no use to anybody else
            for path in (spec_path, state_path):
                path.unlink(missing_ok=True)
        return engine

    def adopt(self, study: str, boot: str | None) -> Engine | None:
        """Kill what a crashed run left. A simulated engine dies with its bisect, so none is ever adopted."""
        for identity, env in list(procs.find(study)):
            owner = env.get(procs.OWNER_VARIABLE, "")
            if env.get(_MARK) == "1" and not procs.owner_alive(owner):
                procs.kill_all(study, env.get(procs.BOOT_VARIABLE, ""), owner)
                procs.wait_gone([str(identity)], 5.0)
        return None

    def fingerprint(self, launch: Launch) -> Mapping[str, str]:
        """The card's name and a hash of both files' figures."""
        card, model = self._rig(launch)
        return {
            "memory.gpu": f"simulated {card.name}",
            "memory.model": rig.fingerprint(card, model),
            "note.simulated": "true",
        }

    def close(self) -> None:
        for engine in list(self._engines):
            engine.stop(5.0)

    def _forget(self, engine: SimulatedEngine) -> None:
        self.clock.detach(engine)
        if engine in self._engines:
            self._engines.remove(engine)

    def _rig(self, launch: Launch) -> tuple[rig.Card, rig.Model]:
        if launch.simulated is None:
            raise UsageProblem(
                "the launch names no simulated card and model",
                hint=f"launches: simulated: {{card: {(rig.known('simulated-card') or ['NAME'])[0]}, model: "
                f"{(rig.known('simulated-model') or ['NAME'])[0]}}}",
            )
        return rig.find_card(launch.simulated.card), rig.find_model(launch.simulated.model)

    def _wait(
        self,
        engine: SimulatedEngine,
        child: subprocess.Popen[bytes],
        order: BootOrder,
        stop: threading.Event,
        began_s: float,
    ) -> None:
        """Until it is ready. Raises BootFailure."""
        started, seen_s = time.monotonic(), began_s
        while True:
            state = engine.snapshot()
            now_s = self.clock.now_s()
            if now_s > seen_s:
                seen_s, started = now_s, time.monotonic()
            if child.poll() is not None:
                raise self._failure(engine, "exited", "", began_s)
            if state is not None and state.ready and engine.is_healthy():
                return
            if stop.is_set():
                raise self._failure(engine, "aborted", "stopped while booting", began_s)
            if now_s - began_s > order.deadline_s:
                raise self._failure(engine, "deadline", f"not ready after {order.deadline_s:.0f} s", began_s)
            if time.monotonic() - started > _START_S:
                raise self._failure(engine, "start", "the simulated engine does not start", began_s)
            time.sleep(_POLL_S)

    def _failure(self, engine: SimulatedEngine, reason: str, message: str, began_s: float) -> BootFailure:
        engine.stop(2.0)
        return BootFailure(
            engine.state(), engine.log_text(), reason, message, wall_s=self.clock.now_s() - began_s
        )


_MARK = "LLM_BISECT_SIMULATED"


class _History:
    """What this study's rig has served so far: kept beside its logs, so that a resumed study boots alike."""

    def __init__(self, path: Path, name: str) -> None:
        self._path, self._name = path, name

    @property
    def shapes(self) -> list[rig.Shape]:
        try:
            return [rig.Shape(**one) for one in self._read().get(self._name, ())]
        except TypeError:
            return []  # written by hand, or by another version

    def remember(self, shape: rig.Shape) -> None:
        """Raises EnvironmentProblem where it cannot be written."""
        found = self._read()
        found.setdefault(self._name, []).append(asdict(shape))
        scratch = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        try:
            scratch.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            scratch.replace(self._path)
        except OSError as error:
            raise EnvironmentProblem(f"{self._path}: cannot be written: {error.strerror}") from error

    def _read(self) -> dict[str, list[dict[str, Any]]]:
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


def _start(order: BootOrder, spec_path: Path, port: int) -> subprocess.Popen[bytes]:
    root = str(Path(llm_bisect.__file__).resolve().parents[1])
    labels = {
        procs.STUDY_VARIABLE: order.study,
        procs.BOOT_VARIABLE: order.boot,
        procs.OWNER_VARIABLE: str(procs.me()),
        _MARK: "1",
    }
    words = [sys.executable, "-I", "-S", "-c", _START, root]
    with order.log_path.open("ab") as out:
        # its stdin is the leash: that pipe closes when this process dies, however it dies
        return subprocess.Popen(
            [*words, "--spec", str(spec_path), "--port", str(port)],
            env={"PATH": os.environ.get("PATH", ""), "LC_ALL": "C.UTF-8", **labels},
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _beside(log_path: Path, suffix: str) -> Path:
    return log_path.with_name(log_path.name + suffix)


def _scale_from_environment() -> float:
    text = os.environ.get(SCALE_VARIABLE, "")
    try:
        scale = float(text) if text else DEFAULT_SCALE
    except ValueError:
        scale = 0.0
    if not 0.01 <= scale <= 1e6:
        raise UsageProblem(f"{SCALE_VARIABLE}={text!r} is no number from 0.01 to 1000000")
    return scale
