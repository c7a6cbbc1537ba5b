"""What a YAML file may cost to read, and which files a compose file brings along.

Nine lines of aliases can stand for a billion values, and neither PyYAML nor Compose bounds that: both are
asked only after the file was counted here, without being expanded.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import yaml

from llm_bisect.model import UsageProblem

MAX_BYTES = 256 << 10  # some ten times the longest compose file that people serve with
MAX_VALUES = 50_000
_PARTS = ("include", "extends")
_READ_TOO = "env_file"


def check_size(path: Path) -> None:
    """Refuse a file that is larger than any profile or compose file. Raises UsageProblem, OSError."""
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise UsageProblem(
            f"{path} has {size / 1024:,.0f} KiB: a profile or compose file has at most {MAX_BYTES >> 10} KiB",
            hint="is it the right file?",
        )


def check_values(path: Path, root: yaml.Node | None) -> None:
    """Raise UsageProblem where the document's aliases stand for more than MAX_VALUES values."""
    if _values(root, {}) > MAX_VALUES:
        raise UsageProblem(
            f"{path}: its anchors and aliases stand for more than {MAX_VALUES:,} values",
            hint="write out what is needed instead of nesting aliases",
        )


def compose_files(path: Path) -> tuple[Path, ...]:
    """The compose file, then the local files that it includes, extends or takes variables from, and theirs.

    Each is counted before it is followed. Paths that hold a variable are not followed. Raises UsageProblem
    for a file that is too large or expands to too much; what cannot be parsed is left for Compose to name.
    """
    found: dict[Path, None] = {}
    queue = [path.absolute()]
    while queue:
        one = queue.pop(0)
        if one in found or not _is_file(one):
            continue
        found[one] = None
        parts, read_too = _named(one)
        queue += parts
        found.update(dict.fromkeys(p for p in read_too if _is_file(p)))
    return tuple(found)


def content(path: Path) -> bytes:
    """The file's bytes; none where they cannot be read (an env file of somebody else's, say)."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # too long for a name, say
        return False


def _beside(path: Path, text: str) -> Path:
    try:
        return path.parent / Path(text).expanduser()
    except RuntimeError:  # ~somebody who is not there
        return path.parent / text


def _named(path: Path) -> tuple[list[Path], list[Path]]:
    """(compose files that this one names, other files that it names)."""
    try:
        check_size(path)
        documents = list(yaml.compose_all(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return [], []
    named: dict[str, list[Path]] = {key: [] for key in (*_PARTS, _READ_TOO)}
    for document in documents:
        check_values(path, document)
        for key, value in _entries(document):
            if key in named:
                named[key] += [_beside(path, text) for text in _texts(value)]
    return [p for key in _PARTS for p in named[key]], named[_READ_TOO]


def _values(node: yaml.Node | None, counted: dict[int, int]) -> int:
    """How many values the node stands for, aliases followed; each node is visited once."""
    if node is None:
        return 0
    if id(node) not in counted:
        counted[id(node)] = 0  # an alias to what it stands in: refused by whoever reads it
        counted[id(node)] = 1 + sum(_values(one, counted) for one in _children(node))
    return counted[id(node)]


def _children(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        yield from (one for pair in node.value for one in pair)
    elif isinstance(node, yaml.SequenceNode):
        yield from node.value


def _entries(root: yaml.Node | None) -> Iterator[tuple[str, yaml.Node]]:
    """Every key with its value, at any depth: an anchor may hold a part of a service."""
    for node in _all(root):
        if isinstance(node, yaml.MappingNode):
            yield from ((str(k.value), v) for k, v in node.value if isinstance(k, yaml.ScalarNode))


def _texts(root: yaml.Node) -> Iterator[str]:
    for node in _all(root):
        if isinstance(node, yaml.ScalarNode) and node.value and not {"$", ":"} & set(node.value):
            yield node.value


def _all(root: yaml.Node | None) -> Iterator[yaml.Node]:
    seen: set[int] = set()
    queue = [root] if root is not None else []
    while queue:
        node = queue.pop()
        if id(node) not in seen:
            seen.add(id(node))
            yield node
            queue += _children(node)
