"""How reports say things: durations, points, and text that others wrote."""

from __future__ import annotations

import contextlib
import getpass
import ipaddress
import platform
import re
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any

from llm_bisect.model.secrets import mask_text

_HOME = re.compile(r"(?:/home/[\w.@-]+|/Users/[\w.@-]+|(?<![\w./-])/root)(?![\w.@-])")
_GPU = re.compile(r"\b(GPU|MIG)-[0-9a-fA-F]{4,8}(?:-[0-9a-fA-F]{4,12}){1,4}(?:/\d+/\d+)?")
_IPV4 = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.]*\w)")
_IPV6 = re.compile(r"(?<![\w:.])(?:[0-9a-fA-F]{0,4}:){2,7}(?:[0-9a-fA-F]{1,4})?(?:%\w+)?(?![\w:])")
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)")
LOCAL = ("127.0.0.1", "0.0.0.0", "::1", "::")  # noqa: S104
_COMMON = """
localhost local host user root admin ubuntu debian server client docker podman engine vllm sglang llama
llamacpp model models simulated process memory runner compose launch probe prompt study test tests
"""
COMMON = frozenset(_COMMON.split())
"""Names that mean nothing of a machine and would mangle the text if they were taken out."""


def scrub(text: str) -> str:
    """`text` without secrets, home paths, addresses, GPU ids, and this machine's host and user names."""
    text = mask_text(text)
    text = _GPU.sub(r"\1-…", text)
    text = _HOME.sub("~", text)
    text = _IPV4.sub(_address, text)
    text = _IPV6.sub(_address, text)
    for name, instead in personal_names().items():
        text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", instead, text)
    return text


def _address(match: re.Match[str]) -> str:
    text = match.group()
    bare = text.partition("%")[0]
    try:
        ipaddress.ip_address(bare)
    except ValueError:
        return text
    if ":" in bare and max(map(len, bare.split(":"))) < 3:
        return text  # `a::b` is a name in C++ rather than a machine
    return text if text in LOCAL else "(address)"


def has_address(text: str) -> bool:
    """True where `text` holds an address of some machine."""
    return any(_address(m) != m.group() for pattern in (_IPV4, _IPV6) for m in pattern.finditer(text))


def personal_names() -> dict[str, str]:
    """Names of this machine and its user → what stands for them; common words are not taken out."""
    names = {platform.node(): "(host)", platform.node().partition(".")[0]: "(host)"}
    with contextlib.suppress(KeyError, OSError):  # this user may have no name
        names[getpass.getuser()] = "(user)"
    return {n: i for n, i in names.items() if len(n) > 3 and n.lower() not in COMMON}


def scrub_all(value: Any, one: Callable[[str], str] = scrub) -> Any:
    """`value` (plain JSON) with every text in it scrubbed, keys included."""
    if isinstance(value, str):
        return one(value)
    if isinstance(value, Mapping):
        return {one(str(k)): scrub_all(v, one) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [scrub_all(v, one) for v in value]
    return value


def one_line(text: object, longest: int = 300) -> str:
    """Text that others wrote (log lines), on one line, without control characters, cut at `longest`."""
    plain = _ESCAPES.sub("", str(text))
    plain = "".join(" " if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp") else c for c in plain)
    plain = " ".join(plain.split())
    return plain if len(plain) <= longest else plain[: longest - 1] + "…"


def duration(seconds: float) -> str:
    """`7.2 s`, `42 s`, `4 min 12 s`, `2 h 05 min`."""
    if round(seconds) < 60:
        return f"{seconds:.1f} s" if round(seconds, 1) < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def value_text(value: object) -> str:
    """A value of an axis: `0.93`, `180,000`, `fp8`."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10_000:
        return f"{value:,}"
    return one_line(value)


def values_text(values: Mapping[str, Any]) -> str:
    """An assignment: `mem-util 0.93, max-model-len 180,000`."""
    return ", ".join(f"{k} {value_text(v)}" for k, v in values.items()) or "your own values"


def tokens_text(tokens: int | None) -> str:
    return "unknown" if tokens is None else f"{tokens:,}"


def plural(count: int, word: str) -> str:
    """`1 boot`, `3 boots`."""
    return f"{count:,} {word}" + ("" if count == 1 else "s")


_PREFIX = re.compile(
    r"^(?:\(\w+ pid=\d+\) )?"
    r"(?:(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d [\d:]{8} (?:\[[^\]]{1,80}\] ?)?)?"
)


def message_of(line: str, longest: int = 160) -> str:
    """A log line without what engines put before their messages."""
    return one_line(_PREFIX.sub("", line), longest)
