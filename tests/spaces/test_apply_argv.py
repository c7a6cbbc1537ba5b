"""Flags in an argv: every spelling is found, changed and taken out; scripts are read and left alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_bisect.spaces.argv import (
    effective,
    expand,
    find_flag,
    flag_variable,
    is_flag,
    normalised,
    remove_flag,
    script_commands,
    script_of,
    set_flag,
)

LEN = ("--max-model-len",)
CTX = ("-c", "--ctx-size")
OPEN = ["bash", "-c", 'set -e\n# don\'t\nexec vllm serve /m --max-model-len 1000 "$@"', "--"]
CLOSED = ["/bin/sh", "-ec", "exec vllm serve /m --max-model-len=1000 --x"]


@pytest.mark.parametrize(
    "words",
    [
        ["serve", "--max-model-len", "5"],
        ["serve", "--max-model-len=5"],
        ["serve", "--max_model_len", "5"],
        ["--max-model-len", "4", "--x", "--max-model-len=5"],
        ["bash", "-c", "exec vllm serve m --max-model-len 5"],
        ["bash", "-euo", "pipefail", "-c", "vllm serve m \\\n  --max-model-len 5 | tee log"],
        ["/usr/bin/env", "A=b", "bash", "-lc", "pip install x; exec vllm --max-model-len '5'"],
        ["tini", "--", "sh", "-c", 'ARGS=(--max-model-len 5)\nexec vllm serve "${ARGS[@]}"'],
        ["bash", "-c", 'exec vllm --max-model-len 4 "$@"', "--", "--max-model-len", "5"],
        ["bash", "-c", 'exec vllm "$@" --max-model-len 5', "--", "--max-model-len", "4"],
        ["bash", "-c", "exec vllm --max-model-len $LEN"],
        ["bash", "-c", 'exec vllm --max-model-len "${LEN:-9}"'],
        ["bash", "-c", "exec vllm --max-model-len ${NOPE:-5}"],
        ["bash", "-c", "echo 'unclosed\nvllm --max-model-len 5"],
    ],
)
def test_the_value_that_the_engine_reads(words: list[str]) -> None:
    """The last one given wins, in a script as well as in a plain argv."""
    assert find_flag(words, LEN, {"LEN": "5"}) == "5"


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--x", "5"], None),
        (["--max-model-len"], ""),
        (["--max-model-len", "--x"], ""),
        (["--max-model-len", "-1"], "-1"),
        (["--max-model-len-extra", "5"], None),
        (["bash", "-c"], None),
        (["bash", "start.sh", "--max-model-len", "7"], "7"),
        (["sh", "-c", ""], None),
        ([], None),
    ],
)
def test_what_is_no_value(words: list[str], value: str | None) -> None:
    """Not given, given without a value, and negative numbers are told apart."""
    assert find_flag(words, LEN) == value


def test_a_shells_own_flag_is_no_flag_of_the_engine() -> None:
    """`bash -c` is not llama.cpp's `-c`: neither read as it nor replaced."""
    words = ["bash", "-c", 'exec llama-server -c 4096 "$@"', "--"]
    assert find_flag(words, CTX) == "4096"
    assert set_flag((), words, CTX, "8192") == (*words, "-c", "8192")
    assert remove_flag((), [*words, "-c", "1"], CTX) == tuple(words)


def test_where_a_script_stands() -> None:
    """Behind wrappers and options of the shell; not where the shell runs a file or nothing."""
    assert script_of(["bash", "-o", "pipefail", "-c", "x", "--"]) is not None
    found = script_of(["env", "bash", "-euxo", "pipefail", "-c", "x"])
    assert found is not None and (found.at, found.args) == (5, 7)
    assert script_of(["bash", "--login", "-c", "x"]) is not None
    for plain in (["vllm", "serve"], ["bash", "file.sh"], ["bash"], ["bash", "-c"], []):
        assert script_of(plain) is None


def test_flags_are_replaced_where_they_stood() -> None:
    """In the spelling that they had; repeats go; new ones are appended in the first spelling."""
    assert set_flag((), ["-c", "1", "--x"], CTX, "2") == ("-c", "2", "--x")
    assert set_flag((), ["--ctx-size=1", "-c", "3"], CTX, "2") == ("--ctx-size=2",)
    assert set_flag((), ["--x"], CTX, "2") == ("--x", "-c", "2")
    assert set_flag((), ["--max_model_len", "1"], LEN, "2") == ("--max_model_len", "2")
    assert set_flag((), ["--eager", "pos"], ("--eager",), None) == ("--eager", "pos")
    assert set_flag((), [], ("--eager",), None) == ("--eager",)


def test_flags_are_taken_out_with_their_values() -> None:
    """A flag that takes none leaves the next word alone."""
    assert remove_flag((), ["--a", "-c", "1", "b", "--ctx-size=2"], CTX) == ("--a", "b")
    assert remove_flag((), ["--eager", "model"], ("--eager",), switch=True) == ("model",)
    assert remove_flag((), ["--eager", "true", "m"], ("--eager",), switch=True) == ("m",)
    assert remove_flag((), OPEN[:3], LEN) == tuple(OPEN[:3])


def test_a_script_that_passes_its_arguments_on_can_be_reached() -> None:
    """What is appended after it wins; where it has no name of its own yet, it gets one."""
    changed = set_flag((), OPEN, LEN, "2000")
    assert changed == (*OPEN, "--max-model-len", "2000") and find_flag(changed, LEN) == "2000"
    unnamed = set_flag((), OPEN[:3], LEN, "2000")
    assert unnamed == (*OPEN[:3], "bash", "--max-model-len", "2000") and find_flag(unnamed, LEN) == "2000"
    split = set_flag(OPEN[:3], ["--", "--max-model-len", "1"], LEN, "2000")
    assert split == ("--", "--max-model-len", "2000")
    assert find_flag(set_flag((), CLOSED, LEN, "2000"), LEN) == "1000"


