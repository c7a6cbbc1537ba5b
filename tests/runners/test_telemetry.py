"""The NVML adapter, against a stand-in for the driver's library that is built from C."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pynvml
import pytest

from llm_bisect.model import UsageProblem
from llm_bisect.runners.telemetry import NullGpu, NvmlGpu, open_gpu

CARD = """count 1
0.name NVIDIA GeForce RTX 3090
0.uuid GPU-1111
0.total 24576
0.used 22260
0.free 1671
0.power 350000
"""


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in, compiled once."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler for the stand-in of the driver's library")
    target = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    source = Path(__file__).with_name("nvml_stub.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(target), str(source)], check=True)
    return target


@pytest.fixture
def rig(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Sets what the stand-in tells."""
    state = tmp_path / "state"
    monkeypatch.setenv("NVML_STUB_STATE", str(state))
    state.write_text(CARD)
    monkeypatch.setattr(pynvml, "nvmlLib", ctypes.CDLL(str(library)))
    monkeypatch.setattr(pynvml, "_nvmlLib_refcount", 0)
    pynvml._nvmlGetFunctionPointer_cache.clear()

    def tell(text: str) -> None:
        state.write_text(text)

    yield tell
    pynvml._nvmlGetFunctionPointer_cache.clear()


def test_a_desktop_card(rig: Callable[[str], None]) -> None:
    """Free memory by the version-2 call; the driver's reserve is not counted as used."""
    gpu = open_gpu()
    assert isinstance(gpu, NvmlGpu)
    (device,) = gpu.devices()
    assert (device.name, device.used_mib, device.memory_api) == ("NVIDIA GeForce RTX 3090", 22260, "v2")
    assert device.power_limit_w == 350.0
    sample = gpu.memory(())
    assert sample is not None and (sample.free_mib, sample.total_mib, sample.source) == (1671, 24576, "nvml")


def test_memory_is_read_anew_each_time(rig: Callable[[str], None]) -> None:
    """A later sample shows what is free then."""
    gpu = open_gpu()
    rig(CARD.replace("1671", "494"))
    sample = gpu.memory(())
    assert sample is not None and sample.free_mib == 494


def test_an_old_driver(rig: Callable[[str], None]) -> None:
    """Without the version-2 call the older one is used, and that is recorded."""
    rig(CARD + "0.v2 13\n")
    (device,) = open_gpu().devices()
    assert (device.memory_api, device.used_mib, device.free_mib) == ("v1", 22260 + 645, 1671)


def test_a_laptop(rig: Callable[[str], None]) -> None:
    """No power limit, and a process whose memory is not told: null, never a guess."""
    rig(CARD.replace("0.power 350000\n", "") + f"0.pid {os.getpid()}\n")
    (device,) = open_gpu().devices()
    assert device.power_limit_w is None
    assert device.processes is not None
    (process,) = device.processes
    assert process.pid == os.getpid() and process.used_mib is None and process.name != "unknown"


def test_who_holds_the_memory(rig: Callable[[str], None]) -> None:
    """A process with its MiB."""
    rig(CARD + f"0.pid {os.getpid()}\n0.pid_mib 21000\n")
    processes = open_gpu().devices()[0].processes
    assert processes is not None and processes[0].used_mib == 21000


def test_a_process_that_computes_and_draws(rig: Callable[[str], None]) -> None:
    """It is one process, and a figure that only one of the driver's lists has is kept."""
    both = CARD + f"0.pid {os.getpid()}\n0.draws {os.getpid()}\n"
    for figures in ("0.pid_mib 21000\n", "0.draws_mib 21000\n", "0.pid_mib 21000\n0.draws_mib 300\n"):
        rig(both + figures)
        processes = open_gpu().devices()[0].processes
        assert processes is not None and [p.used_mib for p in processes] == [21000]
    rig(both)
    processes = open_gpu().devices()[0].processes
    assert processes is not None and [p.used_mib for p in processes] == [None]


def test_processes_that_cannot_be_listed(rig: Callable[[str], None]) -> None:
    """Where the driver lists none (WSL2) that is not the same as nobody being there."""
    rig(CARD + "0.unlisted 1\n")
    assert open_gpu().devices()[0].processes is None
    rig(CARD)
    assert open_gpu().devices()[0].processes == ()


def test_a_card_with_a_screen(rig: Callable[[str], None]) -> None:
    """Display and compute capability are told where the driver knows them, else null."""
    (device,) = open_gpu().devices()
    assert (device.display_active, device.compute_capability) == (None, None)
    for display in (0, 1):
        rig(CARD + f"0.display {display}\n0.capability 86\n")
        (device,) = open_gpu().devices()
        assert (device.display_active, device.compute_capability) == (bool(display), "8.6")


def test_a_driver_without_cards(rig: Callable[[str], None]) -> None:
    """A driver that lists no GPU is told so."""
    rig("count 0\n")
    gpu = open_gpu()
    assert isinstance(gpu, NullGpu) and "lists no GPU" in gpu.reason


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the Python package: a reason, not a traceback."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    gpu = open_gpu()
    assert isinstance(gpu, NullGpu) and "nvidia-ml-py" in gpu.reason


def test_selection_takes_the_tightest(rig: Callable[[str], None]) -> None:
    """By index, by UUID, or all; a GPU that is not there is one sentence."""
    rig(
        CARD.replace("count 1", "count 2")
        + "1.name other\n1.uuid GPU-2222\n1.total 20480\n1.used 20000\n1.free 480\n"
    )
    gpu = open_gpu()

    def free(*names: str) -> float:
        sample = gpu.memory(names)
        assert sample is not None
        return sample.free_mib

    assert (free(), free("0"), free("1"), free("GPU-1111"), free("0", "GPU-2222")) == (
        480,
        1671,
        480,
        1671,
        480,
    )
    with pytest.raises(UsageProblem, match="--gpu 7: there is no such GPU") as caught:
        gpu.memory(("7",))
    assert "1 (GPU-2222, other)" in (caught.value.hint or "")


def test_a_driver_that_is_not_loaded(rig: Callable[[str], None]) -> None:
    """The reason is kept, nothing is raised; a selection is then refused."""
    rig("init 9\n")
    gpu = open_gpu()
    assert isinstance(gpu, NullGpu) and "Driver Not Loaded" in gpu.reason
    assert gpu.devices() == [] and gpu.memory(()) is None
    with pytest.raises(UsageProblem, match="no GPU can be seen"):
        gpu.memory(("0",))


def test_without_a_library() -> None:
    """In a fresh process on a machine without a driver: a reason, not a traceback."""
    code = "from llm_bisect.runners.telemetry import open_gpu; print(getattr(open_gpu(), 'reason', ''))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    if not done.stdout.strip():
        pytest.skip("this machine has an NVIDIA driver")
    assert "no NVIDIA driver" in done.stdout
