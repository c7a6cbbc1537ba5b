"""A boot as arithmetic: pure functions of card, model and settings. docs/simulation.md derives them.

MiB and GiB are binary; times are seconds of the simulated rig.

    available = util × CUDA total − weights − profiled (context, graphs, MTP, activations)
    blocks    = available ÷ planned GiB per block, rounded down
    resident  = weights + blocks × GiB per block + context + graphs + MTP + unseen buffers
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from llm_bisect.runners.sim.rig import Card, KvDtype, Model, Shape
from llm_bisect.runners.sim.settings import Settings

MIB_PER_GIB = 1024.0
_WARM_UP_MIB = 50.0  # after the pool: the sampler's warm-up


class Verdict(StrEnum):
    """How a boot ends."""

    READY = "ready"
    BAD_ARGUMENT = "bad_argument"  # refused before anything is loaded
    NOT_ENOUGH_FREE = "not_enough_free"  # the share is more than what is free
    LOAD_OOM = "load_oom"
    NO_BLOCKS = "no_blocks"
    ADMISSION_REJECTED = "admission_rejected"
    WARM_UP_OOM = "warm_up_oom"


@dataclass(frozen=True)
class Boot:
    """A boot as it will go."""

    verdict: Verdict
    reason: str = ""  # BAD_ARGUMENT: what the engine prints
    seconds: float = 0.0
    first_of_shape: bool = False
    context_tokens: int = 0
    startup_free_gib: float = 0.0
    requested_gib: float = 0.0
    available_gib: float = 0.0
    needed_gib: float = 0.0
    estimated_context_tokens: int = 0  # 0: the engine gives none
    blocks: int = 0
    block_tokens: int = 0
    fixed_blocks: int = 0
    concurrency: float = 0.0
    resident_mib: float = 0.0
    free_mib: float = 0.0
    activation_gib: float = 0.0
    weights_gib: float = 0.0

    @property
    def ready(self) -> bool:
        return self.verdict is Verdict.READY

    @property
    def kv_tokens(self) -> int:
        return self.blocks * self.block_tokens


def shape_of(settings: Settings, context_tokens: int) -> Shape:
    """What the compile caches of this boot are for."""
    return Shape(settings.draft_tokens > 0, settings.kv_dtype, context_tokens)


def block_tokens(model: Model, settings: Settings) -> int:
    """Tokens in one block of the pool."""
    dtype = _dtype(model, settings)
    return dtype.block_tokens if settings.draft_tokens else dtype.block_tokens_without_mtp


def fixed_blocks(model: Model, settings: Settings) -> int:
    """Blocks of recurrent state that one request holds besides its tokens."""
    return model.kv_groups * (2 + settings.draft_tokens)


def planned_gib_per_block(model: Model, settings: Settings) -> float:
    """What the engine charges for a block when it sizes the pool."""
    return model.planned_gib_per_block if settings.draft_tokens else model.planned_gib_per_block_without_mtp


def needed_gib(model: Model, settings: Settings, context_tokens: int) -> float:
    """Pool that one request of the whole declared context needs."""
    return _needed_blocks(model, settings, context_tokens) * planned_gib_per_block(model, settings)


def estimated_context(model: Model, settings: Settings, available_gib: float) -> int:
    """The engine's own estimate of the longest context that fits; 0 where none does."""
    blocks = math.floor(available_gib / planned_gib_per_block(model, settings))
    return max(0, blocks - fixed_blocks(model, settings)) * block_tokens(model, settings)


def weights_gib(model: Model, settings: Settings) -> float:
    """Weights as the boot log shows them, the vision tower included unless it is left out."""
    return model.weights_gib + (0.0 if settings.language_model_only else model.vision_gib)


def available_gib(card: Card, model: Model, settings: Settings, *, first_of_shape: bool) -> float:
    """What is left of the share for the pool. May be negative."""
    activations_mib = model.activation_mib_per_batched_token * settings.max_num_batched_tokens
    mtp_mib = model.mtp_residency_mib if settings.draft_tokens else 0.0
    profiled_mib = (
        card.context_mib + model.cudagraph_mib + mtp_mib + activations_mib + _sampler_mib(model, settings)
    )
    first_gib = model.first_boot_gib if first_of_shape else 0.0
    share_gib = settings.gpu_memory_utilization * card.cuda_total_gib
    return share_gib - weights_gib(model, settings) - profiled_mib / MIB_PER_GIB - first_gib


