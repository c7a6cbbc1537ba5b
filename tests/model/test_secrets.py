"""Masking: what looks like a secret goes, what only sounds like one stays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_bisect.model.secrets import is_secret_name, mask_secrets, mask_text


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "token",
        "api_key",
        "api-key",
        "OPENAI_API_KEY",
        "password",
        "DB_PASSWORD",
        "Authorization",
        "AWS_SECRET_ACCESS_KEY",
        "client_secret",
        "HUGGING_FACE_HUB_TOKEN",
    ],
)
def test_names_of_secrets(name: str) -> None:
    """Names that hold tokens, keys or passwords."""
    assert is_secret_name(name)
    assert mask_secrets({name: "value"}) == {name: "***"}


@pytest.mark.parametrize(
    "name",
    [
        "tokens",
        "prompt_tokens",
        "max_tokens",
        "tokens_processed",
        "kv_cache_tokens",
        "keyboard",
        "monkey",
        "cached_tokens",
        "MAX_NUM_BATCHED_TOKENS",
        "author",
        "keys",
        "tokenizer",
    ],
)
def test_names_that_only_sound_so(name: str) -> None:
    """Token counts are the subject of this tool and stay readable."""
    assert not is_secret_name(name)
    assert mask_secrets({name: "value"}) == {name: "value"}


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("--api-key abc def", "--api-key *** def"),
        ("--api-key=abc", "--api-key=***"),
        ("HF_TOKEN=abc --max-tokens 3", "HF_TOKEN=*** --max-tokens 3"),
        ("Bearer abcdefgh", "Bearer ***"),
        ("https://me:pw@host/x", "https://me:***@host/x"),
        ("hf_abcdefghijklmnopqrst", "***"),
        ("sk-abcdefghijklmnopqrst", "***"),
        ("http://127.0.0.1:8000/v1 MAX_TOKENS=30", "http://127.0.0.1:8000/v1 MAX_TOKENS=30"),
    ],
)
def test_texts(text: str, masked: str) -> None:
    """Secrets inside log lines and commands."""
    assert mask_text(text) == masked


def test_an_argv_hides_the_word_after_its_flag() -> None:
    """`--api-key VALUE` as two words of a list."""
    assert mask_secrets(["x", "--api-key", "v", "--port", "1"]) == ["x", "--api-key", "***", "--port", "1"]


@given(
    st.recursive(st.none() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x))
)
def test_masking_twice_changes_nothing_more(value: object) -> None:
    """Masking is idempotent on any JSON."""
    once = mask_secrets(value)
    assert mask_secrets(once) == once


def test_a_long_line_is_masked_in_linear_time() -> None:
    """A megabyte of near misses ends: no pattern backtracks over it."""
    for piece in ("A_" * 500_000, "a://" * 250_000, "--a-" * 250_000, "Bearer " * 140_000):
        assert isinstance(mask_text(piece), str)
