"""The simulated rig against measured rows: those that it was fitted to, and those that it was not."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from llm_bisect.runners.sim import physics, prefill
from llm_bisect.runners.sim.physics import Verdict
from llm_bisect.runners.sim.rig import Card, Model, find_card, find_model

pytestmark = pytest.mark.serial  # they look for servers by the name of a study

ROOT = Path(__file__).resolve().parents[2]


def _bench() -> ModuleType:
    name = "llm_bisect_bench_simulation_residuals"
    spec = importlib.util.spec_from_file_location(name, ROOT / "bench" / "simulation_residuals.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


bench = _bench()
BALANCED: dict[str, Any] = {
    "gpu_memory_utilization": 0.93,
    "max_model_len": 180000,
    "kv_cache_dtype": "turboquant_3bit_nc",
    "spec": "mtp:3",
    "pr35975": True,
}


@pytest.fixture(scope="module")
def card() -> Card:
    return find_card("rtx3090")


@pytest.fixture(scope="module")
def model() -> Model:
    return find_model("qwen3.6-27b-autoround-int4")


def _row(name: str) -> dict[str, Any]:
    found: dict[str, Any] = bench.rows()[name]
    return found


def test_every_figure_of_the_study_agrees_or_is_explained() -> None:
    """All eight rows are compared, and no figure is off without a reason."""
    found = bench.seed_figures()
    assert {one.row for one in found} == {name for name in bench.rows() if name.startswith("seed-")}
    assert len({one.row for one in found}) == 8 and len(found) > 60
    assert [one for one in found if not one.agrees and not one.note] == []


def test_every_figure_that_was_held_out_agrees() -> None:
    """Rows that nothing was fitted to come out without an explanation."""
    found = bench.held_out_figures()
    assert len({one.row for one in found}) == 2 and len(found) > 8
    assert [one for one in found if not one.agrees] == []


def test_what_is_called_fitted_or_explained_exists() -> None:
    """Each explanation belongs to a figure that really differs, and each fitted figure to a row."""
    found = bench.seed_figures()
    assert set(bench.EXPLAINED) == {(one.row, one.name) for one in found if not one.agrees}
    assert set(bench.FITTED) <= {(one.row, one.name) for one in found}


def test_a_figure_that_is_off_is_seen() -> None:
    """The comparison itself tells 3 % or 64 MiB from more, and verdicts apart."""
    assert bench.Figure("r", "wall, s", 100.0, 103.0).agrees
    assert not bench.Figure("r", "wall, s", 100.0, 103.2).agrees
    assert bench.Figure("r", "free, MiB", 100.0, 164.0).agrees
    assert not bench.Figure("r", "free, MiB", 100.0, 165.0).agrees
    assert not bench.Figure("r", "boot", "ok", "oom_boot").agrees


def test_the_document_is_current() -> None:
    """docs/simulation.md holds the tables that the model gives now."""
    document = (ROOT / "docs" / "simulation.md").read_text(encoding="utf-8")
    _, begin, rest = document.partition(bench.BEGIN)
    text, end, _ = rest.partition(bench.END)
    assert begin and end
    assert text.strip() == bench.generated().strip()


def test_the_walls_are_within_15_percent() -> None:
    """60K takes what it took in each row that measured it, fitted or not."""
    walls = [one for one in bench.seed_figures() if one.name == "60K: wall, s"]
    assert len(walls) == 4
    for one in walls:
        assert one.simulated == pytest.approx(one.measured, rel=0.15), one


def test_held_out_092(card: Card, model: Model) -> None:
    """0.92 took no part in the fit: what stays resident, the pass at 60K and its wall come out."""
    settings = bench.settings_of(_row("seed-mtpon-092-180k-pr35975")["config"])
    boot = physics.boot(card, model, settings)
    assert boot.ready and boot.resident_mib == pytest.approx(21_980, abs=64)
    assert prefill.death(model, settings, boot, 60_000) is None
    assert prefill.prefill_s(card, model, settings, 60_000) == pytest.approx(689, rel=0.15)


def test_held_out_other_rig(model: Model) -> None:
    """A rig that has served nothing refuses 180K at 0.93 with the pool and the estimate of that row."""
    row = _row("i35-180k-093-other-rig")
    boot = physics.boot(find_card("rtx3090-fresh"), model, bench.settings_of({**BALANCED, **row["config"]}))
    assert boot.verdict is Verdict.ADMISSION_REJECTED and boot.first_of_shape
    assert boot.needed_gib == pytest.approx(row["outcome"]["kv_needed_gib"], rel=0.03)
    assert boot.available_gib == pytest.approx(row["outcome"]["kv_available_gib"], rel=0.03)
    assert boot.estimated_context_tokens == row["outcome"]["estimated_max_model_len"]


@pytest.mark.parametrize(
    ("context", "needed_gib"),
    [(180_000, 3.05), (200_000, 3.31), (130_000, 2.43)],
)
def test_the_block_law_gives_the_needed_pool(model: Model, context: int, needed_gib: float) -> None:
    """What one request needs is what engines of this kind printed."""
    settings = bench.settings_of({**BALANCED, "max_model_len": context})
    assert physics.needed_gib(model, settings, context) == pytest.approx(needed_gib, abs=0.006)


@pytest.mark.parametrize(("available_gib", "estimate"), [(2.19, 111_456), (2.40, 127_968)])
def test_the_block_law_gives_the_estimate(model: Model, available_gib: float, estimate: int) -> None:
    """The engine's own estimate follows from the pool that it printed."""
    assert physics.estimated_context(model, bench.settings_of(BALANCED), available_gib) == estimate


