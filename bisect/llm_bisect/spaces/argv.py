"""Flags in an argv, in every spelling: `--flag v`, `--flag=v`, `--the_flag v`, `-c v`, and inside scripts.

A command may be a shell with a script (`bash -c 'exec vllm serve … "$@"' -- …`). Words of such a script are
read, with the variables that the launch's environment gives it; they are never rewritten. What follows the
script reaches the engine only where the script passes `"$@"` on.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

_SHELLS = ("sh", "bash", "dash", "ash", "zsh")
_WRAPPERS = ("env", "tini", "dumb-init", "exec", "gosu", "nice", "catatonit")
_REST = ("$@", "${@}", "$*", "${*}", "${@:1}")
_NO_ENV: Mapping[str, str] = {}
_VARIABLE = re.compile(
    r"\$(?:\{(?P<braced>\w+)(?:(?P<how>:?[-=])(?P<default>[^{}]*))?\}|(?P<plain>[A-Za-z_]\w*))"
)
_NUMBER = re.compile(r"-?(?=.{1,20}$)(?:\d+\.?\d*|\.\d+)", re.ASCII)  # longer ones would be rounded
_SWITCH_WORDS = ("on", "off", "true", "false", "0", "1", "auto")


@dataclass(frozen=True)
class Script:
    """A shell's script in an argv: `argv[at]` is its text, its own arguments begin at `args` (after `$0`)."""

    at: int
    args: int


def script_of(words: Sequence[str]) -> Script | None:
    """Where the script of `bash -c …` stands; None where the argv is no such command."""
    i = 0
    while i < len(words) and (name := words[i].rsplit("/", 1)[-1]) not in _SHELLS:
        if name not in _WRAPPERS and not words[i].startswith("-") and "=" not in words[i]:
            return None
        i += 1
    i += 1
    while i < len(words) and words[i][:1] in ("-", "+") and len(words[i]) > 1:
        letters = "" if words[i].startswith("--") else words[i][1:]
        if "c" in letters:
            i += 1 + letters.count("o")  # -o takes its value after the whole cluster
            return Script(i, i + 2) if i < len(words) else None
        i += 1 + letters.count("o")
    return None


def script_commands(text: str) -> list[list[str]]:
    """The commands of a script, each as its words; quotes are taken off, variables are left."""
    text = re.sub(r"(?m)^\s*#.*$", "", text).replace("\\\n", " ")
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|()\n")
    lexer.whitespace = " \t\r"
    lexer.whitespace_split = True
    lexer.commenters = ""
    commands: list[list[str]] = [[]]
    try:
        for word in lexer:
            if word and not word.strip(";&|()\n"):
                commands.append([])
            else:
                commands[-1].append(word)
    except ValueError:  # an unclosed quote: read as far as words go
        commands = [line.split() for line in text.splitlines()]
    return [c for c in commands if c]


def effective(words: Sequence[str], env: Mapping[str, str] | None = _NO_ENV) -> list[str]:
    """The engine's own argv: of a script, the command that starts the engine, variables filled in (unless
    `env` is None)."""
    script = script_of(words)
    if script is None:
        return list(words)
    result: list[str] = []
    for word in _engine_command(script_commands(words[script.at])):
        result += list(words[script.args :]) if word in _REST else [_filled(word, env)]
    return result


def find_flag(
    words: Sequence[str], spellings: Sequence[str], env: Mapping[str, str] | None = _NO_ENV
) -> str | None:
    """The value of the last such flag, as engines read them; None where it is not given. A flag without a
    value gives an empty text. `env` None: variables of a script stay as text."""
    found = _last(effective(words, env), spellings)
    script = script_of(words)
    if found is None and script is not None:  # gathered in a shell's array, say
        for command in script_commands(words[script.at]):
            value = _last([_filled(w, env) for w in command], spellings)
            found = found if value is None else value
    return found


def flag_variable(words: Sequence[str], spellings: Sequence[str]) -> str | None:
    """The variable of its environment that a script gives the flag (`--flag "$LEN"`: LEN), if it does."""
    value = find_flag(words, spellings, None)
    match = _VARIABLE.fullmatch(value) if value else None
    return (match["braced"] or match["plain"]) if match and script_of(words) else None


def set_flag(
    entrypoint: Sequence[str], command: Sequence[str], spellings: Sequence[str], value: str | None
) -> tuple[str, ...]:
    """The command with the flag set once: replaced where it stood, in the spelling it had, else appended.

    `value` None: a flag without a value. Words of the entrypoint and of a script stay as they are; whether
    the flag then reaches the engine is for `find_flag` to say.
    """
    head, tail = _editable(entrypoint, command)
    result: list[str] = []
    done = False
    for unit in _units(tail, spellings, switch=value is None):
        if not _is(unit[0], spellings):
            result += unit
        elif not done:
            name, equals, _ = unit[0].partition("=")
            result += [name] if value is None else [f"{name}={value}"] if equals else [name, value]
            done = True
    if not done:
        result += [spellings[0]] if value is None else [spellings[0], value]
    return (*head, *result)


