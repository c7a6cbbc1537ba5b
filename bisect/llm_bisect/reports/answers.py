"""The common part of every answer object: what `--json` prints (schema llm-bisect/answer/1)."""

from __future__ import annotations

from typing import Any

from llm_bisect.journal.state import State
from llm_bisect.model import Outcome
from llm_bisect.search.answer import answer_of
from llm_bisect.search.plan import Plan

SCHEMA = "llm-bisect/answer/1"
SHORT_MARGIN_PROMPTS = "single prompts only; accumulated turns were not probed"


def answer_object(state: State) -> dict[str, Any]:
    """The whole answer object of a study, from its state alone. `state.opened` must not be empty."""
    plan = Plan.from_json(state.opened["plan"])
    status = state.status or "interrupted"
    return {
        "schema": SCHEMA,
        "command": state.opened["command"],
        "study": state.opened["study"],
        "profile": state.opened["profile"],
        "runner": state.opened["runner"],
        "simulated": state.opened["simulated"],
        "status": status,
        "why": state.why or "",
        "answer": answer_of(state, plan),
        "candidates": candidates(state),
        "warnings": warnings(state),
        "cost": cost(state),
    }


def cost(state: State) -> dict[str, Any]:
    """Boots, probes and seconds (of the runner's clock) that the study took so far."""
    return {"boots": len(state.boots), "probes": len(state.trials), "seconds": round(state.seconds, 1)}


def candidates(state: State) -> list[dict[str, Any]]:
    """Each candidate with its boots and its probes, in the order in which they were first asked."""
    found: dict[str, dict[str, Any]] = {}
    for trial in state.trials:
        entry = found.setdefault(
            trial.key,
            {"values": dict(trial.values), "candidate": None, "boots": 0, "facts": {}, "probes": []},
        )
        entry["probes"].append(
            {
                "probe": trial.probe,
                "boot": trial.boot,
                "phase": trial.phase.value,
                "prompt_tokens": trial.prompt_tokens,
                "outcome": trial.outcome.value,
                "purpose": trial.purpose,
                "min_free_mib": trial.min_free_mib,
                "tokens_processed": trial.tokens_processed,
                "seconds": round(trial.wall_s, 1),
            }
        )
    for boot in state.boots.values():
        if boot.key in found:
            found[boot.key]["boots"] += 1
            found[boot.key]["candidate"] = boot.candidate
            found[boot.key]["facts"].update(boot.facts)
    return list(found.values())


def warnings(state: State) -> list[str]:
    """What a reader must know besides the answer, each once."""
    told: list[str] = []
    if state.opened.get("simulated"):
        told.append("simulated: no engine and no GPU was used; the figures come from a model of a rig")
    told += [str(c["text"]) for c in state.contradictions]
    told += [f"the engine says: {w}" for b in state.boots.values() for w in b.warnings]
    told += [f"probe {t.probe}: {note}" for t in state.trials for note in t.body.get("notes", ())]
    told += [f"probe {t.probe} was amended to {t.outcome}: {t.amended}" for t in state.trials if t.amended]
    trouble = sum(t.outcome.is_trouble and t.outcome is not Outcome.ABORTED for t in state.trials)
    if trouble:
        told.append(
            f"{trouble} probes ended in trouble that says nothing about the candidate; they were asked again"
        )
    if any(t.outcome is Outcome.TIMEOUT_CLIENT for t in state.trials):
        told.append("a time bound holds for what else this machine did in these hours")
    if any(t.outcome is Outcome.PASS for t in state.trials):
        told.append(SHORT_MARGIN_PROMPTS)
        if all(t.min_free_mib is None for t in state.trials):
            told.append("no memory telemetry on this machine: the margin is unknown")
    return list(dict.fromkeys(told))