def test_the_issue_s_axis(card: Card, model: Model) -> None:
    """mem-util at 60K: 0.93 passes with the margin, 0.935 without it, the last pass is below 0.95, which
    dies of memory."""
    lowest: dict[float, float | None] = {}
    for step in range(170, 197):
        share = step * 0.005
        settings = bench.settings_of({**BALANCED, "gpu_memory_utilization": round(share, 3)})
        boot = physics.boot(card, model, settings)
        if not boot.ready:
            assert boot.verdict is Verdict.ADMISSION_REJECTED and share < 0.88
            continue
        dies = prefill.death(model, settings, boot, 60_000) is not None
        lowest[round(share, 3)] = None if dies else prefill.free_mib(model, settings, boot, 60_030)
    assert (lowest[0.93] or 0) >= 400 > (lowest[0.935] or 0) > 0
    last_pass = max(share for share, free in lowest.items() if free is not None)
    first_fail = min(share for share, free in lowest.items() if free is None)
    assert 0.93 <= last_pass <= 0.945 and first_fail <= 0.95
    assert last_pass < first_fail


def test_the_issue_s_prompt_ceiling(card: Card, model: Model) -> None:
    """At 0.93 memory ends prompts between 70K and 80K, and time would not have."""
    settings = bench.settings_of(BALANCED)
    boot = physics.boot(card, model, settings)
    assert 70_000 < prefill.longest_prompt(model, settings, boot) < 80_000
    assert prefill.prefill_s(card, model, settings, 80_000) < 1500


def test_without_mtp_time_ends_prompts(card: Card, model: Model) -> None:
    """0.95 with 200K and no MTP: 90K is not finished in 1,500 s, and memory is not the reason."""
    config = {
        **BALANCED,
        "gpu_memory_utilization": 0.95,
        "max_model_len": 200_000,
        "spec": "off",
    }
    settings = bench.settings_of(config)
    boot = physics.boot(card, model, settings)
    assert boot.ready
    assert prefill.death(model, settings, boot, 90_000) is None
    assert prefill.prefill_s(card, model, settings, 90_000) > 1530
    assert prefill.prefill_s(card, model, settings, 60_000) < 600


def test_a_refused_context_stays_refused_and_a_served_one_does_not(card: Card, model: Model) -> None:
    """200K at 0.93 is refused for want of caches alone: once that shape has been served, it boots."""
    settings = bench.settings_of({**BALANCED, "max_model_len": 200_000})
    first = physics.boot(card, model, settings)
    assert first.verdict is Verdict.ADMISSION_REJECTED
    assert physics.boot(card, model, settings) == first
    warm = physics.boot(card, model, settings, [physics.shape_of(settings, 200_000)])
    assert warm.ready and warm.available_gib - first.available_gib == pytest.approx(model.first_boot_gib)
