"""`export`: which point is written, as Markdown, JSON, environment lines, and compose from a real profile."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from llm_bisect.model import EnvironmentProblem, UsageProblem
from llm_bisect.reports.export import FORMATS, export
from llm_bisect.spaces.apply import resolve_launch
from llm_bisect.spaces.compose import compose_command
from llm_bisect.spaces.load import load_profile
from llm_bisect.spaces.profile import Profile

Run = Callable[..., Any]

COMPOSE = """\
services:
  engine:
    image: vllm/vllm-openai:nightly
    environment:
      HF_TOKEN: ${HF_TOKEN:-}
    volumes: ["${MODELS:-/srv/models}:/models:ro"]
    command:
      - --model
      - /models/q
      - --gpu-memory-utilization
      - "${GPU_MEMORY_UTILIZATION:-0.95}"
      - --max-num-batched-tokens
      - "4128"
      - --speculative-config
      - '{"method":"mtp","num_speculative_tokens":3}'
"""
PROFILE = """\
profile: long-text
engine: vllm
launches:
  docker: {compose: compose.yml}
  simulated: {card: rtx3090, model: qwen}
probe: {target: 60k}
margin_mib: 400
axes:
  mem-util: {grid: {low: 0.85, high: 0.98, step: 0.005}}
  ubatch: {grid: {values: [2048, 4128]}}
  mtp:
    apply: {json_flag: --speculative-config}
    choices:
      off: null
      k3: {method: mtp, num_speculative_tokens: 3}
      k1: {method: mtp, num_speculative_tokens: 1}
toggles:
  pr35975: {apply: {mount: patch.py, target: /patches/patch.py}}
"""


@pytest.fixture(name="profile")
def _profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Profile:
    try:
        compose_command()
    except EnvironmentProblem as problem:
        pytest.skip(problem.message)
    monkeypatch.delenv("GPU_MEMORY_UTILIZATION", raising=False)
    (tmp_path / "compose.yml").write_text(COMPOSE)
    (tmp_path / "patch.py").write_text("pass\n")
    (tmp_path / "long-text.yml").write_text(PROFILE)
    return load_profile(str(tmp_path / "long-text.yml"))


def config(*files: Path) -> dict[str, Any]:
    argv = [*compose_command(), *(a for f in files for a in ("-f", str(f))), "config", "--format", "json"]
    env = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME")}
    done = subprocess.run(argv, capture_output=True, text=True, check=True, env=env)
    found: dict[str, Any] = json.loads(done.stdout.replace("$$", "$"))["services"]["engine"]
    return found


def test_the_override_of_a_profile_reproduces_the_candidate(
    run_study: Run, mem_util_plan: Run, card: Run, profile: Profile, tmp_path: Path
) -> None:
    """Variable, flag, JSON flag and toggle at once: base and override resolve to the candidate's launch."""
    fixed = {"ubatch": 2048, "mtp": "k1", "pr35975": "on"}
    plan = mem_util_plan(fixed=fixed)
    text = export(run_study(plan, card()), profile, "compose", measured_on="2026-05-02")
    over = tmp_path / "over.yml"
    over.write_text(text)
    wanted = resolve_launch(profile, "docker", {**fixed, "mem-util": 0.93})
    found = config(tmp_path / "compose.yml", over)
    assert tuple(found["command"]) == wanted.command
    assert "0.93" in found["command"] and "2048" in found["command"]
    assert {(m["source"], m["target"]) for m in found["volumes"]} == {
        (m.source, m.target) for m in wanted.mounts
    }
    for part in ("long-text-ceiling", "3 of 3 boots", "single prompts only", "p0002", "2026-05-02", "0.1.0"):
        assert part in text
    assert str(tmp_path) not in text and "${MODELS" not in text


def test_the_users_own_value_is_pinned_too(
    run_study: Run, mem_util_plan: Run, card: Run, profile: Profile, tmp_path: Path
) -> None:
    """It may come from an `.env` that nobody else has: the override says it all the same."""
    (tmp_path / ".env").write_text("GPU_MEMORY_UTILIZATION=0.93\n")
    text = export(run_study(mem_util_plan(), card()), profile, "compose")
    (tmp_path / "over.yml").write_text(text)
    (tmp_path / ".env").unlink()
    assert "0.93" in config(tmp_path / "compose.yml", tmp_path / "over.yml")["command"]


def test_taking_a_json_flag_out(
    run_study: Run, mem_util_plan: Run, card: Run, profile: Profile, tmp_path: Path
) -> None:
    """The choice `off` is no flag at all."""
    text = export(run_study(mem_util_plan(fixed={"mtp": "off"}), card()), profile, "compose")
    (tmp_path / "over.yml").write_text(text)
    assert "--speculative-config" not in config(tmp_path / "compose.yml", tmp_path / "over.yml")["command"]


def test_env_lines(run_study: Run, mem_util_plan: Run, card: Run, profile: Profile, tmp_path: Path) -> None:
    """A line for the variable, a comment for each knob without one; Compose reads the file."""
    plan = mem_util_plan(fixed={"ubatch": 2048, "mtp": "k1"})
    text = export(run_study(plan, card()), profile, "env")
    assert "GPU_MEMORY_UTILIZATION=0.93" in text.splitlines()
    assert any(
        line.startswith("# ubatch 2048") and "--max-num-batched-tokens" in line for line in text.splitlines()
    )
    assert any(line.startswith("# mtp k1") and "num_speculative_tokens" in line for line in text.splitlines())
    (tmp_path / ".env").write_text(text)
    assert "0.93" in config(tmp_path / "compose.yml")["command"]


