"""A launch: everything that starts one engine, after an axis value has been applied to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

AxisValue = str | int | float | bool | None
"""A value of an axis. None: the user's launch does not set it (the engine's default)."""

Values = Mapping[str, AxisValue]
"""One assignment: axis name → value. Axes left out keep the user's own value."""


@dataclass(frozen=True)
class Mount:
    """A bind mount (absolute host path) or a named volume."""

    source: str
    target: str
    read_only: bool = False
    kind: str = "bind"  # bind | volume | tmpfs


@dataclass(frozen=True)
class ComposeRef:
    """The user's own compose file and the variables that this candidate sets for it."""

    file: str  # absolute path; never edited
    service: str
    project: str  # the name of the user's own project (named volumes live under it)
    variables: Mapping[str, str] = field(default_factory=dict)
    sets_command: bool = False  # argv differs from what the file gives under `variables`
    sets_env: Mapping[str, str | None] = field(default_factory=dict)  # None: unset
    adds_mounts: tuple[Mount, ...] = ()
    drops_mount_targets: tuple[str, ...] = ()
    sets_image: bool = False


@dataclass(frozen=True)
class SimulatedRef:
    """The card and model files that stand in for the hardware (names in runners/simulated/)."""

    card: str
    model: str


@dataclass(frozen=True)
class Launch:
    """An effective launch. `command` is the engine's argv without the image's entrypoint."""

    runner: str  # docker | process | simulated
    engine: str  # name of a file in runners/
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    image: str | None = None
    entrypoint: tuple[str, ...] | None = None  # None: the image's own
    mounts: tuple[Mount, ...] = ()
    working_dir: str | None = None
    container_port: int = 8000
    ipc: str | None = None
    shm_size_mib: int | None = None
    privileged: bool = False
    network_mode: str | None = None
    wants_gpu: bool = False
    memory_limit_mib: int | None = None  # container or cgroup limit (memory + swap)
    compose: ComposeRef | None = None
    simulated: SimulatedRef | None = None
    model_path: str | None = None  # weights (file or folder) where the launch names one on this host
    share_mounts: bool = False  # writable binds are used as they are, not redirected to folders of ours
