"""GPU telemetry through NVML: the only module that knows it. Each call may be missing on its own.

Memory is read with the version-2 call where the driver has it: the older one counts the driver's own
reserve as used (3,345 against 2,700 MiB on one card).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from llm_bisect.model import MemorySample, UsageProblem

MIB = 1 << 20


@dataclass(frozen=True)
class GpuProcess:
    """A process that holds memory; `used_mib` is None where the driver does not tell (WSL2, Windows)."""

    pid: int
    name: str
    used_mib: float | None


@dataclass(frozen=True)
class GpuDevice:
    """One GPU at one moment. What the driver does not tell is None."""

    index: int
    uuid: str
    name: str
    driver: str
    total_mib: float
    used_mib: float
    free_mib: float
    memory_api: str  # v2 | v1
    processes: tuple[GpuProcess, ...] | None = ()  # None: they cannot be listed here (WSL2)
    compute_capability: str | None = None
    power_limit_w: float | None = None
    display_active: bool | None = None


class GpuProbe(Protocol):
    """The machine's GPUs."""

    def devices(self) -> list[GpuDevice]: ...

    def memory(self, selection: Sequence[str]) -> MemorySample | None:
        """Free memory now on the tightest of the selected GPUs (indices or UUIDs; empty: all)."""
        ...


class NullGpu:
    """No GPU can be seen; `reason` says why."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def devices(self) -> list[GpuDevice]:
        return []

    def memory(self, selection: Sequence[str]) -> MemorySample | None:
        if selection:
            raise UsageProblem(
                f"--gpu {selection[0]}: no GPU can be seen ({self.reason})", hint="leave out --gpu"
            )
        return None


class NvmlGpu:
    """NVML of the installed driver. Make it with `open_gpu`."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._handles: dict[tuple[str, ...], list[Any]] = {}

    def devices(self) -> list[GpuDevice]:
        """Every GPU with its processes (0.5 ms each)."""
        driver = self._try(self._nvml.nvmlSystemGetDriverVersion) or "unknown"
        return [self._device(i, h, str(driver)) for i, h in self._all()]

    def memory(self, selection: Sequence[str]) -> MemorySample | None:
        """Free memory now on the tightest selected GPU (9 µs a call). Raises UsageProblem for a GPU that is
        not there."""
        key = tuple(selection)
        if key not in self._handles:
            self._handles[key] = self._select(selection)
        figures = [f for h in self._handles[key] if (f := self._try(self._memory, h)) is not None]
        if not figures:
            return None
        free_mib, total_mib, _used, _api = min(figures)
        return MemorySample(free_mib, total_mib, "nvml")

    def _all(self) -> Iterator[tuple[int, Any]]:
        for index in range(self._try(self._nvml.nvmlDeviceGetCount) or 0):
            handle = self._try(self._nvml.nvmlDeviceGetHandleByIndex, index)
            if handle is not None:
                yield index, handle

    def _select(self, selection: Sequence[str]) -> list[Any]:
        named = {}
        for index, handle in self._all():
            named[str(index)] = handle
            named[str(self._try(self._nvml.nvmlDeviceGetUUID, handle))] = handle
        unknown = [s for s in selection if s not in named]
        if unknown:
            known = ", ".join(f"{d.index} ({d.uuid}, {d.name})" for d in self.devices())
            raise UsageProblem(
                f"--gpu {unknown[0]}: there is no such GPU", hint=f"there are: {known or 'none'}"
            )
        return [named[s] for s in selection] if selection else [h for _, h in self._all()]

    def _device(self, index: int, handle: Any, driver: str) -> GpuDevice:
        nvml = self._nvml
        free_mib, total_mib, used_mib, api = self._try(self._memory, handle) or (
            0.0,
            0.0,
            0.0,
            "none",
        )
        capability = self._try(nvml.nvmlDeviceGetCudaComputeCapability, handle)
        limit_mw = self._try(nvml.nvmlDeviceGetPowerManagementLimit, handle)
        display = self._try(nvml.nvmlDeviceGetDisplayActive, handle)
        return GpuDevice(
            index=index,
            uuid=str(self._try(nvml.nvmlDeviceGetUUID, handle) or "unknown"),
            name=str(self._try(nvml.nvmlDeviceGetName, handle) or "unknown"),
            driver=driver,
            total_mib=total_mib,
            used_mib=used_mib,
            free_mib=free_mib,
            memory_api=api,
            processes=self._processes(handle),
            compute_capability=".".join(map(str, capability)) if capability else None,
            power_limit_w=limit_mw / 1000 if limit_mw is not None else None,
            display_active=bool(display) if display is not None else None,
        )

    def _memory(self, handle: Any) -> tuple[float, float, float, str]:
        """(free, total, used in MiB, which call)."""
        nvml, api = self._nvml, "v2"
        try:
            found = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
        except (nvml.NVMLError, AttributeError, TypeError):
            found, api = nvml.nvmlDeviceGetMemoryInfo(handle), "v1"
        return found.free / MIB, found.total / MIB, found.used / MIB, api

    def _processes(self, handle: Any) -> tuple[GpuProcess, ...] | None:
        """Who holds memory; None where the driver lists no processes."""
        asks = (
            self._nvml.nvmlDeviceGetComputeRunningProcesses,
            self._nvml.nvmlDeviceGetGraphicsRunningProcesses,
        )
        lists = [found for ask in asks if (found := self._try(ask, handle)) is not None]
        if not lists:
            return None
        by_pid: dict[int, int | None] = {}
        for process in (one for found in lists for one in found):
            # One that computes and draws is in both lists; a figure that is told beats one that is not.
            known, told = by_pid.get(process.pid), process.usedGpuMemory
            by_pid[process.pid] = told if known is None else max(known, told or 0)
        return tuple(
            GpuProcess(pid, _name(pid), used / MIB if used is not None else None)
            for pid, used in by_pid.items()
        )

    def _try(self, ask: Callable[..., Any], *args: Any) -> Any:
        """The answer, or None where this driver or card does not give it."""
        try:
            return ask(*args)
        except (self._nvml.NVMLError, self._nvml.NVMLLibraryMismatchError):
            return None


def open_gpu() -> NvmlGpu | NullGpu:
    """NVML where a driver is installed, else a `NullGpu` with the reason."""
    try:
        import pynvml
    except ImportError:
        return NullGpu("the Python package nvidia-ml-py is not installed")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return NullGpu(_reason(error))
    gpu = NvmlGpu(pynvml)
    return gpu if gpu.devices() else NullGpu("the driver lists no GPU")


def _reason(error: Exception) -> str:
    text = str(error)
    if "Library Not Found" in text:
        return "no NVIDIA driver is installed (libnvidia-ml.so.1 was not found)"
    return text or type(error).__name__


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip() or "unknown"
    except OSError:
        return "unknown"
