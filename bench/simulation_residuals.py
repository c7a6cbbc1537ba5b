"""The tables of docs/simulation.md: every figure of the study's rows, measured and simulated.

    python bench/simulation_residuals.py            prints the tables
    python bench/simulation_residuals.py --write    puts them into docs/simulation.md

A residual is small within 3 % or 64 MiB (walls: 15 %); any other one needs an explanation here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT / "bisect") not in sys.path:
    sys.path.insert(0, str(ROOT / "bisect"))

from llm_bisect.runners.sim import physics, prefill, rig  # noqa: E402
from llm_bisect.runners.sim.engine import Served, SimEngine  # noqa: E402
from llm_bisect.runners.sim.settings import Settings, read_launch  # noqa: E402

MODEL = "qwen3.6-27b-autoround-int4"
ROWS = ROOT / "tests" / "data" / "outcomes.yaml"
DOC = ROOT / "docs" / "simulation.md"
BEGIN, END = "<!-- begin: bench/simulation_residuals.py -->", "<!-- end -->"

# Rows of the same build on the same card that no parameter was fitted to: (row, card).
HELD_OUT = (("v769-095-180k", "rtx3090"), ("i35-180k-093-other-rig", "rtx3090-fresh"))

# Figures that parameters were fitted to; every other figure is held out.
FITTED = {
    ("seed-mtpon-093-180k-pr35975", "KV pool, GiB"),
    ("seed-mtpon-093-180k-pr35975", "resident after boot, MiB"),
    ("seed-mtpon-093-180k-pr35975", "60K: free at the end, MiB"),
    ("seed-mtpon-093-180k-pr35975", "60K: wall, s"),
    ("seed-mtpon-095-180k-pr35975", "60K: allocation that failed, MiB"),
    ("seed-mtpon-095-180k-pr35975", "60K: free when it failed, MiB"),
    ("seed-mtpon-095-180k-maxt2048", "60K: kernel call that failed"),
    ("seed-mtpon-093-200k-pr35975", "available, GiB"),
    ("seed-mtpoff-095-200k-pr35975", "KV pool, GiB"),
    ("seed-mtpoff-095-200k-pr35975", "KV pool, tokens"),
    ("seed-mtpoff-095-200k-pr35975", "60K: wall, s"),
    ("seed-mtpoff-095-180k", "60K: wall, s"),
    ("seed-mtpoff-095-180k", "60K: decode, tokens/s"),
}

EXPLAINED = {
    (
        "seed-mtpoff-095-180k",
        "resident after boot, MiB",
    ): "the study itself calls this boot 280 MiB smaller than "
    "the one with MTP, and shows it 8 MiB larger; its sister row at 200K shows 21,004, which fits a pool of "
    "67 blocks. No launch differs by the 2,160 MiB between both rows; the model follows 21,004",
    ("seed-mtpoff-095-180k", "60K: prefill, tokens/s"): "one line of statistics (10 s) at 6.1 % of the pool; "
    "simulated: the speed at that moment. The wall of the whole prompt is the figure that is kept",
    ("seed-mtpon-095-180k-pr35975", "KV pool, GiB"): "two tables of the study give 5.07 and 5.5 GiB for this "
    "boot: it mixes two boots",
    (
        "seed-mtpon-095-180k-pr35975",
        "KV pool, tokens",
    ): "as above: the other table has 388K, which is what the "
    "model gives; 363,264 are 88 blocks, and 88 blocks would be 1.49x, not 1.43x",
    ("seed-mtpon-095-180k-pr35975", "concurrency"): "as above",
    (
        "seed-mtpon-093-180k-pr35975",
        "KV pool, tokens",
    ): "the study rounds: about 340K. 4.40 GiB are 85 blocks",
    (
        "seed-mtpon-093-180k-pr35975",
        "90K: wall to the death, s",
    ): "the only death with a time; 112 s for at least "
    "60K tokens is five times the speed of the pass at 60K in the same boot, so no law of time fits both",
    ("seed-mtpon-092-180k-pr35975", "KV pool, GiB"): "0.01 of 23.56 GiB is 0.24 GiB; from 0.92 to 0.93 the "
    "study's pool moves by 0.53 GiB while its resident memory moves by 280 MiB",
    ("seed-mtpon-092-180k-pr35975", "KV pool, tokens"): "as above",
    ("seed-mtpon-092-180k-pr35975", "concurrency"): "as above",
    (
        "seed-mtpon-092-180k-pr35975",
        "60K: free at the end, MiB",
    ): "the slope between 0.93 and 0.95 gives 774; "
    "580 would mean that 0.92 takes 190 MiB more than 0.93 for the same prompt",
    (
        "seed-mtpon-092-180k-pr35975",
        "60K: wall, s",
    ): "slower than at 0.93 for no reason that the study knows; "
    "the model has no term that slows a prompt down when more memory is free",
    (
        "seed-mtpoff-095-200k-pr35975",
        "60K: wall, s",
    ): "504 s and 537 s for the same prompt without MTP: one law cannot be within 3 % of both",
}


@dataclass(frozen=True)
class Figure:
    """One figure of one row. Numbers, or the names of verdicts."""

    row: str
    name: str
    measured: float | str
    simulated: float | str

    @property
    def residual(self) -> float | None:
        """Simulated minus measured; None for verdicts."""
        if isinstance(self.measured, str) or isinstance(self.simulated, str):
            return None
        return self.simulated - self.measured

    @property
    def agrees(self) -> bool:
        """Equal verdicts; numbers within 3 % or 64 MiB."""
        if isinstance(self.measured, str) or isinstance(self.simulated, str):
            return self.measured == self.simulated
        off = abs(self.simulated - self.measured)
        slack_mib = 64.0 if "MiB" in self.name else 64.0 / 1024 if "GiB" in self.name else 0.0
        return off <= max(0.03 * abs(self.measured), slack_mib)

    @property
    def note(self) -> str:
        return EXPLAINED.get((self.row, self.name), "")


def rows() -> dict[str, dict[str, Any]]:
    """All rows of the file, by id."""
    data = yaml.safe_load(ROWS.read_text(encoding="utf-8"))
    return {row["id"]: row for row in data["rows"]}


def settings_of(config: Mapping[str, Any]) -> Settings:
    """The launch that a row describes."""
    if config.get("compose") == "long-text":
        # the recipe as it was published; the row names what differs
        config = {"pr35975": True, "max_num_seqs": 1, "max_num_batched_tokens": 4128, **config}
    spec = str(config.get("spec", "off"))
    argv = [
        "--model=/models/qwen3.6-27b",
        f"--max-model-len={config['max_model_len']}",
        f"--gpu-memory-utilization={config['gpu_memory_utilization']}",
        f"--kv-cache-dtype={config['kv_cache_dtype']}",
        f"--max-num-batched-tokens={config.get('max_num_batched_tokens', 4128)}",
        f"--max-num-seqs={config.get('max_num_seqs', 1)}",
    ]
    if not config.get("vision", False):
        argv.append("--language-model-only")
    if spec.startswith("mtp:"):
        config_json = json.dumps({"method": "mtp", "num_speculative_tokens": int(spec[4:])})
        argv += ["--speculative-config", config_json]
    env = {"GENESIS_ENABLE_P103": "1", "GENESIS_FLA_FWD_H_MAX_T": str(config.get("fla_max_t", 16384))}
    patched = ["/patches/patch_inputs_embeds_optional.py"] if config.get("pr35975") else []
    return read_launch(argv, env, patched)


def figures(row: Mapping[str, Any], card_name: str = "rtx3090") -> Iterator[Figure]:
    """Every figure of a row beside what the rig gives for it."""
    card, model = rig.find_card(card_name), rig.find_model(MODEL)
    settings, outcome, name = settings_of(row["config"]), row["outcome"], str(row["id"])
    boot = physics.boot(card, model, settings)
    yield Figure(name, "boot", str(outcome.get("boot", "ok")), "ok" if boot.ready else boot.verdict.value)
    for key, label, value in (
        ("boot_resident_mib", "resident after boot, MiB", boot.resident_mib),
        ("headroom_mib_before_request", "free after boot, MiB", boot.free_mib),
        ("kv_cache_gib", "KV pool, GiB", boot.available_gib),
        ("kv_cache_tokens", "KV pool, tokens", boot.kv_tokens),
        ("kv_cache_tokens_approx", "KV pool, tokens", boot.kv_tokens),
        ("max_concurrency", "concurrency", boot.concurrency),
        ("max_concurrency_approx", "concurrency", boot.concurrency),
        ("kv_needed_gib", "needed, GiB", boot.needed_gib),
        ("kv_available_gib", "available, GiB", boot.available_gib),
        ("estimated_max_model_len", "estimated context, tokens", boot.estimated_context_tokens),
    ):
        if key in outcome:
            yield Figure(name, label, float(outcome[key]), float(value))
    for probe in outcome.get("probes", ()) if boot.ready else ():
        yield from _probe(name, card, model, settings, probe)


def _probe(
    row: str, card: rig.Card, model: rig.Model, settings: Settings, probe: Mapping[str, Any]
) -> Iterator[Figure]:
    tokens = int(probe["prompt_tokens"])
    engine = SimEngine(card, model, settings)
    boot = engine.start()
    served = engine.serve(tokens, int(probe.get("max_tokens", 30)))
    label = f"{tokens / 1000:g}K"
    limit_s = probe.get("client_timeout_s")
    if limit_s is not None:
        label += f" within {limit_s} s"
    result = {"client_timeout": "timeout", "timeout_indeterminate": "timeout"}.get(
        probe["result"], str(probe["result"])
    )
    yield Figure(row, label, result, _result(served, limit_s))
    death = served.death
    for key, what, value in (
        ("wall_s", "wall, s" if death is None else "wall to the death, s", served.wall_s),
        ("end_free_mib", "free at the end, MiB", served.lowest_free_mib),
        ("oom_alloc_mib", "allocation that failed, MiB", death.asked_mib if death else 0.0),
        ("oom_free_mib", "free when it failed, MiB", death.free_mib if death else 0.0),
        ("oom_at_kernel_call", "kernel call that failed", death.call if death else 0),
        ("pytorch_active_gib", "PyTorch memory when it failed, GiB", _active_gib(card, served)),
        ("decode_tps", "decode, tokens/s", 30 / served.decode_s if served.decode_s else 0.0),
        ("mtp_al", "tokens in a decode step", prefill.tokens_per_step(model, settings)),
    ):
        if key in probe:
            yield Figure(row, f"{label}: {what}", _number(probe[key]), float(value))
    if "prefill_tps" in probe:
        at = probe["kv_usage_pct"] / 100 * boot.kv_tokens
        ten_s_later = prefill.prefill_s(card, model, settings, at + 1000) - prefill.prefill_s(
            card, model, settings, at
        )
        yield Figure(row, f"{label}: prefill, tokens/s", float(probe["prefill_tps"]), 1000 / ten_s_later)


def _result(served: Served, limit_s: float | None) -> str:
    if limit_s is not None and served.wall_s > limit_s:
        return "timeout"
    return "pass" if served.death is None else "oom"


def _active_gib(card: rig.Card, served: Served) -> float:
    free = served.death.free_mib if served.death else 0.0
    return (card.cuda_total_mib - free - card.context_mib - card.startup_used_mib - 121.66) / 1024


def _number(value: object) -> float:
    """`~393/394` is the 393rd call of 394."""
    return float(str(value).lstrip("~").partition("/")[0])


def seed_figures() -> list[Figure]:
    """Figures of the study's own rows."""
    return [figure for row in rows().values() if row["id"].startswith("seed-") for figure in figures(row)]


