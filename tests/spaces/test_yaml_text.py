"""Odd values on their way from a compose file through YAML and back: none is lost, none breaks a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from llm_bisect.model import EnvironmentProblem, Launch
from llm_bisect.spaces.apply import own_values, resolve_launch
from llm_bisect.spaces.argv import normalised
from llm_bisect.spaces.compose import compose_command, read_service, variable_value
from llm_bisect.spaces.identity import candidate_id
from llm_bisect.spaces.load import load_profile
from llm_bisect.spaces.node import Loader
from llm_bisect.spaces.yaml_text import as_json, one_line

DEEP = '{"a": ' * 3000 + "1" + "}" * 3000
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(VALUES)
def test_json_that_yaml_reads_back(value: object) -> None:
    """Property: one line, and the same value; emoji, odd line ends and control characters too."""
    text = as_json(value)
    assert text.isprintable() and yaml.load(text, Loader=Loader) == value  # noqa: S506 - a SafeLoader


@given(st.text(max_size=30))
def test_a_comment_stays_a_comment(text: str) -> None:
    """Property: whatever a value holds, the line after it is the next line."""
    assert len(one_line(text)) == len(text)
    assert yaml.safe_load(f"# {one_line(text)}\na: 1\n") == {"a": 1}


@pytest.fixture
def written(tmp_path: Path) -> str:
    """A compose file of one engine with a place for its words."""
    try:
        compose_command()
    except EnvironmentProblem as problem:
        pytest.skip(f"{problem.message} ({problem.hint})")
    return str(tmp_path / "c.yml")


def engine(path: str, *words: str) -> str:
    service = {"image": "vllm/vllm-openai", "command": list(words)}
    Path(path).write_text(as_json({"services": {"s": service}}), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "value",
    [
        '{"method": "x", "threshold": 1e-05}',
        '{"method": "😀", "n": 1}',
        '{"method": "\x7f\x85\u2028", "n": 1}',
        '{"threshold": NaN}',
        '{"a": "on", "b": null, "c": "1e5", "d": "~", "e": true, "f": "0x1F"}',
        '{"no json',
        "a\x7f\u2028b",
        "on",
        "0x1F",
        "# no comment",
        DEEP,
    ],
    ids=lambda value: ascii(value)[:20],
)
def test_the_users_own_odd_value_is_a_choice(written: str, value: str) -> None:
    """What the file has is what the made profile calls its own, and applying it changes nothing."""
    profile = load_profile(engine(written, "--speculative-config", value))
    own = own_values(profile, "docker")
    assert own["mtp"] is not None
    user = resolve_launch(profile, "docker", {})
    assert user.command == ("--speculative-config", value)
    assert resolve_launch(profile, "docker", own) == user
    back = resolve_launch(profile, "docker", {"mtp": "k1"})
    assert candidate_id(back) != candidate_id(user)


@pytest.mark.parametrize("length", ["9" * 400, "9" * 5000, "5\u2028axes: 1", "\u00b2"])
def test_a_length_that_is_none(written: str, length: str) -> None:
    """Digits without end, and text that would be another key of the profile, are no value of the axis."""
    profile = load_profile(engine(written, "--max-model-len", length, "--gpu-memory-utilization", length))
    assert own_values(profile, "docker") == {"mem-util": None, "max-model-len": None}


@pytest.mark.parametrize(
    ("port", "taken"), [("8123", 8123), ("9" * 5000, 8000), ("\u00b2", 8000), ("${P}", 8000)]
)
def test_a_port_that_is_none(written: str, port: str, taken: int) -> None:
    """The engine's default stands in; the engine itself will say what is wrong."""
    profile = load_profile(engine(written, "--port", port.replace("$", "$$")))
    assert resolve_launch(profile, "docker", {}).container_port == taken


def test_a_default_that_would_end_its_comment(written: str) -> None:
    """A variable's default over several lines of another script adds no key to the profile."""
    engine(written, "--x", "${OTHER:-a\u2028launch: b\x85c}", "--y", "${SMILE:-😀}")
    assert load_profile(written).launches["docker"]["service"] == "s"
    for name, word in (("OTHER", 1), ("SMILE", 3)):
        assert variable_value(written, name) == read_service(written, "s", {}).command[word]


def test_words_of_an_id_are_not_rounded() -> None:
    """Long digits are names, not numbers; JSON nested without end is text."""
    one, two = "1" * 40 + "1", "1" * 40 + "2"
    assert normalised(["--x", one]) != normalised(["--x", two])
    assert normalised(["--x", DEEP]) == [[], ["--x", DEEP]]
    assert len(candidate_id(Launch("docker", "vllm", ("--x", DEEP)))) == 16
