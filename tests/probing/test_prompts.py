"""Prompts: exact lengths, needles where they belong, nothing shared between salts."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_bisect.probing.prompts import NAMES, Needle, PromptMaker

DEPTHS = (0.1, 0.5, 0.9)


def by_byte(text: str, special: bool) -> list[int]:
    """One token per byte."""
    return list(text.encode())


def by_word(text: str, special: bool) -> list[int]:
    """One token per word, and one that opens a text."""
    ids = [sum(word.encode()) for word in re.findall(r"\s?\w+|\S", text)]
    return [1, *ids] if special else ids


def counted(tokenize: Callable[[str, bool], list[int]]) -> tuple[Callable[[str, bool], list[int]], list[int]]:
    calls: list[int] = []

    def count(text: str, special: bool) -> list[int]:
        calls.append(len(text))
        return tokenize(text, special)

    return count, calls


@settings(deadline=None, max_examples=60)
@given(tokens=st.integers(8, 60_000), salt=st.text(max_size=20), words=st.booleans())
def test_the_length_is_exact(tokens: int, salt: str, words: bool) -> None:
    """Whatever the tokenizer, with the first question included, in three calls at most (and one a boot to
    learn how dense its tokens are)."""
    tokenize, calls = counted(by_word if words else by_byte)
    prompt = PromptMaker(tokenize).make(tokens, salt=salt, depths=DEPTHS)
    assert len(prompt.first) == tokens
    assert len(calls) <= 3 + 1


@settings(deadline=None, max_examples=40)
@given(tokens=st.integers(400, 30_000), salt=st.text(max_size=8), depths=st.sets(st.floats(0, 1), max_size=6))
def test_all_needles_stand_at_their_depths(tokens: int, salt: str, depths: set[float]) -> None:
    """Each once, in order, within a few sentences of where it was wanted."""
    prompt = PromptMaker(by_byte).make(max(tokens, 120 * (2 + len(depths))), salt=salt, depths=tuple(depths))
    text = bytes(prompt.first).decode()
    assert len(prompt.needles) == len(depths)
    for needle in prompt.needles:
        assert text.count(needle.sentence) == 1
    places = [text.find(needle.sentence) for needle in prompt.needles]
    assert places == sorted(places)
    if len(text) > 5000 and len(depths) == 1:
        assert abs(places[0] / len(text) - prompt.needles[0].depth) < 0.06


def test_needles_that_do_not_fit_are_left_out() -> None:
    """A short prompt carries as many as it can hold, whole."""
    sizes = [len(PromptMaker(by_byte).make(n, salt="s", depths=DEPTHS).needles) for n in (60, 230, 300, 600)]
    assert sizes == sorted(sizes) and sizes[0] == 0 and sizes[-1] == 3


def test_the_prompt_ends_in_the_first_needles_question() -> None:
    """The hardest needle, nearest to the head, is asked first."""
    prompt = PromptMaker(by_byte).make(2000, salt="s", depths=DEPTHS)
    assert bytes(prompt.first).decode().endswith(prompt.needles[0].question)
    assert prompt.needles[0].depth == 0.1


def test_a_follow_up_is_never_longer_and_shares_the_body() -> None:
    """It may come from the cache of the first, and may not exceed a context that the first filled."""
    prompt = PromptMaker(by_byte).make(2000, salt="s", depths=DEPTHS)
    for needle in prompt.needles[1:]:
        ids = prompt.follow_up(by_byte(needle.question, False))
        assert len(ids) <= 2000
        assert ids[:1900] == list(prompt.first[:1900])
        assert bytes(ids).decode().endswith(needle.question)


def test_two_salts_share_no_prefix() -> None:
    """Neither the first characters nor the order of the sentences nor the digits."""
    one, other = (PromptMaker(by_byte).make(3000, salt=salt, depths=DEPTHS) for salt in ("a", "b"))
    assert one.first[:10] != other.first[:10]
    assert one.first[200:400] != other.first[200:400]
    assert {n.digits for n in one.needles} != {n.digits for n in other.needles}


def test_one_salt_makes_one_prompt() -> None:
    """Asked again after a crash, it is the same."""
    prompts = {PromptMaker(by_byte).make(3000, salt="a", depths=DEPTHS).first for _ in range(3)}
    assert len(prompts) == 1


def test_names_end_differently() -> None:
    """The last bytes of a question point to one needle only, also for a model that looks no farther back."""
    assert len({name[-4:] for name in NAMES}) == len(NAMES)


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (" 48190.", True),
        ("The code is 48190", True),
        (" 48109.", False),
        (" 148190.", False),
        (" 481900", False),
        ("", False),
    ],
)
def test_only_the_exact_digits_count(answer: str, found: bool) -> None:
    """No near misses, no parts of longer numbers."""
    assert Needle(0.5, "amber", "48190").found_in(answer) is found


def test_a_tokenizer_that_changes_its_mind_still_gives_the_length() -> None:
    """A sample may mislead; the length is kept all the same."""
    first = [True]

    def dense(text: str, special: bool) -> list[int]:
        ids = by_byte(text, special)
        if first[0]:
            first[0] = False
            return ids[: len(ids) // 3]
        return ids

    prompt = PromptMaker(dense).make(5000, salt="s", depths=DEPTHS)
    assert len(prompt.first) == 5000
    assert all(needle.sentence in bytes(prompt.first).decode() for needle in prompt.needles)


def test_less_than_eight_tokens_is_refused() -> None:
    """There is no room for a salt."""
    with pytest.raises(ValueError, match="8 tokens"):
        PromptMaker(by_byte).make(7, salt="s", depths=())


@pytest.mark.parametrize("ids", [[], [1], [7, 7, 7, 7]])
def test_a_tokenizer_that_lies_is_refused(ids: list[int]) -> None:
    """No tokens, or one token for everything: no prompt can be made, and nothing spins."""
    with pytest.raises(ValueError, match="came back as"):
        PromptMaker(lambda text, special: list(ids)).make(2_000, salt="s", depths=())
