"""Cards and models of the simulated rig: what the files in `runners/simulated/` say, as types.

A rig is a card (with the history of what it has served) and a model. Both travel to the server process
as plain JSON.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from llm_bisect.model import UsageProblem


@dataclass(frozen=True)
class Shape:
    """What a boot compiles and profiles for. `context_tokens` is the declared context."""

    mtp: bool
    kv_dtype: str
    context_tokens: int

    def covers(self, other: Shape) -> bool:
        """True where `other`'s caches are warm once this shape has been served."""
        return (self.mtp, self.kv_dtype) == (other.mtp, other.kv_dtype) and (
            self.context_tokens >= other.context_tokens
        )


@dataclass(frozen=True)
class Card:
    """A GPU, and what this rig has served before."""

    name: str
    title: str
    total_mib: float  # as nvidia-smi shows it
    cuda_total_gib: float  # as CUDA shows it: what the memory share is a share of
    startup_used_mib: float  # held when the engine first looks: context, libraries
    context_mib: float  # of that, what stays resident beside weights, pool and graphs
    compute_scale: float = 1.0  # prefill speed, RTX 3090 = 1
    bandwidth_scale: float = 1.0  # decode speed, RTX 3090 = 1
    served: tuple[Shape, ...] = ()

    @property
    def cuda_total_mib(self) -> float:
        return self.cuda_total_gib * 1024


@dataclass(frozen=True)
class KvDtype:
    """Tokens in one block of the pool, with and without MTP."""

    block_tokens: int
    block_tokens_without_mtp: int


@dataclass(frozen=True)
class Model:
    """A model as this engine build serves it. See docs/simulation.md for where each figure comes from."""

    name: str
    title: str
    engine_version: str
    trained_context_tokens: int
    weights_gib: float
    vision_gib: float
    mtp_residency_mib: float
    mtp_acceptance: float  # of each draft token
    cudagraph_mib: float
    seq_mib: float  # of the sampler, for each further concurrent sequence
    activation_mib_per_batched_token: float  # what the profiling run finds
    first_boot_gib: float  # what the first boot of a new shape profiles on top
    kv_groups: int  # fixed blocks of a request: groups × (2 + draft tokens)
    gib_per_block: float  # what a block really takes
    planned_gib_per_block: float  # what a block is charged with MTP …
    planned_gib_per_block_without_mtp: float  # … and without
    kv_dtypes: Mapping[str, KvDtype]
    linear_layers: int  # calls of the chunked kernel for each prefill chunk
    value_bytes_per_token: int  # the buffer that this kernel allocates for its output
    first_chunk_mib_per_batched_token: float
    growth_mib_per_ktoken2: float
    segment_mib: float  # steps in which the allocator takes memory
    embeds_patch: str  # file name of the patch that drops the inputs_embeds buffers
    embeds_mib: float
    sub_chunk_switch: str  # environment: 1 turns the sub-chunked kernel on …
    sub_chunk_limit: str  # … for calls longer than this many tokens
    sub_chunk_state_mib: float  # chained states between sub-chunks
    boot_s: float
    first_boot_s: float
    refusal_s: float
    chunk_s: float
    s_per_ktoken: float
    s_per_ktoken3: float
    mtp_slowdown: float  # of the prefill, for each draft token
    decode_s: float
    decode_s_per_ktoken: float
    mtp_decode_slowdown: float  # of a decode step, for each draft token
    notes: tuple[str, ...] = field(default=())


def card_from(data: Mapping[str, Any]) -> Card:
    """A card from plain data. Raises KeyError, TypeError, ValueError where it does not fit."""
    plain = {key: value for key, value in data.items() if key != "kind"}
    served = tuple(Shape(**dict(one)) for one in plain.pop("served", ()))
    return Card(served=served, **plain)


def model_from(data: Mapping[str, Any]) -> Model:
    """A model from plain data. Raises KeyError, TypeError, ValueError where it does not fit."""
    plain = {key: value for key, value in data.items() if key != "kind"}
    dtypes = {name: KvDtype(**dict(one)) for name, one in plain.pop("kv_dtypes").items()}
    notes = tuple(plain.pop("notes", ()))
    return Model(kv_dtypes=dtypes, notes=notes, **plain)


def plain(rig: Card | Model) -> dict[str, Any]:
    """JSON data that `card_from` and `model_from` read back."""
    return asdict(rig)


def find_card(name: str) -> Card:
    """The card of that name. Raises UsageProblem."""
    path, data = _read(name, "simulated-card")
    try:
        card = card_from(data)
    except (KeyError, TypeError, ValueError) as error:
        raise _misfit(path, error, Card) from error
    _positive(path, card, ("total_mib", "cuda_total_gib", "compute_scale", "bandwidth_scale"))
    if card.cuda_total_mib > card.total_mib:
        raise UsageProblem(f"{path}: cuda_total_gib is more than total_mib", hint="nvidia-smi shows both")
    return card


def find_model(name: str) -> Model:
    """The model of that name. Raises UsageProblem."""
    path, data = _read(name, "simulated-model")
    try:
        model = model_from(data)
    except (KeyError, TypeError, ValueError) as error:
        raise _misfit(path, error, Model) from error
    _positive(path, model, ("weights_gib", "gib_per_block", "segment_mib", "linear_layers", "kv_groups"))
    return model


def fingerprint(card: Card, model: Model) -> str:
    """Hash of both: changes with every figure that results depend on."""
    text = json.dumps([plain(card), plain(model)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def known(kind: str) -> list[str]:
    """Names of the cards (`simulated-card`) or models (`simulated-model`) that can be found."""
    from llm_bisect.spaces import resources

    found = set()
    for folder in resources.folders("runners"):
        for path in (folder / "simulated").glob("*.yml"):
            try:
                if path.is_file() and f"kind: {kind}" in path.read_text(encoding="utf-8"):
                    found.add(path.stem)
            except (OSError, UnicodeDecodeError):
                continue
    return sorted(found)


def _read(name: str, kind: str) -> tuple[Path, Mapping[str, Any]]:
    import yaml

    from llm_bisect.spaces import resources

    what = kind.removeprefix("simulated-")
    try:
        path = resources.find("runners", name if "/" in name else f"simulated/{name}.yml")
    except UsageProblem as problem:
        raise UsageProblem(
            f"there is no simulated {what} {name!r}", hint=f"known: {', '.join(known(kind)) or 'none'}"
        ) from problem
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageProblem(f"{path}: cannot be read: {error}") from error
    if not isinstance(data, dict) or data.get("kind") != kind:
        raise UsageProblem(
            f"{path}: this is no simulated {what} (kind: {kind})", hint=f"known: {', '.join(known(kind))}"
        )
    return path, data


def _misfit(path: Path, error: Exception, wanted: type) -> UsageProblem:
    keys = ", ".join(one.name for one in fields(wanted))
    return UsageProblem(f"{path}: {error}", hint=f"the keys of this file: {keys}")


def _positive(path: Path, rig: Card | Model, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(rig, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise UsageProblem(f"{path}: {name}: {value!r} is no positive number")
