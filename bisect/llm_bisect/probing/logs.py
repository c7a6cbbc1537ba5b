"""Logs made ready for reading: bounded, cut to the boot at hand, and matched against an engine's signatures.

Everything here is linear in the log: at most the last 4 MiB are read and no line is longer than 2,000
characters, so that a hostile or endless log costs seconds, not hours.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass, field

from llm_bisect.model import Evidence, Outcome, Phase
from llm_bisect.model.evidence import Fact
from llm_bisect.spaces.engines import EngineDescription, Signature

KEEP_CHARS = 4 * 1024 * 1024
LINE_CHARS = 2000
SHOWN_CHARS = 500
SHOWN_LINES = 12
_ONE_START = 25  # lines between two banner lines of one start, at most
GENERIC = 80  # signatures of this priority and above decide only where none of a lower number matches

_ESCAPES = re.compile(r"\x1b\[[0-9;?]{0,20}[A-Za-z]")
_COMPOSE_PREFIX = re.compile(r"^[\w.-]{1,80}-\d+ {1,40}\| ", re.MULTILINE)
_OUR_WORDS = re.compile(r"^(?:--- (?:host|harness): |\[launch\] |\+ )")
_ENGINE_LINE = re.compile(
    r"^\((?:APIServer|EngineCore|Worker|VllmWorker)|^(?:INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d |"
    r"^\d+\.\d\d\.\d{3}\.\d{3} [IWED] |^llama_|^load_|^srv |^slot |^main: |^Traceback|^\[\d{4}-\d\d-\d\d "
)
_NUMBER = re.compile(r"^(-?[\d,]+(?:\.\d+)?) ?([KMG]i?B|B|bytes)?\.?$")
_IN_MIB = {"KiB": 1 / 1024, "MiB": 1.0, "GiB": 1024.0, "KB": 1 / 1024, "MB": 1.0, "GB": 1024.0}
_TARGET = {"mib": 1.0, "gib": 1 / 1024, "kib": 1024.0, "bytes": 1024.0 * 1024.0}


@dataclass(frozen=True)
class Log:
    """One boot's text and where its lines begin."""

    text: str
    starts: tuple[int, ...] = field(repr=False)

    def line_at(self, offset: int) -> int:
        """Number (from 0) of the line that holds the character at `offset`."""
        return bisect_right(self.starts, offset) - 1

    def line(self, number: int) -> str:
        start = self.starts[number]
        end = self.starts[number + 1] if number + 1 < len(self.starts) else len(self.text)
        return self.text[start:end].rstrip("\n")

    def __len__(self) -> int:
        return len(self.starts)

    def tail(self, count: int) -> tuple[str, ...]:
        """The last non-empty lines, in order."""
        lines = (self.line(number) for number in range(max(0, len(self) - 4 * count), len(self)))
        return tuple(line for line in lines if line.strip())[-count:]


@dataclass(frozen=True)
class Match:
    """A signature found in a log."""

    signature: Signature
    line_number: int
    line: str
    facts: dict[str, Fact]

    @property
    def rank(self) -> tuple[bool, int, int]:
        """Causes that say much come first; among them the earliest; on one line the lower priority."""
        return (self.signature.priority >= GENERIC, self.line_number, self.signature.priority)


def prepare(engine: EngineDescription, log: str) -> tuple[Log, int]:
    """The bounded log and the number of the line where the last boot begins (0 where no banner is seen)."""
    text = log[-KEEP_CHARS:]
    if len(log) > KEEP_CHARS:
        text = text[text.find("\n") + 1 :]
    text = _ESCAPES.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    text = _COMPOSE_PREFIX.sub("", text)
    lines = [line if len(line) <= LINE_CHARS else line[:LINE_CHARS] for line in text.split("\n")]
    starts, position = [], 0
    for line in lines:
        starts.append(position)
        position += len(line) + 1
    ready = Log("\n".join(lines), tuple(starts))
    return ready, _last_boot(engine, ready)


def _last_boot(engine: EngineDescription, log: Log) -> int:
    """Line of the last start banner.

    Different banner lines close together belong to one start, whose first line counts; the same line again
    is another start.
    """
    for pattern in engine.banners:
        found = list(pattern.finditer(log.text))
        if not found:
            continue
        start, said = log.line_at(found[-1].start()), {found[-1].group(0)}
        for one in reversed(found[:-1]):
            number = log.line_at(one.start())
            if start - number > _ONE_START or one.group(0) in said:
                break
            start = number
            said.add(one.group(0))
        return start
    return 0


def has_engine_line(engine: EngineDescription, log: Log) -> bool:
    """True where the engine itself wrote something: a banner or a line in its log format."""
    if any(pattern.search(log.text) for pattern in engine.banners):
        return True
    return any(_ENGINE_LINE.match(log.line(number)) for number in range(len(log)))


def find(engine: EngineDescription, log: Log, *, phase: Phase, where: tuple[str, ...]) -> list[Match]:
    """All matches of the signatures for `phase`, in the order of their lines."""
    found = []
    for signature in engine.signatures:
        if signature.where not in where or (signature.phase is not None and signature.phase is not phase):
            continue
        for number, one in enumerate(signature.pattern.finditer(log.text)):
            if (
                number >= 2000
            ):  # enough of the same; a log that repeats itself for ever must not cost for ever
                break
            at = log.line_at(one.start())
            facts = {
                name: value
                for name in signature.facts
                if (value := to_fact(name, one.group(name), signature.facts[name])) is not None
            }
            found.append(Match(signature, at, log.line(at), facts))
    return sorted(found, key=lambda match: (match.line_number, match.signature.priority))


def without_recovered(matches: list[Match]) -> list[Match]:
    """Drop what was recovered from and the harmless lines.

    A signature whose outcome is `pass` names a harmless line; with `echo` it also says that whatever was
    before it did not stop the engine.
    """
    harmless = {match.line_number for match in matches if match.signature.outcome is Outcome.PASS}
    recovered = max(
        (
            match.line_number
            for match in matches
            if match.signature.outcome is Outcome.PASS and match.signature.echo
        ),
        default=-1,
    )
    return [
        match
        for match in matches
        if match.signature.outcome is not Outcome.PASS
        and match.line_number not in harmless
        and match.line_number > recovered
    ]


def to_fact(name: str, text: str | None, scale: float) -> Fact | None:
    """The text as a number in the unit that ends `name` (…_mib, _gib, _kib, _bytes), else as text."""
    if text is None:
        return None
    number = _NUMBER.match(text.strip().rstrip(","))
    if number is None:
        return text[:200]
    value = float(number[1].replace(",", "")) * scale
    unit, target = number[2], _TARGET.get(name.rsplit("_", 1)[-1])
    if unit and target is not None:
        value *= _IN_MIB.get(unit, 1 / (1024 * 1024)) * target
    return int(value) if value.is_integer() and "." not in number[1] else round(value, 6)


def evidence(
    rule: str,
    lines: list[str] | tuple[str, ...] = (),
    facts: dict[str, Fact] | None = None,
    considered: list[str] | tuple[str, ...] = (),
) -> Evidence:
    """Evidence within its bounds: at most 12 lines of at most 500 characters."""
    shown = [line.strip()[:SHOWN_CHARS] for line in lines if line.strip()]
    return Evidence(
        rule=rule,
        lines=tuple(dict.fromkeys(shown))[:SHOWN_LINES],
        facts=facts or {},
        considered=tuple(dict.fromkeys(considered))[:SHOWN_LINES],
    )


def is_ours(line: str) -> bool:
    """True for a line that a harness added to the log."""
    return _OUR_WORDS.match(line) is not None
