"""GPU memory around a boot: nobody else holds it at the start, and it is given back at the end."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

from llm_bisect.model import EnvironmentProblem, MemorySample, UsageProblem
from llm_bisect.runners import engine_api, procs
from llm_bisect.runners.telemetry import GpuDevice, GpuProbe, NullGpu, open_gpu

HELD_MIB = 1024.0
"""A GPU with more than this in use at the start belongs to somebody; a desktop takes less."""
HELD_UNLISTED_MIB = 2048.0
"""The same where its processes cannot be listed (WSL2), and the desktop's share is not known either."""

_SETTLED_MIB = 64.0
_POLL_S = 0.2
_CONTAINER_ID = re.compile(r"[0-9a-f]{64}")


class Vram:
    """Free memory of the GPUs that one boot uses, and the baseline that it has to come back to."""

    def __init__(self, gpus: Sequence[str], probe: GpuProbe | None = None) -> None:
        self._gpus = tuple(gpus)
        self._probe = probe if probe is not None else open_gpu()
        self._baseline = self._free_mib()

    def sample(self) -> MemorySample | None:
        """Free memory now on the tightest of them; None without telemetry."""
        return self._probe.memory(self._gpus)

    def wait_settled(self, patience_s: float = 30.0) -> bool:
        """Wait until as much is free as before the boot. False where it is not after `patience_s` seconds."""
        deadline = time.monotonic() + patience_s
        while self._baseline is not None:
            free = self._free_mib()
            if free is None or free >= self._baseline - _SETTLED_MIB:
                break
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def _free_mib(self) -> float | None:
        sample = self.sample()
        return None if sample is None else sample.free_mib


def check_gpus(gpus: Sequence[str], probe: GpuProbe | None = None) -> None:
    """Raise EnvironmentProblem where no GPU is seen, or one of `gpus` (empty: all) is held by somebody else.

    Raises UsageProblem for a GPU that is not there.
    """
    probe = probe if probe is not None else open_gpu()
    devices = probe.devices()
    if not devices:
        why = probe.reason if isinstance(probe, NullGpu) else "the driver lists no GPU"
        raise EnvironmentProblem(
            f"the launch asks for a GPU, and this machine shows none: {why}",
            hint="check the driver with nvidia-smi -L, or use --runner simulated",
        )
    for device in selected(devices, gpus):
        _refuse_if_held(device)


def selected(devices: Sequence[GpuDevice], gpus: Sequence[str]) -> list[GpuDevice]:
    """The devices that `gpus` (indices or UUIDs; empty: all) names. Raises UsageProblem."""
    if not gpus:
        return list(devices)
    found = []
    for wanted in gpus:
        match = [one for one in devices if wanted in (str(one.index), one.uuid)]
        if not match:
            there = ", ".join(f"{one.index}: {one.name}" for one in devices)
            raise UsageProblem(f"--gpu {wanted}: there is no such GPU", hint=f"GPUs here: {there}")
        found += match
    return found


def _refuse_if_held(device: GpuDevice) -> None:
    where = f"GPU {device.index} ({device.name})"
    if device.processes is None:
        if device.used_mib > HELD_UNLISTED_MIB:
            raise EnvironmentProblem(
                f"{where} has {device.used_mib:.0f} MiB in use by programs that cannot be listed here",
                hint="close what uses it (nvidia-smi shows it), then run the same command again",
            )
        return
    others = [(one, holder_of(one.pid)) for one in device.processes]
    strangers = [(one, holder) for one, holder in others if not holder.ours]
    known = sum(one.used_mib or 0.0 for one, _ in strangers)
    held = known if len(strangers) < len(others) else max(known, device.used_mib)
    if held <= HELD_MIB:
        return
    largest = max(strangers, key=lambda pair: pair[0].used_mib or 0.0, default=None)
    if largest is None:
        raise EnvironmentProblem(
            f"{where} has {device.used_mib:.0f} MiB in use by a program that this user cannot see",
            hint="run nvidia-smi as root to see it, stop it, then run the same command again",
        )
    process, holder = largest
    size = process.used_mib if process.used_mib is not None else device.used_mib
    raise EnvironmentProblem(
        f"{where} is held by {holder.text}, with {size:.0f} MiB of {held:.0f} MiB in use",
        hint=f"{holder.frees} frees it; then run the same command again",
    )


class Holder:
    """Who a process is, and the command that frees what it holds."""

    def __init__(self, text: str, frees: str, *, ours: bool = False) -> None:
        self.text, self.frees, self.ours = text, frees, ours


def holder_of(pid: int) -> Holder:
    """The container that a process belongs to, else the process itself."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        groups = Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        name, groups = "a process", ""
    if procs.STUDY_VARIABLE in procs.environment(pid):
        return Holder(f"{name} (pid {pid})", f"kill {pid}", ours=True)
    container = _CONTAINER_ID.search(groups)
    if container is None:
        return Holder(f"{name} (pid {pid})", f"kill {pid}")
    called, ours = _container(container[0])
    return Holder(f"container {called} ({name}, pid {pid})", f"docker stop {called}", ours=ours)


def _container(identity: str) -> tuple[str, bool]:
    """Name of a container (its short id where no daemon tells) and whether it is one of ours."""
    host = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    try:
        status, body = engine_api.call(
            host.removeprefix("unix://"), "GET", f"/containers/{identity}/json", timeout_s=5
        )
        answer = json.loads(body) if status == 200 else {}
    except (engine_api.DaemonGone, ValueError):
        answer = {}
    name = str(answer.get("Name") or identity[:12]).lstrip("/")
    return name, engine_api.STUDY_LABEL in (answer.get("Config") or {}).get("Labels", {})


def gpu_fingerprint(probe: GpuProbe | None = None) -> dict[str, str]:
    """GPUs (without their serial numbers), driver, and power limits, which bear on timings alone."""
    devices = (probe if probe is not None else open_gpu()).devices()
    if not devices:
        return {"memory.gpu": "none"}
    limits = [f"{one.power_limit_w:.0f} W" if one.power_limit_w is not None else "?" for one in devices]
    return {
        "memory.gpu": ", ".join(f"{one.name} {one.total_mib:.0f} MiB" for one in devices),
        "memory.driver": devices[0].driver,
        "time.power_limit": ", ".join(limits),
    }