def boot(card: Card, model: Model, settings: Settings, served: Sequence[Shape] = ()) -> Boot:
    """How this launch boots. `served`: shapes that reached ready on this rig besides the card's own list."""
    wrong = _bad_argument(model, settings)
    if wrong:
        return Boot(Verdict.BAD_ARGUMENT, reason=wrong, seconds=20.0)
    share_gib = settings.gpu_memory_utilization * card.cuda_total_gib
    free_gib = (card.cuda_total_mib - card.startup_used_mib) / MIB_PER_GIB
    load_gib = weights_gib(model, settings)
    declared = settings.max_model_len or 0
    known = Boot(
        Verdict.NOT_ENOUGH_FREE,
        seconds=30.0,
        context_tokens=declared if declared > 0 else model.trained_context_tokens,
        startup_free_gib=free_gib,
        requested_gib=share_gib,
        weights_gib=load_gib,
    )
    if share_gib > free_gib:
        return known
    if load_gib > free_gib:
        return replace(known, verdict=Verdict.LOAD_OOM, seconds=60.0)

    longest, first = _declared(card, model, settings, served)
    room = available_gib(card, model, settings, first_of_shape=first)
    blocks = math.floor(room / planned_gib_per_block(model, settings))
    activations_mib = model.activation_mib_per_batched_token * settings.max_num_batched_tokens
    fitted = replace(
        known,
        seconds=model.refusal_s,
        first_of_shape=first,
        context_tokens=longest,
        available_gib=room,
        needed_gib=needed_gib(model, settings, longest),
        estimated_context_tokens=estimated_context(model, settings, room),
        blocks=max(0, blocks),
        block_tokens=block_tokens(model, settings),
        fixed_blocks=fixed_blocks(model, settings),
        activation_gib=activations_mib / MIB_PER_GIB + (model.first_boot_gib if first else 0.0),
    )
    if blocks <= 0:
        return replace(fitted, verdict=Verdict.NO_BLOCKS)
    if longest <= 0 or blocks < _needed_blocks(model, settings, longest):
        return replace(fitted, verdict=Verdict.ADMISSION_REJECTED)
    resident = _resident_mib(card, model, settings, blocks)
    sized = replace(
        fitted,
        seconds=model.boot_s + (model.first_boot_s if first else 0.0),
        concurrency=blocks / _needed_blocks(model, settings, longest),
        resident_mib=resident,
        free_mib=card.total_mib - resident,
    )
    if resident + _WARM_UP_MIB > card.cuda_total_mib:
        return replace(sized, verdict=Verdict.WARM_UP_OOM)
    return replace(sized, verdict=Verdict.READY)


def _declared(card: Card, model: Model, settings: Settings, served: Sequence[Shape]) -> tuple[int, bool]:
    """The declared context, and whether this is the first boot of its shape. `auto` takes what fits."""

    def is_first(context_tokens: int) -> bool:
        shape = shape_of(settings, context_tokens)
        return not any(one.covers(shape) for one in (*card.served, *served))

    longest = settings.max_model_len or model.trained_context_tokens
    if longest > 0:
        return longest, is_first(longest)
    for first in (False, True):
        room = available_gib(card, model, settings, first_of_shape=first)
        longest = min(model.trained_context_tokens, estimated_context(model, settings, room))
        if first or not is_first(longest):
            return longest, first
    raise AssertionError("one of both has returned")


def _resident_mib(card: Card, model: Model, settings: Settings, blocks: int) -> float:
    mtp_mib = model.mtp_residency_mib if settings.draft_tokens else 0.0
    # allocated after the profiling run, so that no pool is made smaller for them
    unseen_mib = 0.0 if model.embeds_patch in settings.patches else model.embeds_mib
    pool_mib = blocks * model.gib_per_block * MIB_PER_GIB
    weights_mib = weights_gib(model, settings) * MIB_PER_GIB
    return (
        weights_mib
        + pool_mib
        + card.context_mib
        + model.cudagraph_mib
        + mtp_mib
        + unseen_mib
        + _sampler_mib(model, settings)
    )


def _sampler_mib(model: Model, settings: Settings) -> float:
    return model.seq_mib * max(0, settings.max_num_seqs - 1)


def _needed_blocks(model: Model, settings: Settings, context_tokens: int) -> int:
    return math.ceil(context_tokens / block_tokens(model, settings)) + fixed_blocks(model, settings)


def _dtype(model: Model, settings: Settings) -> KvDtype:
    return model.kv_dtypes[settings.kv_dtype]


def _bad_argument(model: Model, settings: Settings) -> str:
    """What the engine says of arguments that it refuses outright; empty where it takes them."""
    share = settings.gpu_memory_utilization
    if not 0.0 < share <= 1.0:
        return f"Value error, GPU memory utilization must be less than 1.0. Got {share}."
    if settings.kv_dtype not in model.kv_dtypes:
        return f"ValueError: kv_cache_dtype {settings.kv_dtype} is not supported"
    if settings.tensor_parallel > 1:
        return (
            f"ValueError: World size ({settings.tensor_parallel}) is larger than the number of available "
            "GPUs (1) in this node: tensor parallelism is not supported on the simulated rig."
        )
    longest = settings.max_model_len
    if longest is not None and longest > model.trained_context_tokens:
        return (
            f"Value error, User-specified max_model_len ({longest}) is greater than the derived "
            f"max_model_len (max_position_embeddings={model.trained_context_tokens} or "
            "model_max_length=None in model's config.json)."
        )
    if longest == 0:
        return "Value error, max_model_len must be a positive integer, got 0."
    size, batched = block_tokens(model, settings), settings.max_num_batched_tokens
    if size > batched:
        return (
            f"AssertionError: In Mamba cache align mode, block_size ({size}) must be <= "
            f"max_num_batched_tokens ({batched})."
        )
    return ""
