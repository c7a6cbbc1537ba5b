"""One service of a compose file, as Compose resolves it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llm_bisect.model import Mount
from llm_bisect.spaces.units import parse_mib

# Keys that give a container more of the machine than it gets by default, besides `privileged`.
_POWERS = (
    "pid",
    "userns_mode",
    "uts",
    "cgroup_parent",
    "cap_add",
    "security_opt",
    "devices",
    "device_cgroup_rules",
)


@dataclass(frozen=True)
class ComposeService:
    """A service, all resolved: absolute paths, `$$` is `$`, named volumes have their real names."""

    name: str
    project: str  # the user's own project: named volumes live under it
    image: str | None
    command: tuple[str, ...]
    entrypoint: tuple[str, ...] | None  # None: the image's own
    env: Mapping[str, str]
    mounts: tuple[Mount, ...]
    ports: tuple[int, ...]  # ports inside the container
    published: tuple[int, ...] = ()
    restart: str | None = None
    ipc: str | None = None
    shm_size_mib: int | None = None
    working_dir: str | None = None
    network_mode: str | None = None
    privileged: bool = False
    wants_gpu: bool = False
    mem_limit_mib: int | None = None
    depends_on: tuple[str, ...] = ()
    container_name: str | None = None
    profiles: tuple[str, ...] = ()
    powers: tuple[str, ...] = ()  # "cap_add: SYS_ADMIN", …: more of the machine than usual


def parse_service(name: str, raw: Mapping[str, Any], config: Mapping[str, Any]) -> ComposeService:
    """The service from the JSON of `docker compose config` (with `$$` un-escaped)."""
    volumes = {k: str((v or {}).get("name") or k) for k, v in (config.get("volumes") or {}).items()}
    ports = [p for p in raw.get("ports") or () if isinstance(p, dict)]
    return ComposeService(
        name=name,
        project=str(config.get("name") or ""),
        image=raw.get("image"),
        command=_words(raw.get("command")) or (),
        entrypoint=_words(raw.get("entrypoint")),
        # null: named without a value, and unset where Compose is called, so the container does not get it
        env={k: str(v) for k, v in (raw.get("environment") or {}).items() if v is not None},
        mounts=tuple(_mount(m, volumes) for m in raw.get("volumes") or ()),
        ports=tuple(int(p["target"]) for p in ports),
        published=tuple(int(p["published"]) for p in ports if str(p.get("published", "")).isdigit()),
        restart=raw.get("restart"),
        ipc=raw.get("ipc"),
        shm_size_mib=_mib(raw.get("shm_size")),
        working_dir=raw.get("working_dir"),
        network_mode=raw.get("network_mode"),
        privileged=bool(raw.get("privileged")),
        wants_gpu=_wants_gpu(raw),
        mem_limit_mib=_mib(raw.get("mem_limit") or _resources(raw, "limits").get("memory")),
        depends_on=tuple(raw.get("depends_on") or ()),
        container_name=raw.get("container_name"),
        profiles=tuple(raw.get("profiles") or ()),
        powers=tuple(_powers(raw)),
    )


def _words(raw: Any) -> tuple[str, ...] | None:
    return None if raw is None else tuple(str(word) for word in raw)


def _mount(raw: Mapping[str, Any], volumes: Mapping[str, str]) -> Mount:
    kind = str(raw.get("type", "bind"))
    source = str(raw.get("source") or "")
    return Mount(
        volumes.get(source, source) if kind == "volume" else source,
        str(raw.get("target")),
        bool(raw.get("read_only")),
        kind,
    )


def _resources(raw: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = ((raw.get("deploy") or {}).get("resources") or {}).get(kind) or {}
    return found


def _mib(value: object) -> int | None:
    """Compose prints bytes, as a number or a text."""
    if value is None:
        return None
    text = str(value)
    return int(text) >> 20 if text.isdigit() else round(parse_mib(text))


def _wants_gpu(raw: Mapping[str, Any]) -> bool:
    reserved = _resources(raw, "reservations").get("devices") or ()
    asked = any("gpu" in (d.get("capabilities") or ()) or d.get("driver") == "nvidia" for d in reserved)
    devices = [str(d.get("source") if isinstance(d, dict) else d) for d in raw.get("devices") or ()]
    passed = any(d.startswith(("nvidia.com/gpu", "/dev/nvidia")) for d in devices)
    return asked or passed or bool(raw.get("gpus")) or raw.get("runtime") == "nvidia"


def _powers(raw: Mapping[str, Any]) -> list[str]:
    lines = []
    for key in _POWERS:
        value = raw.get(key)
        for one in value if isinstance(value, list) else [value] if value else []:
            lines.append(f"{key}: {one.get('source') if isinstance(one, dict) else one}")
    return lines
