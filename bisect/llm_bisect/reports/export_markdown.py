"""A point as Markdown: one table row to share, every probe as evidence, and the limits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from llm_bisect.journal.state import State, Trial
from llm_bisect.model import Outcome, Phase
from llm_bisect.reports.export_point import UNCONFIRMED, Point
from llm_bisect.reports.table import ceiling_text, verdict_word
from llm_bisect.reports.words import duration, message_of, one_line, scrub, values_text


def markdown(point: Point, state: State) -> str:
    """The whole document; ends with a newline."""
    tail = point.heading("")[-2:]
    lines = [
        *_table(_row_head(point), [_row(point)]),
        "",
        "### Evidence",
        "",
        *_table(_EVIDENCE, [_evidence(t, point.is_simulated) for t in state.trials]),
        "",
        "### Limits",
        "",
        *(f"- {cell(text)}" for text in [*point.limits, *tail]),
    ]
    return "\n".join(lines) + "\n"


def _row_head(point: Point) -> list[str]:
    context = point.seen.trials[-1].facts.get("context_tokens") if point.seen.trials else None
    at = f"{int(context):,}" if isinstance(context, int | float) else "ctx"
    return [
        "Variant",
        "Config",
        f"{point.prompt_tokens:,} (boots)",
        "longest prompt (last pass, first fail)",
        f"KV @ {at}",
        "lowest free MiB (tier)",
        "bound by",
        "seconds",
        "says",
        *(["rig"] if point.is_simulated else []),
    ]


def _row(point: Point) -> list[str]:
    answer, ceiling = point.answer, point.ceiling
    confirmed = answer["confirmed"]
    free_mib = answer["min_free_mib"]
    walls = [t.wall_s for t in point.seen.passes if t.prompt_tokens == point.prompt_tokens and t.wall_s]
    return [
        str(point.obj["profile"]),
        values_text(point.values),
        f"{'✅' if point.is_confirmed else '❔'} {confirmed['passes']}/{confirmed['boots']} boots",
        ceiling_text({**ceiling, "bound_by": None}),
        _pool(point),
        f"{free_mib:,} ({answer['margin_tier']})" if free_mib is not None else "unknown",
        str(ceiling["bound_by"] or "nothing seen"),
        f"{sum(walls) / len(walls):,.0f}" if walls else "",
        verdict_word(free_mib) if point.is_confirmed else UNCONFIRMED,
        *(["simulated"] if point.is_simulated else []),
    ]


def _pool(point: Point) -> str:
    """The KV pool as the boot log says it: GiB, tokens and concurrency, each where it was seen."""
    facts: dict[str, Any] = {}
    for trial in point.seen.trials:
        facts.update(trial.facts)
    parts = []
    for name, form in (
        ("kv_cache_gib", "{:g} GiB"),
        ("kv_cache_tokens", "{:,} tok"),
        ("max_concurrency", "{:g}x"),
    ):
        if isinstance(value := facts.get(name), int | float):
            parts.append(form.format(value))
    return " / ".join(parts) or "not said"


_EVIDENCE = ("probe", "boot", "values", "prompt", "outcome", "wall", "lowest free MiB", "why")


def _evidence(trial: Trial, simulated: bool) -> list[str]:
    lines = (trial.body.get("evidence") or {}).get("lines") or ()
    why = message_of(lines[0]) if lines and trial.outcome is not Outcome.PASS else ""
    where = " at boot" if trial.phase is Phase.BOOT else ""
    amended = f" (amended: {one_line(trial.amended, 80)})" if trial.amended else ""
    return [
        trial.probe,
        trial.boot or "",
        values_text(trial.values),
        f"{trial.prompt_tokens:,}",
        f"{trial.outcome.value}{where}{amended}" + (" (simulated)" if simulated else ""),
        duration(trial.wall_s) if trial.wall_s else "",
        f"{trial.min_free_mib:,.0f}" if trial.min_free_mib is not None else "",
        why,
    ]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [_line(head), _line(["---"] * len(head)), *(_line(row) for row in rows)]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell(c) for c in cells) + " |"


def cell(text: str) -> str:
    """Text that others wrote, so that it stays in its cell and starts neither markup nor HTML."""
    plain = scrub(one_line(text))
    for char in "\\`|*[]<>~":
        plain = plain.replace(char, "\\" + char)
    return plain.replace("&", "&amp;")
