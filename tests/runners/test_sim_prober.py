"""The simulated runner with the real prober and the real classifier, as the driver uses them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llm_bisect.model import (
    EnvironmentProblem,
    Launch,
    Mount,
    Outcome,
    ProbeRequest,
    ProbeResult,
    SimulatedRef,
    UsageProblem,
)
from llm_bisect.probing.classify import boot_facts, classify_boot
from llm_bisect.probing.prober import Prober
from llm_bisect.runners import procs
from llm_bisect.runners.protocol import BootFailure, BootOrder, Engine
from llm_bisect.runners.simulated_runner import SimulatedRunner
from llm_bisect.spaces.engine_files import load_engine

pytestmark = pytest.mark.serial  # they look for servers by the name of a study


def gone(study: str, within_s: float = 30.0) -> bool:
    """True once no process of that study is left: a server takes a moment to end."""
    end = time.monotonic() + within_s
    while list(procs.find(study)):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


VLLM = load_engine("vllm")
MODEL = "qwen3.6-27b-autoround-int4"
PATCH = Mount("/somewhere/patch_inputs_embeds_optional.py", "/patches/patch_inputs_embeds_optional.py", True)


def launch(share: float = 0.93, context: int = 180_000, *, mtp: bool = True, card: str = "rtx3090") -> Launch:
    """The balanced recipe with some values changed."""
    words = ["--model", "/models/qwen3.6-27b", "--served-model-name", "qwen3.6-27b", "--language-model-only"]
    words += ["--gpu-memory-utilization", str(share), "--max-model-len", str(context)]
    words += ["--max-num-batched-tokens", "4128", "--max-num-seqs", "1"]
    words += ["--kv-cache-dtype", "turboquant_3bit_nc"]
    if mtp:
        words += ["--speculative-config", '{"method":"mtp","num_speculative_tokens":3}']
    return Launch(
        runner="simulated",
        engine="vllm",
        command=tuple(words),
        env={"GENESIS_ENABLE_P103": "1", "GENESIS_FLA_FWD_H_MAX_T": "16384", "HF_TOKEN": "hf_secret"},
        mounts=(PATCH,),
        simulated=SimulatedRef(card, MODEL),
    )


@pytest.fixture
def runner() -> Iterator[SimulatedRunner]:
    runner = SimulatedRunner()
    yield runner
    runner.close()


@pytest.fixture
def boot(runner: SimulatedRunner, tmp_path: Path) -> Booter:
    return Booter(runner, tmp_path)


class Booter:
    """Boots one launch after the other into one folder."""

    def __init__(self, runner: SimulatedRunner, folder: Path) -> None:
        self.runner, self.folder, self.number = runner, folder, 0
        self.prober = Prober(VLLM)
        self.stop = threading.Event()

    def __call__(self, what: Launch) -> Engine:
        self.number += 1
        name = f"b{self.number:03d}"
        self.runner.preflight(what)
        return self.runner.boot(BootOrder("sim-test", name, what, self.folder / f"{name}.log"), self.stop)

    def probe(self, engine: Engine, tokens: int, deadline_s: float = 1500.0) -> ProbeResult:
        request = ProbeRequest(
            probe=f"p{tokens}",
            prompt_tokens=tokens,
            shape="needle",
            max_tokens=30,
            deadline_s=deadline_s,
            depths=(0.1, 0.5, 0.9),
            salt=f"{engine.boot}-{tokens}",
        )
        return self.prober.probe(engine, request, clock=self.runner.clock, stop=self.stop)


def test_60k_passes_and_90k_dies_at_093(boot: Booter, runner: SimulatedRunner) -> None:
    """The balanced recipe: 60K with every needle, the margin and the wall; then 90K kills the engine."""
    engine = boot(launch())
    facts = boot_facts(VLLM, engine.log_text()).facts
    assert facts["kv_cache_gib"] == 4.4 and facts["kv_cache_tokens"] == 350_880
    assert facts["weights_gib"] == 16.87 and facts["context_tokens"] == 180_000
    passed = boot.probe(engine, 60_000)
    assert passed.outcome is Outcome.PASS and passed.engine_alive
    assert passed.prompt_tokens == 60_000 and passed.cached_tokens == 0
    assert len(passed.recall) == 3 and all(check.found for check in passed.recall)
    assert passed.wall_s == pytest.approx(623, rel=0.15)
    assert passed.min_free_mib == pytest.approx(494, abs=64) and passed.memory_source == "simulated"
    died = boot.probe(engine, 90_000)
    assert died.outcome is Outcome.OOM_PROBE and not died.engine_alive
    assert died.evidence.facts["oom_alloc_mib"] == 50.0
    assert 60_000 < (died.tokens_processed or 0) < 80_000
    assert engine.state().exit_code == 0 and not engine.state().running


def test_60k_dies_at_095(boot: Booter) -> None:
    """At 0.95 the same prompt runs out of memory."""
    died = boot.probe(boot(launch(0.95)), 60_000)
    assert died.outcome is Outcome.OOM_PROBE and not died.engine_alive


def test_without_mtp_60k_passes_and_90k_is_out_of_time(boot: Booter) -> None:
    """The largest context: 90K is still computing at the deadline, and the engine lives on."""
    engine = boot(launch(0.95, 200_000, mtp=False))
    passed = boot.probe(engine, 60_000)
    assert passed.outcome is Outcome.PASS and passed.wall_s == pytest.approx(537, rel=0.15)
    late = boot.probe(engine, 90_000)
    assert late.outcome is Outcome.TIMEOUT_CLIENT and late.engine_alive
    assert (late.tokens_processed or 0) > 60_000 and (late.min_free_mib or 0) > 400
    assert boot.probe(engine, 8_000).outcome is Outcome.PASS


def test_200k_is_refused_with_its_estimate_again_and_again(boot: Booter, runner: SimulatedRunner) -> None:
    """A refusal is a boot failure with the engine's estimate, and leaves nothing warm or running."""
    for _ in range(2):
        with pytest.raises(BootFailure) as caught:
            boot(launch(0.93, 200_000))
        assert caught.value.reason == "exited" and caught.value.state.exit_code == 1
        assert classify_boot(VLLM, caught.value)[0] is Outcome.ADMISSION_REJECTED
        facts = boot_facts(VLLM, caught.value.log).facts
        assert facts["estimated_max_model_len"] == 111_456
        assert (facts["kv_needed_gib"], facts["kv_available_gib"]) == (3.31, 2.19)
        assert caught.value.wall_s == pytest.approx(120, rel=0.01)
    assert gone("sim-test")