def held_out_figures() -> list[Figure]:
    """Figures of rows that nothing was fitted to."""
    every = rows()
    return [figure for name, card in HELD_OUT for figure in figures(_complete(every[name]), card)]


def _complete(row: dict[str, Any]) -> dict[str, Any]:
    if row["id"] == "v769-095-180k":
        # the launch of the study before its patch
        return {**row, "config": {"fla_max_t": 16384, "pr35975": False, **row["config"]}}
    return row


def table(found: list[Figure], *, with_fit: bool) -> str:
    """A Markdown table."""
    head = "| figure | measured | simulated | residual |" + (" fitted |" if with_fit else "") + " note |"
    lines: list[str] = []
    for row in dict.fromkeys(figure.row for figure in found):
        lines += [f"**{row}**", "", head, "|---|---:|---:|---:|" + ("---|" if with_fit else "") + "---|"]
        for one in (figure for figure in found if figure.row == row):
            fit = f" {'fitted' if (one.row, one.name) in FITTED else ''} |" if with_fit else ""
            measured, simulated = _shown(one.measured), _shown(one.simulated)
            lines.append(
                f"| {one.name} | {measured} | {simulated} | {_residual(one)} |{fit} {one.note} |".replace(
                    "  |", " |"
                )
            )
        lines.append("")
    return "\n".join(lines)


