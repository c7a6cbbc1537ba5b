"""The journal's file: append-only JSON Lines, one writer, every line chained to the one before.

An append is one line, written whole and synced before it returns. A torn last line is cut when the
journal is opened; anything broken before the last line is refused with its number, and nothing is changed.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from llm_bisect.journal.events import KINDS
from llm_bisect.model import EnvironmentProblem
from llm_bisect.model.secrets import mask_secrets

GITIGNORE = "*\n!.gitignore\n!reference/\n!reference/**\n"
_START = "0" * 16
_ADVICE = {
    errno.ENOSPC: "free some space, then run the same command again",
    errno.EDQUOT: "free some space, then run the same command again",
    errno.EROFS: "--journals DIR or $BISECT_JOURNALS names a folder that can be written",
    errno.EACCES: "--journals DIR or $BISECT_JOURNALS names a folder that can be written",
    errno.EPERM: "--journals DIR or $BISECT_JOURNALS names a folder that can be written",
    errno.ENOTDIR: "--journals DIR or $BISECT_JOURNALS names a folder that can be written",
    errno.EFBIG: "raise the limit on the size of files, then run the same command again",
}


@dataclass(frozen=True)
class Event:
    """One line. `at` is UTC in ISO 8601 with milliseconds."""

    seq: int
    at: str
    kind: str
    body: Mapping[str, Any]


@dataclass(frozen=True)
class _Scan:
    events: list[Event]
    good_bytes: int  # length of the whole lines
    torn_bytes: int
    check: str


class Journal:
    """The one writer of a study's journal. Use it as a context manager; the lock dies with the process."""

    def __init__(self, path: Path, fd: int, scan: _Scan, now: Callable[[], datetime]) -> None:
        self.path = path
        self.events: list[Event] = scan.events
        self.repaired = (
            f"{scan.torn_bytes} bytes of an unfinished last line were cut" if scan.torn_bytes else None
        )
        self._fd = fd
        self._good_bytes = scan.good_bytes
        self._check = scan.check
        self._now = now

    @classmethod
    def open(cls, path: Path, *, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> Journal:
        """Open or create it, take its lock, cut a torn tail. Raises EnvironmentProblem: held by another
        process, not writable, or broken (with the line's number; then nothing has been changed)."""
        try:
            _make_folder(path.parent)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
        except OSError as error:
            raise _problem(path, error) from error
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise EnvironmentProblem(f"{path} is not a plain file", hint="give the study another name")
            _lock(fd, path)
            scan = _scan(_read_all(fd), path)
            if scan.torn_bytes:
                os.ftruncate(fd, scan.good_bytes)
            os.fsync(fd)
            _sync_folder(path.parent)
        except OSError as error:
            os.close(fd)
            raise _problem(path, error) from error
        except BaseException:
            os.close(fd)
            raise
        return cls(path, fd, scan, now)

    @property
    def side_dir(self) -> Path:
        """The study's folder for whole logs; made when first asked for, readable by its owner only."""
        folder = self.path.with_suffix("")
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise _problem(folder, error) from error
        return folder

    def append(self, kind: str, body: Mapping[str, Any]) -> Event:
        """Write one event and sync it. Raises EnvironmentProblem (disk full, read-only, …): then the file
        is as it was before, and every earlier event is safe."""
        if kind not in KINDS:
            raise ValueError(f"unknown kind of event: {kind!r}")
        masked = mask_secrets(dict(body))
        at = self._now().astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        seq = len(self.events) + 1
        check, line = _encode(self._check, seq, at, kind, masked)
        try:
            _write_all(self._fd, line)
            os.fsync(self._fd)
        except OSError as error:
            self._undo()
            raise _problem(self.path, error) from error
        event = Event(seq, at, kind, json.loads(line)["body"])
        self.events.append(event)
        self._check = check
        self._good_bytes += len(line)
        return event

    def _undo(self) -> None:
        """Cut what a failed write left; where even that fails, opening the journal will cut it."""
        try:
            os.ftruncate(self._fd, self._good_bytes)
            os.fsync(self._fd)
        except OSError:
            return

    def close(self) -> None:
        """Give the lock back. Safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def read_journal(path: Path) -> list[Event]:
    """All whole events, also while another process writes. Changes nothing. Raises EnvironmentProblem."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise EnvironmentProblem(f"{path} is not a plain file", hint="name a journal")
        return _scan(path.read_bytes(), path).events
    except OSError as error:
        raise _problem(path, error) from error


def holder_pid(path: Path) -> int | None:
    """The process that holds the journal's lock, or None where nobody does (or it cannot be seen)."""
    try:
        with path.open("rb") as file:
            try:
                fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
                return None
            except OSError:
                return _pid_of_lock(os.fstat(file.fileno()))
    except OSError:
        return None


def _pid_of_lock(found: os.stat_result) -> int | None:
    """The pid in /proc/locks for this file's lock."""
    wanted = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    for line in Path("/proc/locks").read_text().splitlines():
        parts = line.split()
        if len(parts) > 5 and parts[1] == "FLOCK" and parts[-3] == wanted and int(parts[-4]) > 0:
            return int(parts[-4])
    return None


def _lock(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = holder_pid(path)
        who = f"process {pid}" if pid else "another process"
        raise EnvironmentProblem(
            f"study {path.stem!r} is running already: {who} holds {path}",
            hint=f"bisect status {path.stem} shows it, bisect stop {path.stem} ends it",
        ) from None


def _encode(before: str, seq: int, at: str, kind: str, body: Mapping[str, Any]) -> tuple[str, bytes]:
    """(check, line). The check covers the line before, so a line can neither be changed nor moved."""
    plain = {"seq": seq, "at": at, "kind": kind, "body": body}
    check = _check(before, plain)
    text = json.dumps({**plain, "check": check}, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # lone surrogates (from undecodable bytes) cannot be written as UTF-8
    return check, text.encode("utf-8", "backslashreplace").replace(b"\n", b" ") + b"\n"


def _check(before: str, plain: Mapping[str, Any]) -> str:
    canonical = json.dumps(plain, ensure_ascii=True, allow_nan=False, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(f"{before}{canonical}".encode()).hexdigest()[:16]


def _scan(data: bytes, path: Path) -> _Scan:
    """All whole lines with their chain verified; what follows the last of them is torn."""
    events: list[Event] = []
    check, good = _START, 0
    lines = list(_lines(data))
    for number, (start, line) in enumerate(lines, 1):
        problem, event, found = _decode(line, number, check)
        if event is None:
            if number == len(lines) and not line.endswith(b"\n"):
                break
            if number == len(lines) and problem == "not JSON":
                break  # a last line whose middle was never written (lost blocks read as zeros)
            raise EnvironmentProblem(
                f"{path}, line {number}: {problem}; nothing was changed",
                hint="a journal is only ever appended to: restore the file, or start a study of another name",
            )
        events.append(event)
        check, good = found, start + len(line)
    return _Scan(events, good, len(data) - good, check)


def _lines(data: bytes) -> Iterator[tuple[int, bytes]]:
    start = 0
    while start < len(data):
        end = data.find(b"\n", start) + 1 or len(data)
        yield start, data[start:end]
        start = end


def _decode(line: bytes, number: int, before: str) -> tuple[str, Event | None, str]:
    """(what is wrong, event or None, its check)."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return "not JSON", None, ""
    if not line.endswith(b"\n"):
        return "no end of line", None, ""
    if not isinstance(entry, dict) or not {"seq", "at", "kind", "body", "check"} <= entry.keys():
        return "not an event", None, ""
    if entry["kind"] not in KINDS:
        return f"unknown kind of event {entry['kind']!r} (written by a newer bisect?)", None, ""
    if entry["seq"] != number:
        return f"it says it is event {entry['seq']}: events are missing or were moved", None, ""
    check = _check(before, {k: entry[k] for k in ("seq", "at", "kind", "body")})
    if check != entry["check"]:
        return "its check does not fit: it, or the line before, was changed", None, ""
    return "", Event(entry["seq"], entry["at"], entry["kind"], entry["body"]), check


def _make_folder(folder: Path) -> None:
    if not folder.is_dir():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _sync_folder(folder.parent)
    ignore = folder / ".gitignore"
    if not ignore.exists():
        ignore.write_text(GITIGNORE)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _read_all(fd: int) -> bytes:
    chunks: list[bytes] = []
    at = 0
    while chunk := os.pread(fd, 1 << 20, at):
        chunks.append(chunk)
        at += len(chunk)
    return b"".join(chunks)


def _write_all(fd: int, line: bytes) -> None:
    """One write; the rest again only where the system took less."""
    written = os.write(fd, line)
    while written < len(line):
        written += os.write(fd, line[written:])


def _problem(path: Path, error: OSError) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"{path}: {error.strerror or error}",
        hint=_ADVICE.get(error.errno or 0, "check the folder and its disk"),
    )
