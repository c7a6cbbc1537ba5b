"""Masking: planted secrets go, everything else stays as it is."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_bisect.model.secrets import is_secret_name, mask_secrets, mask_text

HF = "hf_" + "aB3" * 12
SK = "sk-" + "proj_x9-" * 4


@pytest.mark.parametrize(
    "name",
    [
        "token", "Token", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "auth_token", "accessToken", "hftoken",
        "api_key", "apikey", "api-key", "apiKey", "APIKEY", "--api-key", "VLLM_API_KEY",
        "x-api-key", "SSH_KEY",
        "signing_key", "password", "PASSWD", "db_password", "client_secret",
        "AWS_SECRET_ACCESS_KEY", "secret",
        "Authorization", "bearer", "credentials", "aws_credential", "--hf-token", "-hft",
        "DB_PASS", "SMTP_PWD",
        "HF_TOKEN_2", "registry_auth", "Set-Cookie", "a" * 5000 + "_TOKEN",
    ],
)  # fmt: skip
def test_names_of_secrets_are_known(name: str) -> None:
    """Tokens, keys, passwords and their like are secrets in every spelling."""
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "tokens", "prompt_tokens", "max_tokens", "tokens_processed", "kv_cache_tokens",
        "tokenizer", "keyboard",
        "monkey", "key", "keys", "eos_token", "pad_token", "eos_token_id", "per_token", "time_per_token",
        "last_pass", "pass", "passes", "PWD", "OLDPWD", "kv-dtype", "KV_CACHE_DTYPE",
        "values_key_count", "-hfr",
        "hft", "first_token_s", "author", "HF_TOKEN_PATH", "", "123", "key_count",
    ],
)  # fmt: skip
def test_other_names_are_left_alone(name: str) -> None:
    """Counts of tokens, words that contain `key`, and the words of our own journals are no secrets."""
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        (f"login with {HF} ok", "login with *** ok"),
        (f"OPENAI {SK}, then", "OPENAI ***, then"),
        ("ghp_" + "a1" * 18, "***"),
        ("eyJhbGciOiJI.eyJzdWIiOiIx.SflKxwRJSMeK", "***"),
        ("Authorization: Bearer abc.def-123", "Authorization: Bearer ***"),
        ("Authorization: Basic dXNlcjpwYXNz\nHost: x", "Authorization: Basic ***\nHost: x"),
        ("sent bearer xyz", "sent bearer ***"),
        ("vllm serve --api-key s3cr3t --port 8000", "vllm serve --api-key *** --port 8000"),
        ("vllm serve --api-key=s3cr3t --port 8000", "vllm serve --api-key=*** --port 8000"),
        ("llama-server -hft abcdef -c 4096", "llama-server -hft *** -c 4096"),
        ("--api-key --port 8000", "--api-key --port 8000"),
        ("HF_TOKEN=abc vllm serve", "HF_TOKEN=*** vllm serve"),
        ("export DB_PASSWORD='a b c'; run", "export DB_PASSWORD='***'; run"),
        ("PASSWORD=p,a(s)s next", "PASSWORD=*** next"),
        ("env: HF_TOKEN=abc", "env: HF_TOKEN=***"),
        ("GET /x?token=abc&n=1", "GET /x?token=***&n=1"),
        ("https://user:pa@ss@host/path?x=1", "https://***@host/path?x=1"),
        ("redis://:p#ss?@host:6379/0", "redis://***@host:6379/0"),
        ("pip --index-url https://oauth2tok@host/simple", "pip --index-url https://***@host/simple"),
        ("non-default args: {'api_key': ['a', 'b'], 'port': 1}",
         "non-default args: {'api_key': [***], 'port': 1}"),
        ("Namespace(api_key='x', hf_token=None, n=1)", "Namespace(api_key='***', hf_token=None, n=1)"),
        ("Namespace(api_key=xyz, n=1)", "Namespace(api_key=***, n=1)"),
        ('{"api_key": "x\\"y", "n": 1}', '{"api_key": "***", "n": 1}'),
        ('"{\\"api_key\\": \\"xyz\\", \\"n\\": 1}"', '"{\\"api_key\\": \\"***\\", \\"n\\": 1}"'),
        ('cut line "api_key": "never clos', 'cut line "api_key": "***'),
        ("x-api-key: abc", "x-api-key: ***"),
        ("password: 123456", "password: ***"),
    ],
)  # fmt: skip
def test_secrets_within_texts_are_masked(text: str, masked: str) -> None:
    """Each form of a secret in a log line, a command line or an URL is replaced, and nothing around it."""
    assert mask_text(text) == masked
    assert mask_text(masked) == masked


@pytest.mark.parametrize(
    "text",
    [
        "print_info: EOS token        = 128009 '<|eot_id|>'",
        "prompt eval time = 95.12 ms / 12 tokens (7.93 ms per token, 126.1 tokens per second)",
        "GPU KV cache size: 61,312 tokens",
        "Maximum concurrency for 200,000 tokens per request: 1.02x",
        "HF_TOKEN=${HF_TOKEN} --api-key ${KEY:-}",
        "max_tokens=30, tokenizer='x', skip_tokenizer_init=False, kv_cache_dtype=fp8",
        "task-force-with-a-long-name-indeed disk-usage-of-the-whole-machine",
        "KeyError: 'layers'  ok: True, key: value, keyboard=us monkey=1",
        "http://127.0.0.1:8000/v1/models and mail a@b.c",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "cut at the end: api_key=",
    ],
)
def test_ordinary_texts_stay_as_they_are(text: str) -> None:
    """Log lines of the engines, and references to variables, are not touched."""
    assert mask_text(text) == text


@pytest.mark.parametrize(
    ("value", "masked"),
    [
        ({"HF_TOKEN": "abc", "n": 1}, {"HF_TOKEN": "***", "n": 1}),
        ({"env": {"A": "x", "MY_KEY": "y"}}, {"env": {"A": "x", "MY_KEY": "***"}}),
        ({"password": 1234, "token": 17}, {"password": "***", "token": 17}),
        ({"secret": None, "api_key": "", "token": True}, {"secret": None, "api_key": "", "token": True}),
        ({"HF_TOKEN": "${HF_TOKEN:-}"}, {"HF_TOKEN": "${HF_TOKEN:-}"}),
        ({"HF_TOKEN": "${HF_TOKEN:-abc}"}, {"HF_TOKEN": "***"}),
        ({"credentials": {"user": "u", "list": ["p", 1]}},
         {"credentials": {"user": "***", "list": ["***", "***"]}}),
        (["serve", "--api-key", "k", "--port", "1"], ["serve", "--api-key", "***", "--port", "1"]),
        (["--api-key", "k1", "k2", "--port", "1"], ["--api-key", "***", "***", "--port", "1"]),
        (["--hf-token", "k", "model"], ["--hf-token", "***", "model"]),
        (["--api-key", 12345], ["--api-key", "***"]),
        (["--api-key=k", "x"], ["--api-key=***", "x"]),
        (("-e", "MY_SECRET=foo bar", "-e", "A=b c"), ["-e", "MY_SECRET=***", "-e", "A=b c"]),
        ([{"name": "HF_TOKEN", "value": "x"}, {"name": "A", "value": "y"}],
         [{"name": "HF_TOKEN", "value": "***"}, {"name": "A", "value": "y"}]),
        ({"prompt_tokens": 60000, "key": "k", "last_pass": 3},
         {"prompt_tokens": 60000, "key": "k", "last_pass": 3}),
        ({1: HF}, {1: "***"}),
        (3.5, 3.5),
    ],
)  # fmt: skip
def test_secrets_within_data_are_masked(value: Any, masked: Any) -> None:
    """Mappings by their keys, argument lists by their flags, environments by their names."""
    assert mask_secrets(value) == masked


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)


@given(PLAIN)
def test_masking_twice_is_masking_once(value: Any) -> None:
    """What has been masked stays as it is: a journal can be copied through the same function."""
    once = mask_secrets(value)
    assert mask_secrets(once) == once


@settings(max_examples=200)
@given(
    st.sampled_from(["HF_TOKEN={}", "--api-key {}", "--password={}", 'x "api_key": "{}" y', "Bearer {}", "a://u:{}@h"]),
    st.from_regex(r"[A-Za-z0-9]{6,40}", fullmatch=True),
    st.text(alphabet="ab \t.,:=\"'", max_size=20),
)  # fmt: skip
def test_a_planted_secret_never_survives(form: str, secret: str, around: str) -> None:
    """Wherever a secret stands in a text, the masked text does not hold it."""
    planted = "~" + secret + "~" if not form.startswith("Bearer") else secret
    text = f"{around} {form.format(planted)} {around}"
    assert secret not in mask_text(text)
    assert secret not in str(mask_secrets({"lines": [text]}))


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "unit",
    ["a", "a ", "token", "token ", "token=", "sk-", "eyJ-", "hf_", "bearer ", "://", "://a@", "--api-key ",
     "key:", "\\", "token='\\", '"', "token=[", "token=,", "token=a,b", "eyJaaaaaaaaa.", "A_", "_PASS",
     "passwd.", "${token:-"],
)  # fmt: skip
def test_no_expression_runs_away(unit: str) -> None:
    """A text of 150,000 characters, whatever it repeats, is done at once: quadratic work would take hours."""
    text = (unit * (150_000 // len(unit) + 1))[:150_000]
    assert mask_text(mask_text(text)) == mask_text(text)
