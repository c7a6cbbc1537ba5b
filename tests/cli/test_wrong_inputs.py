"""What a user will get wrong: one clear sentence, the right exit status, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from llm_bisect.cli.app import app
from llm_bisect.cli.errors import run
from llm_bisect.journal.store import read_journal

USAGE, ENVIRONMENT = 2, 4
KEYS = {
    *("schema", "command", "study", "profile", "runner", "simulated", "status", "why", "answer"),
    *("candidates", "warnings", "cost", "error"),
}

PROFILE = """\
profile: mine
engine: vllm
launches:
  docker:
    image: vllm/vllm-openai:v0.0.1-not-here
    command: [--model, /m, --gpu-memory-utilization, "0.93"]
  simulated: {card: rtx3090, model: qwen3.6-27b-autoround-int4}
probe: {shape: prefill, target: 16k}
axes:
  mem-util: {grid: {low: 0.9, high: 0.95, step: 0.01}}
"""
COMPOSE = """\
services:
  vllm:
    image: vllm/vllm-openai:v0.0.1-not-here
    command: [--model, "${MODEL_NAME:?say which model}", --gpu-memory-utilization, "0.93"]
"""


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every file with its bytes and every folder below this one."""
    return {str(p): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


@dataclass(frozen=True)
class Called:
    """What a call within this process printed and returned."""

    code: int
    out: str
    err: str


@pytest.fixture
def bisect_here(
    bisect_env: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., Called]:
    """Calls the command line within this process: starting Python takes most of a refusal's time."""
    for name, value in bisect_env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)

    def call(*argv: str) -> Called:
        capsys.readouterr()
        code = run(app, list(argv))
        return Called(code, *capsys.readouterr())

    return call


@pytest.fixture
def refused(
    bisect_cli: Callable[..., Any], leftovers: Callable[[], list[str]], tmp_path: Path
) -> Callable[..., str]:
    """Calls `bisect` plainly and with --json; checks the form of its refusal; returns what it said."""

    def call(
        argv: list[str],
        code: int,
        *says: str,
        has_json: bool = True,
        by: Callable[..., Any] = bisect_cli,
        **options: Any,
    ) -> str:
        before, left = tree(tmp_path), leftovers()
        ran = by(*argv, **options)
        said: str = ran.err
        assert ran.code == code, said
        assert ran.out == ""
        lines = said.splitlines()
        assert lines[0].startswith("bisect: ")
        assert len(lines) <= 2, "one sentence and one hint"
        assert "Traceback" not in said and "Error(" not in said and "fault in bisect" not in said
        for text in says:
            assert text in said
        if has_json:
            again = by(*argv, "--json", **options)
            assert (again.code, again.err) == (code, said)
            assert again.out.count("\n") == 1
            found = json.loads(again.out)
            assert set(found) == KEYS
            assert found["command"] == argv[0]
            assert found["status"] == {USAGE: "usage", ENVIRONMENT: "environment"}[code]
            assert found["answer"] == {} and found["cost"]["boots"] == 0
            assert lines[0] == f"bisect: {found['error']['message']}"
        assert tree(tmp_path) == before
        assert leftovers() == left
        return said

    return call


def asked(profile: Path | str, *more: str, axis: str = "mem-util", runner: str = "simulated") -> list[str]:
    return ["ceiling", "--profile", str(profile), "--axis", axis, "--runner", runner, *more]


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("engine: vllm", "engine: vlm", ("mine.yml", "line 2", "engine", "'vlm'", "'vllm'")),
        ("low: 0.9,", "low: 0.99,", ("mine.yml", "axes.mem-util.grid", "0.99", "0.95")),
        ("  mem-util:", "\tmem-util:", ("mine.yml", "line 10", "tab")),
        ("mem-util:", "mem-utli:", ("mine.yml", "mem-utli", "mem-util")),
        ("probe:", "prob:", ("mine.yml", "prob", "probe")),
        ("target: 16k", "target: sixteen", ("mine.yml", "probe.target", "sixteen")),
        ("card: rtx3090", "card: rtx3091", ("rtx3091", "rtx3090")),
        ("step: 0.01", "step: 0", ("mine.yml", "step")),
        ("profile: mine", "profile: [mine", ("mine.yml", "line")),
        ("profile: mine", "profile: mine\nprofile: mine", ("mine.yml", "profile", "twice")),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)
