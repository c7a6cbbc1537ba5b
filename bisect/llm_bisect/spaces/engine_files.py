"""Reading engine descriptions: the files in `runners/`.

A description may include signature files (`kind: signatures`), so that text shared by several engines
(PyTorch, the container daemon, the kernel) is written once. Everything that is wrong raises UsageProblem
and names the file, the key and what is accepted there.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from llm_bisect.model import Bound, Outcome, Phase, Trend, UsageProblem
from llm_bisect.spaces import resources
from llm_bisect.spaces.engines import EngineAxis, EngineDescription, FactPattern, Signature
from llm_bisect.spaces.node import Loader, Node, parse_yaml

_DIALECTS = ("vllm", "llamacpp")
_ENDPOINTS = ("health", "models", "version", "tokenize", "complete", "metrics", "slots", "props")
_UNITS = ("tokens", "fraction")
_TAKES = ("last", "first", "max", "min", "sum")
_WHERE = ("log", "http", "daemon", "host")
_ENGINE_KEYS = (
    "kind",
    "name",
    "title",
    "dialect",
    "port",
    "port_flags",
    "needs_gpu",
    "executables",
    "images",
    "endpoints",
    "offline_env",
    "axes",
    "banners",
    "ready",
    "facts",
    "warnings",
    "signatures",
    "includes",
)
_AXIS_KEYS = ("variables", "flags", "also_flags", "env", "json_flag", "unit", "prefer", "trends", "choices")
_SIGNATURE_KEYS = ("id", "pattern", "outcome", "phase", "echo", "priority", "where", "note", "facts")
_FACT_KEYS = ("name", "pattern", "scale", "take")


def engine_names() -> list[str]:
    """Names of the engines that `load_engine` knows, sorted (signature files are not engines)."""
    return [name for name in resources.names("runners") if _kind(resources.find("runners", name)) == "engine"]


def load_engine(name_or_path: str) -> EngineDescription:
    """The engine of that name, or the description in that file. Raises UsageProblem."""
    path = _as_path(name_or_path)
    if path is None:
        if name_or_path not in resources.names("runners"):
            known = engine_names()
            plain = re.sub(r"[^a-z0-9]", "", name_or_path.lower())
            close = difflib.get_close_matches(plain, known, n=1)
            hint = f"Did you mean {close[0]!r}? " if close else ""
            raise UsageProblem(
                f"There is no engine named {name_or_path!r}.",
                hint=f"{hint}Engines: {', '.join(known) or 'none found'}; a path to a .yml file works too.",
            )
        path = resources.find("runners", name_or_path)
    return _read_once(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=32)
def _read_once(path: Path, _changed_ns: int) -> EngineDescription:
    # a description is asked for at every boot and takes a tenth of a second to read
    return read_engine(path)


def read_engine(path: Path) -> EngineDescription:
    """The engine description in `path`. Raises UsageProblem."""
    root = Node(path, "", parse_yaml(path))
    if root.get("kind", "engine") != "engine":
        raise UsageProblem(
            f"{path.name} is a file of signatures, not an engine.", hint="Name an engine's file."
        )
    root.only(_ENGINE_KEYS)
    signatures = [*_signatures(root)]
    for name in root.strings("includes"):
        included = path.parent / f"{name}.yml"
        if not included.is_file() and name not in resources.names("runners"):
            raise root.problem(
                "includes", f"there is no signature file {name!r}", "Put it beside the engine's file."
            )
        found = included if included.is_file() else resources.find("runners", name)
        more = Node(found, "", parse_yaml(found))
        more.only(("kind", "title", "signatures"))
        signatures += _signatures(more)
    ids = [one.id for one in signatures]
    twice = sorted({one for one in ids if ids.count(one) > 1})
    if twice:
        raise root.problem(
            "signatures", f"the id {twice[0]!r} appears twice", "Give each signature its own id."
        )
    return EngineDescription(
        name=root.text("name"),
        title=root.text("title"),
        dialect=root.choice("dialect", _DIALECTS),
        port=root.port("port"),
        port_flags=root.strings("port_flags") or ("--port",),
        needs_gpu=root.flag("needs_gpu", default=True),
        executables=root.strings("executables"),
        images=root.strings("images"),
        endpoints=root.texts("endpoints", _ENDPOINTS),
        offline_env=root.texts("offline_env"),
        axes={name: _axis(node, name) for name, node in root.mappings("axes").items()},
        banners=root.patterns("banners"),
        ready=root.patterns("ready"),
        facts=tuple(_fact(node) for node in root.items("facts")),
        warnings=root.patterns("warnings"),
        signatures=tuple(signatures),
    )


def _kind(path: Path) -> str:
    """engine | signatures, without refusing a broken file here: loading it says what is wrong with it."""
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=Loader)  # noqa: S506 - a SafeLoader
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return "engine"
    return str(data.get("kind", "engine")) if isinstance(data, dict) else "engine"


def _as_path(text: str) -> Path | None:
    if not text.endswith((".yml", ".yaml")) and "/" not in text:
        return None
    path = Path(text).expanduser()
    if not path.is_file():
        raise UsageProblem(f"The engine description {text!r} does not exist.", hint="Check the path.")
    return path


def _axis(node: Node, name: str) -> EngineAxis:
    node.only(_AXIS_KEYS)
    trends: Mapping[str, Any] = node.mapping("trends").data
    node.mapping("trends").only(tuple(Bound))
    axis = EngineAxis(
        name=name,
        variables=node.strings("variables"),
        flags=node.strings("flags"),
        also_flags=node.string_lists("also_flags"),
        env=node.optional_text("env"),
        json_flag=node.optional_text("json_flag"),
        unit=None if node.get("unit") is None else node.choice("unit", _UNITS),
        prefer=node.choice("prefer", ("high", "low"), "high"),
        trends={Bound(bound): node.mapping("trends").enum(bound, Trend) for bound in trends},
        choices=dict(node.mapping("choices").data),
    )
    if not (axis.variables or axis.flags or axis.env or axis.json_flag):
        raise node.problem("", "no way to set it", "Give at least one of variables, flags, env, json_flag.")
    return axis


def _fact(node: Node) -> FactPattern:
    node.only(_FACT_KEYS)
    pattern = node.pattern("pattern")
    if "v" not in pattern.groupindex:
        raise node.problem("pattern", "the group `v` is missing", "Write (?P<v>…) around the value.")
    return FactPattern(
        name=node.text("name"),
        pattern=pattern,
        scale=node.number("scale", 1.0),
        take=node.choice("take", _TAKES, "last"),
    )


def _signatures(root: Node) -> list[Signature]:
    found = []
    for node in root.items("signatures"):
        node.only(_SIGNATURE_KEYS)
        pattern = node.pattern("pattern")
        facts = {name: node.mapping("facts").number(name, 1.0) for name in node.mapping("facts").data}
        for name in facts:
            if name not in pattern.groupindex:
                raise node.problem(
                    f"facts.{name}", "no such group in the pattern", f"Write (?P<{name}>…) in it."
                )
        found.append(
            Signature(
                id=node.text("id"),
                pattern=pattern,
                outcome=node.enum("outcome", Outcome),
                phase=None if node.get("phase") is None else node.enum("phase", Phase),
                echo=node.flag("echo", default=False),
                priority=int(node.number("priority", 50)),
                where=node.choice("where", _WHERE, "log"),
                note=node.text("note", ""),
                facts=facts,
            )
        )
    return found
