"""Reading YAML files that people write: every error names the file, the line, the key and what is accepted.

YAML 1.2 (only true and false are booleans, `on` and `off` stay text; `25:00` and dates are text, too), no
repeated keys, safe loading only.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Hashable
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

import yaml

from llm_bisect.model import UsageProblem
from llm_bisect.spaces.yaml_limits import check_size, check_values

_E = TypeVar("_E", bound=StrEnum)
_T = TypeVar("_T")


class Lined(dict[Hashable, Any]):
    """A mapping that knows the line (from 1) of each of its keys."""

    lines: dict[Hashable, int]


class Loader(yaml.SafeLoader):
    """YAML 1.2: only true and false are booleans, no base-60 numbers, no dates. Keys may not repeat."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[Hashable, int] = {}
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode):
                if key_node.value in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"the key {key_node.value!r} appears twice", problem_mark=key_node.start_mark
                    )
                seen[key_node.value] = key_node.start_mark.line + 1
        found = Lined(super().construct_mapping(node, deep=deep))
        found.lines = seen
        return found


_TAG = "tag:yaml.org,2002:"
Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag in (_TAG + "null", _TAG + "merge")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_NUMBER_FIRST = "-+.0123456789"
_KINDS = (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+", _NUMBER_FIRST),
    ("float", r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?", _NUMBER_FIRST),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", _NUMBER_FIRST),
)
for _kind, _pattern, _first in _KINDS:
    Loader.add_implicit_resolver(_TAG + _kind, re.compile(rf"^(?:{_pattern})$"), list(_first))


def _construct(loader: Loader, node: yaml.MappingNode) -> Lined:
    found = loader.construct_mapping(node, deep=True)
    return found if isinstance(found, Lined) else Lined(found)


Loader.add_constructor(_TAG + "map", _construct)


def parse_yaml(path: Path) -> object:
    """The file's content. Raises UsageProblem naming the file and the line."""
    try:
        check_size(path)
        loader = Loader(path.read_text(encoding="utf-8"))
        root = loader.get_single_node()
        check_values(path, root)
        return None if root is None else loader.construct_document(root)
    except OSError as error:
        raise UsageProblem(
            f"{path} cannot be read: {error.strerror}.", hint="Check its permissions."
        ) from error
    except UnicodeDecodeError as error:
        raise UsageProblem(f"{path.name} is not UTF-8 text.", hint="Save it as UTF-8.") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path.name}, line {mark.line + 1}" if mark is not None else path.name
        problem = getattr(error, "problem", None) or "it cannot be parsed"
        hint = "Correct that line."
        if "\\t" in problem:
            problem, hint = "a tab indents this line", "YAML wants spaces: replace the tab."
        raise UsageProblem(f"{where}: not valid YAML: {problem}.", hint=hint) from error
    except (RecursionError, ValueError) as error:
        raise UsageProblem(
            f"{path.name}: not valid YAML: nested too deeply, or a number that is none.", hint="Simplify it."
        ) from error