def test_a_mistake_in_a_profile(
    before: str,
    after: str,
    says: tuple[str, ...],
    tmp_path: Path,
    refused: Callable[..., str],
    bisect_here: Callable[..., Called],
) -> None:
    """A profile with a mistake is refused with the file, the place, and what would be right."""
    assert before in PROFILE
    path = tmp_path / "mine.yml"
    path.write_text(PROFILE.replace(before, after, 1), encoding="utf-8")
    refused(asked(path), USAGE, *says, by=bisect_here)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--prompt", "abc"], ("abc", "number of tokens", "60k")),
        (["--prompt", "0"], ("'0'", "number of tokens")),
        (["--confirm", "0"], ("--confirm", "1")),
        (["--confirm", "three"], ("--confirm", "three")),
        (["--until", "25:00"], ("--until", "25:00", "07:00")),
        (["--until", "7"], ("--until", "'7'")),
        (["--max-hours", "-1"], ("--max-hours",)),
        (["--max-hours", "nan"], ("--max-hours", "nan")),
        (["--max-boots", "0"], ("--max-boots",)),
        (["--reserve-mib", "nan"], ("--reserve-mib", "nan")),
        (["--reserve-mib", "inf"], ("--reserve-mib", "inf")),
        (["--tolerance", "150%"], ("--tolerance", "150%")),
        (["--tolerance", "tight"], ("tight", "--tolerance")),
        (["--set", "mem-util"], ("--set", "'mem-util'", "AXIS=VALUE")),
        (["--set", "mem-utl=0.9"], ("mem-utl", "did you mean 'mem-util'")),
        (["--set", "mem-util=high"], ("mem-util", "high")),
        (["--study", "one/two"], ("one/two", "slash")),
        (["--study", ".."], ("..",)),
        (["--study", ""], ("study",)),
        (["--axis", "mem-utl"], ("mem-utl", "did you mean 'mem-util'", "prompt")),
        (["--runner", "podman"], ("podman", "docker, process, simulated")),
        (["--runner", "process"], ("process", "mine", "docker, simulated")),
        (["--gpu", "7"], ("--gpu", "simulated")),
        (["--frob"], ("--frob", "bisect ceiling --help")),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_a_mistake_in_an_argument(
    more: list[str],
    says: tuple[str, ...],
    tmp_path: Path,
    refused: Callable[..., str],
    bisect_here: Callable[..., Called],
) -> None:
    """An argument with a mistake is refused by its name, with what would be right."""
    path = tmp_path / "mine.yml"
    path.write_text(PROFILE, encoding="utf-8")
    refused(asked(path, *more), USAGE, *says, by=bisect_here)


@pytest.mark.parametrize(
    ("profile", "says"),
    [
        ("long-txt", ("long-txt", "did you mean 'long-text'", "tiny-llama")),
        ("./gone.yml", ("./gone.yml", "no such file")),
        ("https://example.org/p.yml", ("https://example.org/p.yml", "downloads nothing")),
        (".", ("'.'",)),
        ("", ("profile",)),
    ],
)
def test_a_profile_that_is_not_there(
    profile: str, says: tuple[str, ...], refused: Callable[..., str], bisect_here: Callable[..., Called]
) -> None:
    """A profile that nobody knows is refused with the nearest name."""
    refused(asked(profile), USAGE, *says, by=bisect_here)


