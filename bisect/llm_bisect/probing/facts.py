"""What a boot log says about the boot: each fact is read on its own, none is derived from another."""

from __future__ import annotations

from llm_bisect.model import BootFacts
from llm_bisect.model.evidence import Fact
from llm_bisect.probing.logs import SHOWN_CHARS, SHOWN_LINES, prepare, to_fact
from llm_bisect.spaces.engines import EngineDescription


def boot_facts(engine: EngineDescription, log: str) -> BootFacts:
    """Facts and warnings of the last boot in `log` (names and units: BootFacts)."""
    ready, start = prepare(engine, log)
    text = ready.text[ready.starts[start] :]
    facts: dict[str, Fact] = {}
    for pattern in engine.facts:
        if pattern.name in facts:
            continue  # several wordings of one fact: the first that is found counts
        values = [
            value
            for found in pattern.pattern.finditer(text)
            if (value := to_fact(pattern.name, found.group("v"), pattern.scale)) is not None
        ]
        if values:
            facts[pattern.name] = _take(values, pattern.take)
    warnings = []
    for warning in engine.warnings:
        hit = warning.search(text)
        if hit is not None:
            warnings.append(hit.group(0).strip()[:SHOWN_CHARS])
    return BootFacts(facts=facts, warnings=tuple(warnings[:SHOWN_LINES]))


def _take(values: list[Fact], how: str) -> Fact:
    numbers = [value for value in values if isinstance(value, int | float)]
    if how in ("max", "min", "sum") and numbers:
        return {"max": max, "min": min, "sum": sum}[how](numbers)  # type: ignore[operator, no-any-return]
    return values[0] if how == "first" else values[-1]
