"""What must not leave this machine inside a working compose file, replaced by variables that do the same.

A masked value would break the file without a word; a required variable says what is missing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llm_bisect.model.secrets import is_secret_name, mask_text
from llm_bisect.reports.compose_words import has_variable, split_words
from llm_bisect.reports.words import has_address
from llm_bisect.spaces.compose_tags import Override

_OTHER_HOME = re.compile(r"(?<![\w./-])(?:/home|/Users)/[\w.@-]+(?![\w.@-])")
_ROOT_HOME = re.compile(r"^/root(?=/|$)")
HOME_ELSEWHERE = "${HOME_FOLDER:?the base names the home folder of another user here}"


def host_path(source: str) -> str:
    """A path of this host without the home folder in it: `${HOME}/models`."""
    home = str(Path.home())
    if source == home or source.startswith(home.rstrip("/") + "/"):
        return "${HOME}" + source[len(home) :]
    return _OTHER_HOME.sub(HOME_ELSEWHERE, _ROOT_HOME.sub(HOME_ELSEWHERE, source))


def guard_service(service: Any) -> Any:
    """The service with secrets, addresses and home paths replaced by variables, so that it still works."""
    if isinstance(service, Override):
        return Override(guard_service(service.value))
    if not isinstance(service, Mapping):
        return service
    return {key: _field(key, value) for key, value in service.items()}


def _field(key: str, value: Any) -> Any:
    if isinstance(value, Override):
        return Override(_field(key, value.value))
    if key == "environment":
        return _environment(value)
    if key in ("command", "entrypoint"):
        return _argv(value) if isinstance(value, list) else _command(value)
    if key == "volumes" and isinstance(value, list):
        return [_volume(v) for v in value]
    return value


def _environment(value: Any) -> Any:
    if isinstance(value, list):
        pairs = [str(item).partition("=") for item in value]
        return [
            f"{k}={_literal(k, v)}" if e and _literal(k, v) != v else i
            for i, (k, e, v) in zip(value, pairs, strict=True)
        ]
    if isinstance(value, Mapping):
        return {k: _literal(k, v) if isinstance(v, str) else v for k, v in value.items()}
    return value


def _literal(name: str, text: str) -> str:
    """A value of a variable or flag, or the variable that stands for it."""
    if not text or has_variable(text):
        return text
    if is_secret_name(name) or mask_text(text) != text:
        return _variable(name, "a secret was left out here")
    if has_address(text):
        return _variable(f"{name}_ADDRESS", "an address was left out here")
    home = str(Path.home())
    return text.replace(home, "${HOME}") if home.startswith(("/home/", "/Users/")) else text


def _variable(name: str, why: str) -> str:
    upper = re.sub(r"\W", "_", name.lstrip("-")).upper() or "VALUE"
    return f"${{{upper if not upper[0].isdigit() else '_' + upper}:?{why}}}"


def _argv(items: list[Any]) -> list[Any]:
    found: list[Any] = []
    flag = ""
    for item in items:
        text = str(item)
        name, equals, value = text.partition("=")
        if text.startswith("-") and equals:
            new = f"{name}={_literal(name, value)}"
        else:
            new = _literal(flag or "argument", text)
        found.append(item if new == text else new)
        flag = text if text.startswith("-") and not equals else ""
    return found


def _command(text: Any) -> Any:
    if not isinstance(text, str):
        return text
    words = split_words(text)
    guarded = _argv([w.text for w in words])
    parts, end = [], 0
    for word, new in zip(words, guarded, strict=True):
        kept = text[word.start : word.end] if new == word.text else f'"{new}"'
        parts.append(text[end : word.start] + kept)
        end = word.end
    return "".join([*parts, text[end:]])


def _volume(entry: Any) -> Any:
    if isinstance(entry, Mapping):
        source = entry.get("source")
        return (
            {**entry, "source": host_path(source)}
            if isinstance(source, str) and host_path(source) != source
            else entry
        )
    source, colon, rest = str(entry).partition(":")
    return entry if host_path(source) == source else host_path(source) + colon + rest
