"""A request as arithmetic: memory and time of a prefill, pure functions of rig, settings and boot.

    free(n) = free after boot − first chunk − growth × n², in steps of the allocator
    seconds = (a n + c n³ + chunks) × MTP's slowdown

It dies in the first kernel call whose output does not fit into what is free.
MiB are binary; `ktokens` are thousands of tokens; times are seconds of the simulated rig.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from llm_bisect.runners.sim.physics import Boot
from llm_bisect.runners.sim.rig import Card, Model
from llm_bisect.runners.sim.settings import Settings, is_on

_ALLOCATION_STEP_MIB = 2.0  # the caching allocator rounds large requests up to this
_FINEST_S = 15.0


@dataclass(frozen=True)
class Death:
    """An allocation that fails during a prefill."""

    tokens: float  # processed when it fails
    call: int  # number of the kernel call, from 1, over the whole prefill
    asked_mib: float
    free_mib: float


@dataclass(frozen=True)
class Chunk:
    """One prefill chunk. `death`: it ends there."""

    start: int
    end: int
    seconds: float  # to its end, or to the death
    death: Death | None = None


# --- memory


def call_mib(model: Model, settings: Settings, chunk_tokens: int) -> float:
    """What one kernel call allocates for its output; with the sub-chunked kernel, for one sub-chunk of it."""
    tokens = min(chunk_tokens, _call_limit(model, settings))
    exact = tokens * model.value_bytes_per_token / 2**20
    return math.ceil(exact / _ALLOCATION_STEP_MIB) * _ALLOCATION_STEP_MIB


def used_mib(model: Model, settings: Settings, tokens: float) -> float:
    """Memory that a prefill has taken on top of the boot once it has processed `tokens`."""
    if tokens <= 0:
        return 0.0
    batched = settings.max_num_batched_tokens
    first = model.first_chunk_mib_per_batched_token * min(tokens, batched)
    if _call_limit(model, settings) < min(tokens, batched):
        first += model.sub_chunk_state_mib
    growth = model.growth_mib_per_ktoken2 * (tokens / 1000.0) ** 2
    return first + math.floor(growth / model.segment_mib) * model.segment_mib


def free_mib(model: Model, settings: Settings, booted: Boot, tokens: float) -> float:
    """Free memory of the card once a prefill has processed `tokens`; may be below zero: it died before."""
    return booted.free_mib - used_mib(model, settings, tokens)


def death(model: Model, settings: Settings, booted: Boot, prompt_tokens: int) -> Death | None:
    """Where a prompt of this length runs out of memory; None where it does not."""
    for chunk in _spans(settings, 0, prompt_tokens):
        found = _death_in(model, settings, booted, *chunk)
        if found is not None:
            return found
    return None


def longest_prompt(model: Model, settings: Settings, booted: Boot) -> int:
    """The longest prompt that memory allows, in tokens, at most the declared context."""
    low, high = 0, booted.context_tokens
    while low < high:
        middle = (low + high + 1) // 2
        if death(model, settings, booted, middle) is None:
            low = middle
        else:
            high = middle - 1
    return low


def _death_in(model: Model, settings: Settings, booted: Boot, start: int, end: int) -> Death | None:
    asked = call_mib(model, settings, end - start)
    if free_mib(model, settings, booted, end) >= asked:
        return None  # it only falls
    for call in range(1, model.linear_layers + 1):
        at = start + (end - start) * call / model.linear_layers
        free = free_mib(model, settings, booted, at)
        if free < asked:
            before = start // settings.max_num_batched_tokens * model.linear_layers
            return Death(at, before + call, asked, max(0.0, free))
    return None


def _call_limit(model: Model, settings: Settings) -> int:
    """Tokens that one call of the kernel handles at once."""
    limit = settings.env.get(model.sub_chunk_limit, "")
    if is_on(settings.env, model.sub_chunk_switch) and limit.isdigit() and int(limit) > 0:
        return int(limit)
    return settings.max_num_batched_tokens


def _spans(settings: Settings, start: int, end: int) -> Iterator[tuple[int, int]]:
    while start < end:
        stop = min(end, start + settings.max_num_batched_tokens)
        yield start, stop
        start = stop


# --- time


def prefill_s(card: Card, model: Model, settings: Settings, tokens: float, *, start: int = 0) -> float:
    """Seconds of a prefill of `tokens` tokens, of which the first `start` come from the cache."""
    if tokens <= start:
        return 0.0
    slowdown = 1.0 + model.mtp_slowdown * settings.draft_tokens

    def law(n: float) -> float:
        k = n / 1000.0
        return model.s_per_ktoken * k + model.s_per_ktoken3 * k**3

    chunks = (tokens - start) / settings.max_num_batched_tokens
    return (law(tokens) - law(start) + model.chunk_s * chunks) * slowdown / card.compute_scale


def decode_step_s(card: Card, model: Model, settings: Settings, context_tokens: int) -> float:
    """Seconds of one decode step behind `context_tokens` tokens."""
    slowdown = 1.0 + model.mtp_decode_slowdown * settings.draft_tokens
    exact = model.decode_s + model.decode_s_per_ktoken * context_tokens / 1000.0
    return exact * slowdown / card.bandwidth_scale


def tokens_per_step(model: Model, settings: Settings) -> int:
    """Tokens that one decode step gives: one, and the draft tokens that are accepted."""
    return 1 + int(settings.draft_tokens * model.mtp_acceptance + 0.5)


def chunks(
    card: Card, model: Model, settings: Settings, booted: Boot, prompt_tokens: int, *, cached: int = 0
) -> Iterator[Chunk]:
    """The prefill of one prompt, chunk by chunk; the last one may hold a death."""
    for start, end in _spans(settings, cached, prompt_tokens):
        found = _death_in(model, settings, booted, start, end)
        upto: float = end if found is None else found.tokens
        seconds = prefill_s(card, model, settings, upto, start=start)
        yield Chunk(start, end, seconds, found)
        if found is not None:
            return


def slices(seconds: float) -> list[float]:
    """A span of time in equal parts that are short enough for a watcher."""
    parts = max(1, math.ceil(seconds / _FINEST_S))
    return [seconds / parts] * parts
