"""The simulated engine without HTTP: one boot with its time, its memory and its prefix cache.

The server drives it in slices of time; property tests and the benchmark call `serve`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from llm_bisect.runners.sim import physics, prefill
from llm_bisect.runners.sim.physics import Boot
from llm_bisect.runners.sim.prefill import Death
from llm_bisect.runners.sim.rig import Card, Model, Shape
from llm_bisect.runners.sim.settings import Settings


@dataclass(frozen=True)
class Served:
    """One request, answered (`death` None) or not. Times in seconds of the rig, memory in MiB."""

    prompt_tokens: int
    cached_tokens: int
    prefill_s: float
    decode_s: float
    lowest_free_mib: float
    tokens_processed: int  # complete chunks
    death: Death | None = None

    @property
    def wall_s(self) -> float:
        return self.prefill_s + self.decode_s


class SimEngine:
    """One boot of one launch on one rig."""

    def __init__(
        self,
        card: Card,
        model: Model,
        settings: Settings,
        served: Sequence[Shape] = (),
        started_s: float = 0.0,
    ) -> None:
        self.card, self.model, self.settings = card, model, settings
        self.boot: Boot = physics.boot(card, model, settings, served)
        self.virtual_s = started_s
        self.free_mib = card.total_mib - card.startup_used_mib
        self.processed_tokens = 0  # of the request at hand
        self.running = 0
        self.dead = False
        self.prompt_tokens_total = 0
        self.generation_tokens_total = 0
        self.requests_total = 0
        self._known_prompts: list[Sequence[int]] = []
        self._used_mib = 0.0  # the allocator gives nothing back

    # --- one step after the other

    def boot_slices(self) -> Iterator[float]:
        """Seconds to pass, slice by slice, until this boot is ready or refused."""
        for seconds in prefill.slices(self.boot.seconds):
            self.virtual_s += seconds
            yield seconds
        if self.boot.ready:
            self.free_mib = self.boot.free_mib

    def prefill_slices(self, prompt_tokens: int, cached_tokens: int = 0) -> Iterator[float]:
        """Seconds to pass, slice by slice. Ends early with `dead` where memory runs out: see `death`."""
        self.processed_tokens = cached_tokens
        self.death: Death | None = None
        for chunk in prefill.chunks(
            self.card, self.model, self.settings, self.boot, prompt_tokens, cached=cached_tokens
        ):
            for seconds in prefill.slices(chunk.seconds):
                self.virtual_s += seconds
                yield seconds
            reached: float = chunk.end if chunk.death is None else chunk.death.tokens
            self._take(reached)
            if chunk.death is not None:
                self.death = chunk.death
                self.dead = True
                return
            self.processed_tokens = chunk.end

    def decode_slices(self, prompt_tokens: int, new_tokens: int) -> Iterator[tuple[float, int]]:
        """Seconds to pass and tokens that come with them, until `new_tokens` are there."""
        done = 0
        while done < new_tokens:
            seconds = prefill.decode_step_s(self.card, self.model, self.settings, prompt_tokens + done)
            tokens = min(prefill.tokens_per_step(self.model, self.settings), new_tokens - done)
            self.virtual_s += seconds
            done += tokens
            self._take(prompt_tokens + done)
            yield seconds, tokens

    def cached_tokens(self, ids: Sequence[int]) -> int:
        """Leading tokens of this prompt that are in the pool, in whole blocks; at least one is computed."""
        if not self.settings.prefix_caching:
            return 0
        size = self.boot.block_tokens
        best = 0
        for known in self._known_prompts:
            blocks = 0
            while (
                (blocks + 1) * size < len(ids)
                and (blocks + 1) * size <= len(known)
                and ids[blocks * size : (blocks + 1) * size] == known[blocks * size : (blocks + 1) * size]
            ):
                blocks += 1
            best = max(best, blocks * size)
        return best

    def finish(self, ids: Sequence[int], new_tokens: int) -> None:
        """Count a request that was answered, and keep its prompt in the cache as far as the pool goes."""
        self.prompt_tokens_total += len(ids)
        self.generation_tokens_total += new_tokens
        self.requests_total += 1
        self.processed_tokens = 0
        if self.settings.prefix_caching:
            self._known_prompts.append(ids)
            while sum(len(known) for known in self._known_prompts) > self.boot.kv_tokens:
                self._known_prompts.pop(0)

    @property
    def kv_usage(self) -> float:
        """Share of the pool that the request at hand has filled."""
        return min(1.0, self.processed_tokens / self.boot.kv_tokens) if self.boot.kv_tokens else 0.0

    def _take(self, tokens: float) -> None:
        self._used_mib = max(self._used_mib, prefill.used_mib(self.model, self.settings, tokens))
        self.free_mib = max(0.0, self.boot.free_mib - self._used_mib)

    # --- at once

    def start(self) -> Boot:
        """Boot it; the clock moves on."""
        for _ in self.boot_slices():
            pass
        return self.boot

    def serve(self, prompt_tokens: int, max_tokens: int = 1) -> Served:
        """One prompt that no cache knows. A boot that is not ready, or dead, serves nothing: RuntimeError."""
        if not self.boot.ready or self.dead:
            raise RuntimeError(f"this engine serves nothing: {self.boot.verdict}")
        began = self.virtual_s
        for _ in self.prefill_slices(prompt_tokens):
            pass
        prefilled = self.virtual_s
        if not self.dead:
            for _ in self.decode_slices(prompt_tokens, max_tokens):
                pass
        return Served(
            prompt_tokens=prompt_tokens,
            cached_tokens=0,
            prefill_s=prefilled - began,
            decode_s=self.virtual_s - prefilled,
            lowest_free_mib=self.free_mib,
            tokens_processed=self.processed_tokens,
            death=self.death,
        )
