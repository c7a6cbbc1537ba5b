"""Properties of the simulated rig between and beyond its measured rows, on every card."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from llm_bisect.runners.sim import physics, prefill, rig
from llm_bisect.runners.sim.engine import SimEngine
from llm_bisect.runners.sim.physics import Verdict
from llm_bisect.runners.sim.settings import Settings, read_launch

pytestmark = pytest.mark.serial  # they look for servers by the name of a study

MODEL = rig.find_model("qwen3.6-27b-autoround-int4")
CARDS = {name: rig.find_card(name) for name in rig.known("simulated-card")}
PATCH = "/patches/patch_inputs_embeds_optional.py"


def launch(
    share: float = 0.93,
    context: int = 180_000,
    mtp: int = 3,
    *,
    batched: int = 4128,
    patched: bool = True,
    kv: str = "turboquant_3bit_nc",
    seqs: int = 1,
) -> Settings:
    """A launch of the long-text recipe with some values changed."""
    argv = ["--gpu-memory-utilization", str(share), "--max-model-len", str(context), "--kv-cache-dtype", kv]
    argv += ["--max-num-batched-tokens", str(batched), "--max-num-seqs", str(seqs), "--language-model-only"]
    if mtp:
        argv += ["--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": mtp})]
    return read_launch(argv, {}, [PATCH] if patched else [])


cards = st.sampled_from(sorted(CARDS))
shares = st.floats(0.5, 1.0).map(lambda share: round(share, 4))
contexts = st.integers(1_000, 262_144)
drafts = st.integers(0, 3)
prompts = st.integers(1, 262_144)


@given(cards, shares, shares, contexts, drafts)
def test_a_larger_share_admits_more_and_leaves_less(
    name: str, one: float, other: float, context: int, mtp: int
) -> None:
    """Raising mem-util never loses admission, and never leaves more memory or a longer prompt."""
    low, high = sorted((one, other))
    card = CARDS[name]
    few, many = (physics.boot(card, MODEL, launch(share, context, mtp)) for share in (low, high))
    if few.ready and many.verdict is not Verdict.NOT_ENOUGH_FREE:
        assert many.verdict in (Verdict.READY, Verdict.WARM_UP_OOM)
        assert many.blocks >= few.blocks
        if many.ready:
            assert many.free_mib <= few.free_mib
            shorter = prefill.longest_prompt(MODEL, launch(high, context, mtp), many)
            assert shorter <= prefill.longest_prompt(MODEL, launch(low, context, mtp), few)


@given(cards, shares, contexts, contexts, drafts)
def test_a_longer_context_is_never_easier_to_admit(
    name: str, share: float, one: int, other: int, mtp: int
) -> None:
    """Where a context boots, every shorter one boots as well."""
    short, long = sorted((one, other))
    if physics.boot(CARDS[name], MODEL, launch(share, long, mtp)).ready:
        assert physics.boot(CARDS[name], MODEL, launch(share, short, mtp)).ready


@given(cards, shares, drafts, prompts, prompts)
def test_memory_falls_and_time_rises_with_the_prompt(
    name: str, share: float, mtp: int, one: int, other: int
) -> None:
    """A longer prompt leaves no more memory, takes longer, and survives only where a shorter one does."""
    short, long = sorted((one, other))
    settings, card = launch(share, 60_000, mtp), CARDS[name]
    boot = physics.boot(card, MODEL, settings)
    times_s = [prefill.prefill_s(card, MODEL, settings, tokens) for tokens in (short, long, long + 1)]
    assert times_s[0] <= times_s[1] < times_s[2]
    assert prefill.used_mib(MODEL, settings, long) >= prefill.used_mib(MODEL, settings, short)
    if boot.ready and prefill.death(MODEL, settings, boot, long) is None:
        assert prefill.death(MODEL, settings, boot, short) is None


@given(st.floats(0.8, 0.9), drafts, st.booleans())
def test_the_estimate_is_what_would_have_been_admitted(share: float, mtp: int, fresh: bool) -> None:
    """The estimate in a refusal fits the pool of that refusal exactly, and one block more does not."""
    settings = launch(share, 262_144, mtp)
    boot = physics.boot(CARDS["rtx3090-fresh" if fresh else "rtx3090"], MODEL, settings)
    assume(boot.verdict is Verdict.ADMISSION_REJECTED and boot.estimated_context_tokens > 0)
    fits = boot.estimated_context_tokens
    assert physics.needed_gib(MODEL, settings, fits) <= boot.available_gib
    assert physics.needed_gib(MODEL, settings, fits + 1) > boot.available_gib


@given(st.integers(4128, 40_000), st.integers(4128, 40_000), prompts)
def test_more_batched_tokens_cost_memory(one: int, other: int, prompt: int) -> None:
    """Larger chunks leave a smaller pool, and no more memory for any prompt of at least one chunk."""
    few, many = sorted((one, other))
    small, large = launch(0.9, 60_000, batched=few), launch(0.9, 60_000, batched=many)
    card = CARDS["rtx5090"]
    boots = physics.boot(card, MODEL, small), physics.boot(card, MODEL, large)
    assert boots[1].available_gib <= boots[0].available_gib
    # the pool gives back in whole blocks what the activations take from it
    block_mib = MODEL.gib_per_block * 1024
    gained = boots[1].free_mib - boots[0].free_mib
    lost = prefill.used_mib(MODEL, large, prompt) - prefill.used_mib(MODEL, small, prompt)
    assert lost >= 0 and gained <= (many - few) * MODEL.activation_mib_per_batched_token + block_mib


@pytest.mark.parametrize("prompt", [8_000, 60_000, 75_000])
def test_a_faster_card_is_faster_by_its_scale(prompt: int) -> None:
    """Prefill time is the 3090's divided by the card's scale; what memory does is the same law."""
    settings = launch()
    base = prefill.prefill_s(CARDS["rtx3090"], MODEL, settings, prompt)
    for card in CARDS.values():
        assert prefill.prefill_s(card, MODEL, settings, prompt) == pytest.approx(base / card.compute_scale)


def test_a_larger_card_takes_longer_prompts_and_a_smaller_one_refuses() -> None:
    """32 GB boot a context with more pool at the same share; 24 GB of another make behave alike; the weights
    do not fit into 16 GB."""

    def boot(name: str, share: float = 0.93) -> physics.Boot:
        return physics.boot(CARDS[name], MODEL, launch(share))

    assert boot("rtx5090").ready and boot("rtx5090").kv_tokens > 2 * boot("rtx3090").kv_tokens
    assert boot("rtx4090").ready and abs(boot("rtx4090").free_mib - boot("rtx3090").free_mib) < 150
    assert boot("rtx4080").verdict is Verdict.LOAD_OOM
    # at the share that gives the 3090's pool, all the rest is for prompts
    same_pool = 0.93 * CARDS["rtx3090"].cuda_total_gib / CARDS["rtx5090"].cuda_total_gib
    small, large = launch(), launch(round(same_pool, 3))
    assert prefill.longest_prompt(MODEL, large, physics.boot(CARDS["rtx5090"], MODEL, large)) > 1.5 * (
        prefill.longest_prompt(MODEL, small, boot("rtx3090"))
    )


@pytest.mark.parametrize(
    ("settings", "verdict", "said"),
    [
        (lambda: launch(0.99), Verdict.NOT_ENOUGH_FREE, ""),
        (lambda: launch(0.73), Verdict.NO_BLOCKS, ""),
        (lambda: launch(0.87), Verdict.ADMISSION_REJECTED, ""),
        (lambda: launch(0.95, seqs=2500), Verdict.ADMISSION_REJECTED, ""),
        (lambda: launch(1.2), Verdict.BAD_ARGUMENT, "utilization"),
        (lambda: launch(batched=2048), Verdict.BAD_ARGUMENT, "block_size (4128)"),
        (lambda: launch(context=300_000), Verdict.BAD_ARGUMENT, "derived max_model_len"),
        (lambda: launch(kv="int2"), Verdict.BAD_ARGUMENT, "kv_cache_dtype"),
    ],
)
def test_each_way_in_which_a_boot_can_fail(
    settings: Callable[[], Settings], verdict: Verdict, said: str
) -> None:
    """A share above what is free, no pool, too small a pool, and arguments that are refused outright."""
    boot = physics.boot(CARDS["rtx3090"], MODEL, settings())
    assert boot.verdict is verdict
    assert said in boot.reason


def test_a_boot_may_run_out_of_memory_after_its_pool() -> None:
    """What the profiling run does not see makes the last step of a boot fail where the share is high."""
    from dataclasses import replace

    tight = replace(CARDS["rtx3090"], startup_used_mib=1.0)
    boot = physics.boot(tight, MODEL, launch(0.995, patched=False))
    assert boot.verdict is Verdict.WARM_UP_OOM


def test_auto_takes_what_fits() -> None:
    """`--max-model-len auto` boots with the longest context of the pool that it finds."""
    words = "--max-model-len=auto --gpu-memory-utilization=0.85 --kv-cache-dtype=turboquant_3bit_nc"
    words += " --max-num-seqs=1 --max-num-batched-tokens=4128 --language-model-only"
    settings = read_launch(words.split(), {}, [PATCH])
    boot = physics.boot(CARDS["rtx3090"], MODEL, settings)
    assert boot.ready and boot.context_tokens == boot.estimated_context_tokens > 0


@given(st.integers(1, 100_000), st.integers(1, 64))
def test_the_engine_and_the_formulas_agree(prompt: int, answer: int) -> None:
    """Stepping through a request slice by slice ends where the closed formulas say."""
    engine = SimEngine(CARDS["rtx3090"], MODEL, launch())
    boot = engine.start()
    served = engine.serve(prompt, answer)
    death = prefill.death(MODEL, engine.settings, boot, prompt)
    assert served.death == death
    if death is None:
        wall = prefill.prefill_s(engine.card, MODEL, engine.settings, prompt)
        assert served.prefill_s == pytest.approx(wall)
        assert served.tokens_processed == prompt
        assert engine.serve(1).death is None
    else:
        assert served.tokens_processed <= death.tokens < served.tokens_processed + 4128
        with pytest.raises(RuntimeError):
            engine.serve(1)


def test_memory_is_not_given_back_within_a_boot() -> None:
    """After a long prompt a short one leaves no more free memory, and survives like on a fresh boot."""
    engine = SimEngine(CARDS["rtx3090"], MODEL, launch())
    engine.start()
    first = engine.serve(8_000)
    long = engine.serve(60_000)
    again = engine.serve(8_000)
    assert first.lowest_free_mib > long.lowest_free_mib == again.lowest_free_mib
    assert again.death is None
