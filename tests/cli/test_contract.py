"""The contract of `ceiling --json`: one object, its keys, and the exit status of each way to end."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llm_bisect.journal.store import read_journal

ROOT = Path(__file__).resolve().parents[2]
COMMON = {
    *("schema", "command", "study", "profile", "runner", "simulated", "status", "why", "answer"),
    *("candidates", "warnings", "cost"),
}
ONLY_WHERE_THERE = {"lower_limit_outcome", "non_monotone", "unusable"}


def documented(heading: str) -> set[str]:
    """The keys in the first column of the table below that heading of docs/json.md."""
    text = (ROOT / "docs" / "json.md").read_text(encoding="utf-8").split(heading, 1)[1].split("\n## ", 1)[0]
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    assert rows
    return {key for row in rows for key in re.findall(r"`(\w+)`", row)}


def kinds(journal: Path) -> list[str]:
    return [e.kind for e in read_journal(journal)]


@pytest.fixture
def journal(bisect_env: dict[str, str]) -> Path:
    """Where the journal of study `s` is."""
    return Path(bisect_env["BISECT_JOURNALS"]) / "s.jsonl"


@pytest.fixture
def axis_question(sim_profile: Callable[..., Path]) -> list[str]:
    """A short study of an ordered axis, with a failing end."""
    probe = {"shape": "prefill", "target": "90k", "start": "90k", "max_prompt": "90k", "max_tokens": 4}
    probe["deadline"] = "2h"
    axes = {"mem-util": {"grid": {"values": [0.93, 0.985]}, "prefer": "high", "survival": "falls"}}
    profile = sim_profile("steep", probe=probe, axes=axes)
    return [
        *("ceiling", "--profile", str(profile), "--axis", "mem-util", "--runner", "simulated"),
        *("--confirm", "1", "--study", "s"),
    ]


def test_an_answer_is_one_object_with_all_keys(
    axis_question: list[str], bisect_cli: Callable[..., Any], journal: Path
) -> None:
    """Answered: exit 0 and one object with every key of docs/json.md; asked again it is printed at once."""
    ran = bisect_cli(*axis_question, "--json")
    assert ran.code == 0, ran.err
    assert ran.out.count("\n") == 1
    found = ran.json
    assert set(found) == COMMON == documented("# The JSON contract") - {"error"}
    assert found["schema"] == "llm-bisect/answer/1"
    assert (found["command"], found["study"], found["profile"]) == ("ceiling", "s", "steep")
    assert (found["runner"], found["simulated"], found["status"]) == ("simulated", True, "answered")
    assert any("simulated" in one for one in found["warnings"])
    answer = found["answer"]
    assert set(answer) | ONLY_WHERE_THERE == documented("## `answer` of `ceiling`") | ONLY_WHERE_THERE
    assert (answer["axis"], answer["target_prompt"]) == ("mem-util", 90_000)
    assert (answer["last_pass"], answer["first_fail"]) == (0.93, 0.985)
    assert answer["fail_outcome"] == "oom_probe"
    assert answer["bound_by"] == "memory"
    assert answer["recommended"] == 0.93
    assert answer["confirmed"]["passes"] == answer["confirmed"]["boots"] >= 1
    assert answer["prompt_ceiling"].keys() == {
        "at",
        "last_pass",
        "first_fail",
        "fail_outcome",
        "bound_by",
        "boots",
    }
    probes = [p for c in found["candidates"] for p in c["probes"]]
    assert found["cost"]["probes"] == len(probes) == kinds(journal).count("probe_finished")
    assert found["cost"]["boots"] == sum(c["boots"] for c in found["candidates"])
    assert found["cost"]["seconds"] > 0

    before = journal.read_bytes()
    again = bisect_cli(*axis_question, "--json")
    assert (again.code, again.out) == (0, ran.out)
    assert bisect_cli("resume", "s", "--json").out == ran.out
    assert bisect_cli("resume", str(journal), "--json").out == ran.out
    seen = bisect_cli("status", "s", "--json").json
    assert {k: v for k, v in seen.items() if k != "running_pid"} == found
    assert seen["running_pid"] is None
    plain = bisect_cli(*axis_question)
    assert plain.code == 0 and plain.out.startswith("SIMULATED")
    assert journal.read_bytes() == before, "looking at an answer boots nothing and writes nothing"


def test_a_spent_budget_prints_its_bracket(
    question: list[str], bisect_cli: Callable[..., Any], journal: Path
) -> None:
    """Out of boots: exit 3 with what is known; the same command goes on and ends like an unbroken study."""
    argv = [*question, "--confirm", "2", "--json"]
    ran = bisect_cli(*argv, "--max-boots", "1")
    assert ran.code == 3, ran.err
    assert (ran.json["status"], ran.json["cost"]["boots"]) == ("budget-spent", 1)
    assert "1 of 1 boots spent" in ran.json["why"]
    assert ran.json["answer"]["last_pass"] == 20_000
    assert (ran.json["answer"]["recommended"], ran.json["answer"]["unconfirmed"]) == (None, 20_000)
    resumed = bisect_cli("resume", "s", "--json")
    assert resumed.code == 0, resumed.err
    assert "study_resumed" in kinds(journal)
    journal.unlink()
    calm = bisect_cli(*argv)
    assert resumed.json["answer"] == calm.json["answer"]
    assert resumed.json["candidates"][0]["boots"] == calm.json["candidates"][0]["boots"]


@pytest.mark.parametrize(
    ("limit", "booted"),
    [(["--max-hours", "0.05"], 0), (["--max-hours", "0.3"], 1), (["--max-hours", "0"], 0)],
)
def test_hours_are_kept(
    limit: list[str], booted: int, question: list[str], bisect_cli: Callable[..., Any]
) -> None:
    """No probe starts that may end after the limit (a boot takes 4 minutes on this rig)."""
    ran = bisect_cli(*question, "--confirm", "9", "--json", *limit)
    assert (ran.code, ran.json["status"]) == (3, "budget-spent"), ran.err
    assert ran.json["cost"]["boots"] >= booted
    assert ran.json["cost"]["seconds"] <= float(limit[1]) * 3600
    assert (ran.json["cost"]["boots"] == 0) == (booted == 0)


def test_a_local_time_is_kept(question: list[str], bisect_cli: Callable[..., Any]) -> None:
    """--until: too soon for one boot it boots nothing; most of a day later it answers."""
    from datetime import datetime, timedelta

    now = datetime.now().astimezone()
    soon, later = now + timedelta(minutes=2), now + timedelta(hours=22)
    ran = bisect_cli(*question, "--json", "--until", f"{soon:%H:%M}")
    assert (ran.code, ran.json["status"], ran.json["cost"]["boots"]) == (3, "budget-spent", 0), ran.err
    ran = bisect_cli("resume", "s", "--json", "--until", f"{later:%H:%M}")
    assert (ran.code, ran.json["status"]) == (0, "answered"), ran.err


def test_no_feasible_point(
    sim_profile: Callable[..., Path], small_profile: dict[str, Any], bisect_cli: Callable[..., Any]
) -> None:
    """Where no value serves the target: exit 3, the reason, null for a recommendation, nothing to export."""
    from_small = ["--axis", "mem-util", "--runner", "simulated", "--study", "s"]
    launches = small_profile["launches"]
    command = [w.replace("180000", "262144") for w in launches["docker"]["command"]]
    launches = {**launches, "docker": {**launches["docker"], "command": command}}
    profile = sim_profile("tight", launches=launches)
    ran = bisect_cli("ceiling", "--profile", str(profile), *from_small, "--json")
    assert ran.code == 3, ran.err
    assert ran.json["status"] == "no-feasible-point"
    assert ran.json["why"]
    assert ran.json["answer"]["recommended"] is None
    assert ran.json["answer"]["last_pass"] is None
    assert bisect_cli("resume", "s").code == 3
    exported = bisect_cli("export", "s", "--to", "compose")
    assert exported.code in (2, 3) and exported.out == ""


@pytest.fixture
def other_card(tmp_path: Path) -> Callable[[], None]:
    """Puts a changed copy of the simulated card before the packaged one."""

    def change() -> None:
        folder = tmp_path / "runners" / "simulated"
        folder.mkdir(parents=True)
        source = ROOT / "runners" / "simulated" / "rtx3090.yml"
        shutil.copy(source, folder)
        text = source.read_text(encoding="utf-8")
        assert "context_mib: 172" in text
        (folder / source.name).write_text(text.replace("context_mib: 172", "context_mib: 180"))

    return change


def test_a_changed_machine_needs_a_word(
    axis_question: list[str], bisect_cli: Callable[..., Any], journal: Path, other_card: Callable[[], None]
) -> None:
    """A study of another machine is refused with the difference; --reverify asks both ends again."""
    first = bisect_cli(*axis_question, "--json")
    assert first.code == 0, first.err
    before = journal.read_bytes()
    other_card()
    for argv in (axis_question, ["resume", "s"]):
        ran = bisect_cli(*argv, "--json")
        assert ran.code == 2, ran.err
        assert "'s'" in ran.err and "model was" in ran.err and "--reverify" in ran.err
        assert ran.json["status"] == "usage"
    assert journal.read_bytes() == before
    ran = bisect_cli(*axis_question, "--json", "--reverify")
    assert ran.code == 0, ran.err
    events = read_journal(journal)
    at = next(i for i, e in enumerate(events) if e.kind == "reverify")
    asked = {
        (e.body["values"]["mem-util"], e.body["prompt_tokens"])
        for e in events[at:]
        if e.kind == "probe_asked"
    }
    assert {(0.93, 90_000), (0.985, 90_000)} <= asked
    assert ran.json["answer"]["last_pass"] == 0.93
    assert ran.json["answer"]["first_fail"] == 0.985
    assert bisect_cli(*axis_question).code == 0, "the new machine is the study's own now"


def test_a_dry_run_writes_nothing(
    question: list[str], bisect_cli: Callable[..., Any], tmp_path: Path
) -> None:
    """--dry-run prints clock times and what would be written, and leaves every folder as it was."""

    def look() -> dict[str, bytes | None]:
        return {str(p): p.read_bytes() if p.is_file() else None for p in tmp_path.rglob("*")}

    env = {"LLM_BISECT_CACHE": str(tmp_path / "cache"), "HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    before = look()
    ran = bisect_cli(*question, "--dry-run", "--max-hours", "5", "--max-boots", "7", env=env)
    assert ran.code == 0, ran.err
    assert re.search(r"done \w{3} \d\d:\d\d, 9 of 10 by \w{3} \d\d:\d\d", ran.out)
    assert str(tmp_path / "journals" / "s.jsonl") in ran.out
    assert "5 h 00 min, 7 boots" in ran.out
    assert "SIMULATED" in ran.out
    plan = bisect_cli(*question, "--dry-run", "--json", env=env)
    assert plan.out.count("\n") == 1
    found = json.loads(plan.out)
    assert (found["schema"], found["first"]["prompt_tokens"]) == ("llm-bisect/plan/1", 8_000)
    assert found["ends"]["expected"] <= found["ends"]["p90"]
    assert look() == before


def test_a_dry_run_of_a_begun_study(
    question: list[str], bisect_cli: Callable[..., Any], journal: Path
) -> None:
    """It plans what is left, and says so where nothing is."""
    argv = [*question, "--confirm", "2"]
    assert bisect_cli(*argv, "--max-boots", "1").code == 3
    before = journal.read_bytes()
    ran = bisect_cli(*argv, "--dry-run")
    assert "s (continues)" in ran.out
    assert journal.read_bytes() == before
    assert bisect_cli(*argv).code == 0
    assert "nothing: the study is answered" in bisect_cli(*argv, "--dry-run").out


def test_exports_and_explanations_of_an_answer(question: list[str], bisect_cli: Callable[..., Any]) -> None:
    """What is exported says where it comes from; `explain` names every probe."""
    assert bisect_cli(*question).code == 0
    exported = bisect_cli("export", "s", "--to", "json")
    assert exported.code == 0, exported.err
    assert json.loads(exported.out)
    assert "imulated" in bisect_cli("export", "s", "--to", "markdown").out
    told = bisect_cli("explain", "s").out
    assert all(probe in told for probe in ("p0001", "p0002", "p0003"))


def test_the_doctor_of_the_simulated_rig(question: list[str], bisect_cli: Callable[..., Any]) -> None:
    """`doctor` exits 0 for what can run and 4 for what cannot, in words and as one object."""
    profile = question[2]
    ran = bisect_cli("doctor", "--profile", profile, "--runner", "simulated", "--json")
    assert ran.code == 0, ran.out
    assert (ran.json["schema"], ran.json["status"]) == ("llm-bisect/doctor/1", "answered")
    ran = bisect_cli("doctor", "--profile", profile, "--runner", "docker")
    assert ran.code == 4
    assert re.search(r"^MISSING +launch", ran.out, re.MULTILINE)
