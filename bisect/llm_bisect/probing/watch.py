"""Watching one streamed request until it ends: progress, memory, deadlines.

Three threads: one reads the stream, one asks the engine for its counters (that call may block while the
engine computes), and the caller's own samples memory and keeps the deadlines. Deadlines are judged by the
runner's clock alone, never by this machine's; real time only paces the loop.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from llm_bisect.model import MemorySample, Progress
from llm_bisect.probing.dialects import Answer, Dialect, Reading
from llm_bisect.probing.dialects.base import parse
from llm_bisect.probing.wire import Api, CallFailed, Stream
from llm_bisect.runners.protocol import Clock, Engine

OnProgress = Callable[[Progress, MemorySample | None], None]

TEXT_CHARS = 200_000
_LOOP_S = 0.02  # real seconds between two turns of the loop
_SAMPLE_S = 0.1  # real seconds between two samples of free memory
_LOOK_S = 0.25  # real seconds between two looks at the counters
_STILL_LOOKS = 3  # so many looks must have found the same counters before silence is believed


@dataclass(frozen=True)
class Limits:
    """Seconds of the runner's clock."""

    deadline_s: float
    silence_s: float
    grace_s: float = 0.0  # after the deadline: the stream stays open, and what is read completely counts
    least_real_s: float = (
        0.0  # real seconds it has anyway: a simulated clock may race through a short deadline
    )


@dataclass
class MemoryLow:
    """The lowest free memory seen, and how others' memory grew."""

    lowest: MemorySample | None = None
    last: MemorySample | None = None
    others_first_mib: float | None = None
    others_most_mib: float | None = None

    def take(self, sample: MemorySample | None) -> None:
        if sample is None:
            return
        self.last = sample
        if self.lowest is None or sample.free_mib < self.lowest.free_mib:
            self.lowest = sample
        if sample.others_mib is not None:
            if self.others_first_mib is None:
                self.others_first_mib = sample.others_mib
            self.others_most_mib = max(self.others_most_mib or 0.0, sample.others_mib)

    @property
    def others_grew_mib(self) -> float | None:
        if self.others_first_mib is None or self.others_most_mib is None:
            return None
        return self.others_most_mib - self.others_first_mib


@dataclass
class Ending:
    """How one request ended."""

    answer: Answer
    status: int | None = None
    body: str = ""
    client_error: str | None = None  # timeout | silence | aborted, or what Stream.error says
    began_s: float = 0.0
    ended_s: float = 0.0
    first_text_s: float | None = None  # since it began
    tokens: int | None = None  # how far the prompt came
    progressing: bool | None = None  # None: nothing showed it, either way
    late_s: float = 0.0  # how long after the deadline it was read completely
    memory: MemoryLow = field(default_factory=lambda: MemoryLow())

    @property
    def wall_s(self) -> float:
        return max(0.0, self.ended_s - self.began_s)

    @property
    def complete(self) -> bool:
        return self.status == 200 and self.client_error is None and self.answer.error is None