def test_a_simulated_point_is_marked_everywhere(
    run_study: Run, mem_util_plan: Run, card: Run, profile: Profile
) -> None:
    """No format lets a simulated result pass for a measured one."""
    state = run_study(mem_util_plan(), card(), simulated=True, runner="simulated")
    for to in FORMATS:
        assert "simulated" in export(state, profile, to).lower(), to
    rows = [line for line in export(state, None, "markdown").splitlines() if line.startswith("|")]
    assert all("simulated" in row for row in rows if "mem-util" in row)


def test_markdown(run_study: Run, mem_util_plan: Run, card: Run) -> None:
    """The row, every probe, the limits; a pipe of a log line does not split its cell."""
    state = run_study(mem_util_plan(), card())
    text = export(state, None, "markdown")
    rows = text.splitlines()
    assert rows[2].startswith(
        "| long-text | mem-util 0.93 | ✅ 3/3 boots | 73,200 passes (1 boot), 75,000 fails"
    )
    assert "402 (thin)" in rows[2] and "passes here" in rows[2] and "recommended" not in text
    for trial in state.trials:
        assert any(row.startswith(f"| {trial.probe} | {trial.boot} |") for row in rows)
    widths = {row.replace("\\|", "").count("|") for row in rows[4:] if row.startswith("|")}
    assert len(widths) == 1
    assert "\\| tried 50 MiB" in text
    assert "recommended" in export(run_study(mem_util_plan(), card(2_000)), None, "markdown")


def test_markdown_of_hostile_text(run_study: Run, mem_util_plan: Run, card: Run) -> None:
    """HTML, links, secrets and home paths of a log line come out as harmless text."""
    state = run_study(mem_util_plan(), card())
    hostile = "<img src=x> [a](http://10.1.2.3/) hf_abcdefghijklmnopqrst /home/alice/x | `code`"
    bad = {"evidence": {"lines": [hostile]}}
    trials = tuple(dataclasses.replace(t, body=bad) if t.outcome != "pass" else t for t in state.trials)
    text = export(dataclasses.replace(state, trials=trials), None, "markdown")
    assert "alice" not in text and "hf_abc" not in text and "10.1.2.3" not in text
    assert "\\<img" in text and "\\[a\\]" in text and "\\`code\\`" in text


def test_json(run_study: Run, mem_util_plan: Run, card: Run) -> None:
    """The answer object with the point, its proof and its limits."""
    obj = json.loads(export(run_study(mem_util_plan(), card()), None, "json"))
    assert obj["schema"] == "llm-bisect/answer/1"
    part = obj["export"]
    assert part["values"] == {"mem-util": 0.93} and part["confirmed"] is True
    assert part["proof"] == ["p0002", "p0008", "p0009"]
    assert any("single prompts" in limit for limit in part["limits"])


def test_an_unconfirmed_point_is_refused_or_marked(
    run_study: Run, mem_util_plan: Run, card: Run, profile: Profile
) -> None:
    """Without the flag the error names it; with it every format says UNCONFIRMED."""
    state = run_study(mem_util_plan(), card(), stop_after=5)
    with pytest.raises(UsageProblem, match="budget-spent") as raised:
        export(state, None, "json")
    assert "--include-unconfirmed" in (raised.value.hint or "")
    for to in FORMATS:
        assert "UNCONFIRMED" in export(state, profile, to, include_unconfirmed=True), to


def test_no_point_no_export(run_study: Run, mem_util_plan: Run, card: Run) -> None:
    """Nothing feasible, nothing asked yet, no such format, no profile: one sentence each."""
    state = run_study(mem_util_plan(), card(admitted_from=0.99))
    with pytest.raises(UsageProblem, match="no-feasible-point"):
        export(state, None, "json", include_unconfirmed=True)
    good = run_study(mem_util_plan(), card())
    with pytest.raises(UsageProblem, match="no export format"):
        export(good, None, "csv")
    with pytest.raises(UsageProblem, match="needs the study's profile"):
        export(good, None, "compose")
    with pytest.raises(UsageProblem, match="no question yet"):
        export(dataclasses.replace(good, opened={}), None, "json")


def test_prompt_and_choices(run_study: Run, mem_util_plan: Run, card: Run, profile: Profile) -> None:
    """A prompt study exports the launch that it tested, a choices study the choice."""
    prompt = run_study(mem_util_plan(axis="prompt", kind="prompt", own=None, points=()), card())
    assert "nothing differs" in export(prompt, profile, "compose")
    assert json.loads(export(prompt, None, "json"))["export"]["prompt_tokens"] == 60_000

    def truth(values: Mapping[str, Any], n: int) -> Any:
        return card()({}, n)

    plan = mem_util_plan(axis="mtp", kind="choices", own="k3", points=("off", "k1", "k3"))
    state = run_study(plan, truth)
    assert "| mtp " in export(state, None, "markdown")
    assert "73,200 passes" in export(state, None, "markdown")
    assert "# mtp " in export(state, profile, "env")


def test_a_process_has_no_compose_file(run_study: Run, mem_util_plan: Run, card: Run, tmp_path: Path) -> None:
    """It is said, with the formats that do work."""
    path = tmp_path / "p.yml"
    path.write_text(
        "profile: p\nengine: llamacpp\nlaunch: {runner: process, command: [llama-server, --port, '{port}']}\n"
    )
    profile = load_profile(str(path))
    plan = mem_util_plan(axis="prompt", kind="prompt", own=None, points=())
    state = run_study(plan, card(), runner="process")
    with pytest.raises(UsageProblem, match="starts a process") as raised:
        export(state, profile, "compose")
    assert "--to env or --to json" in (raised.value.hint or "")
    assert export(state, profile, "env").startswith("# ")
