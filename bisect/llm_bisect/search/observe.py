"""What the observations say about one candidate: passes and failures by prompt length, boots, margins."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from llm_bisect.journal.state import State, Trial, values_key
from llm_bisect.model import BOUND_OF, AxisValue, Bound, Outcome, Phase, Values
from llm_bisect.search.length import LengthBracket, length_bracket
from llm_bisect.search.plan import Plan

NEEDS_REPEAT = frozenset({Outcome.ENGINE_CRASHED, Outcome.HANG, Outcome.RECALL_FAILED})
"""Failures that a flake (or needles that happen to look alike) can cause: one alone is asked again, on a
fresh boot and with fresh needles, before it counts."""

USUAL_BATCH_TOKENS = 4096  # where the log does not tell: progress shows in steps of about one batch
CONTEXT_RESERVE_TOKENS = 64  # follow-up questions may be a little longer than the first


@dataclass(frozen=True)
class Candidate:
    """All observations of one assignment of values."""

    values: Values
    trials: tuple[Trial, ...]

    @property
    def passes(self) -> tuple[Trial, ...]:
        return tuple(t for t in self.trials if t.outcome is Outcome.PASS)

    @property
    def failures(self) -> tuple[Trial, ...]:
        """Failures that count: of crashes and hangs only those that a second one has confirmed."""
        counted, _ = self._flakes
        return tuple(
            t
            for t in self.trials
            if t.outcome in BOUND_OF and (t.outcome not in NEEDS_REPEAT or t.probe in counted)
        )

    @property
    def unrepeated(self) -> Trial | None:
        """A crash or hang that nothing has settled yet: it must be asked again before it counts."""
        return self._flakes[1]

    @property
    def _flakes(self) -> tuple[frozenset[str], Trial | None]:
        """(probes of the crashes and hangs that count, the first one that is not settled).

        The next verdict that bears on its length settles it: a pass clears it, another crash or hang
        confirms both, and any other failure stands in its place.
        """
        counted: set[str] = set()
        open_flake: Trial | None = None
        for trial in self.trials:
            if trial.outcome not in NEEDS_REPEAT or trial.probe in counted:
                continue
            verdict = self._settling(trial)
            if verdict is None:
                open_flake = open_flake or trial
            elif verdict.outcome in NEEDS_REPEAT:
                counted |= {trial.probe, verdict.probe}
        return frozenset(counted), open_flake

    def _settling(self, flake: Trial) -> Trial | None:
        for trial in self.trials:
            if trial.seq <= flake.seq:
                continue
            if trial.outcome is Outcome.PASS:
                bears = trial.prompt_tokens >= flake.prompt_tokens
            else:
                bears = trial.phase is Phase.BOOT or trial.prompt_tokens <= flake.prompt_tokens
            if bears:
                return trial
        return None

    def passes_at(self, prompt_tokens: int) -> tuple[Trial, ...]:
        """Passes that prove this length: a pass of a longer prompt proves the shorter."""
        return tuple(t for t in self.passes if t.prompt_tokens >= prompt_tokens)

    def failures_at(self, prompt_tokens: int) -> tuple[Trial, ...]:
        """Failures that prove this length fails: a boot that failed, or a shorter prompt that failed."""
        return tuple(t for t in self.failures if t.phase is Phase.BOOT or t.prompt_tokens <= prompt_tokens)

    @property
    def boot_failure(self) -> Trial | None:
        return next((t for t in self.failures if t.phase is Phase.BOOT), None)

    def boots_passed(self, prompt_tokens: int) -> int:
        """Boots on which a prompt of exactly this length passed."""
        return len({t.boot for t in self.passes if t.prompt_tokens == prompt_tokens})

    def boots_judged(self, prompt_tokens: int) -> int:
        """Boots that gave a verdict on this length, failures of shorter prompts included."""
        passed = {t.boot for t in self.passes if t.prompt_tokens == prompt_tokens}
        return len(passed | {t.boot for t in self.failures_at(prompt_tokens)})

    def min_free_mib(self, prompt_tokens: int) -> float | None:
        """The margin at this length: lowest free memory over all passes at or below it, in MiB.

        Free memory of a boot stays where its longest prompt left it, so a pass after a longer prompt on the
        same boot tells of that prompt; it counts only where there is no other.
        """
        seen = [t for t in self.passes if t.prompt_tokens <= prompt_tokens and t.min_free_mib is not None]
        clean = [t for t in seen if not self._after_longer(t)]
        return min((t.min_free_mib for t in clean or seen if t.min_free_mib is not None), default=None)

    def _after_longer(self, trial: Trial) -> bool:
        return any(
            t.boot == trial.boot and t.seq < trial.seq and t.prompt_tokens > trial.prompt_tokens
            for t in self.trials
        )

    def has_margin(self, prompt_tokens: int, margin_mib: float) -> bool:
        """True where the margin is kept, or cannot be known for want of telemetry."""
        free_mib = self.min_free_mib(prompt_tokens)
        return free_mib is None or free_mib >= margin_mib

    def context_tokens(self, plan: Plan) -> int | None:
        """The longest prompt that the context leaves room for, as the engine itself says; None: unknown."""
        caps = [int(t.facts["context_tokens"]) for t in self.trials if "context_tokens" in t.facts]
        limits = [min(caps) - plan.max_tokens - CONTEXT_RESERVE_TOKENS] if caps else []
        if plan.max_prompt_tokens is not None:
            limits.append(plan.max_prompt_tokens)
        return max(1, min(limits)) if limits else None

    def cap_name(self, plan: Plan) -> str:
        """What ends the line where even the longest passes: the context, or the profile's max_prompt."""
        cap = self.context_tokens(plan)
        return "max_prompt" if cap is not None and cap == plan.max_prompt_tokens else Bound.CONTEXT.value

    def lengths(self, plan: Plan, margin_mib: float | None = None) -> LengthBracket:
        """The prompt bracket; with `margin_mib`, a pass that left less counts as a failure."""
        in_probe = [t for t in self.failures if t.phase is Phase.PROBE]
        passes = {t.prompt_tokens for t in self.passes}
        fails = {t.prompt_tokens for t in in_probe}
        if margin_mib is not None:
            fails |= {n for n in passes if not self.has_margin(n, margin_mib)}
        return length_bracket(passes, fails, self.context_tokens(plan))

    def first_failure(self, prompt_tokens: int) -> Trial | None:
        """The failure that closes the bracket at this length."""
        return next((t for t in self.failures if t.prompt_tokens == prompt_tokens), None)


