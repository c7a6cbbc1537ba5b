"""Changing raw parts of a compose service: its command, environment and volumes, all else left as written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

from llm_bisect.model import Mount, UsageProblem
from llm_bisect.reports.compose_words import (
    Word,
    align,
    could_be,
    escape,
    has_variable,
    quote,
    split_words,
    substitute,
    volume_target,
)


def edit_command(raw: Any, own: Sequence[str], wanted: Sequence[str], variables: Mapping[str, str]) -> Any:
    """`raw` (a list, a string, or None) changed so that it gives `wanted`; it gives `own` as it stands.

    `variables` are put in, every other variable stays. Raises UsageProblem where a change falls into text
    that cannot be written without resolving a variable.
    """
    if raw is None:
        return [escape(argument) for argument in wanted]
    is_text = isinstance(raw, str)
    words = split_words(raw) if is_text else [Word(str(item), 0, 0, quoted=True) for item in raw]
    changes = _Changes(words, align(words, own, splits=is_text), variables)
    for tag, i, i_end, j, j_end in SequenceMatcher(None, own, wanted, autojunk=False).get_opcodes():
        if tag == "equal":
            continue
        shared = min(i_end - i, j_end - j)
        for k in range(shared):
            changes.replace(i + k, wanted[j + k])
        for k in range(i + shared, i_end):
            changes.remove(k)
        changes.insert(i + shared, wanted[j + shared : j_end])
    return changes.as_text(raw) if is_text else changes.as_list(raw)


class _Changes:
    """Edits by argument, kept by word."""

    def __init__(self, words: Sequence[Word], counts: Sequence[int], variables: Mapping[str, str]) -> None:
        self.words, self.counts, self.variables = words, counts, variables
        self.owners = [w for w, count in enumerate(counts) for _ in range(count)]
        self.instead: dict[int, str | None] = {}  # word → its argument; None: removed
        self.after: dict[int, list[str]] = {}  # word (-1: the start) → arguments put in after it

    def replace(self, argument: int, new: str) -> None:
        w = self._owner(argument)
        text = self.words[w].text
        put_in = substitute(text, self.variables)
        if put_in != text and could_be(put_in, new):
            return  # the variable does it
        if has_variable(text) and any(c.isspace() for c in new):
            raise _would_resolve(text)  # a script, most likely
        self.instead[w] = new

    def remove(self, argument: int) -> None:
        self.instead[self._owner(argument)] = None

    def insert(self, before: int, new: Sequence[str]) -> None:
        if not new:
            return
        w = self.owners[before - 1] if before else -1
        if 0 < before < len(self.owners) and self.owners[before] == w:
            raise _would_resolve(self.words[w].text)
        self.after.setdefault(w, []).extend(new)

    def _owner(self, argument: int) -> int:
        w = self.owners[argument]
        if self.counts[w] != 1:
            raise _would_resolve(self.words[w].text)
        return w

    def as_list(self, raw: Sequence[Any]) -> list[Any]:
        found: list[Any] = [escape(a) for a in self.after.get(-1, ())]
        for w, item in enumerate(raw):
            new = self.instead.get(w, "")
            if w not in self.instead:
                put_in = substitute(str(item), self.variables)
                found.append(item if put_in == item else put_in)
            elif new is not None:
                found.append(escape(new))
            found += [escape(a) for a in self.after.get(w, ())]
        return found

    def as_text(self, raw: str) -> str:
        parts = [" ".join(quote(a) for a in self.after.get(-1, ()))]
        end = 0
        for w, word in enumerate(self.words):
            gap, end = raw[end : word.start], word.end
            if w not in self.instead:
                parts.append(gap + raw[word.start : word.end])
            elif (new := self.instead[w]) is not None:
                parts.append(gap + quote(new))
            parts += [f" {quote(a)}" for a in self.after.get(w, ())]
        return substitute("".join([*parts, raw[end:]]), self.variables).lstrip()


def _would_resolve(text: str) -> UsageProblem:
    return UsageProblem(
        f"the change falls into {text[:80]!r} of the compose file, whose variables would have to be resolved",
        hint="--to env or --to json name the values; write them in by hand",
    )


def edit_environment(raw: Any, sets: Mapping[str, str | None]) -> Any:
    """`raw` (a list, a mapping, or None) with these variables of the container set, or taken out (None)."""
    if isinstance(raw, list):
        kept = [item for item in raw if str(item).partition("=")[0] not in sets]
        # in place where the entry was there, so that a reader finds it
        new = {k: f"{k}={escape(v)}" for k, v in sets.items() if v is not None}
        if len(kept) == len(raw):
            return [*raw, *new.values()]
        named = [(str(item).partition("=")[0], item) for item in raw]
        found = [
            new.pop(k) if k in new else item for k, item in named if k not in sets or sets[k] is not None
        ]
        return [*found, *new.values()]
    found_map = {k: v for k, v in (raw or {}).items() if k not in sets or sets[k] is not None}
    return {**found_map, **{k: escape(v) for k, v in sets.items() if v is not None}}


def edit_volumes(raw: Any, adds: Sequence[tuple[Mount, str]], drops: Sequence[str]) -> list[Any]:
    """`raw` without the mounts at `drops`, and with `adds` (each with its source as it is to be written)."""
    gone = [*drops, *(mount.target for mount, _ in adds)]
    kept = [
        entry for entry in raw or [] if not any(could_be(_tidy(volume_target(entry)), _tidy(t)) for t in gone)
    ]
    return [*kept, *(mount_entry(mount, source) for mount, source in adds)]


def mount_entry(mount: Mount, source: str) -> dict[str, Any]:
    """A mount in Compose's long form. `source` is written as it is, variables and all."""
    entry: dict[str, Any] = {"type": mount.kind}
    if mount.kind != "tmpfs":
        entry["source"] = source
    entry["target"] = escape(mount.target)
    if mount.read_only:
        entry["read_only"] = True
    if mount.kind == "bind":
        entry["bind"] = {"create_host_path": False}  # a missing file is an error, not a new folder
    return entry


def _tidy(target: str) -> str:
    return target.rstrip("/") or "/"
