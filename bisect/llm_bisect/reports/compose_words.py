"""Text of compose files without resolving it: variables, words of a command, short volume entries."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from llm_bisect.model import UsageProblem

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OPERATORS = (":-", ":?", ":+", "-", "?", "+")


@dataclass(frozen=True)
class _Variable:
    """One `${NAME:-default}` or `$NAME` at text[start:end]."""

    name: str
    operator: str
    operand: str
    start: int
    end: int


def _variable_at(text: str, start: int) -> _Variable | None:
    """The variable whose `$` is at `start`, or None where it is a plain `$`."""
    if text[start + 1 : start + 2] != "{":
        match = _NAME.match(text, start + 1)
        return _Variable(match.group(), "", "", start, match.end()) if match else None
    match = _NAME.match(text, start + 2)
    end = _closing(text, start + 1)
    if match is None or end is None:
        return None
    rest = text[match.end() : end]
    operator = next((o for o in _OPERATORS if rest.startswith(o)), "")
    return _Variable(match.group(), operator, rest[len(operator) :], start, end + 1)


def _closing(text: str, opening: int) -> int | None:
    """Index of the brace that closes the one at `opening`."""
    depth, i = 0, opening
    while i < len(text):
        if text[i] == "{":
            depth += 1
        elif text[i] == "}":
            depth -= 1
            if depth == 0:
                return i
        i += 1
    return None


def _rewrite(text: str, plain: Callable[[str], str], variable: Callable[[_Variable], str]) -> str:
    """`text` with each stretch of plain text and each variable replaced."""
    parts: list[str] = []
    start = i = 0
    while (i := text.find("$", i)) >= 0:
        if text[i + 1 : i + 2] == "$":  # an escaped dollar
            i += 2
            continue
        found = _variable_at(text, i)
        if found is None:
            i += 1
            continue
        parts += [plain(text[start:i]), variable(found)]
        start = i = found.end
    return "".join([*parts, plain(text[start:])])


def has_variable(text: str) -> bool:
    """True where Compose would put something in."""
    return _rewrite(text, lambda t: "", lambda v: "$") != ""


def substitute(text: str, variables: Mapping[str, str]) -> str:
    """`text` with just these variables put in; every other `${VAR}` stays as it is."""

    def put(v: _Variable) -> str:
        operand = substitute(v.operand, variables)
        if v.name not in variables:
            return f"${{{v.name}{v.operator}{operand}}}" if operand != v.operand else text[v.start : v.end]
        value = variables[v.name]
        if v.operator in (":+", "+"):
            return operand if value or v.operator == "+" else ""
        if v.operator == ":-" and not value:
            return operand
        return escape(value)

    return _rewrite(text, str, put)


def escape(text: str) -> str:
    """Compose would read a `$` as the start of a variable."""
    return text.replace("$", "$$")


def could_be(raw: str, resolved: str) -> bool:
    """True where `raw`, its variables put in, can give `resolved`."""
    pattern = _rewrite(raw, lambda t: re.escape(t.replace("$$", "$")), lambda v: ".*")
    return re.fullmatch(pattern, resolved, re.DOTALL) is not None


@dataclass(frozen=True)
class Word:
    """One word of a command: its text without quotes, and where it stands in the raw text."""

    text: str
    start: int
    end: int
    quoted: bool = False


def split_words(raw: str) -> list[Word]:
    """The words of a command string as Compose splits them, before variables are put in."""
    words: list[Word] = []
    i = 0
    while i < len(raw):
        if raw[i].isspace():
            i += 1
            continue
        start, text, quoted = i, "", False
        quote = ""
        while i < len(raw) and (quote or not raw[i].isspace()):
            char = raw[i]
            if quote and char == quote:
                quote, i = "", i + 1
            elif not quote and char in "'\"":
                quote, quoted, i = char, True, i + 1
            elif char == "\\" and quote != "'" and i + 1 < len(raw):
                text, i = text + {"n": "\n", "t": "\t"}.get(raw[i + 1], raw[i + 1]), i + 2
            elif raw.startswith("$$", i):
                text, i = text + "$$", i + 2
            elif char == "$" and (found := _variable_at(raw, i)) is not None:
                text, i = text + raw[i : found.end], found.end
            else:
                text, i = text + char, i + 1
        words.append(Word(text, start, i, quoted))
    return words


def align(words: Sequence[Word], argv: Sequence[str], *, splits: bool) -> list[int]:
    """How many arguments each word gave: one each, or (`splits`) any number for a word with a variable.

    Raises UsageProblem where the words cannot have given these arguments.
    """

    @cache
    def best(w: int, a: int) -> tuple[int, ...] | None:
        if w == len(words):
            return () if a == len(argv) else None
        word = words[w]
        free = splits and not word.quoted and has_variable(word.text)
        for n in (1, 0, *range(2, len(argv) - a + 1)) if free else (1,):
            if a + n > len(argv) or not could_be(word.text, " ".join(argv[a : a + n])):
                continue
            if (rest := best(w + 1, a + n)) is not None:
                return (n, *rest)
        return None

    found = best(0, 0)
    if found is None:
        raise UsageProblem(
            "the compose file's command is not the one that was tested",
            hint="was the file edited since? --to env or --to json still name the values",
        )
    return list(found)


def quote(argument: str) -> str:
    """One argument as a word of a command string."""
    return escape(shlex.quote(argument))


def volume_target(entry: object) -> str:
    """Where a volume is mounted, raw; empty where the entry has no target."""
    if isinstance(entry, Mapping):
        return str(entry.get("target", ""))
    parts = split_colons(str(entry))
    return parts[1] if len(parts) > 1 else parts[0]


def split_colons(text: str) -> list[str]:
    """A short volume entry at its colons, those inside `${…}` left alone."""
    marked = _rewrite(text, lambda t: t.replace(":", "\0"), lambda v: text[v.start : v.end])
    return marked.split("\0")