def candidate(state: State, values: Values) -> Candidate:
    """What has been observed of these values."""
    key = values_key(values)
    return Candidate(values, tuple(t for t in state.observations if t.key == key))


def ordered_points(plan: Plan) -> tuple[AxisValue, ...]:
    """The axis's values with the user's own among them, from the least to the most preferred."""
    points = set(plan.points) | ({plan.own} if plan.own is not None else set())
    return tuple(sorted(points, key=_number, reverse=plan.prefer == "low"))


def bound_of(trial: Trial) -> Bound:
    return BOUND_OF[trial.outcome]


def length_hints(
    found: Candidate, plan: Plan, bracket: LengthBracket, remembered: Iterable[int] = ()
) -> tuple[int, ...]:
    """Lengths worth trying next, by what a failing probe had processed when it ended.

    Memory grows with the tokens processed, so the ceiling lies within about one batch above the place
    where a probe died; a probe that ran out of time shows how far that time reaches. Measured on
    llama-server: 5 of 5 ceilings lay within one logical batch.
    """
    hints: list[int] = list(remembered)
    for trial in found.failures:
        tokens = trial.tokens_processed
        if trial.phase is not Phase.PROBE or not tokens or tokens >= trial.prompt_tokens:
            continue
        if bound_of(trial) is Bound.MEMORY:
            hints.append(tokens)
            hints.append(tokens + int(trial.facts.get("n_batch", USUAL_BATCH_TOKENS)))
        elif trial.outcome is Outcome.TIMEOUT_CLIENT:
            hints.append(int(tokens * 0.97))
    near = plan.slack_tokens(bracket.lo or 0) // 2
    lo = bracket.lo if bracket.lo is not None else 0
    return tuple(
        h for h in hints if h > lo + near and (bracket.hi is None or h < bracket.hi - near) and h > 0
    )


def _number(value: AxisValue) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"a value of an ordered axis must be a number, not {value!r}")
    return float(value)
