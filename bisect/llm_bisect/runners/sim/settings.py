"""What a launch asks of the simulated engine: its argv, environment and mounts, read as vLLM reads them."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_OFF = ("", "0", "false", "no", "off")
_NUMBER = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>[kKmMgG]?)")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
_GENESIS = re.compile(r"GENESIS_ENABLE_(?P<patch>[A-Z]+\d+\w*)")


class ArgumentError(Exception):
    """The engine's own parser refuses the launch: the text is what it would print."""


@dataclass(frozen=True)
class Settings:
    """The part of a launch that the model of the rig knows. Lengths in tokens."""

    gpu_memory_utilization: float = 0.9
    max_model_len: int | None = None  # None: the model's own; -1: as long as fits
    draft_tokens: int = 0  # MTP; 0: off
    kv_dtype: str = "auto"
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    language_model_only: bool = False
    prefix_caching: bool = True
    tensor_parallel: int = 1
    model_path: str = "model"
    served_name: str = "model"
    patches: frozenset[str] = frozenset()  # file names of mounted patches
    genesis: Mapping[str, bool] = field(default_factory=dict)  # patch → applied
    env: Mapping[str, str] = field(default_factory=dict)  # only names that the rig may look at


def read_launch(argv: Sequence[str], env: Mapping[str, str], mounted: Sequence[str]) -> Settings:
    """Settings of a launch; `mounted` are paths of its mounts. Raises ArgumentError."""
    flags = _flags(_words(argv))
    model = _last(flags, "--model") or _positional(argv) or "model"
    text = _last(flags, "--gpu-memory-utilization") or "0.9"
    try:
        share = float(text)
    except ValueError as error:
        raise ArgumentError(f"argument --gpu-memory-utilization: invalid float value: {text!r}") from error
    return Settings(
        gpu_memory_utilization=share,
        max_model_len=_length(_last(flags, "--max-model-len"), "--max-model-len"),
        draft_tokens=_draft_tokens(flags),
        kv_dtype=_last(flags, "--kv-cache-dtype") or "auto",
        max_num_batched_tokens=_length(_last(flags, "--max-num-batched-tokens"), "--max-num-batched-tokens")
        or 8192,
        max_num_seqs=_length(_last(flags, "--max-num-seqs"), "--max-num-seqs") or 256,
        language_model_only="--language-model-only" in flags,
        prefix_caching="--no-enable-prefix-caching" not in flags,
        tensor_parallel=_length(
            _last(flags, "--tensor-parallel-size") or _last(flags, "-tp"), "--tensor-parallel-size"
        )
        or 1,
        model_path=model,
        served_name=_last(flags, "--served-model-name") or model,
        patches=frozenset(path.rstrip("/").rpartition("/")[2] for path in mounted),
        genesis={
            found["patch"]: env[name].strip().lower() not in _OFF
            for name in sorted(env)
            if (found := _GENESIS.fullmatch(name))
        },
        env=relevant_env(env),
    )


def relevant_env(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that the rig may look at; none of them holds a secret."""
    return {name: value for name, value in env.items() if name.startswith(("GENESIS_", "VLLM_SSM_"))}


def without_key(argv: Sequence[str]) -> list[str]:
    """The argv without the key that clients must send."""
    kept: list[str] = []
    skip = False
    for word in argv:
        if skip or word.startswith("--api-key="):
            skip = False
        elif word == "--api-key":
            skip = True
        else:
            kept.append(word)
    return kept


def is_on(env: Mapping[str, str], name: str) -> bool:
    return env.get(name, "").strip().lower() not in _OFF


def _words(argv: Sequence[str]) -> list[str]:
    """Words of the launch; the text of a shell script is taken apart."""
    words: list[str] = []
    for word in argv:
        if " --" in word and not word.lstrip().startswith("{"):
            try:
                words += shlex.split(word, comments=True)
            except ValueError:
                words.append(word)
        else:
            words.append(word)
    return words


def _flags(words: Sequence[str]) -> dict[str, list[str]]:
    """Flag → its values in order; a flag without one has an empty text."""
    flags: dict[str, list[str]] = {}
    for index, word in enumerate(words):
        if not word.startswith("-") or word == "-":
            continue
        name, equals, value = word.partition("=")
        if not equals and index + 1 < len(words):
            following = words[index + 1]
            value = "" if re.match(r"--?[a-zA-Z]", following) else following
        # vLLM takes dots and underscores for dashes
        name = "--" + name[2:].replace("_", "-") if name.startswith("--") else name
        flags.setdefault(name, []).append(value)
    return flags


def _last(flags: Mapping[str, Sequence[str]], name: str) -> str | None:
    return flags[name][-1] if flags.get(name) else None


def _positional(argv: Sequence[str]) -> str | None:
    words = _words(argv)
    if "serve" in words and words.index("serve") + 1 < len(words):
        following = words[words.index("serve") + 1]
        return None if following.startswith("-") else following
    return None


def _length(text: str | None, flag: str) -> int | None:
    """`180000`, `180k` (thousands), `180K` (of 1024), `auto` and `-1` (as much as fits)."""
    if text is None:
        return None
    if text.strip().lower() in ("auto", "-1"):
        return -1
    found = _NUMBER.fullmatch(text.strip())
    if found is None:
        raise ArgumentError(f"argument {flag}: invalid human_readable_int value: {text!r}")
    return int(float(found["number"]) * _UNITS[found["unit"]])


def _draft_tokens(flags: Mapping[str, Sequence[str]]) -> int:
    text = _last(flags, "--speculative-config")
    found: object = None
    if text:
        try:
            found = json.loads(text)
        except ValueError as error:
            raise ArgumentError(
                f"argument --speculative-config: Value {text} cannot be converted to <function loads>."
            ) from error
    number = _last(flags, "--speculative-config.num-speculative-tokens")
    if number is not None:
        return int(number) if number.isdigit() else 0
    if not isinstance(found, dict):
        return 0
    tokens = found.get("num_speculative_tokens", 1)
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise ArgumentError("Value error, num_speculative_tokens must be greater than zero.")
    return tokens
