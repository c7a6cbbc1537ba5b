"""Masking of secrets, so that none reaches a journal, a log or an export. Pure; idempotent.

Two questions are asked: does a *name* look like a secret's (`HF_TOKEN`, `--api-key`, `password`), and does
a *text* hold something of a secret's form (`hf_…`, `sk-…`, `Bearer …`, `https://user:password@…`). Every
expression runs in linear time: possessive repeats, and a match may start only at the start of a word.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MASK = "***"

_PLAIN_WORDS = re.compile(
    r"passwd|password|passphrase|secret|credential|authorization|bearer|api[-_. ]?key|access[-_. ]?key",
    re.IGNORECASE,
)
_GLUED_TOKEN = re.compile(
    r"(?:hf|hub|auth|access|refresh|api|gh|github|gitlab|bot|oauth|session)token$", re.IGNORECASE
)
_ENV_PASS = re.compile(r"[A-Z0-9_]+_(?:PASS|PWD)")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_NO_LETTER = re.compile(r"[^A-Za-z]+")
# Words of the trade: a vocabulary's special tokens and counts of tokens are no secrets.
_OF_A_MODEL = re.compile(
    r"eos|bos|eot|eom|pad|unk|sep|cls|mask|img|image|audio|video|special|first|last|next|prev|per|each|one"
    r"|stop|max|min|new|draft|think|start|end|begin|fim|nl|lf|by|n|num|prompt|input|output|completion"
    r"|context|kv"
)

_FORMS = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"hf_[A-Za-z0-9]{20,}+"
    r"|sk-[A-Za-z0-9_-]{16,}+"
    r"|gh[pousr]_[A-Za-z0-9]{20,}+"
    r"|github_pat_[A-Za-z0-9_]{20,}+"
    r"|(?:glpat|nvapi|dckr_pat)[-_][A-Za-z0-9_-]{16,}+"
    # a signed web token
    r"|(?<![_-])eyJ[A-Za-z0-9_-]{8,}+\.[A-Za-z0-9_-]{8,}+\.[A-Za-z0-9_-]{8,}+"
    r")"
)
_BEARER = re.compile(r"(?<![A-Za-z0-9])(bearer[ \t]++)[A-Za-z0-9._~+/=-]++", re.IGNORECASE)
_USERINFO = re.compile(r"(?<=://)[^\s/\"'<>@]++@(?:[^\s/\"'<>@]++@)*+")

_HINT = re.compile(
    r"token|key|secret|passw|passphrase|_pass|_pwd|credential|auth|bearer|cookie|hft", re.IGNORECASE
)
_NAME = re.compile(r"(?<![\w.-])[\w.-]++")
_ASSIGNS = re.compile(r"\\*+[\"']?[ \t]*+[:=][ \t]*+")
_AFTER_FLAG = re.compile(r"[ \t]++(?!-)")
_SCHEME = re.compile(r"(?:basic|bearer|token|digest)[ \t]++", re.IGNORECASE)
_QUOTED = re.compile(r"([\"'])((?:(?!\1)[^\\\n]|\\.)*+)")  # to the end where a cut line never closes it
_ESCAPED = re.compile(r"(\\++[\"'])([^\\\"'\n]*+)")  # JSON within JSON
_LIST = re.compile(r"\[[^\]\n]++\]?")
# Punctuation ends a value only where something else follows: a password may hold it.
_BARE = re.compile(r"(?:[^\s\"',;&(){}\[\]<>|]|[,;&(){}\[\]<>|](?![\s\"',;&(){}\[\]<>|]|$|[\w.-]*+[:=]))++")
_NOTHING = frozenset({"none", "null", "true", "false", "", MASK})
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?%?")
_REFERENCE = re.compile(r"\$\{[A-Za-z_]\w*+(?::?[-?])?\}")  # `${HF_TOKEN}`: where it is, not what it is
_ENV_ITEM = re.compile(r"([A-Za-z_]\w*+)=(.+)", re.DOTALL)


def is_secret_name(name: str) -> bool:
    """True where a value of this name is a secret: an option, variable or key, in any case or spelling."""
    name = name[-200:]
    if _PLAIN_WORDS.search(name) or _GLUED_TOKEN.search(name) or _ENV_PASS.fullmatch(name):
        return True
    words = [w.lower() for w in _NO_LETTER.split(_CAMEL.sub("_", name)) if w]
    if not words:
        return False
    if words[-1] == "token":
        return len(words) < 2 or _OF_A_MODEL.fullmatch(words[-2]) is None
    if words == ["hft"]:  # llama-server's short form of --hf-token
        return name.startswith("-")
    return words[-1] in ("auth", "cookie") or (words[-1] == "key" and len(words) > 1)


def mask_secrets(value: Any) -> Any:
    """A copy of plain data (mappings, sequences, texts, numbers) with every secret replaced by `***`.

    Tuples come back as lists, as JSON would give them back; what is no container and no text is returned
    as it is. `None`, truth values and `${NAME}` references stay, whatever their name.
    """
    if isinstance(value, Mapping):
        # `{name: HF_TOKEN, value: …}`, as container files list their variables
        listed = value.get("name")
        named = isinstance(listed, str) and is_secret_name(listed)
        return {k: _under(listed if named and k == "value" else k, v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return _mask_items(value)
    return mask_text(value) if isinstance(value, str) else value


def mask_text(text: str) -> str:
    """The text with every secret in it replaced by `***`. Linear in its length."""
    if "://" in text:
        text = _USERINFO.sub(f"{MASK}@", text)
    text = _BEARER.sub(rf"\g<1>{MASK}", _FORMS.sub(MASK, text))
    return _mask_named(text) if _HINT.search(text) else text


def _under(name: Any, value: Any) -> Any:
    """The value of a key, masked as a whole where the key says so."""
    if not isinstance(name, str) or not is_secret_name(name):
        return mask_secrets(value)
    return _blank(value, keep_numbers=_is_lone_token(name))


def _blank(value: Any, *, keep_numbers: bool) -> Any:
    if isinstance(value, Mapping):
        return {k: _blank(v, keep_numbers=keep_numbers) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_blank(v, keep_numbers=keep_numbers) for v in value]
    if value is None or isinstance(value, bool) or (keep_numbers and isinstance(value, int | float)):
        return value
    if isinstance(value, str) and (value == "" or _REFERENCE.fullmatch(value)):
        return value
    return MASK


def _mask_items(items: list[Any] | tuple[Any, ...]) -> list[Any]:
    """A list: an argv's secret flag masks what follows it, an environment's `NAME=value` is masked whole."""
    masked: list[Any] = []
    flag: str | None = None
    for item in items:
        if not isinstance(item, str):
            masked.append(mask_secrets(item) if flag is None else _blank(item, keep_numbers=False))
            flag = None
        elif item.startswith("-"):
            masked.append(mask_text(item))
            flag = item if "=" not in item and is_secret_name(item) else None
        elif flag is not None:
            masked.append(_blank(item, keep_numbers=False))
            # `--api-key` takes several values; what follows another flag's value is something else.
            flag = flag if flag.endswith("api-key") else None
        elif (found := _ENV_ITEM.fullmatch(item)) and is_secret_name(found[1]):
            masked.append(f"{found[1]}={_blank(found[2], keep_numbers=False)}")
        else:
            masked.append(mask_text(item))
    return masked


def _is_lone_token(name: str) -> bool:
    """True where a number may be a token of a vocabulary; a password of digits is a password."""
    return name.strip("-").lower() == "token"


def _mask_named(text: str) -> str:
    """Values after a secret's name: `NAME=value`, `name: value`, `"name": "value"`, `--name value`."""
    parts: list[str] = []
    done = at = 0
    while found := _NAME.search(text, at):
        at = found.end()
        name = found[0]
        if not is_secret_name(name):
            continue
        sep = _ASSIGNS.match(text, at)
        if sep is None and name.startswith("-"):
            sep = _AFTER_FLAG.match(text, at)
        if sep is None:
            continue
        start = sep.end()
        if scheme := _SCHEME.match(text, start):  # `Authorization: Basic …`
            start = scheme.end()
        masked, end = _mask_value(text, start, keep_numbers=_is_lone_token(name))
        parts += [text[done:start], masked]
        done = at = end
    parts.append(text[done:])
    return "".join(parts)


def _mask_value(text: str, start: int, *, keep_numbers: bool) -> tuple[str, int]:
    """The masked value that starts here, and where it ended."""
    for form in (_REFERENCE, _QUOTED, _ESCAPED, _LIST, _BARE):
        if found := form.match(text, start):
            break
    else:
        return "", start
    quote, value = (found[1], found[2]) if found.groups() else ("", found[0])
    harmless = value.lower() in _NOTHING or _REFERENCE.fullmatch(value) is not None
    if harmless or (keep_numbers and _NUMBER.fullmatch(value)):
        return found[0], found.end()
    return (f"[{MASK}]" if form is _LIST else f"{quote}{MASK}"), found.end()