@pytest.mark.parametrize(
    "content", [b"", b"just words\n", b"- a\n- list\n", b"\xff\xfe\x00", b"a: &a [*a]\n"]
)
def test_a_file_that_is_no_profile(
    content: bytes, tmp_path: Path, refused: Callable[..., str], bisect_here: Callable[..., Called]
) -> None:
    """A file that holds something else is refused by its name."""
    path = tmp_path / "other.yml"
    path.write_bytes(content)
    refused(asked(path), USAGE, "other.yml", by=bisect_here)


def test_no_command_or_an_unknown_one(refused: Callable[..., str], bisect_cli: Callable[..., Any]) -> None:
    """An unknown command is refused; without any, the help is shown."""
    refused(["ceilling"], USAGE, "ceilling", "bisect --help")
    ran = bisect_cli()
    assert ran.code == USAGE
    assert "ceiling" in ran.out + ran.err


def test_a_compose_file_with_an_unset_required_variable(tmp_path: Path, refused: Callable[..., str]) -> None:
    """Compose's own complaint is told: the file, the variable and the text that the file gives."""
    compose = tmp_path / "compose.yml"
    compose.write_text(COMPOSE, encoding="utf-8")
    env = {"MODEL_NAME": ""}
    refused(asked(compose, runner="docker"), USAGE, "compose.yml", "MODEL_NAME", "say which model", env=env)
    path = tmp_path / "mine.yml"
    data = yaml.safe_load(PROFILE)
    data["launches"]["docker"] = {"compose": "compose.yml"}
    path.write_text(yaml.safe_dump(data), encoding="utf-8")
    refused(asked(path, runner="docker"), USAGE, "compose.yml", "MODEL_NAME", "say which model", env=env)


def test_docker_that_is_not_running(tmp_path: Path, refused: Callable[..., str]) -> None:
    """A dead socket is named, with what to do; nothing is simulated instead."""
    path = tmp_path / "mine.yml"
    path.write_text(PROFILE, encoding="utf-8")
    env = {"DOCKER_HOST": f"unix://{tmp_path}/docker.sock"}
    said = refused(asked(path, runner="docker"), ENVIRONMENT, "Docker", f"{tmp_path}/docker.sock", env=env)
    assert "simulated" not in said
    refused([a for a in asked(path) if a not in ("--runner", "simulated")], ENVIRONMENT, "Docker", env=env)


@pytest.mark.docker
def test_an_image_that_is_missing(docker_host: Any, tmp_path: Path, refused: Callable[..., str]) -> None:
    """A missing image is named before anything is created, with the command that gets it."""
    path = tmp_path / "mine.yml"
    path.write_text(PROFILE, encoding="utf-8")
    env = {"DOCKER_HOST": docker_host.host}
    refused(
        *(asked(path, runner="docker"), ENVIRONMENT, "vllm/vllm-openai:v0.0.1-not-here", "--allow-pull"),
        env=env,
    )
    assert docker_host.ours() == []


def process_profile(path: Path, **launch: Any) -> Path:
    """A profile of a plain process."""
    data = {
        "profile": "proc",
        "engine": "llamacpp",
        "launch": {"runner": "process", **launch},
        "probe": {"shape": "prefill", "target": "1k", "start": "500", "max_tokens": 1, "deadline": "30s"},
        "boot": {"deadline": "20s"},
    }
    path.write_text(yaml.safe_dump(data), encoding="utf-8")
    return path


def test_a_program_that_is_missing(tmp_path: Path, refused: Callable[..., str]) -> None:
    """A process launch whose program is not installed is refused before a journal is made."""
    path = process_profile(tmp_path / "p.yml", command=["no-such-server", "--port", "{port}"])
    refused(asked(path, axis="prompt", runner="process"), ENVIRONMENT, "no-such-server")


