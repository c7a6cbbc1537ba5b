"""Flags in an argv, in every spelling: `--flag v`, `--flag=v`, `-c v`, and inside `bash -c "…"` scripts."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

_SHELLS = ("sh", "bash", "dash", "ash", "zsh")


def find_flag(words: Sequence[str], spellings: Sequence[str]) -> str | None:
    """The value of the last such flag, as engines read them; None where it is not given. A flag without a
    value gives an empty text. Scripts after a shell's -c are read too."""
    found: str | None = None
    for argv in _readings(words):
        for i, word in enumerate(argv):
            name, equals, value = word.partition("=")
            if name not in spellings:
                continue
            if equals:
                found = value
            else:
                following = argv[i + 1] if i + 1 < len(argv) else ""
                found = following if not _is_flag(following) else ""
    return found


def has_flag(words: Sequence[str], spellings: Sequence[str]) -> bool:
    """True where the flag stands in the argv itself (not only inside a script)."""
    return any(word.partition("=")[0] in spellings for word in words)


def in_script(words: Sequence[str], spellings: Sequence[str]) -> bool:
    """True where the flag is given inside a script, where it cannot be replaced."""
    return find_flag(words, spellings) is not None and not has_flag(words, spellings)


def set_flag(words: Sequence[str], spellings: Sequence[str], value: str) -> tuple[str, ...]:
    """The argv with the flag set once: replaced where it stood, in the spelling it had, else appended."""
    result: list[str] = []
    done = skip = False
    for i, word in enumerate(words):
        if skip:
            skip = False
            continue
        name, equals, _ = word.partition("=")
        if name not in spellings:
            result.append(word)
            continue
        takes_next = not equals and i + 1 < len(words) and not _is_flag(words[i + 1])
        skip = takes_next
        if not done:
            result += [f"{name}={value}"] if equals else [name, value]
            done = True
    return tuple(result) if done else (*result, spellings[0], value)


def remove_flag(words: Sequence[str], spellings: Sequence[str]) -> tuple[str, ...]:
    """The argv without the flag and its value."""
    result: list[str] = []
    skip = False
    for i, word in enumerate(words):
        if skip:
            skip = False
            continue
        name, equals, _ = word.partition("=")
        if name in spellings:
            skip = not equals and i + 1 < len(words) and not _is_flag(words[i + 1])
            continue
        result.append(word)
    return tuple(result)


def normalised(words: Sequence[str]) -> tuple[str, ...]:
    """The argv with `--flag=v` written as two words: two spellings of one launch become one."""
    result: list[str] = []
    for word in words:
        name, equals, value = word.partition("=")
        result += [name, value] if equals and name.startswith("--") else [word]
    return tuple(result)


def _readings(words: Sequence[str]) -> Iterator[list[str]]:
    yield list(words)
    for i, word in enumerate(words[:-1]):
        shell = i > 0 and words[i - 1].rsplit("/", 1)[-1] in _SHELLS
        if word in ("-c", "-lc", "-ec") and (shell or " " in words[i + 1]):
            try:
                yield shlex.split(words[i + 1].replace("\\\n", " "), comments=False)
            except ValueError:
                yield words[i + 1].split()


def _is_flag(word: str) -> bool:
    """True for a flag's name; negative numbers are values."""
    return word.startswith("-") and len(word) > 1 and not word[1].isdigit() and word[1] != "."
