"""Ways to stop a study: signals, a closed terminal, `bisect stop`, and `kill -9`."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llm_bisect.journal.store import holder_pid, read_journal

SLOW = {"LLM_BISECT_SIM_SCALE": "20"}  # a boot takes 12 s then, a probe about one


def kinds(journal: Path) -> list[str]:
    return [e.kind for e in read_journal(journal)]


@pytest.fixture
def journals(bisect_env: dict[str, str]) -> Path:
    """The test's folder of journals."""
    return Path(bisect_env["BISECT_JOURNALS"])


@pytest.fixture
def gone(engines_of: Callable[[Path], list[int]], journals: Path) -> Callable[[], bool]:
    """True as soon as no engine of the studies lives, within ten seconds."""

    def look() -> bool:
        for _ in range(200):
            if not engines_of(journals):
                return True
            time.sleep(0.05)
        return False

    return look


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_stops_cleanly(
    number: signal.Signals,
    question: list[str],
    start: Callable[..., Any],
    bisect_cli: Callable[..., Any],
    gone: Callable[[], bool],
    tmp_path: Path,
) -> None:
    """130, one object, no engine; the same command goes on and gives the answer of an unbroken study."""
    running = start([*question, "--json"], env=SLOW)
    running.wait_for("boot_started")
    running.child.send_signal(number)
    code, out, err = running.finish(timeout_s=30)
    assert code == 130, err
    assert "stopping" in err and "Traceback" not in err
    found = json.loads(out)
    assert (found["status"], found["why"]) == ("interrupted", "stopped on request")
    assert gone()
    assert kinds(running.journal)[-1] == "study_paused"
    assert "interrupted" in bisect_cli("status").out
    ran = bisect_cli(*question, "--json")
    assert ran.code == 0, ran.err
    running.journal.unlink()
    assert ran.json["answer"] == bisect_cli(*question, "--json").json["answer"]


def test_the_second_signal_ends_at_once(
    question: list[str],
    start: Callable[..., Any],
    bisect_cli: Callable[..., Any],
    engines_of: Callable[[Path], list[int]],
    journals: Path,
    gone: Callable[[], bool],
) -> None:
    """An engine that does not end holds the first stop up; the second does not wait for it."""
    running = start(question, env=SLOW)
    running.wait_for("boot_started")
    ends_s = time.monotonic() + 30
    while not (engines := engines_of(journals)) and time.monotonic() < ends_s:
        time.sleep(0.02)
    assert len(engines) == 1
    os.kill(engines[0], signal.SIGSTOP)
    try:
        running.child.send_signal(signal.SIGINT)
        lines: list[str] = []
        while not (lines and lines[-1].startswith("stopping")):
            lines.append(running.child.stderr.readline())
            assert lines[-1], "".join(lines)
        running.child.send_signal(signal.SIGINT)
        code, _out, err = running.finish(timeout_s=10)
    finally:
        os.kill(engines[0], signal.SIGCONT)
    assert (code, err) == (130, "")
    assert kinds(running.journal)[-1] != "study_paused", "it did not wait for the engine"
    assert gone()
    ran = bisect_cli(*question, "--json")
    assert ran.code == 0, ran.err
    assert ran.json["answer"]["recommended"] == 20_000


def on_terminal(slave: int) -> Callable[[], None]:
    """In the child: that terminal is its controlling one, as in a window of the user's."""

    def take() -> None:
        os.setsid()
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

    return take


def test_a_closed_terminal_does_not_end_a_study(
    question: list[str], start: Callable[..., Any], gone: Callable[[], bool]
) -> None:
    """SIGHUP and a terminal that is gone: the study goes on to its answer."""
    master, slave = pty.openpty()
    running = start(
        question,
        env={"LLM_BISECT_SIM_SCALE": "200", "TERM": "xterm", "CI": ""},
        stdin=slave,
        stdout=slave,
        stderr=slave,
        preexec_fn=on_terminal(slave),
    )
    os.close(slave)
    running.wait_for("boot_started")
    assert b"\x1b[" in os.read(master, 65536)
    os.close(master)
    running.finish()
    assert kinds(running.journal)[-1] == "study_closed"
    assert gone()


def test_stop_from_another_process(
    question: list[str], start: Callable[..., Any], bisect_cli: Callable[..., Any], gone: Callable[[], bool]
) -> None:
    """`bisect stop` returns when the study has ended; a second one finds nothing to do."""
    running = start([*question, "--json"], env=SLOW)
    running.wait_for("boot_started")
    stopped = bisect_cli("stop", "s", timeout_s=40)
    assert stopped.code == 0, stopped.err
    assert "bisect resume s" in stopped.err
    assert holder_pid(running.journal) is None
    code, out, _err = running.finish()
    assert (code, json.loads(out)["status"]) == (130, "interrupted")
    assert gone()
    before = running.journal.read_bytes()
    again = bisect_cli("stop", "s")
    assert again.code == 0 and "not running" in again.err
    assert running.journal.read_bytes() == before


