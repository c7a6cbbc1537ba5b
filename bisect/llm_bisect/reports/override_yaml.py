"""Reading a compose file raw, and writing an override: every scalar stays as its author wrote it.

Compose resolves `${VAR}`, and YAML readers resolve `on` and `0.90`; an export must do neither, or tokens and
home paths end up in the file that is passed on.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from llm_bisect.model import UsageProblem
from llm_bisect.spaces.compose_tags import Override, Reset, add_compose_tags

MOST_NODES = 200_000  # anchors that expand to more are an attack or a mistake
DEEPEST = 64
TEXT = "tag:yaml.org,2002:str"
NULLS = frozenset({"", "~", "null", "Null", "NULL"})


class Plain(str):
    """A scalar that was written without quotes: written back without quotes."""

    __slots__ = ()


def read_raw(path: Path) -> dict[str, Any]:
    """The file as mappings, lists and texts, nothing resolved but anchors and merge keys.

    Raises UsageProblem naming file and line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageProblem(f"{path}: cannot be read ({error})", hint="give back the compose file") from error
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        raw = _Reader().read(node, 0) if node is not None else {}
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise UsageProblem(f"{path}{line}: {problem}", hint="docker compose config shows the same") from error
    except RecursionError as error:
        raise UsageProblem(
            f"{path}: aliases that expand too far", hint="a mapping contains itself"
        ) from error
    if not isinstance(raw, dict):
        raise UsageProblem(f"{path}: not a mapping", hint="a compose file has a mapping of services")
    return raw


class _Reader:
    """From YAML nodes to values; counts nodes, since aliases may expand without end."""

    def __init__(self) -> None:
        self.nodes = 0
        self.flatten = yaml.constructor.SafeConstructor().flatten_mapping

    def read(self, node: yaml.Node, depth: int) -> Any:
        self.nodes += 1
        if self.nodes > MOST_NODES or depth > DEEPEST:
            raise yaml.YAMLError("aliases that expand too far")
        if isinstance(node, yaml.ScalarNode):
            if node.style is not None:
                return str(node.value)
            return None if node.value in NULLS else Plain(node.value)
        if isinstance(node, yaml.SequenceNode):
            return [self.read(child, depth + 1) for child in node.value]
        if not isinstance(node, yaml.MappingNode):
            raise yaml.YAMLError("a node of no known kind")
        self.flatten(node)
        return {str(key.value): self.read(value, depth + 1) for key, value in node.value}


def differing(old: Any, new: Any, key: str = "") -> Any:
    """What must be laid over `old` so that Compose makes `new` of it; `Same` where nothing must be.

    `key` is the name of the field: lists of some fields are merged by Compose, others are appended to.
    """
    if old == new:
        return Same
    if key in ("command", "entrypoint", "test"):
        return new
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        if key == "environment" and set(old) - set(new):
            return Override(dict(new))  # a value of null would be taken from the shell instead
        found = {k: differing(old.get(k, Same), value, k) for k, value in new.items()}
        found.update({k: Reset() for k in old if k not in new})
        return {k: value for k, value in found.items() if value is not Same}
    if isinstance(old, list) and isinstance(new, list):
        if key in ("environment", "labels") and _names(old) <= _names(new):
            return [item for item in new if item not in old]
        if new[: len(old)] == old:
            return new[len(old) :]  # Compose appends
        return Override(new)
    return new


class _Same:
    """Nothing to write."""


Same = _Same()


def _names(items: list[Any]) -> set[str]:
    return {str(item).partition("=")[0] for item in items}


def dump(document: Mapping[str, Any]) -> str:
    """The document as YAML. Texts that were not `Plain` in the base are quoted."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=4096, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    block = "\n" in text.rstrip("\n") and not any(
        line != line.rstrip() or "\t" in line for line in text.split("\n")
    )
    return dumper.represent_scalar(TEXT, text, style="|" if block else '"')


def _plain(dumper: yaml.SafeDumper, text: Plain) -> yaml.Node:
    # its own tag, so that the emitter has no reason to quote what another reader would take for a number
    return dumper.represent_scalar(_tag_of(dumper, str(text)), str(text))


def _mapping(dumper: yaml.SafeDumper, mapping: dict[str, Any]) -> yaml.Node:
    node = dumper.represent_mapping("tag:yaml.org,2002:map", {})
    node.flow_style = not mapping
    node.value = [(_key(dumper, key), dumper.represent_data(value)) for key, value in mapping.items()]
    return node


def _key(dumper: yaml.SafeDumper, key: str) -> yaml.Node:
    """Keys are written plain where any YAML reader takes them for the text that they are."""
    return dumper.represent_scalar(TEXT, key, style=None if _tag_of(dumper, key) == TEXT else '"')


def _tag_of(dumper: yaml.SafeDumper, text: str) -> str:
    """What a YAML 1.1 reader takes unquoted text for."""
    return str(dumper.resolve(yaml.ScalarNode, text, (True, False)))  # type: ignore[no-untyped-call]


_Dumper.add_representer(str, _text)
_Dumper.add_representer(Plain, _plain)
add_compose_tags(_Dumper)
_Dumper.add_representer(dict, _mapping)
