"""One engine at work: its clock, its log and its published state, shared by the threads that serve."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from llm_bisect.runners.sim import log
from llm_bisect.runners.sim.engine import SimEngine
from llm_bisect.runners.sim.rig import Card, Model, Shape, card_from, model_from
from llm_bisect.runners.sim.settings import Settings
from llm_bisect.runners.sim.state import SharedState, Snapshot

DEFAULT_SCALE = 3000.0
_STATS_S = 10.0  # seconds of the rig between two lines of statistics
_LONGEST_NAP_S = 0.25  # real seconds; a nap ends early where the process is told to stop

Gone = Callable[[], bool]
"""True where the client of the request at hand has hung up."""


@dataclass(frozen=True)
class Spec:
    """What the process is told."""

    card: Card
    model: Model
    argv: tuple[str, ...]
    env: dict[str, str]
    mounts: tuple[str, ...]
    served: tuple[Shape, ...] = ()
    scale: float = DEFAULT_SCALE
    started_s: float = 0.0
    state: str | None = None
    dies_with_stdin: bool = False

    @classmethod
    def read(cls, path: Path) -> Spec:
        """Raises OSError, ValueError, KeyError, TypeError."""
        data = json.loads(path.read_text(encoding="utf-8"))
        launch = data["launch"]
        return cls(
            card=card_from(data["card"]),
            model=model_from(data["model"]),
            argv=tuple(launch["argv"]),
            env=dict(launch.get("env") or {}),
            mounts=tuple(launch.get("mounts") or ()),
            served=tuple(Shape(**one) for one in data.get("served") or ()),
            scale=float(data.get("scale") or DEFAULT_SCALE),
            started_s=float(data.get("started_s") or 0.0),
            state=data.get("state"),
            dies_with_stdin=bool(data.get("dies_with_stdin")),
        )


class EngineDied(Exception):
    """The engine ran out of memory while it served this request."""


class ClientGone(Exception):
    """The client hung up; its request is dropped."""


class Rig:
    """One engine, its clock and its log, shared by the threads that serve requests."""

    def __init__(self, spec: Spec, settings: Settings, out: TextIO | None = None) -> None:
        self.spec, self.settings = spec, settings
        self.engine = SimEngine(spec.card, spec.model, settings, spec.served, spec.started_s)
        self.lines = log.Lines(spec.card, spec.model, settings, self.engine.boot)
        self.lock = threading.RLock()  # of the engine's numbers and of the log
        self.turn = threading.Lock()  # one request at a time
        self.waiting = 0
        self.ready = False
        self.ended = threading.Event()  # told to stop
        self.died = threading.Event()  # and its client has been told
        self.requests = 0
        self.stats_at_s = spec.started_s
        self._out = out if out is not None else sys.stdout
        self._shared = SharedState(Path(spec.state)) if spec.state else None
        self.show()

    # --- log, state, time

    def say(self, lines: Iterable[str] | str) -> None:
        with self.lock:
            for line in (lines,) if isinstance(lines, str) else lines:
                self._out.write(line + "\n")
            self._out.flush()

    def snapshot(self) -> Snapshot:
        with self.lock:
            engine = self.engine
            return Snapshot(
                virtual_s=engine.virtual_s,
                free_mib=engine.free_mib,
                total_mib=self.spec.card.total_mib,
                processed_tokens=engine.processed_tokens,
                running=engine.running,
                ready=float(self.ready),
            )

    def show(self) -> None:
        """Publish the state to the runner."""
        if self._shared is not None:
            with self.lock:
                self._shared.write(self.snapshot())

    def pass_time(self, seconds: float) -> None:
        """Let the real time of this slice pass; the engine's own clock has moved already."""
        end = time.monotonic() + seconds / self.spec.scale
        while (left := end - time.monotonic()) > 0 and not self.ended.is_set():
            time.sleep(min(left, _LONGEST_NAP_S))
        self.show()

    # --- boot

    def boot(self) -> bool:
        """Boot it; True where it is ready."""
        self.say(self.lines.head(self.engine.virtual_s))
        for seconds in self.engine.boot_slices():
            self.pass_time(seconds)
        self.say(self.lines.booting(self.engine.virtual_s))
        self.show()
        return self.engine.boot.ready

    # --- requests

    def new_id(self, kind: str) -> str:
        with self.lock:
            self.requests += 1
            return f"{kind}-{self.requests:08x}"

    def wait_turn(self, gone: Gone) -> None:
        """Wait until no other request runs. Raises ClientGone, EngineDied."""
        with self.lock:
            self.waiting += 1
        try:
            while not self.turn.acquire(timeout=0.02):
                if gone():
                    raise ClientGone
            if self.engine.dead:
                self.turn.release()
                raise EngineDied
        finally:
            with self.lock:
                self.waiting -= 1

    def prefill(self, request: str, ids: Sequence[int], gone: Gone) -> int:
        """Compute a prompt; the number of its tokens that came from the cache. Raises as above."""
        engine = self.engine
        with self.lock:
            cached = engine.cached_tokens(ids)
            engine.running = 1
            began_s, self.stats_at_s = engine.virtual_s, engine.virtual_s
            steps = engine.prefill_slices(len(ids), cached)
        while True:
            with self.lock:
                seconds = next(steps, None)
                self._stats((engine.processed_tokens - cached) / max(1e-9, engine.virtual_s - began_s), 0.0)
            if seconds is None:
                break
            self.pass_time(seconds)
            if gone():
                raise ClientGone
        if engine.death is not None:
            self._die(request, len(ids))
            raise EngineDied
        return cached

    def decode(self, ids: Sequence[int], new_tokens: int, gone: Gone) -> Iterator[int]:
        """Tokens of the answer as they come: how many each time. Raises as above."""
        steps = self.engine.decode_slices(len(ids), new_tokens)
        while True:
            with self.lock:
                step = next(steps, None)
                if step is not None:
                    self._stats(0.0, step[1] / step[0])
            if step is None:
                break
            self.pass_time(step[0])
            if gone():
                raise ClientGone
            yield step[1]
        with self.lock:
            self.engine.finish(ids, new_tokens)

    def done(self) -> None:
        """The request has ended, however it did."""
        with self.lock:
            self.engine.running = 0
            if not self.engine.dead:
                self.engine.processed_tokens = 0
        self.show()
        self.turn.release()
        if self.engine.dead:
            self.died.set()

    def _stats(self, prompt_tps: float, decode_tps: float) -> None:
        engine = self.engine
        if engine.virtual_s - self.stats_at_s < _STATS_S:
            return
        self.stats_at_s = engine.virtual_s
        self.say(self.lines.stats(engine.virtual_s, prompt_tps, decode_tps, engine.running, engine.kv_usage))

    def _die(self, request: str, prompt_tokens: int) -> None:
        engine, death = self.engine, self.engine.death
        assert death is not None  # noqa: S101 - says what the caller has seen
        start = engine.processed_tokens
        end = min(prompt_tokens, start + self.settings.max_num_batched_tokens)
        self.say(self.lines.oom(engine.virtual_s, request, (start, end - start), death))
