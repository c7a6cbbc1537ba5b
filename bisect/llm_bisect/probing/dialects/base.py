"""What a dialect does: count, send and watch a request in one engine's own words."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from llm_bisect.probing.wire import Api


class NoTokenizer(Exception):
    """The engine does not say how many tokens a text has; nothing exact can be asked of it."""


@dataclass
class Answer:
    """What a streamed answer has said so far. Written by the stream's thread under `lock`."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    text: str = ""
    pieces: int = 0  # chunks that carried text
    finished: bool = False  # the engine said that this was all
    error: str | None = None  # an error inside a stream that began with 200
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    prefill_tps: float | None = None
    decode_tps: float | None = None
    processed_tokens: int | None = None
    total_tokens: int | None = None
    chunks: int = 0  # JSON objects of any kind: something came


@dataclass(frozen=True)
class Reading:
    """One look at the engine's counters. `mark` changes whenever work was done."""

    mark: tuple[float, ...] = ()
    tokens: int | None = None
    busy: bool | None = None
    source: str = ""


class Dialect(Protocol):
    """One per engine and boot; it may remember what does not change during a boot."""

    def tokenize(self, api: Api, text: str, *, special: bool) -> list[int]:
        """Token ids; `special`: with the tokens that open a text. Raises NoTokenizer, CallFailed."""
        ...

    def request(
        self, api: Api, prompt: Sequence[int], max_tokens: int, *, may_reuse: bool
    ) -> tuple[str, Mapping[str, Any]]:
        """Path and JSON body of a streamed greedy completion. Raises CallFailed."""
        ...

    def read(self, data: Mapping[str, Any], answer: Answer) -> None:
        """Take one JSON object of the stream into `answer` (the caller holds the lock)."""
        ...

    def look(self, api: Api) -> Reading | None:
        """The engine's counters now; None where it has none. Raises CallFailed."""
        ...

    def reuses_prompts(self, api: Api) -> bool:
        """True where a second question on the same prompt is cheap. Raises CallFailed."""
        ...


def parse(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`, or {} where there is none."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def as_int(value: object) -> int | None:
    return (
        int(value)
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15
        else None
    )


def as_float(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def token_ids(value: object) -> list[int] | None:
    """The value as a list of token ids, or None."""
    if not isinstance(value, list):
        return None
    if not all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in value):
        return None
    return list(value)