def test_a_script_fed_by_a_variable() -> None:
    """The variable is named, so that it can be set instead of the flag."""
    assert flag_variable(["bash", "-c", "vllm --max-model-len ${LEN:-5}"], LEN) == "LEN"
    assert flag_variable(["bash", "-c", 'vllm --max-model-len="$LEN"'], LEN) == "LEN"
    assert flag_variable(CLOSED, LEN) is None
    assert flag_variable(["--max-model-len", "$LEN"], LEN) is None  # no shell reads that


def test_commands_of_a_script() -> None:
    """Cut at line ends, semicolons, pipes and brackets outside of quotes; comments are left out."""
    text = "# it's a comment\na 'b;c' && d | e; (f)\nexec g \"h\ni\" \\\n  --j"
    assert script_commands(text) == [["a", "b;c"], ["d"], ["e"], ["f"], ["exec", "g", "h\ni", "--j"]]
    assert effective(["sh", "-c", 'a --x; exec b --y "$@"', "n", "1", "2"]) == ["exec", "b", "--y", "1", "2"]


@pytest.mark.parametrize(
    ("word", "expanded"),
    [
        ("$A", "1"),
        ("${A}", "1"),
        ("${E:-d}", "d"),
        ("${E-d}", ""),
        ("${U:-d}", "d"),
        ("${U-d}", "d"),
        ("${U}", "${U}"),
        ('{"n":${A}}', '{"n":1}'),
    ],
)
def test_variables_of_a_shell(word: str, expanded: str) -> None:
    """As a shell reads them; what is not known stays as text."""
    assert expand(word, {"A": "1", "E": ""}) == expanded


def test_one_argv_in_two_spellings() -> None:
    """Equals signs, underscores, order, numbers, JSON and aliases do not make another argv."""
    aliases = {"--ctx-size": "-c"}
    one = normalised(["serve", "m", "-c", "10", "--x_y=0.930", "--j", '{"b": 1, "a": 2}'], aliases)
    two = normalised(["serve", "m", "--j", '{"a":2,"b":1}', "--x-y", "0.93", "--ctx-size=10"], aliases)
    assert one == two
    assert normalised(["--j", "{no json"]) == [[], ["--j", "{no json"]]
    assert normalised(["sh", "-c", "a  --b\n", "n", "--d=1"]) == normalised(
        ["sh", "-c", "a --b", "n", "--d", "1"]
    )
    assert normalised(["--a", "1", "--a", "2"]) != normalised(["--a", "2", "--a", "1"])


WORD = st.from_regex(r"[a-z0-9./]{1,6}", fullmatch=True)
FLAGS = st.lists(st.tuples(st.sampled_from(["--a", "--b-c", "-d", "--e"]), WORD, st.booleans()), max_size=6)


@given(FLAGS, WORD)
def test_setting_is_read_back_and_removing_removes(flags: list[tuple[str, str, bool]], value: str) -> None:
    """Whatever stood there: after setting, exactly one is there with the value; after removing, none."""
    words = [w for f, v, eq in flags for w in ([f"{f}={v}"] if eq and f.startswith("--") else [f, v])]
    spellings = ("--b-c", "-d")
    changed = set_flag((), words, spellings, value)
    assert find_flag(changed, spellings) == value
    assert sum(w.partition("=")[0] in spellings for w in changed) == 1
    assert set_flag((), changed, spellings, value) == changed
    gone = remove_flag((), changed, spellings)
    assert find_flag(gone, spellings) is None
    for other in ("--a", "--e"):
        assert find_flag(gone, (other,)) == find_flag(words, (other,))


ODD = st.one_of(
    st.text(max_size=8),
    st.from_regex(r"-?[0-9]{0,3}\.?[0-9]{0,3}", fullmatch=True),
    st.sampled_from(
        ["on", "TRUE", "-", "--", "=", "$@", "a=b", "-1", '{"b": 1, "a": [2 ]}', "--b_c", "--b-c=1", "-d"]
    ),
)
WORDS = st.lists(ODD, max_size=7).filter(lambda words: script_of(words) is None)


@given(WORDS, ODD.filter(lambda value: not is_flag(value)))
def test_any_words_at_all(words: list[str], value: str) -> None:
    """Property: whatever the words are, a value that is set is read back, and once removed is gone."""
    spellings = ("--b-c", "-d")
    assert find_flag(set_flag((), words, spellings, value), spellings) == value
    assert find_flag(remove_flag((), words, spellings), spellings) is None


@given(st.lists(ODD, max_size=7), st.lists(ODD, max_size=2))
def test_the_normal_form_is_its_own(words: list[str], values: list[str]) -> None:
    """Property: what is normal stays so, and one form has one normal form."""
    normal = normalised(["serve", *words, *values])
    assert normalised([word for unit in normal for word in unit]) == normal


@given(st.text(max_size=120), st.lists(ODD, max_size=4))
def test_any_script_is_read_and_left_alone(text: str, words: list[str]) -> None:
    """Property: no text breaks the reader; setting and removing keep the script's bytes."""
    argv = ["bash", "-c", text, "--", *words]
    find_flag(argv, LEN, {"A": "1"})
    flag_variable(argv, LEN)
    normalised(argv)
    assert set_flag((), argv, LEN, "5")[:4] == tuple(argv[:4])
    assert remove_flag((), argv, LEN)[:4] == tuple(argv[:4])
    passing = ["bash", "-c", 'exec vllm serve m --max-model-len 4 "$@"', "--", *words]
    assert find_flag(set_flag((), passing, LEN, "5"), LEN) == "5"
