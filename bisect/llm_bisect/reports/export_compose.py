"""A launch as a compose file: an override of the user's own file, or a whole service for an image.

The override holds only what differs from the base. Variables that the point does not set stay `${VAR}`, so
neither a token nor a home path of this machine gets into it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llm_bisect.model import ComposeRef, Launch, Mount, UsageProblem
from llm_bisect.reports.compose_edit import edit_command, edit_environment, edit_volumes, mount_entry
from llm_bisect.reports.compose_extends import raw_service
from llm_bisect.reports.compose_words import escape, substitute
from llm_bisect.reports.guard import guard_service, host_path
from llm_bisect.reports.override_yaml import Same, differing, dump, read_raw

BUILTIN = "builtin:"
NOT_MERGED = ("version", "name", "include")


def compose_override(own: Launch, chosen: Launch, heading: Sequence[str], *, standalone: bool = False) -> str:
    """The override that makes `chosen` of the user's file (`own`: its launch as it stands).

    `standalone`: the whole file with the changes in it, instead of an override. Raises UsageProblem where the
    file cannot be read or a change cannot be written without resolving a variable.
    """
    ref = chosen.compose
    if ref is None:
        raise ValueError("the launch has no compose file")
    path = Path(ref.file)
    document = read_raw(path)
    base = {k: v for k, v in document.items() if not k.startswith("x-") and k not in NOT_MERGED}
    # what the service extends is part of what the override is laid over
    base["services"] = {**(base.get("services") or {}), ref.service: raw_service(document, ref.service, path)}
    edited = _put_in(base, ref.variables)
    edited["services"][ref.service] = _edit_service(base["services"][ref.service], edited, own, chosen, ref)
    if standalone:
        changed = edited
    else:
        changed = differing(base, edited)
        changed = {"services": {ref.service: {}}} if changed is Same else changed
        changed.setdefault("services", {}).setdefault(ref.service, {})
    changed["services"] = {k: guard_service(v) for k, v in changed["services"].items()}
    told = [*heading, *_how_to_start(path, changed, ref, standalone), *_missing(base, edited, ref)]
    return _comments(told) + dump(changed)


def _edit_service(
    base: Mapping[str, Any], edited: Mapping[str, Any], own: Launch, chosen: Launch, ref: ComposeRef
) -> dict[str, Any]:
    service = dict(edited["services"][ref.service])
    if ref.sets_command:
        service["command"] = edit_command(base.get("command"), own.command, chosen.command, ref.variables)
    if ref.sets_env:
        service["environment"] = edit_environment(service.get("environment"), ref.sets_env)
    if ref.adds_mounts or ref.drops_mount_targets:
        folder = Path(ref.file).parent
        adds = [(m, _source(m.source, folder) if m.kind == "bind" else m.source) for m in ref.adds_mounts]
        service["volumes"] = edit_volumes(service.get("volumes"), adds, ref.drops_mount_targets)
    if ref.sets_image and chosen.image:
        service["image"] = escape(chosen.image)
    return service


def _put_in(value: Any, variables: Mapping[str, str]) -> Any:
    """`value` with these variables put in, everywhere; what does not mention them is the same object."""
    if isinstance(value, str):
        text = substitute(value, variables)
        return value if text == value else text
    if isinstance(value, Mapping):
        return {k: _put_in(v, variables) for k, v in value.items()}
    if isinstance(value, list):
        return [_put_in(v, variables) for v in value]
    return value


def _source(source: str, folder: Path) -> str:
    """A mount's source from the compose file's folder, where both lie in one tree."""
    if not Path(source).is_absolute():
        return source
    relative = os.path.relpath(source, folder)
    climbs = len(Path(relative).parts) - len([p for p in Path(relative).parts if p != ".."])
    if climbs >= len(folder.resolve().parts) - 1 or climbs > 4:
        return host_path(escape(source))
    return escape(relative if relative.startswith("..") else f"./{relative}")


def _how_to_start(path: Path, changed: Mapping[str, Any], ref: ComposeRef, standalone: bool) -> list[str]:
    if standalone:
        return [f"start: docker compose -f THIS_FILE up {ref.service}, in the folder of {path.name}"]
    if changed == {"services": {ref.service: {}}}:
        return [f"nothing differs from {path.name}: the point is the file's own values"]
    return [f"start: docker compose -f {path.name} -f THIS_FILE up {ref.service}"]


def _missing(base: Any, edited: Any, ref: ComposeRef) -> list[str]:
    """Variables that the file itself mentions nowhere: an override cannot set them."""
    found = []
    for name, value in ref.variables.items():
        if _put_in(base, {name: value}) == base:
            found.append(
                f"also put {name}={value} into .env: {Path(ref.file).name} itself does not mention it"
            )
    return found


def service_file(chosen: Launch, name: str, heading: Sequence[str]) -> str:
    """A whole compose file for a launch that has an image and no compose file. Raises UsageProblem."""
    if chosen.image is None:
        raise UsageProblem(
            "this launch starts a process, which a compose file cannot say",
            hint="use --to env or --to json",
        )
    service: dict[str, Any] = {"image": escape(chosen.image)}
    if chosen.entrypoint is not None:
        service["entrypoint"] = [escape(a) for a in chosen.entrypoint]
    model = _model_target(chosen)
    named = {"{port}": str(chosen.container_port), "{model}": model or "{model}"}
    service["command"] = [_filled(escape(a), named) for a in chosen.command]
    if chosen.env:
        service["environment"] = {k: escape(v) for k, v in chosen.env.items()}
    volumes = [
        mount_entry(m, host_path(escape(m.source)) if m.kind == "bind" else escape(m.source))
        for m in chosen.mounts
    ]
    if model is not None:
        volumes.append(mount_entry(Mount("", model, read_only=True), _model_source(str(chosen.model_path))))
    if volumes:
        service["volumes"] = volumes
    if chosen.network_mode:
        service["network_mode"] = chosen.network_mode
    if chosen.network_mode != "host":
        service["ports"] = [f"127.0.0.1:{chosen.container_port}:{chosen.container_port}"]
    for field, value in (
        ("working_dir", chosen.working_dir),
        ("ipc", chosen.ipc),
        ("shm_size", f"{chosen.shm_size_mib}m" if chosen.shm_size_mib else None),
        ("mem_limit", f"{chosen.memory_limit_mib}m" if chosen.memory_limit_mib else None),
        ("memswap_limit", f"{chosen.memory_limit_mib}m" if chosen.memory_limit_mib else None),
        ("privileged", chosen.privileged or None),
    ):
        if value is not None:
            service[field] = value
    if chosen.wants_gpu:
        device = {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
    document: dict[str, Any] = {"services": {name: guard_service(service)}}
    declared: dict[str, Any] = {m.source: {} for m in chosen.mounts if m.kind == "volume"}
    if declared:
        document["volumes"] = declared
    return _comments([*heading, f"start: docker compose -f THIS_FILE up {name}"]) + dump(document)


def _model_target(launch: Launch) -> str | None:
    """Where the weights stand in the container, where the command asks for `{model}`; else None."""
    if launch.model_path is None or not any("{model}" in word for word in launch.command):
        return None
    suffix = ".gguf" if launch.model_path.startswith(BUILTIN) else Path(launch.model_path).suffix
    return f"/models/model{suffix}"


def _model_source(path: str) -> str:
    if path.startswith(BUILTIN):
        return (
            f"${{MODEL_FILE:?the study used the model {path.removeprefix(BUILTIN)} that bisect makes itself}}"
        )
    return host_path(escape(path))


def _filled(word: str, named: Mapping[str, str]) -> str:
    for placeholder, value in named.items():
        word = word.replace(placeholder, value)
    return word


def _comments(lines: Sequence[str]) -> str:
    return "".join(f"# {line}\n" for line in lines)