def remove_flag(
    entrypoint: Sequence[str], command: Sequence[str], spellings: Sequence[str], *, switch: bool = False
) -> tuple[str, ...]:
    """The command without the flag and its value (`switch`: it has none, unless that is on, off, …)."""
    head, tail = _editable(entrypoint, command, needs_name=False)
    kept = [unit for unit in _units(tail, spellings, switch=switch) if not _is(unit[0], spellings)]
    return (*head, *(word for unit in kept for word in unit))


def normalised(words: Sequence[str], aliases: Mapping[str, str] = _NO_ENV) -> list[list[str]]:
    """The argv as sorted units (a flag with its values): what engines read alike becomes alike.

    `aliases`: a flag's spelling → the one to write. Words before the first flag, repeated flags and scripts
    keep their order.
    """
    script = script_of(words)
    if script is not None:
        whole = [["script", *c] for c in script_commands(words[script.at])]
        return [list(words[: script.at]), *whole, *normalised(words[script.args :], aliases)]
    units: list[list[str]] = [[]]
    for word in words:
        if not is_flag(word):
            units[-1].append(_plain(word))
            continue
        name, equals, value = word.partition("=") if word.startswith("--") else (word, "", "")
        name = tidy(name)
        units.append([aliases.get(name, name), *([_plain(value)] if equals else [])])
    return [units[0], *sorted(units[1:], key=lambda unit: unit[0])]


def expand(word: str, env: Mapping[str, str]) -> str:
    """`$NAME`, `${NAME}` and `${NAME:-default}` as a shell would; what is not known stays as text."""

    def value(match: re.Match[str]) -> str:
        found = env.get(match["braced"] or match["plain"])
        if found or (found is not None and not (match["how"] or "").startswith(":")):
            return found
        return match["default"] if match["default"] is not None else match[0]

    return _VARIABLE.sub(value, word)


def is_flag(word: str) -> bool:
    """True for a flag's name; negative numbers are values."""
    return word.startswith("-") and len(word) > 1 and not word[1].isdigit() and word[1] not in ". "


def tidy(name: str) -> str:
    """`--the_flag` and `--the-flag` are one flag to the engines."""
    return name.replace("_", "-") if name.startswith("--") else name


def _filled(word: str, env: Mapping[str, str] | None) -> str:
    return word if env is None else expand(word, env)


def _engine_command(commands: Sequence[list[str]]) -> list[str]:
    passes = [c for c in commands if any(w in _REST for w in c)]
    execs = [c for c in commands if "exec" in c]
    flagged = [c for c in commands if any(is_flag(w) for w in c)]
    return next((group[-1] for group in (passes, execs, flagged, commands) if group), [])


def _last(argv: Sequence[str], spellings: Sequence[str]) -> str | None:
    found: str | None = None
    for i, word in enumerate(argv):
        if not _is(word, spellings):
            continue
        following = argv[i + 1] if i + 1 < len(argv) else ""
        found = word.partition("=")[2] if "=" in word else "" if is_flag(following) else following
    return found


def _is(word: str, spellings: Sequence[str]) -> bool:
    return is_flag(word) and tidy(word.partition("=")[0]) in {tidy(s) for s in spellings}


def _units(words: Sequence[str], spellings: Sequence[str], *, switch: bool) -> list[list[str]]:
    """The words, such flags together with their values."""
    units: list[list[str]] = []
    takes = False
    for word in words:
        if takes and not is_flag(word) and (not switch or word.lower() in _SWITCH_WORDS):
            units[-1].append(word)
            takes = False
            continue
        units.append([word])
        takes = _is(word, spellings) and "=" not in word
    return units


def _editable(
    entrypoint: Sequence[str], command: Sequence[str], *, needs_name: bool = True
) -> tuple[list[str], list[str]]:
    """(words of the command that stay as they are, words whose flags may be changed)."""
    words = [*entrypoint, *command]
    script = script_of(words)
    start = len(entrypoint)
    if script is not None:
        if len(words) < script.args and needs_name:
            words.append("bash")  # the first word after a script is its $0
        start = max(start, min(script.args, len(words)))
    return words[len(entrypoint) : start], words[start:]


def _plain(word: str) -> str:
    """A value in one spelling: `0.930` and `0.93`, and JSON with any spaces and order."""
    if word[:1] in ("{", "["):
        try:
            return json.dumps(json.loads(word), sort_keys=True)
        except (ValueError, RecursionError):
            return word
    return format(Decimal(word).normalize(), "f") if _NUMBER.fullmatch(word) else word
