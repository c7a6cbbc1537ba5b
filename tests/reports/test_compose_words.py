"""Compose text without resolving it: variables, words, alignment, volume entries."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_bisect.model import UsageProblem
from llm_bisect.reports.compose_words import (
    align,
    could_be,
    escape,
    has_variable,
    quote,
    split_words,
    substitute,
    volume_target,
)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("${A:-0.95}", "0.93"),
        ("$A", "0.93"),
        ("${A}x${B:-1}", "0.93x${B:-1}"),
        ("${B:-${A:-2}}", "${B:-0.93}"),
        ("${A:?needed}", "0.93"),
        ("${A:+set ${B}}", "set ${B}"),
        ("$${A} $$A", "$${A} $$A"),
        ("${AB} $AB ${BA:-A}", "${AB} $AB ${BA:-A}"),
        ('${A:-{"x":{"y":1}}} tail', "0.93 tail"),
        ("100$ and $1", "100$ and $1"),
    ],
)
def test_only_the_named_variable_is_put_in(raw: str, expected: str) -> None:
    """Every spelling of the variable is replaced, every other stays as it was written."""
    assert substitute(raw, {"A": "0.93"}) == expected


def test_an_empty_value_gives_the_default_and_a_dollar_is_escaped() -> None:
    """As Compose reads `:-` and `-`; a dollar in a value would start a variable."""
    assert substitute("${A:-${B}} ${A-d}", {"A": ""}) == "${B} "
    assert substitute("${A}", {"A": "x$y"}) == "x$$y"


@given(st.text(alphabet="ab $'\"\\{}\n", max_size=20))
def test_an_argument_survives_quoting(text: str) -> None:
    """A quoted argument is one word, has no variable, and stands for itself."""
    words = split_words(quote(text))
    assert len(words) == 1
    assert not has_variable(words[0].text)
    assert could_be(words[0].text, text)
    assert could_be(escape(text), text)


def test_words_keep_variables_whole() -> None:
    """Blanks inside `${…}` do not split a word; quotes and backslashes are read as Compose reads them."""
    raw = '--a ${A:-1 2} --b \'${B:-q r}\' c\\ d "e \\"f\\""'
    assert [w.text for w in split_words(raw)] == ["--a", "${A:-1 2}", "--b", "${B:-q r}", "c d", 'e "f"']


def test_a_variable_may_give_any_number_of_arguments() -> None:
    """Unquoted in a command string it is split, and nothing at all where it is empty."""
    words = split_words("--a ${EXTRA} --b '${X}' tail")
    assert align(words, ["--a", "--b", "", "tail"], splits=True) == [1, 0, 1, 1, 1]
    assert align(words, ["--a", "--c", "1", "--b", "q r", "tail"], splits=True) == [1, 2, 1, 1, 1]
    with pytest.raises(UsageProblem, match="not the one that was tested"):
        align(words, ["--z", "tail"], splits=True)


@pytest.mark.parametrize(
    ("entry", "target"),
    [
        ("./a:/b:ro", "/b"),
        ("${M:-/home/x/y}:/models", "/models"),
        ("/only", "/only"),
        ({"source": "a", "target": "/t"}, "/t"),
        ("${A:-x:y}:/z", "/z"),
    ],
)
def test_targets_of_volume_entries(entry: object, target: str) -> None:
    """Colons inside `${…}` separate nothing."""
    assert volume_target(entry) == target
