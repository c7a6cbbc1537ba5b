"""Engine descriptions: the shipped ones, and what is said of a broken one."""

from __future__ import annotations

from pathlib import Path

import pytest

from llm_bisect.model import Bound, Outcome, Trend, UsageProblem
from llm_bisect.spaces.engine_files import engine_names, load_engine, read_engine

SMALL = """
name: own
title: Own engine
dialect: vllm
port: 9000
endpoints: {health: /health}
axes:
  mem-util: {flags: [--mem], unit: fraction, trends: {memory: falls}}
  fa: {flags: [-fa], choices: {on: on, off: off, none: null}}
signatures:
  - {id: a, pattern: 'boom (?P<n>\\d+)', outcome: oom_boot, facts: {n: 1}}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "own.yml"
    path.write_text(text, encoding="utf-8")
    return path


def test_signature_files_are_no_engines() -> None:
    """The names are those of engines alone."""
    assert {"vllm", "llamacpp", "sglang"} <= set(engine_names())
    assert not {"docker", "torch"} & set(engine_names())


@pytest.mark.parametrize("name", ["vllm", "llamacpp", "sglang"])
def test_every_shipped_engine_can_be_started_and_watched(name: str) -> None:
    """Endpoints, offline switches, axes, and signatures for what the search must tell apart."""
    engine = load_engine(name)
    assert engine.name == name
    assert {"health", "tokenize", "complete"} <= set(engine.endpoints)
    assert engine.offline_env
    outcomes = {signature.outcome for signature in engine.signatures}
    assert {Outcome.OOM_PROBE, Outcome.CONTEXT_EXCEEDED, Outcome.INFRA, Outcome.MODEL_MISSING} <= outcomes
    assert {"max-model-len", "ubatch", "kv-dtype"} <= set(engine.axes)


def test_the_trends_of_the_axes() -> None:
    """Memory utilisation admits more and leaves less; a longer context is harder to admit."""
    mem = load_engine("vllm").axes["mem-util"]
    assert mem.flags[0] == "--gpu-memory-utilization"
    assert mem.trends[Bound.ADMISSION] is Trend.RISES and mem.trends[Bound.MEMORY] is Trend.FALLS
    length = load_engine("vllm").axes["max-model-len"]
    assert length.unit == "tokens" and length.trends[Bound.MEMORY] is Trend.FLAT
    assert load_engine("llamacpp").axes["max-model-len"].trends[Bound.MEMORY] is Trend.FALLS


def test_llamacpp_sets_both_cache_types() -> None:
    """One value for K and V."""
    axis = load_engine("llamacpp").axes["kv-dtype"]
    assert axis.flags[0] == "-ctk"
    assert axis.also_flags == (("-ctv", "--cache-type-v"),)


def test_on_and_off_stay_text() -> None:
    """As keys and as values; only true and false are booleans."""
    choices = load_engine("llamacpp").axes["flash-attn"].choices
    assert dict(choices) == {"on": "on", "off": "off", "auto": "auto"}
    assert load_engine("vllm").axes["mtp"].choices["off"] is None


def test_a_description_by_path(tmp_path: Path) -> None:
    """A file of the user's own needs no place among ours."""
    engine = load_engine(str(write(tmp_path, SMALL)))
    assert engine.name == "own"
    assert engine.port_flags == ("--port",)
    assert engine.signatures[0].facts == {"n": 1.0}


def test_a_changed_description_is_read_again(tmp_path: Path) -> None:
    """Nothing stale is served after an edit."""
    import os

    path = write(tmp_path, SMALL)
    assert load_engine(str(path)).port == 9000
    write(tmp_path, SMALL.replace("9000", "9001"))
    os.utime(path, ns=(1, 1))
    assert load_engine(str(path)).port == 9001


@pytest.mark.parametrize(
    ("name", "close"),
    [("vlm", "'vllm'"), ("llama.cpp", "'llamacpp'"), ("llama-cpp", "'llamacpp'"), ("SGLang", "'sglang'")],
)
def test_an_unknown_engine_names_the_closest(name: str, close: str) -> None:
    """And all there are."""
    with pytest.raises(UsageProblem) as told:
        load_engine(name)
    assert repr(name) in told.value.message
    assert close in str(told.value.hint)
    assert "vllm" in str(told.value.hint)


def test_a_signature_file_is_refused() -> None:
    """Asked for by name, it says that it is no engine."""
    with pytest.raises(UsageProblem, match="not an engine"):
        load_engine("docker")


def test_a_path_that_does_not_exist(tmp_path: Path) -> None:
    """The path is named."""
    with pytest.raises(UsageProblem, match=r"gone\.yml"):
        load_engine(str(tmp_path / "gone.yml"))


@pytest.mark.parametrize(
    ("old", "new", "where", "accepted"),
    [
        ("port: 9000", "port: nine", "port", "1 to 65535"),
        ("port: 9000", "port: 99999", "port", "1 to 65535"),
        ("dialect: vllm", "dialect: grpc", "dialect", "vllm, llamacpp"),
        ("title: Own engine", "titel: x", "titel", "Did you mean 'title'"),
        ("unit: fraction", "unit: percent", "axes.mem-util.unit", "tokens, fraction"),
        ("memory: falls", "memory: down", "axes.mem-util.trends.memory", "falls"),
        ("memory: falls", "vram: falls", "axes.mem-util.trends.vram", "admission"),
        ("flags: [--mem]", "flag: [--mem]", "axes.mem-util.flag", "Did you mean 'flags'"),
        ("flags: [--mem], ", "", "axes.mem-util", "flags"),
        ("outcome: oom_boot", "outcome: oom", "signatures[0].outcome", "oom_boot"),
        ("'boom (?P<n>\\d+)'", "'boom ('", "signatures[0].pattern", "re"),
        ("facts: {n: 1}", "facts: {m: 1}", "signatures[0].facts.m", "(?P<m>"),
        ("{health: /health}", "[health]", "endpoints", "key: value"),
        ("name: own", "name: own\nname: own", "line 3", "Correct that line"),
        ("name: own", "name: [own", "line", "Correct that line"),
        ("signatures:", "includes: [nothing]\nsignatures:", "includes", "beside"),
    ],
)
def test_what_is_wrong_names_file_key_and_what_is_accepted(
    tmp_path: Path, old: str, new: str, where: str, accepted: str
) -> None:
    """One clear sentence for each mistake, and what to write instead."""
    assert old in SMALL
    with pytest.raises(UsageProblem) as told:
        read_engine(write(tmp_path, SMALL.replace(old, new)))
    assert "own.yml" in told.value.message
    assert where in told.value.message
    assert accepted in str(told.value.hint)


def test_one_id_twice_is_refused(tmp_path: Path) -> None:
    """Evidence names the signature, so its name must be its own."""
    again = "  - {id: a, pattern: 'other', outcome: infra}\n"
    with pytest.raises(UsageProblem, match="'a' appears twice"):
        read_engine(write(tmp_path, SMALL + again))
