"""`bisect doctor`: whether this machine can run it, and what to do about each thing that is missing."""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from llm_bisect.cli.errors import Exit
from llm_bisect.journal.locate import check_writable, journals_dir
from llm_bisect.model import BisectError, Launch

LOW_DISK_GIB = 5.0


@dataclass(frozen=True)
class Check:
    """One thing looked at. `state`: ok, note (worth knowing), or missing (what is asked cannot run)."""

    name: str
    state: str
    text: str
    fix: str | None = None


def run_doctor(profile: str | None, runner: str | None, gpus: tuple[str, ...], json_output: bool) -> int:
    """Look, change nothing. Exit status 4 where something that is asked for is missing."""
    checks = list(_machine()) if profile is None else [*_machine(needed=()), *_profile(profile, runner, gpus)]
    missing = any(c.state == "missing" for c in checks)
    if json_output:
        status = "environment" if missing else "answered"
        answer = {"schema": "llm-bisect/doctor/1", "command": "doctor", "status": status}
        print(json.dumps({**answer, "checks": [asdict(c) for c in checks]}, ensure_ascii=False))
    else:
        width = max(len(c.name) for c in checks)
        for check in checks:
            mark = {"ok": "ok     ", "note": "note   ", "missing": "MISSING"}[check.state]
            print(f"{mark}  {check.name:<{width}}  {check.text}")
            if check.fix and check.state != "ok":
                print(f"{'':9}{'':<{width}}  → {check.fix}")
    return Exit.ENVIRONMENT if missing else Exit.ANSWERED


def _machine(needed: tuple[str, ...] = ()) -> Iterator[Check]:
    yield Check("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.release()}")
    yield _guarded("compose", _compose, "compose" in needed)
    yield _guarded("docker", _docker, "docker" in needed)
    yield from _gpus()
    yield _guarded("llama-server", _llama_server, False)
    yield _guarded("journals", _journals, True)
    free_gib = shutil.disk_usage(Path.cwd()).free / 2**30
    state = "ok" if free_gib >= LOW_DISK_GIB else "note"
    yield Check("disk", state, f"{free_gib:.0f} GiB free here", "logs and images need room")


def _guarded(name: str, look: Callable[[], str], needed: bool) -> Check:
    """A check that may fail: missing where it is needed, else worth knowing."""
    try:
        return Check(name, "ok", look())
    except BisectError as problem:
        return Check(name, "missing" if needed else "note", problem.message, problem.hint)


def _compose() -> str:
    from llm_bisect.spaces.compose import compose_command

    return " ".join(compose_command())


def _docker() -> str:
    from llm_bisect.runners.docker_client import connect

    client = connect()
    try:
        return f"engine {client.version()['Version']}"
    finally:
        client.close()


def _llama_server() -> str:
    from llm_bisect.runners.executables import find_llama_server

    return str(find_llama_server())


def _journals() -> str:
    folder = journals_dir(None, os.environ, Path.cwd())
    check_writable(folder)
    return f"{folder}{'' if folder.exists() else ' (made by the first study)'}"


def _gpus() -> Iterator[Check]:
    from llm_bisect.runners.telemetry import NullGpu, open_gpu

    gpu = open_gpu()
    if isinstance(gpu, NullGpu):
        yield Check("gpu", "note", f"none seen: {gpu.reason}", "needed only where a launch asks for one")
        return
    for device in gpu.devices():
        memory = f"{device.free_mib:,.0f} of {device.total_mib:,.0f} MiB free"
        yield Check(f"gpu {device.index}", "ok", f"{device.name}, {memory}, driver {device.driver}")
        for process in device.processes or ():
            used = f"{process.used_mib:,.0f} MiB" if process.used_mib is not None else "memory"
            yield Check(
                f"gpu {device.index}",
                "note",
                f"{used} held by {process.name} (pid {process.pid})",
                "free it before a study; bisect never stops what it did not start",
            )


def _profile(name: str, runner: str | None, gpus: tuple[str, ...]) -> Iterator[Check]:
    from llm_bisect.opening import default_runner
    from llm_bisect.runners.make import make_runner
    from llm_bisect.spaces.apply import own_values, resolve_launch
    from llm_bisect.spaces.load import load_profile

    profile = load_profile(name, runner=runner)
    chosen = runner or default_runner(profile)
    yield Check("profile", "ok", f"{profile.name}: {profile.engine.title}, runner {chosen}")
    if profile.historical:
        yield Check("profile", "note", profile.historical)
    launch = resolve_launch(profile, chosen, {})
    values = ", ".join(f"{k} {v}" for k, v in own_values(profile, chosen).items() if v is not None)
    yield Check("own values", "ok", values or "none of the axes is set")
    if chosen != "simulated":
        yield from _mounts(launch)

    def ready() -> str:
        made = make_runner(chosen)
        try:
            made.preflight(launch, gpus=gpus)
        finally:
            made.close()
        return "everything that this launch needs is here"

    yield _guarded("launch", ready, True)


def _mounts(launch: Launch) -> Iterator[Check]:
    for mount in launch.mounts:
        if mount.kind == "bind" and not Path(mount.source).exists():
            text = f"{mount.source} (for {mount.target}) does not exist"
            yield Check("mount", "missing", text, "create or fetch it")