class Node:
    """One mapping of the file, with where it stands, so that each error can name its place."""

    def __init__(self, path: Path, where: str, data: object, line: int | None = None) -> None:
        self.path = path
        self.where = where
        self.line = line  # of its key, where it is known
        if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
            raise self.problem("", "a mapping with text keys is expected here", "Write `key: value` lines.")
        self.data: dict[str, Any] = data

    def problem(self, key: str, what: str, hint: str) -> UsageProblem:
        """An error at `key` of this mapping: the file, the line where it is known, the place."""
        place = ".".join(part for part in (self.where, key) if part)
        lines = getattr(getattr(self, "data", None), "lines", {})
        line = lines.get(re.split(r"[.\[]", key, maxsplit=1)[0], self.line)
        where = f"{self.path.name}, line {line}" if line else self.path.name
        return UsageProblem(f"{where}: {place + ': ' if place else ''}{what}.", hint=hint)

    def only(self, keys: tuple[str, ...]) -> None:
        for key in self.data:
            if key not in keys:
                close = difflib.get_close_matches(key, keys, n=1)
                hint = f"Did you mean {close[0]!r}? " if close else ""
                raise self.problem(key, "unknown key", f"{hint}Keys here: {', '.join(keys)}.")

    def get(self, key: str, default: object = None) -> Any:
        return self.data.get(key, default)

    def text(self, key: str, default: str | None = None) -> str:
        value = self.get(key, default)
        if not isinstance(value, str) or (not value and default is None):
            raise self.problem(key, f"text is expected, not {shown(value)}", f"Write `{key}: some text`.")
        return value

    def optional_text(self, key: str) -> str | None:
        return None if self.get(key) is None else self.text(key)

    def flag(self, key: str, *, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.problem(key, f"{shown(value)} is not true or false", "Accepted: true, false.")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.problem(key, f"a number is expected, not {shown(value)}", f"Write `{key}: 1.0`.")
        return float(value)

    def port(self, key: str) -> int:
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 65535:
            raise self.problem(key, f"{shown(value)} is not a port", "Accepted: 1 to 65535.")
        return value

    def choice(self, key: str, accepted: tuple[str, ...], default: str | None = None) -> str:
        value = self.get(key, default)
        if value not in accepted:
            raise self.problem(key, f"{shown(value)} is not accepted", f"Accepted: {', '.join(accepted)}.")
        return str(value)

    def enum(self, key: str, kind: type[_E], default: _E | None = None) -> _E:
        return kind(self.choice(key, tuple(kind), default))

    def strings(self, key: str) -> tuple[str, ...]:
        return self._list(key, lambda value: value if isinstance(value, str) and value else None, "texts")

    def string_lists(self, key: str) -> tuple[tuple[str, ...], ...]:
        def read(value: object) -> tuple[str, ...] | None:
            good = isinstance(value, list) and value and all(isinstance(one, str) and one for one in value)
            return tuple(value) if good and isinstance(value, list) else None

        return self._list(key, read, "lists of texts")

    def patterns(self, key: str) -> tuple[re.Pattern[str], ...]:
        return tuple(self._compile(key, text) for text in self.strings(key))

    def pattern(self, key: str) -> re.Pattern[str]:
        return self._compile(key, self.text(key))

    def texts(self, key: str, accepted: tuple[str, ...] | None = None) -> dict[str, str]:
        node = self.mapping(key)
        if accepted is not None:
            node.only(accepted)
        return {name: node.text(name) for name in node.data}

    def mapping(self, key: str) -> Node:
        data = {} if self.get(key) is None else self.get(key)
        if not isinstance(data, dict):
            raise self.problem(key, f"a mapping is expected, not {shown(data)}", "Write `key: value` lines.")
        line = getattr(self.data, "lines", {}).get(key, self.line)
        return Node(self.path, ".".join(part for part in (self.where, key) if part), data, line)

    def mappings(self, key: str) -> dict[str, Node]:
        node = self.mapping(key)
        return {name: node.mapping(name) for name in node.data}

    def items(self, key: str) -> list[Node]:
        values = self.get(key) or []
        if not isinstance(values, list):
            raise self.problem(key, f"a list is expected, not {shown(values)}", "Begin each entry with `- `.")
        place = ".".join(part for part in (self.where, key) if part)
        return [Node(self.path, f"{place}[{index}]", value) for index, value in enumerate(values)]

    def _list(self, key: str, read: Callable[[object], _T | None], what: str) -> tuple[_T, ...]:
        values = self.get(key)
        if values is None:
            return ()
        if not isinstance(values, list):
            raise self.problem(
                key, f"a list of {what} is expected, not {shown(values)}", f"Write `{key}: [a, b]`."
            )
        found = [read(value) for value in values]
        for index, value in enumerate(found):
            if value is None:
                raise self.problem(
                    f"{key}[{index}]",
                    f"{shown(values[index])} is not accepted",
                    f"A list of {what} is expected.",
                )
        return tuple(value for value in found if value is not None)

    def _compile(self, key: str, text: str) -> re.Pattern[str]:
        try:
            return re.compile(text, re.MULTILINE)
        except re.error as error:
            raise self.problem(
                key, f"not a regular expression: {error}", "Python's `re` syntax is used."
            ) from error


def amount(node: Node, key: str, parse: Callable[[str | int | float], _T], default: _T) -> _T:
    """A quantity with its unit. Raises UsageProblem naming the place."""
    value = node.get(key)
    if value is None:
        return default
    try:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise UsageProblem(
                f"{shown(value)} is no amount", hint="write a number or a text such as 60k or 25m"
            )
        return parse(value)
    except UsageProblem as problem:
        raise node.problem(key, problem.message, problem.hint or "") from None


def shown(value: object) -> str:
    """A value as an error shows it, at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