@pytest.mark.parametrize(
    ("what", "outcome"),
    [
        (launch(0.85), Outcome.ADMISSION_REJECTED),
        (launch(0.74), Outcome.ADMISSION_REJECTED),
        (launch(0.995), Outcome.OOM_BOOT),
        (launch(card="rtx4080"), Outcome.OOM_BOOT),
        (launch(context=400_000), Outcome.CONFIG_ERROR),
        (launch(share=1.5), Outcome.CONFIG_ERROR),
    ],
    ids=["small pool", "no pool", "above the card", "weights too large", "context", "share"],
)
def test_refused_boots_are_classified(boot: Booter, what: Launch, outcome: Outcome) -> None:
    """Every way in which a boot is refused is what a real engine's words would be taken for."""
    with pytest.raises(BootFailure) as caught:
        boot(what)
    assert classify_boot(VLLM, caught.value)[0] is outcome, caught.value.log


def test_what_was_served_once_is_warm_afterwards(boot: Booter) -> None:
    """On a rig that has served nothing a shape's first boot has the smaller pool, its second does not."""
    pools = []
    for _ in range(2):
        engine = boot(launch(0.95, 100_000, card="rtx3090-fresh"))
        pools.append(boot_facts(VLLM, engine.log_text()).facts["kv_cache_gib"])
        engine.stop()
    assert float(pools[1]) - float(pools[0]) == pytest.approx(2.21, abs=0.011)


def test_a_history_that_cannot_be_kept_leaves_no_engine(boot: Booter) -> None:
    """Where what was served cannot be written down, the boot ends with a sentence and is stopped; a history
    that is no history counts as none."""
    place = boot.folder / "simulated-rig.json"
    place.mkdir()
    with pytest.raises(EnvironmentProblem, match=r"simulated-rig\.json"):
        boot(launch(0.95, 100_000, card="rtx3090-fresh"))
    assert gone("sim-test")
    place.rmdir()
    place.write_text(f'{{"rtx3090-fresh/{MODEL}": [{{"wrong": 1}}]}}', encoding="utf-8")
    assert boot(launch(0.95, 100_000, card="rtx3090-fresh")).state().running


def test_the_clock_goes_with_the_work(boot: Booter, runner: SimulatedRunner) -> None:
    """Work moves the clock by its own seconds; real waiting does not; `sleep` without work does."""
    clock = runner.clock
    assert clock.now_s() == 0
    engine = boot(launch())
    booted_s = clock.now_s()
    assert booted_s == pytest.approx(240, abs=1)
    time.sleep(0.05)
    assert clock.now_s() == booted_s
    boot.probe(engine, 1_000)
    probed_s = clock.now_s()
    assert booted_s < probed_s < booted_s + 60
    engine.stop()
    began = time.monotonic()
    clock.sleep(6 * 3600.0)
    assert time.monotonic() - began < 2
    assert clock.now_s() == pytest.approx(probed_s + 6 * 3600)
    second = boot(launch())
    assert clock.now_s() == pytest.approx(probed_s + 6 * 3600 + 240, abs=1)
    second.stop()


