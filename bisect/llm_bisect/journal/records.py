"""One line of a journal: its form, the chain of check values, and the reading of a whole file. Pure.

A line is `{"seq":…,"at":"…","kind":"…","body":{…},"check":"…"}` in this order, without spaces between. The
check is the head of a SHA-256 over the check of the line before and the canonical JSON of the first four
fields (keys sorted, ASCII), so a line can neither be changed, dropped nor moved without being seen.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

FIRST_CHECK = "0" * 16
_CHECK_FIELD = re.compile(rb',"check":"([0-9a-f]{16})"\}')
_FIELDS = ["seq", "at", "kind", "body", "check"]


@dataclass(frozen=True)
class Event:
    """One event. `seq` counts from 1; `at` is UTC, ISO 8601 with milliseconds and `Z`."""

    seq: int
    at: str
    kind: str
    body: Mapping[str, Any]


@dataclass(frozen=True)
class Written:
    """An event as a reader will see it (tuples have become lists), its line with its end, and its check."""

    event: Event
    line: bytes
    check: str


class BrokenLine(Exception):
    """A line (`number` counts from 1) that no crash of a writer can explain, and what is wrong with it."""

    def __init__(self, number: int, what: str) -> None:
        super().__init__(f"line {number} {what}")
        self.number = number
        self.what = what


class _Torn(Exception):
    """What a write that was cut short may leave, where it is the last line."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


@dataclass(frozen=True)
class Scan:
    """What a file holds. Bytes from `good_bytes` on (`torn_bytes` of them) are an unfinished last line."""

    events: list[Event]
    check: str  # of the last event: the next line's chain goes on from it
    good_bytes: int
    torn_bytes: int
    unended: bool  # the last event is whole but for its line end


def encode(before: str, event: Event) -> Written:
    """The event's line; `before` is the check of the line before.

    Raises ValueError for a number that is not finite and TypeError for what JSON cannot hold.
    """
    as_read = replace(event, body=_plain(event.body, "body"))
    check = _chained(before, as_read)
    return Written(as_read, _line(as_read, check) + b"\n", check)


def _line(event: Event, check: str) -> bytes:
    fields = {"seq": event.seq, "at": event.at, "kind": event.kind, "body": event.body, "check": check}
    return json.dumps(fields, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def scan(data: bytes, kinds: frozenset[str]) -> Scan:
    """All events of a file's bytes, each verified. Raises BrokenLine where the fault is not a torn tail."""
    events: list[Event] = []
    check, start = FIRST_CHECK, 0
    while start < len(data):
        end = data.find(b"\n", start)
        line = data[start:] if end < 0 else data[start:end]
        after = len(data) if end < 0 else end + 1
        number = len(events) + 1
        try:
            event, check = _decode(line, number, check, kinds)
        except _Torn as torn:
            if after < len(data):
                raise BrokenLine(number, torn.what) from None
            return Scan(events, check, start, len(data) - start, unended=False)
        events.append(event)
        start = after
    return Scan(events, check, len(data), 0, unended=bool(data) and not data.endswith(b"\n"))


def _decode(line: bytes, number: int, before: str, kinds: frozenset[str]) -> tuple[Event, str]:
    """The event of a line without its line end. Raises _Torn or BrokenLine."""
    try:
        fields = json.loads(line, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        _refuse_two_in_one(line, number, before, kinds)
        raise _Torn("is empty" if not line.strip(b"\0 \t\r") else "is not JSON") from None
    if not isinstance(fields, dict) or list(fields) != _FIELDS or not isinstance(fields["body"], dict):
        raise _Torn("is not an event")
    event = Event(fields["seq"], fields["at"], fields["kind"], fields["body"])
    if event.seq != number:
        what = f"is event {event.seq!r} where {number} belongs: lines are missing or were moved"
        raise BrokenLine(number, what)
    if line.endswith(b"\r"):
        raise BrokenLine(number, "has Windows line ends: something has converted the file")
    check = _chained(before, event)
    if fields["check"] != check:
        raise _Torn("does not fit its check value: it, or the line before it, was changed")
    if line != _line(event, check):
        raise BrokenLine(number, "was written again by another program (spaces or spellings differ)")
    if event.kind not in kinds:
        raise BrokenLine(number, f"has the unknown kind {event.kind!r}: a newer bisect may have written it")
    return event, check


def _refuse_two_in_one(line: bytes, number: int, before: str, kinds: frozenset[str]) -> None:
    """A whole event with more behind it has lost its line end since; a torn write never looks like that."""
    for found in _CHECK_FIELD.finditer(line, 0, len(line) - 1):
        with contextlib.suppress(_Torn):
            _decode(line[: found.end()], number, before, kinds)
            raise BrokenLine(number, "holds more than one event: its line end is missing")


def _chained(before: str, event: Event) -> str:
    fields = {"seq": event.seq, "at": event.at, "kind": event.kind, "body": event.body}
    canonical = json.dumps(fields, allow_nan=False, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(f"{before}{canonical}".encode()).hexdigest()[:16]


def _plain(value: Any, where: str) -> Any:
    """The value as JSON gives it back; what would come back as something else is refused with its place."""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{where} has the key {key!r}: keys of a journal's events are texts")
        return {_text(key): _plain(inner, f"{where}.{key}") for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, f"{where}[{n}]") for n, inner in enumerate(value)]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int):
        return int(value)
    if not isinstance(value, float):
        raise TypeError(f"{where} is a {type(value).__name__}: a journal holds plain JSON only")
    if not math.isfinite(value):
        raise ValueError(f"{where} is {value}: a journal holds finite numbers only")
    return float(value)


def _text(text: str) -> str:
    """Half characters (of a broken log) cannot be written: pairs are joined, single ones replaced."""
    try:
        text.encode()
    except UnicodeEncodeError:
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return str.__str__(text)


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")