@pytest.mark.llama
def test_a_port_that_is_taken(llama_server: Path, tmp_path: Path, bisect_cli: Callable[..., Any]) -> None:
    """A port in the user's own command that is in use does not matter: the engine gets a free one."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = str(held.getsockname()[1])
        words = [str(llama_server), "--host", "127.0.0.1", "--port", port, "-m", "{model}", "-c", "1024"]
        path = process_profile(tmp_path / "p.yml", command=words, model="builtin:tiny-llama")
        ran = bisect_cli(*asked(path, "--confirm", "1", axis="prompt", runner="process"), "--json")
    assert ran.code == 0, ran.err
    assert ran.json["answer"]["last_pass"] == 959  # what 1,024 tokens of context leave room for


def test_a_gpu_that_is_not_there(tmp_path: Path, refused: Callable[..., str]) -> None:
    """A launch that asks for a GPU, on a machine without that one, says which and exits 4."""
    path = process_profile(tmp_path / "p.yml", command=["/bin/sleep", "{port}"], gpus=True)
    refused(asked(path, "--gpu", "77", axis="prompt", runner="process"), ENVIRONMENT, "GPU")


def test_a_journals_folder_below_a_file(
    tmp_path: Path, question: list[str], refused: Callable[..., str]
) -> None:
    """A folder that cannot be, because a file stands in its place."""
    (tmp_path / "notes").write_text("mine", encoding="utf-8")
    refused(
        [*question, "--journals", str(tmp_path / "notes/j")], ENVIRONMENT, f"{tmp_path}/notes", "--journals"
    )


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts a small disk of its own; skips where that is not allowed."""
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        folder = tmp_path / "disk"
        if folder not in mounted:
            folder.mkdir()
        if os.geteuid() != 0 or shutil.which("mount") is None:
            pytest.skip("mounting a small disk needs root")
        remount = [] if folder not in mounted else ["remount,"]
        words = ["mount", "-t", "tmpfs", "-o", "".join([*remount, options]), "tmpfs", str(folder)]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"this machine lets nobody mount a small disk: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in set(mounted):
        subprocess.run(["umount", str(folder)], check=True)


def test_a_journals_folder_that_is_read_only(
    small_disk: Callable[..., Path],
    question: list[str],
    refused: Callable[..., str],
    bisect_cli: Callable[..., Any],
) -> None:
    """A disk that is mounted read-only is named."""
    folder = small_disk("size=64k,ro")
    said = refused([*question, "--journals", str(folder)], ENVIRONMENT, str(folder), "--journals")
    assert "read-only" in said or "cannot be written" in said
    refused([*question, "--journals", str(folder / "new")], ENVIRONMENT, str(folder), "--journals")
    ran = bisect_cli("doctor", env={"BISECT_JOURNALS": str(folder)})
    assert ran.code == ENVIRONMENT
    assert re.search(rf"^MISSING +journals +{folder} cannot be written", ran.out, re.MULTILINE)


def fill(folder: Path) -> Path:
    """Write a file until the disk is full; its path."""
    path = folder / "filling"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    with contextlib.suppress(OSError):
        while os.write(fd, b"x" * 65536):
            pass
    os.close(fd)
    return path


def test_a_disk_that_is_full(
    small_disk: Callable[..., Path], question: list[str], refused: Callable[..., str]
) -> None:
    """A full disk is named before the first boot, and no empty journal stays."""
    folder = small_disk("size=64k")
    fill(folder)
    refused([*question, "--journals", str(folder)], ENVIRONMENT, str(folder), "space")


def test_a_disk_that_fills_up_in_the_night(
    small_disk: Callable[..., Path],
    question: list[str],
    start: Callable[..., Any],
    bisect_cli: Callable[..., Any],
    engines_of: Callable[[Path], list[int]],
) -> None:
    """The study ends with 4 and a whole journal; with room again the same command ends it."""
    folder = small_disk("size=20m")
    argv = [*question, "--confirm", "2", "--json"]
    running = start(argv, env={"LLM_BISECT_SIM_SCALE": "60", "BISECT_JOURNALS": str(folder)})
    running.wait_for("probe_started")
    filling = fill(folder)
    code, out, err = running.finish()
    assert code == ENVIRONMENT, err
    assert "Traceback" not in err and str(folder) in err
    assert "space" in json.loads(out)["error"]["message"].lower()
    assert engines_of(folder) == []
    assert not any(
        e.body["outcome"] != "pass" for e in read_journal(folder / "s.jsonl") if "outcome" in e.body
    )
    filling.unlink()
    ran = bisect_cli(*argv, "--journals", str(folder))
    assert ran.code == 0, ran.err
    assert ran.json["answer"]["recommended"] == 20_000


