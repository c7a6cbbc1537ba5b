"""The simulated runner where things go wrong around it: a stalled machine, a crash, a resumed study."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import llm_bisect
from llm_bisect.model import EnvironmentProblem, Launch, Mount, Outcome, ProbeRequest, SimulatedRef
from llm_bisect.probing.prober import Prober
from llm_bisect.runners import procs
from llm_bisect.runners.protocol import BootFailure, BootOrder
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


STUDY = f"sim-stall-{os.getpid()}"


def launch(share: float = 0.93, context: int = 180_000, card: str = "rtx3090") -> Launch:
    """The balanced recipe."""
    words = ["--model=/models/q", f"--gpu-memory-utilization={share}", f"--max-model-len={context}"]
    words += ["--max-num-batched-tokens=4128", "--max-num-seqs=1", "--kv-cache-dtype=turboquant_3bit_nc"]
    words += ["--language-model-only", "--speculative-config", '{"method":"mtp","num_speculative_tokens":3}']
    patch = Mount("/p/patch_inputs_embeds_optional.py", "/patches/patch_inputs_embeds_optional.py", True)
    return Launch(
        "simulated",
        "vllm",
        tuple(words),
        mounts=(patch,),
        simulated=SimulatedRef(card, "qwen3.6-27b-autoround-int4"),
    )


def order(folder: Path, boot: str, what: Launch) -> BootOrder:
    return BootOrder(STUDY, boot, what, folder / f"{boot}.log")


@pytest.fixture
def runner() -> Iterator[SimulatedRunner]:
    runner = SimulatedRunner(scale=1_000.0)
    yield runner
    runner.close()


def _server(boot: str) -> int:
    found = [identity.pid for identity, _ in procs.find(STUDY, boot)]
    assert len(found) == 1
    return found[0]


def test_a_stalled_machine_ages_nothing(runner: SimulatedRunner, tmp_path: Path) -> None:
    """While the server's process is stopped the clock stands, and the probe that it interrupts still passes
    with the time that it takes without."""
    engine = runner.boot(order(tmp_path, "b1", launch()), threading.Event())
    pid = _server("b1")
    stood: list[float] = []

    def stall() -> None:
        before = runner.clock.now_s()
        while runner.clock.now_s() < before + 30:
            time.sleep(0.002)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.05)
        stood.append(runner.clock.now_s())
        time.sleep(1.0)  # a thousand seconds of the rig, had it gone on
        stood.append(runner.clock.now_s())
        os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=stall)
    thread.start()
    request = ProbeRequest("p1", 40_000, deadline_s=400.0, silence_s=100.0, depths=(0.5,))
    prober = Prober(load_engine("vllm"))
    result = prober.probe(engine, request, clock=runner.clock, stop=threading.Event())
    thread.join()
    assert result.outcome is Outcome.PASS
    assert len(stood) == 2 and stood[0] == stood[1]
    assert 200 < result.wall_s < 260


def test_adopt_ends_a_server_that_could_not_end_itself(tmp_path: Path) -> None:
    """A server that was stopped by a signal when its bisect was killed is found by its labels and killed;
    one whose bisect lives is left alone."""
    program = (
        "import sys, threading; sys.path[:0] = sys.argv[1:3]; from pathlib import Path;"
        "import test_sim_stall_child as t; t.run(Path(sys.argv[2]), sys.argv[3]); threading.Event().wait(60)"
    )
    helper = (
        "import threading\n"
        "from llm_bisect.model import Launch, SimulatedRef\n"
        "from llm_bisect.runners.protocol import BootOrder\n"
        "from llm_bisect.runners.simulated_runner import SimulatedRunner\n"
        "def run(folder, study):\n"
        "    global runner\n"
        "    runner = SimulatedRunner()\n"
        f"    what = Launch('simulated', 'vllm', {launch().command!r},\n"
        "        simulated=SimulatedRef('rtx3090', 'qwen3.6-27b-autoround-int4'))\n"
        "    runner.boot(BootOrder(study, 'b1', what, folder / 'b1.log'), threading.Event())\n"
        "    print('ready', flush=True)\n"
    )
    (tmp_path / "test_sim_stall_child.py").write_text(helper)
    root = str(Path(llm_bisect.__file__).parents[1])
    child = subprocess.Popen(
        [sys.executable, "-c", program, root, str(tmp_path), STUDY], stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        pid = _server("b1")
        runner = SimulatedRunner()
        assert runner.adopt(STUDY, None) is None
        assert _server("b1") == pid
        os.kill(pid, signal.SIGSTOP)
        child.kill()
        child.wait()
        assert _server("b1") == pid
        assert runner.adopt(STUDY, "b1") is None
        assert gone(STUDY)
    finally:
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()
        procs.kill_all(STUDY, "b1")


def test_a_resumed_study_boots_as_if_it_had_gone_on(tmp_path: Path) -> None:
    """What a shape's first boot left warm is still warm for another runner on the same study's folder, and a
    refused boot leaves nothing warm."""

    def pool(what: Launch) -> str:
        runner = SimulatedRunner()
        try:
            try:
                engine = runner.boot(order(tmp_path, "b1", what), threading.Event())
            except BootFailure as failure:
                return "refused" if "To serve at least one request" in failure.log else failure.log
            line = next(one for one in engine.log_text().splitlines() if "Available KV cache memory" in one)
            return line.rpartition(": ")[2]
        finally:
            runner.close()

    fresh = launch(card="rtx3090-fresh")
    short = launch(context=100_000, card="rtx3090-fresh")
    assert [pool(fresh), pool(fresh)] == ["refused", "refused"]
    assert [pool(short), pool(short)] == ["2.19 GiB", "4.40 GiB"]
    assert pool(fresh) == "refused"  # 100K being warm says nothing of 180K
    assert pool(launch()) == "4.40 GiB"  # the rig that has served it


def test_only_the_log_and_the_history_stay(runner: SimulatedRunner, tmp_path: Path) -> None:
    """The files that the two processes share are gone once it is ready, and nothing runs after a stop."""
    engine = runner.boot(order(tmp_path, "b1", launch()), threading.Event())
    assert [path.name for path in tmp_path.iterdir()] == ["b1.log"]
    sample = engine.memory()
    assert sample is not None and sample.source == "simulated" and sample.total_mib == 24576
    engine.stop()
    engine.stop()
    assert engine.memory() is None and engine.state().stopped_by_us
    assert gone(STUDY)


def test_a_folder_that_cannot_be_written_is_said(runner: SimulatedRunner, tmp_path: Path) -> None:
    """The place of the logs is a file: one sentence instead of a traceback."""
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem) as caught:
        runner.boot(order(tmp_path / "file", "b1", launch()), threading.Event())
    assert "file" in caught.value.message
