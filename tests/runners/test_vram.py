"""Whose GPU it is, and waiting until its memory is given back, on devices that the tests script."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from llm_bisect.model import EnvironmentProblem, MemorySample, UsageProblem
from llm_bisect.runners import procs, vram
from llm_bisect.runners.telemetry import GpuDevice, GpuProcess
from llm_bisect.runners.vram import Vram


def gpu(
    index: int = 0, used_mib: float = 300.0, processes: Sequence[tuple[int, float | None]] | None = ()
) -> GpuDevice:
    """A scripted GPU; `processes` are (pid, MiB)."""
    listed = None if processes is None else tuple(GpuProcess(pid, "x", mib) for pid, mib in processes)
    return GpuDevice(
        index, f"GPU-{'abc'[index]}", "RTX 3090", "580.1", 24576.0, used_mib, 24576.0 - used_mib, "v2", listed
    )


@dataclass
class Probe:
    """A scripted machine: devices, and free memory at each look."""

    gpus: list[GpuDevice] = field(default_factory=lambda: [gpu()])
    free_mib: list[float] = field(default_factory=list)

    def devices(self) -> list[GpuDevice]:
        return self.gpus

    def memory(self, selection: Sequence[str]) -> MemorySample | None:
        if not self.free_mib:
            return None
        return MemorySample(self.free_mib.pop(0) if len(self.free_mib) > 1 else self.free_mib[0])


def test_no_gpu_is_an_environment_problem() -> None:
    """A launch that asks for a GPU does not start on a machine without one."""
    with pytest.raises(EnvironmentProblem, match="asks for a GPU"):
        vram.check_gpus((), Probe(gpus=[]))


def test_a_desktop_is_no_holder() -> None:
    """A few hundred MiB of a display are not in the way."""
    vram.check_gpus((), Probe([gpu(used_mib=900, processes=[(os.getpid(), 400)])]))


def test_a_holder_is_named_with_what_frees_it() -> None:
    """Process, MiB and the command that frees it."""
    device = gpu(used_mib=20_500, processes=[(os.getpid(), 20_000)])
    with pytest.raises(EnvironmentProblem, match=r"GPU 0 .*20000 MiB") as caught:
        vram.check_gpus((), Probe([device]))
    assert f"pid {os.getpid()}" in caught.value.message
    assert f"kill {os.getpid()}" in str(caught.value.hint)


def test_an_engine_of_ours_is_no_stranger() -> None:
    """An engine that a study left is reaped or adopted, and does not refuse the study that asks."""
    env = {**os.environ, procs.STUDY_VARIABLE: "s"}
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=env)
    try:
        vram.check_gpus((), Probe([gpu(used_mib=20_000, processes=[(child.pid, 19_900)])]))
    finally:
        child.kill()
        child.wait()


def test_only_the_chosen_gpus_are_judged() -> None:
    """By index or UUID; one that is not there is named with those that are."""
    busy = gpu(1, used_mib=20_000, processes=[(os.getpid(), None)])
    probe = Probe([gpu(), busy])
    vram.check_gpus(("0",), probe)
    vram.check_gpus(("GPU-a",), probe)
    with pytest.raises(EnvironmentProblem, match="20000 MiB"):
        vram.check_gpus(("GPU-b",), probe)
    with pytest.raises(UsageProblem, match="--gpu 7") as wrong:
        vram.check_gpus(("7",), probe)
    assert "0: RTX 3090" in str(wrong.value.hint)


@pytest.mark.parametrize(("used_mib", "refused"), [(1900, False), (2100, True)])
def test_unlisted_processes_are_judged_by_use(used_mib: float, refused: bool) -> None:
    """Where processes cannot be listed, memory in use decides."""
    probe = Probe([gpu(used_mib=used_mib, processes=None)])
    if refused:
        with pytest.raises(EnvironmentProblem, match="2100 MiB"):
            vram.check_gpus((), probe)
    else:
        vram.check_gpus((), probe)


def test_memory_that_no_visible_process_holds() -> None:
    """Another user's process holds it: said so."""
    with pytest.raises(EnvironmentProblem, match="cannot see"):
        vram.check_gpus((), Probe([gpu(used_mib=9_000, processes=[])]))


def test_waits_until_memory_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settled is as much free as before the boot, less 64 MiB."""
    monkeypatch.setattr(vram, "_POLL_S", 0.0)
    assert Vram((), Probe(free_mib=[20_000, 500, 9_000, 19_950])).wait_settled()
    assert not Vram((), Probe(free_mib=[20_000, 500])).wait_settled(patience_s=0.05)
    assert Vram((), Probe()).wait_settled()


def test_fingerprint_has_no_serial_number() -> None:
    """Name, size and driver bear on memory, the power limit on timings; no UUID is told."""
    found = vram.gpu_fingerprint(Probe([gpu(), gpu(1)]))
    assert found == {
        "memory.gpu": "RTX 3090 24576 MiB, RTX 3090 24576 MiB",
        "memory.driver": "580.1",
        "time.power_limit": "?, ?",
    }
    assert vram.gpu_fingerprint(Probe(gpus=[])) == {"memory.gpu": "none"}
