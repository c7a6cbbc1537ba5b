"""Writing values as YAML that every reader reads back: PyYAML and Compose alike."""

from __future__ import annotations

import json


def as_json(value: object) -> str:
    """JSON in one line that is YAML, too. Plain JSON is not always: YAML knows no pairs of surrogates, takes
    some characters for line ends and refuses others."""
    return "".join(c if c.isprintable() else _escaped(c) for c in json.dumps(value, ensure_ascii=False))


def one_line(text: str) -> str:
    """The text with a space for everything that might end a line, so that it stays one comment."""
    return "".join(c if c.isprintable() else " " for c in text)


def _escaped(character: str) -> str:
    point = ord(character)
    return f"\\u{point:04x}" if point < 0x10000 else f"\\U{point:08x}"
