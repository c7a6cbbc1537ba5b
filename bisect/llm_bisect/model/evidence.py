"""What was seen: log lines, facts with units, the engine's state, memory and progress."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Fact = str | int | float | bool


@dataclass(frozen=True)
class Evidence:
    """Why an outcome was chosen. `lines` are log or HTTP lines, at most 12 of at most 500 characters."""

    rule: str  # id of the signature or the name of the decision
    lines: tuple[str, ...] = ()
    facts: Mapping[str, Fact] = field(default_factory=dict)  # names carry units: oom_alloc_mib, …
    considered: tuple[str, ...] = ()  # what else matched and did not decide


@dataclass(frozen=True)
class BootFacts:
    """Facts of one boot, each read on its own from the log, never derived from each other.

    Names (all optional): weights_gib, kv_cache_gib, kv_cache_tokens, max_concurrency, context_tokens,
    estimated_max_model_len, kv_needed_gib, kv_available_gib, activation_gib, graph_gib, resident_mib,
    compute_buffer_mib, kv_buffer_mib, n_batch, n_ubatch, slots, version.
    """

    facts: Mapping[str, Fact] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def number(self, name: str) -> float | None:
        """The fact as a number, or None where it was not seen or is no number."""
        value = self.facts.get(name)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


@dataclass(frozen=True)
class EngineState:
    """State of the container or process, read before it is removed."""

    running: bool
    exit_code: int | None = None  # negative: killed by that signal (processes); 128+n in containers
    oom_killed: bool = False  # by the limit of our own container or cgroup: evidence, not a verdict
    stopped_by_us: bool = False
    status: str = ""  # created, running, exited, dead, …
    error: str = ""  # what the daemon or the operating system said


@dataclass(frozen=True)
class MemorySample:
    """Free memory on the tightest device at one moment."""

    free_mib: float
    total_mib: float | None = None
    source: str = "nvml"  # nvml | cgroup | simulated
    others_mib: float | None = None  # memory of processes that are not the candidate's, where known


@dataclass(frozen=True)
class Progress:
    """How far a request has come. `tokens` may be None where the engine only shows that it works."""

    tokens: int | None = None
    total_tokens: int | None = None
    busy: bool | None = None
    source: str = ""  # slots | prompt_progress | metrics | log | stream
