"""A profile: what is served and how, which knobs may vary, and what a probe is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from llm_bisect.model import AxisValue, Bound, Trend
from llm_bisect.spaces.engines import EngineDescription


@dataclass(frozen=True)
class Apply:
    """How a value reaches the launch; the first that the launch offers is used, in this order."""

    variable: tuple[str, ...] = ()  # Compose variables
    flag: tuple[str, ...] = ()
    also_flags: tuple[tuple[str, ...], ...] = ()  # further flags that take the same value
    env: str | None = None
    json_flag: str | None = None
    mount: str | None = None  # a toggle: this file is mounted or not
    mount_target: str | None = None
    image: bool = False


@dataclass(frozen=True)
class Axis:
    """One knob. `values` are in ascending order for an ordered axis, in file order for choices.

    The axis `prompt` has no values: its line is the prompt length in tokens up to the context.
    """

    name: str
    kind: str  # ordered | choices | prompt
    apply: Apply = field(default_factory=Apply)
    values: tuple[AxisValue, ...] = ()  # choices: their labels
    payloads: Mapping[str, object] = field(default_factory=dict)  # choices: label → what is written
    unit: str | None = None  # tokens | fraction
    step: float | None = None
    prefer: str = "high"  # high | low
    trends: Mapping[Bound, Trend] = field(default_factory=dict)
    toggle: bool = False
    requires: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()


@dataclass(frozen=True)
class ProbeSpec:
    """What one probe is. Lengths in tokens, times in seconds."""

    shape: str = "needle"
    target_tokens: int = 32768
    start_tokens: int = 8000  # the first fact: a short probe of the user's own values
    max_tokens: int = 30
    deadline_s: float = 1500.0
    silence_s: float = 300.0
    slow_s: float | None = None
    depths: tuple[float, ...] = (0.1, 0.5, 0.9)
    max_prompt_tokens: int | None = None  # never ask for more than this


@dataclass(frozen=True)
class Profile:
    """One profile, validated. `launches` holds the raw launch of each runner, validated but unresolved."""

    name: str
    path: Path | None  # None: made from a compose file on the fly
    engine: EngineDescription
    launches: Mapping[str, Mapping[str, object]]  # docker | process | simulated
    probe: ProbeSpec
    axes: Mapping[str, Axis]  # toggles included (kind choices, values on/off), and always `prompt`
    margin_mib: float = 0.0
    reserve_mib: float = 0.0
    tiers_mib: tuple[float, float] = (1024.0, 2048.0)
    tolerance: float = 0.03  # share of the prompt …
    tolerance_tokens: int = 1024  # … or this many tokens, whichever is larger
    boot_deadline_s: float = 3600.0
    boot_silence_s: float = 300.0
    historical: str | None = None  # a sentence where image or patch tree can no longer be had
    pins: Mapping[str, Mapping[str, object]] = field(default_factory=dict)  # checked in shape, kept raw
    source_sha256: str = ""  # of the profile's and its compose file's bytes
