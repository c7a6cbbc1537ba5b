"""A service's raw definition with what it `extends`, from this or another compose file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llm_bisect.model import UsageProblem
from llm_bisect.reports.compose_words import volume_target
from llm_bisect.reports.override_yaml import Plain, read_raw

DEEPEST = 16


def raw_service(document: Mapping[str, Any], name: str, path: Path, depth: int = 0) -> dict[str, Any]:
    """The service as Compose would merge it, nothing resolved. Raises UsageProblem where it is not there."""
    services = document.get("services")
    service = services.get(name) if isinstance(services, Mapping) else None
    if not isinstance(service, Mapping):
        included = " (files that it includes are not searched)" if "include" in document else ""
        raise UsageProblem(
            f"{path}: no service {name!r}{included}", hint="--to env or --to json still name the values"
        )
    extends = service.get("extends")
    if extends is None or depth > DEEPEST:
        return dict(service)
    if isinstance(extends, str):
        extends = {"service": extends}
    parent_path, parent = path, document
    if extends.get("file"):
        parent_path = path.parent / str(extends["file"])
        parent = read_raw(parent_path)
    found = raw_service(parent, str(extends["service"]), parent_path, depth + 1)
    if "volumes" in found and parent_path.parent != path.parent:
        found["volumes"] = [_moved(v, parent_path.parent, path.parent) for v in found["volumes"] or []]
    child = {k: v for k, v in service.items() if k != "extends"}
    merged: dict[str, Any] = merge(found, child)
    return merged


def _moved(volume: Any, old: Path, new: Path) -> Any:
    """A relative source counts from the file that names it."""
    base = os.path.relpath(old, new)
    if isinstance(volume, Mapping):
        source = str(volume.get("source", ""))
        return {**volume, "source": _joined(base, source)} if source.startswith(".") else volume
    return _joined(base, str(volume)) if str(volume).startswith(".") else volume


def _joined(base: str, source: str) -> str:
    path, colon, rest = source.partition(":")
    joined = os.path.normpath(f"{base}/{path}")
    return (joined if joined.startswith(".") else f"./{joined}") + colon + rest


def merge(parent: Any, child: Any, key: str = "") -> Any:
    """As Compose merges: mappings by key, commands replaced, other lists appended (by name or target)."""
    if key == "environment":
        parent, child = _as_mapping(parent), _as_mapping(child)
    if isinstance(parent, Mapping) and isinstance(child, Mapping):
        both = {k: merge(v, child[k], k) if k in child else v for k, v in parent.items()}
        return {**both, **{k: v for k, v in child.items() if k not in parent}}
    if key in ("command", "entrypoint", "test") or not (isinstance(parent, list) and isinstance(child, list)):
        return child
    if key == "volumes":
        named = {volume_target(v) for v in child}
        return [*(v for v in parent if volume_target(v) not in named), *child]
    return [*parent, *(item for item in child if item not in parent)]


def _as_mapping(environment: Any) -> Any:
    if not isinstance(environment, list):
        return environment or {}
    pairs = [str(item).partition("=") for item in environment]
    return {
        name: Plain(value) if equals and value else (value if equals else None)
        for name, equals, value in pairs
    }