def test_stop_of_a_study_that_was_killed(
    question: list[str], start: Callable[..., Any], bisect_cli: Callable[..., Any], gone: Callable[[], bool]
) -> None:
    """After `kill -9` nothing lives on; `stop` says so, `status` names the crash, `resume` answers."""
    running = start(question, env={"LLM_BISECT_SIM_SCALE": "60"})
    running.wait_for("probe_started")
    running.child.kill()
    running.finish()
    stopped = bisect_cli("stop", "s")
    assert stopped.code == 0 and "not running" in stopped.err
    assert gone()
    assert "resume continues it" in bisect_cli("status").out
    ran = bisect_cli("resume", "s", "--json")
    assert ran.code == 0, ran.err
    assert ran.json["answer"]["recommended"] == 20_000
    assert kinds(running.journal).count("probe_lost") == 1


def read_terminal(master: int) -> str:
    """All that is written until the other side is closed."""
    chunks = []
    while True:
        try:
            chunk = os.read(master, 65536)
        except OSError:
            break
        if not chunk:
            break
        chunks.append(chunk)
    return b"".join(chunks).decode("utf-8", "replace")


def test_the_live_view_on_a_terminal(question: list[str], start: Callable[..., Any]) -> None:
    """It draws, shows the bracket, and leaves the cursor and the answer behind."""
    master, slave = pty.openpty()
    env = {
        "LLM_BISECT_SIM_SCALE": "400",
        "TERM": "xterm-256color",
        "CI": "",
        "NO_COLOR": "",
        "COLUMNS": "150",
    }
    running = start(question, env=env, stdout=slave, stderr=slave)
    os.close(slave)
    shown = read_terminal(master)
    os.close(master)
    assert running.finish()[0] == 0
    assert "Traceback" not in shown
    assert "prompt: 20,000 passes, no failure yet" in shown
    assert "spent; about" in shown
    assert "recommended 20,000 tokens" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l"), "the cursor is shown again"
    after = shown[shown.rindex("\x1b[?25h") :].split("SIMULATED: a model", 1)
    assert len(after) == 2, "the answer comes below the view, not into it"


def test_the_second_signal_on_a_terminal(
    question: list[str], start: Callable[..., Any], gone: Callable[[], bool]
) -> None:
    """Ending at once gives the cursor back, which the live view hides."""
    master, slave = pty.openpty()
    env = {**SLOW, "TERM": "xterm-256color", "CI": "", "NO_COLOR": ""}
    running = start(question, env=env, stdout=slave, stderr=slave)
    os.close(slave)
    running.wait_for("boot_started")
    running.child.send_signal(signal.SIGTERM)
    running.child.send_signal(signal.SIGINT)
    shown = read_terminal(master)
    os.close(master)
    assert running.finish()[0] == 130
    assert "stopping: the engine is being stopped" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
    assert gone()


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_pipe_gets_plain_lines(
    more: list[str], question: list[str], bisect_cli: Callable[..., Any]
) -> None:
    """No codes for a terminal, whatever the environment wishes for; one line per event, each marked."""
    env = {"FORCE_COLOR": "1", "CLICOLOR_FORCE": "1", "NO_COLOR": "", "TERM": "xterm-256color"}
    ran = bisect_cli(*question, *more, env=env)
    assert ran.code == 0, ran.err
    assert "\x1b" not in ran.out + ran.err and "\r" not in ran.out + ran.err
    assert all(line.startswith("[simulated] ") for line in ran.err.splitlines())
    assert sum("asks" in line for line in ran.err.splitlines()) == 3
    refused = bisect_cli(*question, "--prompt", "abc", *more, env=env)
    helped = bisect_cli("--help", env=env)
    assert "\x1b" not in refused.out + refused.err + helped.out + helped.err


def test_a_reader_that_leaves(question: list[str], start: Callable[..., Any]) -> None:
    """`bisect … | head -0`: no traceback, and the study is whole all the same."""
    reader, writer = os.pipe()
    os.close(reader)
    running = start(question, stdout=writer)
    os.close(writer)
    _code, _out, err = running.finish()
    assert "Traceback" not in err and "Exception ignored" not in err
    assert kinds(running.journal)[-1] == "study_closed"
