"""The shared words as types: no I/O, and nothing of the other rooms."""

from llm_bisect.model.errors import BisectError, EnvironmentProblem, UsageProblem
from llm_bisect.model.evidence import BootFacts, EngineState, Evidence, MemorySample, Progress
from llm_bisect.model.launch import AxisValue, ComposeRef, Launch, Mount, SimulatedRef, Values
from llm_bisect.model.outcome import BOUND_OF, Bound, MarginTier, Outcome, Phase, Trend, margin_tier
from llm_bisect.model.result import BootResult, ProbeRequest, ProbeResult, RecallCheck

__all__ = [
    "BOUND_OF",
    "AxisValue",
    "BisectError",
    "BootFacts",
    "BootResult",
    "Bound",
    "ComposeRef",
    "EngineState",
    "EnvironmentProblem",
    "Evidence",
    "Launch",
    "MarginTier",
    "MemorySample",
    "Mount",
    "Outcome",
    "Phase",
    "ProbeRequest",
    "ProbeResult",
    "Progress",
    "RecallCheck",
    "SimulatedRef",
    "Trend",
    "UsageProblem",
    "Values",
    "margin_tier",
]