def test_a_stopped_boot_and_a_boot_out_of_time(runner: SimulatedRunner, tmp_path: Path) -> None:
    """A stop while it boots and a deadline of the rig's seconds both end it, and nothing is left."""
    stop = threading.Event()
    stop.set()
    with pytest.raises(BootFailure) as caught:
        runner.boot(BootOrder("sim-test", "b1", launch(), tmp_path / "b1.log"), stop)
    assert caught.value.reason == "aborted" and caught.value.state.stopped_by_us
    with pytest.raises(BootFailure) as caught:
        runner.boot(
            BootOrder("sim-test", "b2", launch(), tmp_path / "b2.log", deadline_s=60.0), threading.Event()
        )
    assert caught.value.reason == "deadline"
    assert gone("sim-test")


def test_a_running_probe_can_be_stopped(tmp_path: Path) -> None:
    """`stop` in the middle of a prompt ends the probe as aborted, and the engine is free again."""
    runner = SimulatedRunner(scale=300.0)
    try:
        boot = Booter(runner, tmp_path)
        engine = boot(launch())
        threading.Timer(0.5, boot.stop.set).start()
        result = boot.probe(engine, 60_000)
        assert result.outcome is Outcome.ABORTED
        assert engine.state().running
    finally:
        runner.close()


def test_nothing_secret_is_written(boot: Booter, tmp_path: Path) -> None:
    """No value of the launch's environment that the rig does not need is found in its files."""
    engine = boot(launch())
    engine.stop()
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or b"hf_secret" not in path.read_bytes()


def test_an_engine_does_not_outlive_its_bisect(tmp_path: Path) -> None:
    """`kill -9` of the process that started it ends the engine too; `adopt` finds nothing to take over."""
    program = (
        "import sys, threading, time; from pathlib import Path; sys.path[:0] = [sys.argv[1], sys.argv[3]];"
        "import llm_bisect_sim_launch as l; from llm_bisect.runners.simulated_runner import SimulatedRunner;"
        "from llm_bisect.runners.protocol import BootOrder; r = SimulatedRunner();"
        "r.boot(BootOrder('sim-kill', 'b1', l.LAUNCH, Path(sys.argv[2]) / 'b1.log'), threading.Event());"
        "print('ready', flush=True); time.sleep(60)"
    )
    what = launch()
    text = (
        "from llm_bisect.model import Launch, SimulatedRef\n"
        f"LAUNCH = Launch(runner='simulated', engine='vllm', command={what.command!r}, "
        f"simulated=SimulatedRef('rtx3090', {MODEL!r}))\n"
    )
    (tmp_path / "llm_bisect_sim_launch.py").write_text(text, encoding="utf-8")
    source = str(Path(procs.__file__).resolve().parents[2])
    child = subprocess.Popen(
        [sys.executable, "-c", program, source, str(tmp_path), str(tmp_path)], stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        assert len(list(procs.find("sim-kill"))) == 1
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        end = time.monotonic() + 10
        while list(procs.find("sim-kill")) and time.monotonic() < end:
            time.sleep(0.02)
        assert gone("sim-kill")
    finally:
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()
    runner = SimulatedRunner()
    assert runner.adopt("sim-kill", "b1") is None


def test_unknown_rigs_are_named_with_those_that_there_are(runner: SimulatedRunner) -> None:
    """A card that is not there, and a launch without one, are said in a sentence, with those known."""
    wrong = launch(card="rtx9090")
    with pytest.raises(UsageProblem) as caught:
        runner.preflight(wrong)
    assert "rtx9090" in caught.value.message and "rtx3090" in (caught.value.hint or "")
    bare = Launch(runner="simulated", engine="vllm", command=())
    with pytest.raises(UsageProblem):
        runner.preflight(bare)


def test_the_fingerprint_says_simulated(runner: SimulatedRunner) -> None:
    """The fingerprint names the card, hashes its figures, and says what it is; all in plain text."""
    found = runner.fingerprint(launch())
    assert found["memory.gpu"] == "simulated rtx3090" and found["note.simulated"] == "true"
    assert found != runner.fingerprint(launch(card="rtx3090-fresh"))
    assert json.loads(json.dumps(dict(found))) == dict(found)
