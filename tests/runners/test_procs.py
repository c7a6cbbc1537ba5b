"""Processes of ours: identity, labels in the environment, killing, and the reaper's own rules."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llm_bisect.runners import engine_api, procs
from llm_bisect.runners.reaper import Guarded, Reaper

SLEEP = [sys.executable, "-c", "import signal,time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"]


def marked(study: str, boot: str, owner: str = "1:1") -> subprocess.Popen[bytes]:
    """A process that carries our marks."""
    env = {
        **os.environ,
        procs.STUDY_VARIABLE: study,
        procs.BOOT_VARIABLE: boot,
        procs.OWNER_VARIABLE: owner,
    }
    return subprocess.Popen(SLEEP, env=env, start_new_session=True)


def test_identity_tells_a_reused_pid_apart() -> None:
    """The same number with another start time is another process."""
    own = procs.me()
    assert own.alive
    assert procs.owner_alive(str(own))
    assert not procs.ProcessId(own.pid, own.start_ticks + 1).alive
    assert not procs.owner_alive("") and not procs.owner_alive("x:y")


def test_a_zombie_is_not_alive() -> None:
    """A child that ended and was not waited for counts as gone."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    deadline = time.monotonic() + 20
    while procs.start_ticks(child.pid) is not None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert procs.ProcessId.of(child.pid) is None
    child.wait()


def test_only_the_marked_ones_are_killed() -> None:
    """Study, boot and owner must all be the asked ones."""
    study = f"s-{os.getpid()}"
    mine, other_boot, other_owner = marked(study, "a"), marked(study, "b"), marked(study, "a", "2:2")
    try:
        assert len(list(procs.find(study))) == 3
        procs.kill_all(study, "a", "1:1")
        assert mine.wait(timeout=10) == -signal.SIGKILL
        assert other_boot.poll() is None
        assert other_owner.poll() is None
    finally:
        for child in (mine, other_boot, other_owner):
            child.kill()
            child.wait()


def test_descendants_are_listed() -> None:
    """This process's children are among them, and itself."""
    child = subprocess.Popen(SLEEP)
    try:
        assert {os.getpid(), child.pid} <= set(procs.children(os.getpid()))
    finally:
        child.kill()
        child.wait()


def test_reaper_spares_what_was_released() -> None:
    """When the pipe closes, only what is still guarded is stopped."""
    study = f"r-{os.getpid()}"
    guarded, released = marked(study, "a"), marked(study, "b")
    reaper = Reaper()
    try:
        reaper.guard(Guarded("process", study, "a", "1:1"))
        reaper.guard(Guarded("process", study, "b", "1:1"))
        reaper.release("b")
        assert reaper._child is not None and reaper._child.stdin is not None
        reaper._child.stdin.close()
        assert guarded.wait(timeout=20) == -signal.SIGKILL
        assert reaper._child.wait(timeout=20) == 0
        assert released.poll() is None
    finally:
        for child in (guarded, released):
            child.kill()
            child.wait()


def test_reaper_told_that_all_is_stopped_stops_nothing() -> None:
    """A clean end is not a crash."""
    study = f"d-{os.getpid()}"
    kept = marked(study, "a")
    reaper = Reaper()
    try:
        reaper.guard(Guarded("process", study, "a", "1:1"))
        assert reaper.identity == str(procs.ProcessId.of(reaper.pid or 0))
        reaper.close()
        assert reaper.identity == ""
        assert kept.poll() is None
    finally:
        kept.kill()
        kept.wait()


def test_daemon_that_is_gone(tmp_path: Path) -> None:
    """The reaper's own calls say so rather than hang."""
    with pytest.raises(engine_api.DaemonGone):
        engine_api.remove_labelled(str(tmp_path / "none.sock"), "s", "b")
