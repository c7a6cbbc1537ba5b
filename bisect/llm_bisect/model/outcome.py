"""What can happen to a boot or a probe, and which bound each outcome speaks of."""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """Where it happened."""

    BOOT = "boot"
    PROBE = "probe"


class Outcome(StrEnum):
    """What happened, typed. The comments say what proves each."""

    PASS = "pass"  # noqa: S105
    RECALL_FAILED = "recall_failed"  # answered, a needle is missing
    OOM_BOOT = "oom_boot"  # accelerator memory ran out while booting
    OOM_PROBE = "oom_probe"  # … while serving a request
    ADMISSION_REJECTED = "admission_rejected"  # KV pool too small for the declared context
    CONTEXT_EXCEEDED = "context_exceeded"  # request refused: longer than the context
    TIMEOUT_CLIENT = "timeout_client"  # our deadline passed while the engine progressed
    HANG = "hang"  # no progress
    SLOW = "slow"  # finished, slower than the profile allows
    ENGINE_CRASHED = "engine_crashed"  # died of anything but memory
    PATCH_FAILED = "patch_failed"
    CONFIG_ERROR = "config_error"
    MODEL_MISSING = "model_missing"
    HOST_OOM_KILLED = "host_oom_killed"  # system memory: the limit of our own container or cgroup
    INFRA = "infra"  # GPU busy, port taken, daemon down, image missing, disk full, driver
    VOID = "void"  # the probe measured nothing: cached prefix, wrong length, salt lost
    ABORTED = "aborted"  # we stopped it

    @property
    def is_trouble(self) -> bool:
        """True where the outcome says nothing about the candidate and moves no bracket."""
        return self in (Outcome.INFRA, Outcome.VOID, Outcome.ABORTED)


class Bound(StrEnum):
    """What ends a line of growing values. One bracket per bound; they are never merged."""

    MEMORY = "memory"
    ADMISSION = "admission"
    TIME = "time"
    RECALL = "recall"
    CONTEXT = "context"
    UNUSABLE = "unusable"  # the value cannot be served at all: crash, bad configuration, failed patch


BOUND_OF: dict[Outcome, Bound] = {
    Outcome.OOM_BOOT: Bound.MEMORY,
    Outcome.OOM_PROBE: Bound.MEMORY,
    Outcome.HOST_OOM_KILLED: Bound.MEMORY,
    Outcome.ADMISSION_REJECTED: Bound.ADMISSION,
    Outcome.TIMEOUT_CLIENT: Bound.TIME,
    Outcome.HANG: Bound.TIME,
    Outcome.SLOW: Bound.TIME,
    Outcome.RECALL_FAILED: Bound.RECALL,
    Outcome.CONTEXT_EXCEEDED: Bound.CONTEXT,
    Outcome.ENGINE_CRASHED: Bound.UNUSABLE,
    Outcome.PATCH_FAILED: Bound.UNUSABLE,
    Outcome.CONFIG_ERROR: Bound.UNUSABLE,
    Outcome.MODEL_MISSING: Bound.UNUSABLE,
}
"""The bound that a failing outcome speaks of; `pass`, `infra`, `void` and `aborted` have none."""


class Trend(StrEnum):
    """How passing a bound changes as an axis value rises."""

    RISES = "rises"  # a higher value passes more easily
    FALLS = "falls"  # a higher value passes less easily
    FLAT = "flat"  # no known effect
    UNKNOWN = "unknown"


class MarginTier(StrEnum):
    """How much memory was left at the worst moment of the passes."""

    THIN = "thin"
    MARGINAL = "marginal"
    COMFORTABLE = "comfortable"


def margin_tier(free_mib: float, thresholds_mib: tuple[float, float] = (1024, 2048)) -> MarginTier:
    """Tier of the lowest free VRAM in MiB; `thresholds_mib` are the upper ends of thin and marginal."""
    thin_below, marginal_below = thresholds_mib
    if free_mib < thin_below:
        return MarginTier.THIN
    return MarginTier.MARGINAL if free_mib < marginal_below else MarginTier.COMFORTABLE
