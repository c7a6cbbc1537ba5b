"""Hostile files: refused in one sentence before anything expands them, and parts are found where they lie."""

from __future__ import annotations

import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from llm_bisect.model import EnvironmentProblem, UsageProblem
from llm_bisect.spaces.compose import compose_command, read_service
from llm_bisect.spaces.load import load_profile
from llm_bisect.spaces.node import parse_yaml
from llm_bisect.spaces.yaml_limits import MAX_BYTES, MAX_VALUES, check_values, compose_files, content


def needs_compose() -> None:
    try:
        compose_command()
    except EnvironmentProblem as problem:
        pytest.skip(f"{problem.message} ({problem.hint})")


LETTERS = "abcdefghi"
LISTS = "x-a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"x-{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in pairwise(LETTERS)
)
MERGES = "x-a: &a {k: v}\n" + "".join(
    f"x-{new}: &{new}\n  <<: [{', '.join([f'*{old}'] * 9)}]\n" for old, new in pairwise(LETTERS)
)
SERVICE = "services: {{s: {{image: vllm/vllm-openai, {key}: *i}}}}\n"
BOMBS = {
    "command": LISTS + SERVICE.format(key="command"),
    "environment": MERGES + SERVICE.format(key="environment"),
}


@pytest.fixture
def never_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compose expands such files until memory ends: it must not be started."""

    def refuse(*args: object, **options: object) -> object:
        raise AssertionError("Compose was asked")

    monkeypatch.setattr(subprocess, "run", refuse)


@pytest.mark.parametrize("name", BOMBS)
def test_aliases_that_stand_for_a_billion_values(tmp_path: Path, name: str, never_asked: None) -> None:
    """As a compose file, as a profile, and read directly: the file is named, nothing expands it."""
    file = tmp_path / "bomb.yml"
    file.write_text(BOMBS[name], encoding="utf-8")
    for read in (lambda: read_service(str(file), "s", {}), lambda: load_profile(str(file))):
        with pytest.raises(UsageProblem, match=r"bomb\.yml: its anchors and aliases stand for more") as told:
            read()
        assert told.value.hint


def test_a_bomb_among_the_choices_of_a_profile(tmp_path: Path) -> None:
    """A profile keeps payloads as they are, so that there, too, they are counted first."""
    lines = "".join(f"        {line}\n" for line in LISTS.splitlines())
    file = tmp_path / "p.yml"
    file.write_text(
        "profile: p\nengine: vllm\nlaunch: {image: i}\naxes:\n  mtp:\n    choices:\n      k:\n" + lines,
        encoding="utf-8",
    )
    with pytest.raises(UsageProblem, match=r"p\.yml: its anchors and aliases stand for more than 50,000"):
        load_profile(str(file))


def test_a_bomb_in_a_file_that_is_included(tmp_path: Path, never_asked: None) -> None:
    """Parts are counted before Compose reads them, also parts of parts."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "deep.yml").write_text(BOMBS["command"], encoding="utf-8")
    (tmp_path / "sub" / "mid.yml").write_text("include: [deep.yml]\n", encoding="utf-8")
    file = tmp_path / "c.yml"
    file.write_text(
        "include: [{path: [sub/mid.yml]}]\nservices: {s: {image: vllm/vllm-openai}}\n", encoding="utf-8"
    )
    with pytest.raises(UsageProblem, match=r"deep\.yml: its anchors"):
        read_service(str(file), "s", {})


@pytest.mark.parametrize(
    "text",
    [
        "services:\n  s:\n    image: vllm/vllm-openai\n    environment:\n" + "      K: v\n" * 100_000,
        "profile: p\nengine: vllm\n" + "# padding\n" * 100_000,
        "services: {s: {image: vllm/vllm-openai, command: '" + "--a b " * 170_000 + "'}}\n",
    ],
    ids=["environment", "profile", "command"],
)
def test_a_megabyte(tmp_path: Path, text: str, never_asked: None) -> None:
    """No profile and no compose file is as long: it is not parsed at all."""
    file = tmp_path / "long.yml"
    file.write_text(text, encoding="utf-8")
    for read in (load_profile, lambda path: read_service(path, "s", {})):
        with pytest.raises(UsageProblem, match=r"long\.yml has [\d,]+ KiB: .* at most 256 KiB") as told:
            read(str(file))
        assert told.value.hint == "is it the right file?"


def test_the_longest_file_that_is_read(tmp_path: Path) -> None:
    """The limit itself is within it."""
    file = tmp_path / "x.yml"
    file.write_text("a: 1\n#" + "x" * (MAX_BYTES - 6), encoding="utf-8")
    assert file.stat().st_size == MAX_BYTES and parse_yaml(file) == {"a": 1}


