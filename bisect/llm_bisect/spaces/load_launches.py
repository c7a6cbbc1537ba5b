"""Launches of a profile: how an engine is started by each runner, checked but not resolved."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from llm_bisect.spaces.node import Node, amount, shown
from llm_bisect.spaces.units import parse_mib

RUNNERS = ("docker", "process", "simulated")

_COMPOSE_KEYS = ("runner", "compose", "service", "share_mounts")
_IMAGE_KEYS = (
    "runner",
    "image",
    "command",
    "entrypoint",
    "environment",
    "volumes",
    "gpus",
    "memory_limit",
    "model",
    "ipc",
    "shm_size",
    "port",
    "share_mounts",
)
_PROCESS_KEYS = ("runner", "command", "env", "model", "memory_limit", "gpus")
_SIMULATED_KEYS = ("runner", "card", "model")


def read_launches(root: Node) -> dict[str, Mapping[str, object]]:
    """Runner → its launch. Paths are absolute; relative ones lie beside the profile. Raises UsageProblem."""
    if (root.get("launch") is None) == (root.get("launches") is None):
        raise root.problem(
            "launch", "a profile needs either launch or launches", "launch: {compose: FILE} is the shortest."
        )
    if root.get("launch") is not None:
        node = root.mapping("launch")
        named = {node.choice("runner", RUNNERS, "docker"): node}
    else:
        root.mapping("launches").only(RUNNERS)
        named = root.mappings("launches")
    for name, node in named.items():
        node.choice("runner", (name,), name)
    readers = {"docker": _docker, "process": _process, "simulated": _simulated}
    launches: dict[str, Mapping[str, object]] = {n: readers[n](node) for n, node in named.items()}
    if "simulated" in launches and "docker" not in launches:
        raise root.problem(
            "launches", "simulated needs the docker launch that it stands in for", "Add launches.docker."
        )
    if not launches:
        raise root.problem("launches", "there is no launch", f"Accepted: {', '.join(RUNNERS)}.")
    if root.flag("share_mounts", default=False) and "docker" in launches:
        launches["docker"] = {**launches["docker"], "share_mounts": True}
    return launches


def _docker(node: Node) -> dict[str, object]:
    if node.get("compose") is not None:
        node.only(_COMPOSE_KEYS)
        return {
            "compose": beside(node, node.text("compose")),
            "service": node.optional_text("service"),
            "share_mounts": node.flag("share_mounts", default=False),
        }
    node.only(_IMAGE_KEYS)
    if node.get("image") is None:
        raise node.problem(
            "", "a docker launch needs compose or image", "Write `compose: FILE`, or `image: NAME`."
        )
    return {
        "image": node.text("image"),
        "command": _argv(node, "command"),
        "entrypoint": _argv(node, "entrypoint") or None,
        "environment": _environment(node, "environment"),
        "volumes": list(node.strings("volumes")),
        "gpus": node.get("gpus"),
        "memory_limit": _limit(node),
        "model": _model(node),
        "ipc": node.optional_text("ipc"),
        "shm_size": amount(node, "shm_size", parse_mib, 0.0) or None,
        "port": node.port("port") if node.get("port") is not None else None,
        "share_mounts": node.flag("share_mounts", default=False),
    }


def _process(node: Node) -> dict[str, object]:
    node.only(_PROCESS_KEYS)
    command = _argv(node, "command")
    if not command:
        raise node.problem("command", "a process needs a command", 'e.g. [llama-server, --port, "{port}", …]')
    return {
        "command": command,
        "env": _environment(node, "env"),
        "model": _model(node),
        "memory_limit": _limit(node),
        "gpus": node.get("gpus"),
    }


def _simulated(node: Node) -> dict[str, object]:
    node.only(_SIMULATED_KEYS)
    return {"card": node.text("card"), "model": node.text("model")}


def _argv(node: Node, key: str) -> list[str]:
    """An argv: a list of texts and numbers, or one text that is split as a shell would."""
    value = node.get(key)
    if isinstance(value, str):
        try:
            return shlex.split(value)
        except ValueError as error:
            raise node.problem(key, f"{shown(value)}: {error}", "Write a list of words instead.") from None
    if not isinstance(value, list | None):
        raise node.problem(
            key, f"a list of words is expected, not {shown(value)}", "Write `command: [a, b]`."
        )
    for index, word in enumerate(value or []):
        if isinstance(word, bool) or not isinstance(word, str | int | float):
            raise node.problem(f"{key}[{index}]", f"{shown(word)} is no word", "Put it in quotes.")
    return [str(word) for word in value or []]


def _environment(node: Node, key: str) -> dict[str, str]:
    """A mapping, or a list of NAME=VALUE."""
    if isinstance(node.get(key), list):
        pairs = [text.partition("=") for text in node.strings(key)]
        bad = next((name for name, equals, _ in pairs if not equals), None)
        if bad is not None:
            raise node.problem(key, f"{bad!r} has no value", "Write NAME=VALUE.")
        return {name: value for name, _, value in pairs}
    found = node.mapping(key).data
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise node.problem(key, f"{name}: {shown(value)} is no text", 'Put it in quotes, e.g. "1".')
    return {name: str(value) for name, value in found.items()}


def _limit(node: Node) -> int | None:
    mib = amount(node, "memory_limit", parse_mib, 0.0)
    return round(mib) if mib else None


def _model(node: Node) -> str | None:
    text = node.optional_text("model")
    return text if text is None or text.startswith("builtin:") else beside(node, text)


def beside(node: Node, text: str) -> str:
    """A path of the profile, absolute: relative ones lie beside the profile."""
    path = Path(text).expanduser()
    return str(path if path.is_absolute() else node.path.parent / path)
