"""Masking of secrets in whatever is kept: names that look like secrets, and texts that hold one. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MASK = "***"

_WORDS = (
    r"(?:api[-_]?key|apikey|access[-_]?key|secret(?:[-_]?key)?|password|passwd|passphrase"
    r"|credentials?|authorization|bearer|private[-_]?key)"
)
_SECRET_NAME = re.compile(
    rf"(?:^|[-_.\s])(?:{_WORDS}|token|auth|key)$|^(?:hf|huggingface|github|openai)[-_](?:token|key)",
    re.I,
)
_SECRET_FLAG = re.compile(rf"^--?(?:[\w-]*-)?(?:{_WORDS}|token)$", re.I)
_TEXTS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\bhf_[A-Za-z0-9]{16,200}"), MASK),
    (re.compile(r"\bsk-[A-Za-z0-9_-]{16,200}"), MASK),
    (re.compile(r"\bgh[pousr]_[A-Za-z0-9]{20,200}"), MASK),
    (re.compile(r"(\bBearer\s+)[A-Za-z0-9._~+/=-]{6,2000}", re.I), rf"\1{MASK}"),
    (
        re.compile(rf"(--?(?:[a-z]{{1,30}}-){{0,4}}(?:{_WORDS}|token)(?:=|\s+))[^\s'\"]{{1,2000}}", re.I),
        rf"\1{MASK}",
    ),
    (
        re.compile(
            r"(\b[A-Z][A-Z0-9_]{0,60}(?:TOKEN|API_KEY|SECRET|PASSWORD|_KEY)\s?[=:]\s?['\"]?)[^\s'\"]{1,2000}"
        ),
        rf"\1{MASK}",
    ),
    (re.compile(r"(\b[a-z][a-z0-9+.-]{1,20}://[^\s/:@]{1,200}:)[^\s/@]{1,500}@", re.I), rf"\1{MASK}@"),
)


def is_secret_name(name: str) -> bool:
    """True for names of variables and keys that hold a secret (`HF_TOKEN`); `max_tokens` is none."""
    return _SECRET_NAME.search(name) is not None


def mask_text(text: str) -> str:
    """The text with everything that looks like a secret replaced by ***. Linear in its length."""
    for pattern, replacement in _TEXTS:
        text = pattern.sub(replacement, text)
    return text


def mask_secrets(value: Any) -> Any:
    """A copy of plain JSON data with secrets masked, by key, by text, and by the flag before a value."""
    if isinstance(value, str):
        return mask_text(value)
    if isinstance(value, Mapping):
        return {
            k: MASK if is_secret_name(str(k)) and isinstance(v, str) and v else mask_secrets(v)
            for k, v in value.items()
        }
    if isinstance(value, list | tuple):
        masked: list[Any] = []
        hide_next = False
        for item in value:
            masked.append(MASK if hide_next and isinstance(item, str) else mask_secrets(item))
            hide_next = isinstance(item, str) and _SECRET_FLAG.match(item) is not None
        return masked
    return value