class _Looker:
    """Asks for the engine's counters in a thread, again and again, until told to stop."""

    def __init__(self, dialect: Dialect, api: Api) -> None:
        self.reading: Reading | None = None
        self.looks = 0  # looks that have ended, however they did
        self.failed = False
        self.pause_s = _LOOK_S
        self._stop = threading.Event()
        self._dialect, self._api = dialect, api
        self._thread = threading.Thread(target=self._run, name="probe-look", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                reading = self._dialect.look(self._api)
                self.failed = False
                if reading is not None:
                    self.reading = reading
            except CallFailed:
                self.failed = True
            self.looks += 1
            self._stop.wait(self.pause_s)


def run_request(
    engine: Engine,
    dialect: Dialect,
    api: Api,
    request: tuple[str, Mapping[str, Any]],
    limits: Limits,
    *,
    clock: Clock,
    stop: threading.Event,
    memory: MemoryLow,
    total_tokens: int | None = None,
    on_progress: OnProgress | None = None,
) -> Ending:
    """Send `request` (path, JSON body) and watch it to its end. Never raises for what an engine does."""
    answer = Answer()
    ending = Ending(answer=answer, began_s=clock.now_s(), memory=memory)

    def on_data(payload: bytes) -> None:
        with answer.lock:
            if payload == b"[DONE]":
                answer.finished = True
                return
            data = parse(payload)
            if data and len(answer.text) < TEXT_CHARS:
                answer.chunks += 1
                dialect.read(data, answer)

    path, body = request
    stream = Stream(api, path, body, on_data)
    looker = _Looker(dialect, api)
    try:
        stream.start()
        _Watch(engine, stream, looker, ending, limits, clock, total_tokens, on_progress).until_ended(stop)
    finally:
        looker.stop()
        stream.give_up()
    with answer.lock:
        ending.status = stream.status
        ending.body = bytes(stream.kept).decode("utf-8", "replace")
        ending.tokens = _most(ending.tokens, answer.processed_tokens)
        if ending.client_error is None:
            ending.client_error = stream.error
        if (
            ending.client_error is None
            and ending.status == 200
            and not answer.finished
            and answer.error is None
        ):
            # the connection was closed in the middle, or this was never such a stream
            ending.client_error = "connection_reset" if answer.chunks else "garbage"
            ending.client_error = ending.client_error if stream.kept else "empty_reply"
    return ending


class _Watch:
    """The caller's loop."""

    def __init__(
        self,
        engine: Engine,
        stream: Stream,
        looker: _Looker,
        ending: Ending,
        limits: Limits,
        clock: Clock,
        total_tokens: int | None,
        on_progress: OnProgress | None,
    ) -> None:
        self.engine, self.stream, self.looker = engine, stream, looker
        self.ending, self.limits, self.clock = ending, limits, clock
        self.total_tokens, self.on_progress = total_tokens, on_progress
        self.moved_s = ending.began_s  # when progress was last seen
        self.seen: tuple[object, ...] = ()
        self.source = ""
        self.looks_when_moved = 0
        self.began_real_s = time.monotonic()

    def until_ended(self, stop: threading.Event) -> None:
        turn = 0
        while not self.stream.done.is_set():
            if stop.is_set():
                self._end("aborted")
                return
            now_s = self.clock.now_s()
            pace = self._pace(now_s)
            if turn % max(1, int(_SAMPLE_S / _LOOP_S / pace)) == 0:
                self.ending.memory.take(self.engine.memory())
            self._look(now_s)
            if self._gave_up(now_s):
                return
            turn += 1
            # either event ends the wait soon enough: `stop` is looked at on every turn
            self.stream.done.wait(_LOOP_S)
        self.ending.memory.take(self.engine.memory())
        now_s = self.clock.now_s()
        self._look(now_s)
        self.ending.ended_s = now_s
        self.ending.late_s = max(0.0, now_s - self.ending.began_s - self.limits.deadline_s)

    def _pace(self, now_s: float) -> float:
        """How much faster than real time the runner's clock goes; a simulated one is looked at more often."""
        real_s = time.monotonic() - self.began_real_s
        pace = max(1.0, (now_s - self.ending.began_s) / real_s) if real_s > _LOOP_S else 1.0
        self.looker.pause_s = max(_LOOP_S, _LOOK_S / pace)
        return pace

    def _look(self, now_s: float) -> None:
        answer, reading = self.ending.answer, self.looker.reading
        with answer.lock:
            marks: tuple[object, ...] = (
                answer.pieces,
                answer.processed_tokens,
                reading.mark if reading else (),
            )
            processed, pieces = answer.processed_tokens, answer.pieces
        if pieces and self.ending.first_text_s is None:
            self.ending.first_text_s = now_s - self.ending.began_s
        tokens = _most(processed, reading.tokens if reading is not None and reading.busy else None)
        if tokens is not None and self.total_tokens is not None:
            tokens = min(tokens, self.total_tokens)
        if marks == self.seen:
            return
        first, self.seen = not self.seen, marks
        self.looks_when_moved = self.looker.looks
        if not first:
            self.moved_s = now_s
        self.ending.tokens = _most(self.ending.tokens, tokens)
        self.source = "prompt_progress" if processed is not None else reading.source if reading else "stream"
        if self.on_progress is not None:
            seen = Progress(
                tokens=self.ending.tokens,
                total_tokens=self.total_tokens,
                busy=reading.busy if reading else None,
                source=self.source,
            )
            self.on_progress(seen, self.ending.memory.last)

    def _gave_up(self, now_s: float) -> bool:
        """True where a deadline has passed; what it was is written down."""
        answer = self.ending.answer
        counted = self.looker.reading is not None or answer.processed_tokens is not None or answer.pieces > 0
        silent_s = now_s - self.moved_s
        # without counters only the deadline ends it; an engine that answers no look at all is silent too
        still = self.looker.looks - self.looks_when_moved >= _STILL_LOOKS and (counted or self.looker.failed)
        if silent_s > self.limits.silence_s and still:
            self.ending.progressing = False
            self._end("silence")
            return True
        if time.monotonic() - self.began_real_s < self.limits.least_real_s:
            return False
        if now_s - self.ending.began_s > self.limits.deadline_s + self.limits.grace_s:
            window_s = min(self.limits.silence_s, max(30.0, 0.25 * self.limits.deadline_s))
            self.ending.progressing = silent_s <= window_s if counted else None
            self._end("timeout")
            return True
        return False

    def _end(self, why: str) -> None:
        # it may have ended in this very moment: what was read completely counts
        if why != "aborted" and self._has_ended() and self.stream.error is None:
            self.ending.progressing = None
        else:
            self.ending.client_error = why
        self.ending.ended_s = self.clock.now_s()

    def _has_ended(self) -> bool:
        """True where the answer was read to its end, though its thread may have a moment's work left: after
        a suspend both are seen at once."""
        with self.ending.answer.lock:
            finished = self.ending.answer.finished
        return self.stream.done.wait(1.0) if finished else self.stream.done.is_set()


def _most(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return other if one is None else one
    return max(one, other)
