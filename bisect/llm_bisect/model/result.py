"""What is asked of a probe and what comes back from a boot or a probe."""

from __future__ import annotations

from dataclasses import dataclass, field

from llm_bisect.model.evidence import BootFacts, Evidence
from llm_bisect.model.outcome import Outcome


@dataclass(frozen=True)
class ProbeRequest:
    """One request to one boot."""

    probe: str  # the probe's id: names its log and is part of the salt
    prompt_tokens: int
    shape: str = "needle"  # needle | prefill
    max_tokens: int = 30
    deadline_s: float = 1500.0  # the profile's time budget for one request
    silence_s: float = 300.0  # no progress for this long: hang
    slow_s: float | None = None  # a pass that took longer is `slow`
    depths: tuple[float, ...] = (0.1, 0.5, 0.9)
    salt: str = ""


@dataclass(frozen=True)
class RecallCheck:
    """One needle: where it stood (0 = head, 1 = tail) and whether it came back."""

    depth: float
    found: bool


@dataclass(frozen=True)
class ProbeResult:
    """What a probe measured. Times are seconds of the runner's clock."""

    outcome: Outcome
    evidence: Evidence
    prompt_tokens: int  # as counted by the engine where it says so, else as built
    wall_s: float = 0.0
    first_token_s: float | None = None
    tokens_processed: int | None = None  # how far the prompt had come when it ended
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    prefill_tps: float | None = None
    decode_tps: float | None = None
    min_free_mib: float | None = None
    memory_source: str | None = None
    others_grew_mib: float | None = None
    recall: tuple[RecallCheck, ...] = ()
    http_status: int | None = None
    engine_alive: bool = True  # False: the engine is dead or unusable and must be booted again
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class BootResult:
    """How a boot ended: ready (`pass`) or typed failure."""

    outcome: Outcome
    evidence: Evidence
    facts: BootFacts = field(default_factory=BootFacts)
    wall_s: float = 0.0
    free_mib: float | None = None
    memory_source: str | None = None
