"""Engine descriptions: the schema of the files in `runners/`.

An engine is data: its flags for each axis, its endpoints, the facts its boot log prints and the log
signatures with the outcome that each proves. A new engine needs a new file, not new code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from llm_bisect.model import Bound, Outcome, Phase, Trend


@dataclass(frozen=True)
class EngineAxis:
    """How this engine takes one knob, and which way each bound moves as its value rises."""

    name: str
    variables: tuple[str, ...] = ()  # Compose variables that files use for it, first is preferred
    flags: tuple[str, ...] = ()  # spellings of its flag, first is the one we write
    also_flags: tuple[tuple[str, ...], ...] = ()  # more flags that get the same value: their spellings
    env: str | None = None
    json_flag: str | None = None
    unit: str | None = None  # tokens | fraction | None
    prefer: str = "high"
    trends: Mapping[Bound, Trend] = field(default_factory=dict)
    choices: Mapping[str, object] = field(default_factory=dict)  # unordered: label → value


@dataclass(frozen=True)
class FactPattern:
    """A number or text of the boot log. Group `v` holds it; `scale` brings it to the unit in the name."""

    name: str
    pattern: re.Pattern[str]
    scale: float = 1.0
    take: str = "last"  # last | first | max | min | sum over all matches of this boot


@dataclass(frozen=True)
class Signature:
    """A message format, what it proves, and what it never proves alone."""

    id: str
    pattern: re.Pattern[str]
    outcome: Outcome
    phase: Phase | None = None  # None: either
    echo: bool = False  # repeats a cause named elsewhere; never decides
    priority: int = 50  # lower is read first among root causes on the same line
    where: str = "log"  # log | http | daemon
    note: str = ""
    facts: Mapping[str, float] = field(default_factory=dict)  # named group → scale to the unit in its name


@dataclass(frozen=True)
class EngineDescription:
    """One file of `runners/`."""

    name: str
    title: str
    dialect: str  # vllm | llamacpp: how a request is counted, sent and watched
    port: int
    port_flags: tuple[str, ...] = ("--port",)
    needs_gpu: bool = True
    executables: tuple[str, ...] = ()  # argv[0] spellings and images that identify the engine
    images: tuple[str, ...] = ()
    endpoints: Mapping[str, str] = field(
        default_factory=dict
    )  # health, models, tokenize, complete, metrics, slots
    offline_env: Mapping[str, str] = field(
        default_factory=dict
    )  # set in every candidate unless pulling is allowed
    axes: Mapping[str, EngineAxis] = field(default_factory=dict)
    banners: tuple[re.Pattern[str], ...] = ()  # first line of a boot
    ready: tuple[re.Pattern[str], ...] = ()
    facts: tuple[FactPattern, ...] = ()
    warnings: tuple[re.Pattern[str], ...] = ()
    signatures: tuple[Signature, ...] = ()