def test_no_boot_on_a_full_disk(
    small_disk: Callable[..., Path], question: list[str], bisect_cli: Callable[..., Any]
) -> None:
    """A study goes on only where its logs have room: too little is no verdict about the engine."""
    folder = small_disk("size=20m")
    argv = [*question, "--confirm", "2", "--json", "--journals", str(folder)]
    assert bisect_cli(*argv, "--max-boots", "1").code == 3
    before = (folder / "s.jsonl").read_bytes()
    (folder / "filling").write_bytes(bytes(8 << 20))
    ran = bisect_cli(*argv)
    assert ran.code == ENVIRONMENT
    assert "MiB of space left" in ran.err
    assert (folder / "s.jsonl").read_bytes() == before


def test_a_study_that_runs_already(
    start: Callable[..., Any],
    question: list[str],
    refused: Callable[..., str],
    bisect_cli: Callable[..., Any],
) -> None:
    """A second writer is refused with the first one's process and how to end it; the first goes on."""
    first = start(question, env={"LLM_BISECT_SIM_SCALE": "20"})
    first.wait_for("boot_started")
    for argv in (question, ["resume", "s"]):
        ran = bisect_cli(*argv, "--json")
        assert ran.code == ENVIRONMENT
        assert f"process {first.child.pid}" in ran.err and "bisect stop s" in ran.err
        assert ran.json["status"] == "environment"
    assert f"running (pid {first.child.pid})" in bisect_cli("status").out
    assert bisect_cli("status", "s", "--json").json["running_pid"] == first.child.pid
    assert first.child.poll() is None


def test_a_journal_that_is_broken_in_the_middle(
    question: list[str],
    bisect_cli: Callable[..., Any],
    bisect_here: Callable[..., Called],
    bisect_env: dict[str, str],
    refused: Callable[..., str],
) -> None:
    """A journal with a changed line is refused by every command, with the line; it is not touched."""
    assert bisect_cli(*question).code == 0
    journal = Path(bisect_env["BISECT_JOURNALS"]) / "s.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    lines[3] = (
        lines[3].replace(b"8000", b"9000") if b"8000" in lines[3] else lines[3].replace(b"b001", b"b009")
    )
    journal.write_bytes(b"".join(lines))
    refused(question, USAGE, "s.jsonl", "line 4", "--study")
    refused(["resume", "s"], USAGE, "s.jsonl", "line 4", by=bisect_here)
    refused(["status", "s"], USAGE, "s.jsonl", "line 4", by=bisect_here)
    refused(["explain", "s"], USAGE, "s.jsonl", "line 4", has_json=False, by=bisect_here)
    refused(["export", "s", "--to", "json"], USAGE, "s.jsonl", "line 4", has_json=False, by=bisect_here)
    assert "unreadable" in bisect_cli("status").out


def test_a_study_that_there_is_not(
    question: list[str],
    bisect_cli: Callable[..., Any],
    bisect_here: Callable[..., Called],
    refused: Callable[..., str],
) -> None:
    """Every command that looks at a study refuses a name that it does not find, with the nearest one."""
    refused(["status", "s"], USAGE, "'s'", by=bisect_here)
    assert bisect_cli(*question, "--study", "night").code == 0
    refused(["status", "nigth"], USAGE, "nigth", "did you mean night", by=bisect_here)
    refused(["resume", "nigth"], USAGE, "did you mean night", by=bisect_here)
    refused(["stop", "nigth"], USAGE, "did you mean night", has_json=False, by=bisect_here)
    refused(["explain", "nigth"], USAGE, "did you mean night", has_json=False, by=bisect_here)
    refused(["export", "nigth", "--to", "json"], USAGE, "did you mean night", has_json=False, by=bisect_here)
    refused(
        ["export", "night", "--to", "yaml"], USAGE, "yaml", "compose, env, markdown, json", has_json=False
    )


