"""`kill -9` of bisect: at random moments, and just before and after every kind of event.

Each study that was killed ends with the same answer as one that was left alone; no event is lost, at most
the probe in flight is asked again, and no container is left. BISECT_SOAK=1 runs the full counts.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llm_bisect.journal import events as kinds
from llm_bisect.journal.state import fold
from llm_bisect.journal.store import Event, read_journal

SOAK = bool(os.environ.get("BISECT_SOAK"))
RANDOM_KILLS = 30
HELPER = Path(__file__).with_name("kill_helper.py")
WAIT_S = 30.0

# lengths well apart from each other, so that no probe sits on the edge where boots differ
COARSE = ("--tolerance", "1500", "--confirm", "2")


def same(answer: dict[str, Any]) -> dict[str, Any]:
    """What must be the same after a kill: all but the free memory, which a real machine moves."""
    return {k: v for k, v in answer.items() if k not in ("min_free_mib", "margin_mib", "margin_tier")}


def argv_of(profile: Path, runner: str, study: str) -> list[str]:
    axis = ["--axis", "prompt", "--runner", runner, "--study", study]
    return ["ceiling", "--profile", str(profile), *axis, *COARSE, "--json"]


def wait_until_gone(docker_host: Any) -> None:
    """The reaper removes what a killed bisect left, within seconds."""
    deadline_s = time.monotonic() + WAIT_S
    while docker_host.ours():
        assert time.monotonic() < deadline_s, "a killed bisect left a container"
        time.sleep(0.1)


def starts_with(after: list[Event], before: list[Event]) -> bool:
    return after[: len(before)] == before


@pytest.mark.docker
@pytest.mark.llama
@pytest.mark.slow
def test_killed_at_random_moments(
    tiny_image: str,
    docker_host: Any,
    tiny_profile: Callable[..., Path],
    bisect_cli: Callable[..., Any],
    bisect_env: dict[str, str],
    tmp_path: Path,
) -> None:
    """Thirty kills spread over studies of a real llama-server in containers; each study is killed until it
    has had its share and is then left to end."""
    profile = tiny_profile("kills", {"-ub": "2048"}, memory_limit="256m", target="2000")
    calm = bisect_cli(*argv_of(profile, "docker", "calm"))
    assert calm.code == 0, calm.err
    env = {**bisect_env, "DOCKER_HOST": docker_host.host}
    draw = random.Random(20_260_501)
    kills = studies = 0
    while kills < RANDOM_KILLS:
        studies += 1
        study = f"killed-{studies}"
        journal = tmp_path / "journals" / f"{study}.jsonl"
        for _ in range(RANDOM_KILLS):
            before = read_journal(journal) if journal.exists() else []
            child = subprocess.Popen(
                [sys.executable, "-m", "llm_bisect", *argv_of(profile, "docker", study)],
                env=env,
                cwd=tmp_path,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            try:
                child.wait(timeout=draw.uniform(0.4, 4.0))
                ended = True
            except subprocess.TimeoutExpired:
                child.send_signal(signal.SIGKILL)
                child.wait()
                ended = False
                kills += 1
            after = read_journal(journal) if journal.exists() else []
            assert starts_with(after, before), "an event was lost"
            if ended:
                break
        wait_until_gone(docker_host)
        ran = bisect_cli(*argv_of(profile, "docker", study))
        assert ran.code == 0, ran.err
        assert same(ran.json["answer"]) == same(calm.json["answer"])
        state = fold(read_journal(journal))
        asked_twice = state.probes_asked - len(state.trials)
        assert asked_twice == state.probes_lost <= kills
    wait_until_gone(docker_host)


KILLABLE = sorted(
    kinds.KINDS - {kinds.CONTRADICTION_SEEN, kinds.VERDICT_AMENDED, kinds.REVERIFY, kinds.STUDY_PAUSED}
)


@pytest.fixture(scope="module")
def calm_answer() -> dict[str, Any]:
    """The answer of the study that nobody kills, by its first use."""
    return {}


@pytest.mark.llama
@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", KILLABLE)
def test_killed_around_every_kind_of_event(
    kind: str,
    when: str,
    llama_server: Path,
    tiny_profile: Callable[..., Path],
    bisect_cli: Callable[..., Any],
    bisect_env: dict[str, str],
    tmp_path: Path,
    calm_answer: dict[str, Any],
) -> None:
    """Killed just before or just after an event is written, the same command ends with the answer of a study
    that was left alone. (A context of 4,096 tokens ends the line: the ceiling is exact.)"""
    profile = tiny_profile("kinds", {"-c": "4096", "-ub": "512"}, memory_limit="1g", target="1000")
    text = profile.read_text(encoding="utf-8").replace("    memory_limit: 1g\n", "")
    profile.write_text(text, encoding="utf-8")
    if not calm_answer:
        calm = bisect_cli(*argv_of(profile, "process", "calm"))
        assert calm.code == 0, calm.err
        calm_answer.update(same(calm.json["answer"]))
    study = "killed"
    if kind in (kinds.STUDY_RESUMED, kinds.PROBE_LOST):
        _killed(profile, study, "after", kinds.PROBE_STARTED, 2, bisect_env, tmp_path)
    n = 2 if kind in (kinds.PROBE_ASKED, kinds.PROBE_STARTED, kinds.PROBE_FINISHED) else 1
    assert _killed(profile, study, when, kind, n, bisect_env, tmp_path) == -signal.SIGKILL
    journal = tmp_path / "journals" / f"{study}.jsonl"
    before = read_journal(journal)
    ran = bisect_cli(*argv_of(profile, "process", study))
    assert ran.code == 0, ran.err
    assert same(ran.json["answer"]) == calm_answer
    after = read_journal(journal)
    assert starts_with(after, before)
    state = fold(after)
    assert state.probes_asked - len(state.trials) == state.probes_lost <= 2


def _killed(profile: Path, study: str, when: str, kind: str, n: int, env: dict[str, str], cwd: Path) -> int:
    argv = [sys.executable, str(HELPER), when, kind, str(n), *argv_of(profile, "process", study)]
    done = subprocess.run(argv, env=env, cwd=cwd, capture_output=True, text=True, timeout=120)
    return done.returncode
