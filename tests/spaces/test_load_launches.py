"""Launches of a profile: what is accepted, where paths lie, and the sentence for each mistake."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llm_bisect.model import UsageProblem
from llm_bisect.spaces.load import load_profile

Load = Callable[[str], Any]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Launches (YAML text) of a profile that is otherwise whole."""

    def make(text: str) -> Any:
        path = tmp_path / "p.yml"
        path.write_text(f"profile: p\nengine: llamacpp\n{text}\n", encoding="utf-8")
        return load_profile(str(path)).launches

    return make


def test_an_image(load: Load, tmp_path: Path) -> None:
    """Every key of a launch from an image, with its unit; paths lie beside the profile."""
    found = load(
        "launch: {image: x/y, command: [-c, 8192, -fa, on], entrypoint: /e.sh 'a b'"
        ", environment: {A: 1, B: x}, volumes: [./m:/m:ro], gpus: all, memory_limit: 1.5g"
        ", model: m.gguf, ipc: host, shm_size: 1g"
        ", port: 81}"
    )["docker"]
    assert found["command"] == ["-c", "8192", "-fa", "on"] and found["entrypoint"] == ["/e.sh", "a b"]
    assert found["environment"] == {"A": "1", "B": "x"} and found["memory_limit"] == 1536
    assert (found["shm_size"], found["port"], found["model"]) == (1024, 81, str(tmp_path / "m.gguf"))


def test_a_process(load: Load, tmp_path: Path) -> None:
    """A command, an environment as a list, a model that is built in or a path."""
    found = load(
        "launch: {runner: process, command: 'llama-server -m \"{model}\"', env: [A=1, B=x=y], model: ~/m}"
    )
    assert found["process"]["command"] == ["llama-server", "-m", "{model}"]
    assert found["process"]["env"] == {"A": "1", "B": "x=y"}
    assert found["process"]["model"] == str(Path.home() / "m")
    assert (
        load("launch: {runner: process, command: [x], model: 'builtin:tiny'}")["process"]["model"]
        == "builtin:tiny"
    )


def test_a_compose_file_lies_beside_the_profile(load: Load, tmp_path: Path) -> None:
    """Wherever bisect is called from."""
    assert load("launch: {compose: sub/c.yml}")["docker"]["compose"] == str(tmp_path / "sub" / "c.yml")
    assert load("launch: {compose: /abs/c.yml, service: s}")["docker"] == {
        "compose": "/abs/c.yml",
        "service": "s",
        "share_mounts": False,
    }


@pytest.mark.parametrize(
    "text",
    ["launch: {compose: c.yml, share_mounts: true}", "launch: {compose: c.yml}\nshare_mounts: true"],
)
def test_share_mounts(load: Load, text: str) -> None:
    """It may stand in the launch or in the profile."""
    assert load(text)["docker"]["share_mounts"] is True


def test_several_runners(load: Load) -> None:
    """One launch for each runner; `simulated` names a card and a model."""
    found = load(
        "launches: {docker: {image: x}, process: {command: [y]}, simulated: {card: rtx3090, model: m}}"
    )
    assert list(found) == ["docker", "process", "simulated"]
    assert found["simulated"] == {"card": "rtx3090", "model": "m"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "launch: a profile needs either launch or launches"),
        ("launches: {}", "launches: there is no launch"),
        ("launch: {}", "launch: a docker launch needs compose or image"),
        ("launch: [x]", "p.yml, line 3: launch: a mapping is expected, not \\['x'\\]"),
        ("launches: {podman: {image: x}}", "launches.podman: unknown key"),
        (
            "launches: {docker: {runner: process, image: x}}",
            "launches.docker.runner: 'process' is not accepted",
        ),
        ("launches: {simulated: {card: c, model: m}}", "simulated needs the docker launch"),
        ("launch: {image: x, command: [true]}", "launch.command\\[0\\]: True is no word"),
        ("launch: {image: x, command: {a: b}}", "launch.command: a list of words is expected"),
        ('launch: {image: x, command: "a \'b"}', "launch.command: .* No closing quotation"),
        ("launch: {image: x, environment: {A: true}}", "launch.environment: A: True is no text"),
        ("launch: {image: x, environment: [A]}", "launch.environment: 'A' has no value"),
        ("launch: {image: x, port: 0}", "launch.port: 0 is not a port"),
        ("launch: {image: x, memory_limit: lots}", "launch.memory_limit: 'lots' is not an amount of memory"),
        ("launch: {image: x, memory_limit: [1]}", "launch.memory_limit: \\[1\\] is no amount"),
        ("launch: {compose: c.yml, image: x}", "launch.image: unknown key"),
        ("launch: {runner: process}", "launch.command: a process needs a command"),
        ("launch: {image: x, share_mounts: 1}", "launch.share_mounts: 1 is not true or false"),
    ],
)
def test_each_mistake_has_its_sentence(load: Load, text: str, says: str) -> None:
    """The file, the key, what was wrong, and a hint."""
    with pytest.raises(UsageProblem, match=says) as told:
        load(text)
    assert "p.yml" in told.value.message and told.value.hint