def test_status_where_nothing_was_ever_asked(bisect_cli: Callable[..., Any], tmp_path: Path) -> None:
    """No studies is an answer, and looking makes no folder."""
    before = tree(tmp_path)
    ran = bisect_cli("status")
    assert (ran.code, ran.err) == (0, "")
    assert "no studies" in ran.out
    assert bisect_cli("status", "--json").json["studies"] == []
    assert tree(tmp_path) == before


def test_an_export_before_the_answer(
    question: list[str], bisect_cli: Callable[..., Any], refused: Callable[..., str], tmp_path: Path
) -> None:
    """A study that recommends nothing yet exports nothing, and says how to get it all the same."""
    assert bisect_cli(*question, "--set", "mem-util=0.94", "--confirm", "3", "--max-boots", "1").code == 3
    for form in ("compose", "env", "markdown"):
        argv = ["export", "s", "--to", form, "--output", str(tmp_path / "out")]
        refused(argv, USAGE, "--include-unconfirmed", has_json=False)


def test_another_question_under_the_same_name(
    question: list[str], bisect_cli: Callable[..., Any], refused: Callable[..., str]
) -> None:
    """A study is never continued with another question: the difference is shown."""
    assert bisect_cli(*question).code == 0
    refused([*question, "--prompt", "12k"], USAGE, "'s'", "16000", "12000", "--study")
    refused([*question, "--axis", "mem-util"], USAGE, "prompt", "mem-util", "--study")
    refused([*question, "--prompt", "12k", "--dry-run"], USAGE, "16000", "12000")


def test_a_profile_that_was_edited_between_two_runs(
    question: list[str], bisect_cli: Callable[..., Any], refused: Callable[..., str], tmp_path: Path
) -> None:
    """An edited profile is another question, also to `resume`."""
    assert bisect_cli(*question, "--confirm", "2", "--max-boots", "1").code == 3
    path = tmp_path / "small.yml"
    path.write_text(path.read_text().replace("enable-chunked-prefill", "enable-prefix-caching"))
    refused([*question, "--confirm", "2"], USAGE, "'s'", "small.yml", "edited")
    refused(["resume", "s"], USAGE, "'s'", "small.yml", "edited")


def test_a_profile_that_is_gone_at_resume(
    question: list[str], bisect_cli: Callable[..., Any], refused: Callable[..., str], tmp_path: Path
) -> None:
    """`resume` needs the profile's file, and names it."""
    assert bisect_cli(*question, "--confirm", "2", "--max-boots", "1").code == 3
    (tmp_path / "small.yml").unlink()
    refused(["resume", "s"], USAGE, "small.yml")


def test_init_without_a_compose_file(refused: Callable[..., str], bisect_cli: Callable[..., Any]) -> None:
    """`init` says that there is none, or that the one named is not there."""
    refused(["init"], USAGE, "no compose file", has_json=False)
    refused(["init", "gone/compose.yml"], USAGE, "gone/compose.yml", has_json=False)


def test_an_output_that_cannot_be_written(
    question: list[str], bisect_cli: Callable[..., Any], refused: Callable[..., str], tmp_path: Path
) -> None:
    """`export --output` into nowhere names the path and exits 4."""
    assert bisect_cli(*question).code == 0
    argv = ["export", "s", "--to", "json", "--output", str(tmp_path / "nowhere" / "o.json")]
    refused(argv, ENVIRONMENT, "nowhere/o.json", has_json=False)
