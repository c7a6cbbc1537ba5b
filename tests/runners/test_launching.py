"""Placeholders, port flags, models and keys of a launch; ports and programs."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from llm_bisect.model import EnvironmentProblem, Launch, UsageProblem
from llm_bisect.runners import executables, launching, ports
from llm_bisect.runners.docker_start import project_name, with_model


def test_placeholders_are_filled_and_other_braces_stay() -> None:
    """JSON flags keep their braces."""
    words = ("-m", "{model}", "--port={port}", '{"method":"mtp"}')
    assert launching.fill(words, port=7, model="/m") == ("-m", "/m", "--port=7", '{"method":"mtp"}')


def test_model_placeholder_without_a_model() -> None:
    """A command that asks for a model that the launch does not name is a usage problem."""
    with pytest.raises(UsageProblem, match="model"):
        launching.fill(("{model}",), port=1, model=None)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (("serve", "--port", "8000", "-x"), ("serve", "--port", "9", "-x")),
        (("serve", "--port=8000"), ("serve", "--port=9")),
        (("serve",), ("serve", "--port", "9")),
    ],
)
def test_port_flag_is_replaced_or_added(command: tuple[str, ...], expected: tuple[str, ...]) -> None:
    """Whichever way the command writes its port, it becomes ours."""
    assert launching.with_port(command, ("--port",), 9, where="here") == expected


@pytest.mark.parametrize("command", [(), ("bash", "-c", "vllm serve"), ("/bin/sh", "run.sh")])
def test_port_flag_has_no_place_in_a_script(command: tuple[str, ...]) -> None:
    """A shell script takes no engine flag: exit 2, saying where."""
    with pytest.raises(UsageProblem, match="here"):
        launching.with_port(command, ("--port",), 9, where="here")


@pytest.mark.parametrize(
    ("command", "env", "key"),
    [
        (("--api-key", "a,b"), {}, "a"),
        (("--api-key=c",), {"VLLM_API_KEY": "d"}, "c"),
        ((), {"VLLM_API_KEY": "d"}, "d"),
        ((), {}, None),
    ],
)
def test_api_key(command: tuple[str, ...], env: dict[str, str], key: str | None) -> None:
    """The key is found in the command or the environment."""
    assert launching.api_key(command, env) == key


def test_missing_model_is_an_environment_problem(tmp_path: Path) -> None:
    """The path is named."""
    with pytest.raises(EnvironmentProblem, match=r"gone\.gguf"):
        launching.model_file(Launch("process", "llamacpp", (), model_path=str(tmp_path / "gone.gguf")))


def test_docker_launch_mounts_its_model(tmp_path: Path) -> None:
    """A model that the command asks for is mounted read-only, a file or a folder."""
    weights = tmp_path / "x.gguf"
    weights.write_bytes(b"GGUF")
    found = with_model(Launch("docker", "llamacpp", ("-m", "{model}"), image="i", model_path=str(weights)))
    assert found.command == ("-m", "/models/model.gguf")
    assert [(one.source, one.target, one.read_only) for one in found.mounts] == [
        (str(weights), "/models/model.gguf", True)
    ]
    found = with_model(Launch("docker", "vllm", ("{model}",), image="i", model_path=str(tmp_path)))
    assert found.command == ("/models/model",)
    found = with_model(Launch("docker", "vllm", ("/own",), image="i", model_path=str(tmp_path)))
    assert found.mounts == ()


def test_project_names_are_what_compose_takes() -> None:
    """Lower case letters, digits and hyphens, of bounded length, the boot always in it."""
    name = project_name("Long Text/ceiling_mem-util " * 9, "B0012")
    assert name.startswith("bisect-long-text-ceiling-mem-util")
    assert name.endswith("-b0012")
    assert len(name) <= 60
    assert project_name("ß", "!") == "bisect-study-boot"


def test_free_ports_are_free_and_differ() -> None:
    """A port in use is not given, and none is given twice."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert not ports.is_free(taken.getsockname()[1])
    given = [ports.free_port() for _ in range(50)]
    assert len(set(given)) == 50
    assert all(ports.is_free(port) for port in given)


def test_programs_are_found_or_said_to_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On PATH, by path, or with the command that installs it."""
    program = tmp_path / "llama-server"
    program.write_text("#!/bin/true\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert executables.resolve("llama-server") == program
    assert executables.resolve(str(program)) == program
    program.unlink()
    monkeypatch.setattr(executables, "packaged_llama_server", lambda: None)
    with pytest.raises(EnvironmentProblem) as caught:
        executables.resolve("llama-server")
    assert "pip install" in str(caught.value.hint)
    with pytest.raises(EnvironmentProblem, match="may not be executed"):
        executables.resolve(str(program))
