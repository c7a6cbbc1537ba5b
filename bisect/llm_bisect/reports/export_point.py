"""The point that an export writes out: its values, its proof, its limits."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llm_bisect._version import __version__
from llm_bisect.journal.state import State
from llm_bisect.model import UsageProblem, Values
from llm_bisect.reports.answers import SHORT_MARGIN_PROMPTS
from llm_bisect.reports.table import ceiling_text, free_text, verdict_word
from llm_bisect.reports.words import one_line, scrub, value_text, values_text
from llm_bisect.search.observe import Candidate, candidate
from llm_bisect.search.plan import Plan

UNCONFIRMED = "UNCONFIRMED"
SIMULATED = "simulated: a model of a rig answered; no engine and no GPU was used"


@dataclass(frozen=True)
class Point:
    """One point of a study. `obj` is the whole answer object; `seen` all that was observed of the point."""

    obj: Mapping[str, Any]
    plan: Plan
    values: Values
    prompt_tokens: int  # the length at which it was confirmed
    is_confirmed: bool
    seen: Candidate
    version: str  # of bisect, when the study was opened
    measured_on: str | None = None  # date of the journal's last event

    @property
    def answer(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.obj["answer"]
        return found

    @property
    def is_simulated(self) -> bool:
        return bool(self.obj["simulated"])

    @property
    def proof(self) -> tuple[str, ...]:
        """Probes that passed exactly the confirmed length at these values."""
        return tuple(t.probe for t in self.seen.passes if t.prompt_tokens == self.prompt_tokens)

    @property
    def ceiling(self) -> Mapping[str, Any]:
        """The longest prompt at these values: last_pass, first_fail, fail_outcome, bound_by, boots."""
        if self.plan.kind == "ordered":
            found = self.answer["prompt_ceiling"]
        elif self.plan.kind == "prompt":
            found = {**self.answer, "boots": self.seen.boots_passed(self.answer["last_pass"] or 0)}
        else:
            chosen = self.values[self.plan.axis]
            found = next(c["prompt_ceiling"] for c in self.answer["choices"] if c["value"] == chosen)
        result: Mapping[str, Any] = found
        return result

    @property
    def headline(self) -> str:
        """One sentence: values, boots, margin."""
        confirmed = self.answer["confirmed"]
        return (
            f"{values_text(self.values)}: {confirmed['passes']} of {confirmed['boots']} boots passed "
            f"{self.prompt_tokens:,} tokens, {free_text(self.answer)}"
        )

    @property
    def limits(self) -> list[str]:
        """What the point does not promise."""
        found = []
        if self.is_simulated:
            found.append(SIMULATED)
        if not self.is_confirmed:
            found.append(f"{UNCONFIRMED}: not passed on {self.plan.confirm} fresh boots with the margin")
        rate = self.answer["confirmed"].get("failure_rate_below_pct")
        if rate is not None:
            found.append(f"it fails on fewer than {rate} % of boots at 95 % confidence; no more is proved")
        found.append(SHORT_MARGIN_PROMPTS)
        if not self.is_simulated:
            found.append("measured on one rig only; other cards and drivers were not tried")
        if self.answer["min_free_mib"] is None:
            found.append("no memory telemetry: the margin is unknown")
        found.append(f"longest prompt seen there: {ceiling_text(self.ceiling)}")
        return found

    def heading(self, title: str) -> list[str]:
        """Header lines of an export, scrubbed: what this is, outcome, limits, proof, date, version."""
        marks = [
            w for w, on in (("SIMULATED", self.is_simulated), (UNCONFIRMED, not self.is_confirmed)) if on
        ]
        word = verdict_word(self.answer["min_free_mib"]) if self.is_confirmed else UNCONFIRMED
        lines = [
            f"{' '.join(marks)}{': ' if marks else ''}{title}",
            f"study {self.obj['study']}, profile {self.obj['profile']}, status {self.obj['status']}",
            f"{word}: {self.headline}",
            *(f"limit: {text}" for text in self.limits),
            f"proved by probes {', '.join(self.proof) or 'none'}",
            f"llm-bisect {self.version}" + (f", measured {self.measured_on}" if self.measured_on else ""),
        ]
        return [scrub(one_line(line)) for line in lines]


def point_of(
    state: State, obj: Mapping[str, Any], *, include_unconfirmed: bool, measured_on: str | None = None
) -> Point:
    """The recommended point, or the unconfirmed one where that is wanted. Raises UsageProblem."""
    if not state.opened:
        raise UsageProblem("this journal holds no question yet", hint="run the command that began it again")
    plan = Plan.from_json(state.opened["plan"])
    answer = obj["answer"]
    value, is_confirmed = answer["recommended"], True
    if value is None:
        value, is_confirmed = answer.get("unconfirmed"), False
        if value is None or not include_unconfirmed:
            raise _nothing(obj, value)
    values = plan.own_values if plan.kind == "prompt" else plan.values_at(value)
    return Point(
        obj=obj,
        plan=plan,
        values=values,
        prompt_tokens=value if plan.kind == "prompt" else plan.target_tokens,
        is_confirmed=is_confirmed,
        seen=candidate(state, values),
        version=str(state.opened.get("version") or __version__),
        measured_on=measured_on or state.opened.get("date"),
    )


def _nothing(obj: Mapping[str, Any], unconfirmed: object) -> UsageProblem:
    study = shlex.quote(obj["study"])
    why = obj["status"] + (f": {one_line(obj['why'])}" if obj.get("why") else "")
    if unconfirmed is not None:
        best = value_text(unconfirmed)
        return UsageProblem(
            f"study {obj['study']} has no confirmed point ({why}); {best} is the best so far",
            hint=f"--include-unconfirmed writes it out, marked; bisect resume {study} goes on confirming",
        )
    return UsageProblem(
        f"study {obj['study']} has no point to export ({why})",
        hint=f"bisect explain {study} says what was seen; bisect resume {study} goes on where it can",
    )