def _residual(figure: Figure) -> str:
    if figure.residual is None:
        return "agrees" if figure.agrees else "differs"
    share = 100 * figure.residual / figure.measured if figure.measured else 0.0  # type: ignore[operator]
    mark = "" if figure.agrees else " **explained**"
    return f"{_shown(figure.residual, sign=True)} ({share:+.1f} %){mark}"


def _shown(value: float | str, *, sign: bool = False) -> str:
    if isinstance(value, str):
        return value
    form = "+," if sign else ","
    size = abs(value)
    return (
        f"{value:{form}.0f}" if size >= 100 else f"{value:{form}.1f}" if size >= 10 else f"{value:{form}.2f}"
    )


def generated() -> str:
    """What stands between the marks in docs/simulation.md."""
    return (
        "### The study's rows\n\n"
        + table(seed_figures(), with_fit=True)
        + "\n### Rows that nothing was fitted to\n\n"
        + table(held_out_figures(), with_fit=False)
    ).rstrip() + "\n"


def main() -> int:
    text = generated()
    if "--write" not in sys.argv[1:]:
        print(text)
        return 0
    doc = DOC.read_text(encoding="utf-8")
    before, _, rest = doc.partition(BEGIN)
    after = rest.partition(END)[2]
    DOC.write_text(f"{before}{BEGIN}\n{text}{END}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
