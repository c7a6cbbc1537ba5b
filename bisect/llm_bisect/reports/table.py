"""The answer for a person: one screen of plain text, at most 100 columns."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping
from typing import Any

from llm_bisect.reports.words import duration, one_line, plural, tokens_text, value_text
from llm_bisect.search.answer import LEAST_RECOMMENDABLE_MIB

WIDTH = 100
MOST_WARNINGS = 8


def answer_lines(obj: Mapping[str, Any]) -> list[str]:
    """The answer object (schema llm-bisect/answer/1, command `ceiling`) on one screen."""
    answer = obj["answer"]
    lines = []
    if obj["simulated"]:
        lines.append("SIMULATED: a model of a rig answered; no engine and no GPU was used")
    lines += _wrap(f"{obj['study']} ({obj['profile']}, {obj['runner']}): {_status(obj)}")
    if "choices" in answer:
        lines += _choices(answer)
    elif answer["axis"] == "prompt":
        lines += _prompt(answer)
    else:
        lines += _ordered(answer)
    warnings = [one_line(w) for w in obj["warnings"] if not (obj["simulated"] and w.startswith("simulated:"))]
    for warning in warnings[:MOST_WARNINGS]:
        lines += _wrap(f"note: {warning}")
    if len(warnings) > MOST_WARNINGS:
        lines.append(f"      and {len(warnings) - MOST_WARNINGS} more: {_bisect('status', obj)} --json")
    cost = obj["cost"]
    lines += _wrap(
        f"cost: {plural(cost['boots'], 'boot')}, {plural(cost['probes'], 'probe')}, {hours(cost['seconds'])}"
        + (" (simulated time)" if obj["simulated"] else "")
    )
    return lines + [line for text in _next(obj) for line in _wrap(f"next: {text}")]


def hours(seconds: float) -> str:
    """`2:05 h`; below a minute in seconds."""
    if seconds < 60:
        return duration(seconds)
    minutes = round(seconds / 60)
    return f"{minutes // 60}:{minutes % 60:02d} h"


def verdict_word(min_free_mib: float | None) -> str:
    """`recommended` needs a margin that others can rely on; below it, or unknown: `passes here`."""
    enough = min_free_mib is not None and min_free_mib >= LEAST_RECOMMENDABLE_MIB
    return "recommended" if enough else "passes here"


def free_text(part: Mapping[str, Any]) -> str:
    """`lowest free 494 MiB (thin)`."""
    if part["min_free_mib"] is None:
        return "lowest free memory unknown (no telemetry)"
    return f"lowest free {part['min_free_mib']:,} MiB ({part['margin_tier']})"


def _status(obj: Mapping[str, Any]) -> str:
    return str(obj["status"]) + (f": {one_line(obj['why'])}" if obj.get("why") else "")


def _ordered(answer: Mapping[str, Any]) -> list[str]:
    axis, target = answer["axis"], answer["target_prompt"]
    last, fail, outcome = (answer[k] for k in ("last_pass", "first_fail", "fail_outcome"))
    bound = f": bound by {answer['bound_by']}" if answer["bound_by"] else ""
    failure = f"{value_text(fail)} fails ({outcome}){bound}"
    if last is not None:
        head = f"{axis} {value_text(last)} passes {target:,} tokens, "
        lines = _wrap(head + (failure if fail is not None else "no value beyond it was seen to fail"))
    elif fail is not None:
        lines = _wrap(f"{axis}: no value seen passes {target:,} tokens, {failure}")
    else:
        known = "no value seen passes" if answer["lower_limit"] is not None else "nothing is known yet about"
        lines = [f"{axis}: {known} {target:,} tokens"]
    if answer["lower_limit"] is not None:
        why = answer.get("lower_limit_outcome")
        lines.append(
            f"lower limit: {axis} {value_text(answer['lower_limit'])} fails" + (f" ({why})" if why else "")
        )
    lines += _point(answer)
    if answer["prompt_ceiling"] is not None:
        c = answer["prompt_ceiling"]
        lines += _wrap(f"longest prompt at {value_text(c['at'])}: {ceiling_text(c)}")
    if answer.get("non_monotone"):
        crossed = answer["non_monotone"]
        lines += _wrap(
            f"not monotone: {value_text(crossed['passes'])} passed although {value_text(crossed['fails'])} "
            "failed; only the safe side is used"
        )
    if answer.get("unusable"):
        told = ", ".join(value_text(v) for v in answer["unusable"])
        lines += _wrap(f"unusable for a reason of its own: {axis} {told}")
    return lines


def _prompt(answer: Mapping[str, Any]) -> list[str]:
    last, fail, outcome = (answer[k] for k in ("last_pass", "first_fail", "fail_outcome"))
    parts = [f"{last:,} tokens pass" if last is not None else "no prompt was seen to pass"]
    if fail is not None:
        parts.append(f"{fail:,} fail ({outcome})")
    elif outcome is not None:
        parts.append(f"a boot failed ({outcome})")
    else:
        parts.append("no failure was seen")
    bound = f": bound by {answer['bound_by']}" if answer["bound_by"] else ""
    return _wrap(f"longest prompt: {', '.join(parts)}{bound}") + _point(answer, " tokens")


def _choices(answer: Mapping[str, Any]) -> list[str]:
    axis, target = answer["axis"], answer["target_prompt"]
    lines = []
    for choice in answer["choices"]:
        parts = [f"longest prompt {ceiling_text(choice['prompt_ceiling'])}"]
        if choice["boot_outcome"]:
            parts = [f"does not boot ({choice['boot_outcome']})"]
        elif choice["passes_target"]:
            parts += [f"passes {target:,}", free_text(choice)]
        else:
            parts.append(f"{target:,} was not seen to pass")
        lines += _wrap(f"{axis} {value_text(choice['value'])}: {'; '.join(parts)}")
    return lines + _point(answer)


def ceiling_text(c: Mapping[str, Any]) -> str:
    """`76,000 passes (1 boot), 78,000 fails (oom_probe): bound by memory`."""
    last, fail, outcome = c["last_pass"], c["first_fail"], c["fail_outcome"]
    parts = [f"{last:,} passes ({plural(c['boots'], 'boot')})" if last is not None else "no pass yet"]
    if fail is not None:
        parts.append(f"{fail:,} fails" + (f" ({outcome})" if outcome else ""))
    elif c["bound_by"] != "context" and outcome is None:
        parts.append("no failure seen yet")
    bound = f": bound by {c['bound_by']}" if c["bound_by"] else ""
    return ", ".join(parts) + bound


def _point(answer: Mapping[str, Any], unit: str = "") -> list[str]:
    """The recommended point with its proof, or the unconfirmed one."""
    value, confirmed = answer["recommended"], answer["confirmed"]
    shipped = value is not None
    value = value if shipped else answer.get("unconfirmed")
    if value is None:
        return ["nothing to recommend: no point passes with the margin"]
    named = f"{value_text(value)}{unit}"
    if not shipped:
        named = f"UNCONFIRMED {named}"
    elif verdict_word(answer["min_free_mib"]) == "recommended":
        named = f"recommended {named}"
    else:
        named = f"{named} passes here"
    proof = f"{confirmed['passes']}/{confirmed['boots']} boots at {confirmed['prompt_tokens']:,} tokens"
    lines = _wrap(f"{named}: {proof}, {free_text(answer)}")
    if (rate := confirmed.get("failure_rate_below_pct")) is not None:
        lines += _wrap(f"  what that proves: it fails on fewer than {rate} % of boots (95 % confidence)")
    return lines


def _next(obj: Mapping[str, Any]) -> list[str]:
    answer, status = obj["answer"], obj["status"]
    if status == "running":
        return [f"{_bisect('stop', obj)} ends it; what it found is kept"]
    # a process has no compose file to write an override for
    export = f"{_bisect('export', obj)} --to {'markdown' if obj.get('runner') == 'process' else 'compose'}"
    if status == "answered":
        if answer["recommended"] is not None:
            return [export]
        if answer.get("unconfirmed") is not None:
            return [f"{export} --include-unconfirmed", f"{_bisect('explain', obj)} says why it stopped"]
        return [f"a smaller margin_mib or --reserve-mib, or another axis; {_bisect('explain', obj)} says why"]
    if status == "no-feasible-point":
        last = _last_failure(obj)
        told = [f"the last probe ended in {last}"] if last else []
        return [*told, f"{_bisect('explain', obj)}; then a shorter --prompt or another axis"]
    again = [f"{_bisect('resume', obj)}"]
    if status == "environment":
        again = ["bisect doctor, then " + again[0]]
    if answer.get("recommended") is not None or answer.get("unconfirmed") is not None:
        again.append(f"{export}{'' if answer['recommended'] is not None else ' --include-unconfirmed'}")
    return again


def _last_failure(obj: Mapping[str, Any]) -> str | None:
    probes = [(p["probe"], p, c["values"]) for c in obj["candidates"] for p in c["probes"]]
    failed = [p for p in probes if p[1]["outcome"] != "pass"]
    if not failed:
        return None
    _, probe, _ = max(failed, key=lambda p: str(p[0]))
    return f"{probe['outcome']} ({probe['phase']}, {tokens_text(probe['prompt_tokens'])} tokens)"


def _bisect(command: str, obj: Mapping[str, Any]) -> str:
    return f"bisect {command} {shlex.quote(obj['study'])}"


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, subsequent_indent="      ", break_on_hyphens=False, break_long_words=True
    ) or [""]