def test_weights_given_as_a_profile(tmp_path: Path) -> None:
    """A huge sparse file is refused by its size; only its beginning is looked at."""
    file = tmp_path / "model.gguf"
    with file.open("wb") as stream:
        stream.write(b"GGUF\0")
        stream.truncate(1 << 30)
    with pytest.raises(UsageProblem, match=r"model\.gguf has 1,048,576 KiB"):
        load_profile(str(file))


@pytest.mark.parametrize(
    "text",
    [
        "services: " + "{a: " * 20_000 + "1" + "}" * 20_000,
        "services: &a {s: *a}\n",
        "a: [\0]\nservices: {}\n",
    ],
    ids=["deep", "cyclic", "binary"],
)
def test_what_only_compose_can_name(tmp_path: Path, text: str) -> None:
    """Nesting without end, cycles and bytes that are no text: one sentence from whoever reads it first."""
    needs_compose()
    file = tmp_path / "c.yml"
    file.write_text(text, encoding="utf-8")
    for read in (load_profile, lambda path: read_service(path, "s", {})):
        with pytest.raises(UsageProblem, match=r"c\.yml") as told:
            read(str(file))
        assert "\n" not in told.value.message and len(told.value.message) < 800


def test_parts_of_a_compose_file(tmp_path: Path) -> None:
    """Includes in both forms, extends, env files, in an anchor too; neither variables nor addresses."""
    (tmp_path / "sub").mkdir()
    texts = {
        "c.yml": (
            "include: [a.yml, {path: [sub/b.yml], env_file: sub/inc.env}, '${X}.yml', 'oci://e.invalid/x']\n"
            "x-base: &base {env_file: [{path: one.env}, two.env, gone.env]}\n"
            "services:\n  s: {<<: *base, extends: {file: e.yml, service: t}}\n  t: {extends: u}\n"
        ),
        "a.yml": "include: c.yml\n",
        "sub/b.yml": "services: {z: {env_file: z.env}}\n",
        "e.yml": "services: {t: !reset {}}\n",
        **dict.fromkeys(("one.env", "two.env", "sub/inc.env", "sub/z.env", "u", "other.yml"), "K=1\n"),
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    found = {str(p.relative_to(tmp_path)) for p in compose_files(tmp_path / "c.yml")}
    assert found - {"u"} == set(texts) - {"other.yml", "u"}
    assert compose_files(tmp_path / "c.yml")[0] == tmp_path / "c.yml"
    assert compose_files(tmp_path / "none.yml") == ()


def test_names_that_no_file_can_have(tmp_path: Path) -> None:
    """Too long, or in the home of nobody: left for Compose to name."""
    file = tmp_path / "c.yml"
    file.write_text(f"include: ['{'n' * 5000}', ~nobody-of-that-name/x.yml]\n", encoding="utf-8")
    assert compose_files(file) == (file,)
    assert content(tmp_path / "gone") == b""


def test_a_part_elsewhere_that_was_edited_is_read_again(tmp_path: Path) -> None:
    """The answer of Compose is kept only as long as every part of the file is the same."""
    needs_compose()
    other = tmp_path / "other"
    other.mkdir()
    (tmp_path / "mine").mkdir()
    base, file = other / "base.yml", tmp_path / "mine" / "c.yml"
    base.write_text("services: {t: {image: 'i:1'}}\n", encoding="utf-8")
    file.write_text("services: {s: {extends: {file: ../other/base.yml, service: t}}}\n", encoding="utf-8")
    assert read_service(str(file), "s", {}).image == "i:1"
    base.write_text("services: {t: {image: 'i:two'}}\n", encoding="utf-8")
    assert read_service(str(file), "s", {}).image == "i:two"


def test_a_study_is_another_where_a_part_was_edited(tmp_path: Path) -> None:
    """The profile's hash counts what its compose file includes."""
    part, file, profile = (tmp_path / n for n in ("e.yml", "c.yml", "p.yml"))
    part.write_text("services: {t: {image: i}}\n", encoding="utf-8")
    file.write_text("services: {s: {extends: {file: e.yml, service: t}}}\n", encoding="utf-8")
    profile.write_text("profile: p\nengine: vllm\nlaunch: {compose: c.yml}\n", encoding="utf-8")
    before = load_profile(str(profile)).source_sha256
    part.write_text("services: {t: {image: j}}\n", encoding="utf-8")
    assert load_profile(str(profile)).source_sha256 != before


@given(st.integers(1, 12), st.integers(1, 12))
def test_values_are_counted_as_if_written_out(levels: int, each: int) -> None:
    """Property: refused exactly where the document, written out, has more values than allowed."""
    text = "".join(f"- &n{i} [{', '.join([f'*n{i - 1}' if i else 'x'] * each)}]\n" for i in range(levels))
    size, total = 1, 1
    for _ in range(levels):
        size = 1 + each * size
        total += size
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if total > MAX_VALUES:
        with pytest.raises(UsageProblem, match="stand for more than"):
            check_values(Path("x.yml"), root)
    else:
        check_values(Path("x.yml"), root)
