"""YAML as people write it: version 1.2, and one sentence with the place for whatever is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from llm_bisect.model import UsageProblem
from llm_bisect.spaces.node import Node, parse_yaml


def parsed(folder: Path, text: str) -> object:
    path = folder / "x.yml"
    path.write_text(text, encoding="utf-8")
    return parse_yaml(path)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("off", "off"),
        ("on", "on"),
        ("yes", "yes"),
        ("No", "No"),
        ("true", True),
        ("False", False),
        ("25:00", "25:00"),
        ("2026-05-02", "2026-05-02"),
        ("010", "010"),
        ("=", "="),
        ("60_000", 60_000),
        ("-7", -7),
        ("0x1F", 31),
        ("0.93", 0.93),
        ("1.5e3", 1500.0),
        (".5", 0.5),
        ("~", None),
        ("null", None),
        ("1e5", "1e5"),
    ],
)
def test_scalars_are_those_of_yaml_1_2(tmp_path: Path, text: str, value: object) -> None:
    """Only true and false are booleans; base-60 numbers, octals and dates stay text."""
    found = parsed(tmp_path, f"key: {text}\n")
    assert found == {"key": value}
    assert isinstance(found, dict) and type(found["key"]) is type(value)


def test_on_and_off_are_keys_too(tmp_path: Path) -> None:
    """Labels of choices need no quotes."""
    assert parsed(tmp_path, "off: null\non: 1\n") == {"off": None, "on": 1}


def test_anchors_and_merges_still_work(tmp_path: Path) -> None:
    """What YAML offers against repetition."""
    assert parsed(tmp_path, "a: &a {x: 1}\nb: {<<: *a, y: 2}\n") == {"a": {"x": 1}, "b": {"x": 1, "y": 2}}


@pytest.mark.parametrize(
    ("text", "says", "hint"),
    [
        ("a: 1\n\tb: 2\n", "x.yml, line 2: not valid YAML: a tab indents this line", "spaces"),
        ("a: [1\n", "x.yml, line 2: not valid YAML", "Correct that line"),
        ("a: 1\na: 2\n", "x.yml, line 2: not valid YAML: the key 'a' appears twice", "Correct"),
        ("b:\n  a: 1\n  a: 2\n", "x.yml, line 3: not valid YAML: the key 'a' appears twice", "Correct"),
        ("a: !!python/object:os.system x\n", "line 1: not valid YAML: could not determine a constructor", ""),
        ("[" * 3000, "not valid YAML: nested too deeply", "Simplify"),
    ],
)
def test_what_is_no_yaml(tmp_path: Path, text: str, says: str, hint: str) -> None:
    """The file and the line; a tab is called a tab; nothing is executed."""
    with pytest.raises(UsageProblem) as told:
        parsed(tmp_path, text)
    assert says in told.value.message
    assert hint in str(told.value.hint)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    """The system's own reason."""
    with pytest.raises(UsageProblem, match="cannot be read: No such file"):
        parse_yaml(tmp_path / "gone.yml")
    with pytest.raises(UsageProblem, match="cannot be read: Is a directory"):
        parse_yaml(tmp_path)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    text = "n: 1\nb: 1\np: 0\nlist: [a, 1]\nlists: [[a], []]\nm: [1]\ni: 3\nr: ['(']\nitems: [1]\ne: ''\n"
    return Node(tmp_path / "x.yml", "", parsed(tmp_path, text))


@pytest.mark.parametrize(
    ("read", "says"),
    [
        (lambda n: n.text("n"), "x.yml, line 1: n: text is expected, not 1"),
        (lambda n: n.text("e"), "x.yml, line 10: e: text is expected, not ''"),
        (lambda n: n.text("gone"), "x.yml: gone: text is expected, not None"),
        (lambda n: n.flag("b", default=False), "x.yml, line 2: b: 1 is not true or false"),
        (lambda n: n.port("p"), "x.yml, line 3: p: 0 is not a port"),
        (lambda n: n.number("list", 1.0), "x.yml, line 4: list: a number is expected, not ['a', 1]"),
        (lambda n: n.strings("list"), "x.yml, line 4: list[1]: 1 is not accepted"),
        (lambda n: n.strings("i"), "x.yml, line 7: i: a list of texts is expected, not 3"),
        (lambda n: n.string_lists("lists"), "x.yml, line 5: lists[1]: [] is not accepted"),
        (lambda n: n.mapping("m"), "x.yml, line 6: m: a mapping is expected, not [1]"),
        (lambda n: n.patterns("r"), "x.yml, line 8: r: not a regular expression"),
        (lambda n: n.items("i"), "x.yml, line 7: i: a list is expected, not 3"),
        (lambda n: n.items("items"), "x.yml: items[0]: a mapping with text keys is expected here"),
    ],
)
def test_each_kind_of_value_has_its_sentence(node: Node, read: object, says: str) -> None:
    """The file, the line, the key, and what stood there."""
    assert callable(read)
    with pytest.raises(UsageProblem) as told:
        read(node)
    assert told.value.message.startswith(says)
    assert told.value.hint


def test_a_missing_mapping_is_empty(node: Node) -> None:
    """Optional parts may be left out."""
    assert node.mapping("gone").data == {} and node.items("gone") == [] and node.strings("gone") == ()


def test_numbers_are_read(node: Node) -> None:
    """Whole numbers are numbers, too."""
    assert node.number("n", 0.0) == 1.0 and node.number("gone", 2.5) == 2.5


def test_a_long_value_is_cut(tmp_path: Path) -> None:
    """An error stays one line."""
    with pytest.raises(UsageProblem) as told:
        Node(tmp_path / "x.yml", "", {"a": ["x" * 500]}).text("a")
    assert len(told.value.message) < 140
