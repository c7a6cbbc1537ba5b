"""The journal's file: append-only JSON Lines, one writer, every line chained to the one before.

An event is one line, written whole and synced before `append` returns. A torn last line is cut when the
journal is opened; anything broken before it is refused with its number, and then nothing is changed.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

from llm_bisect.journal import files
from llm_bisect.journal.events import KINDS
from llm_bisect.journal.lock import holder_pid
from llm_bisect.journal.records import BrokenLine, Event, Scan, encode, scan
from llm_bisect.model import EnvironmentProblem, UsageProblem
from llm_bisect.model.secrets import mask_secrets

__all__ = ["BrokenJournal", "Event", "Journal", "holder_pid", "read_journal", "utc_now"]


class BrokenJournal(UsageProblem):
    """A journal with a fault that no crash explains. `line` counts from 1. Nothing has been changed."""

    def __init__(self, path: Path, broken: BrokenLine) -> None:
        super().__init__(
            f"{path}: {broken}; nothing was changed",
            hint="restore the file (it is only ever appended to), or begin again with another --study name",
        )
        self.line = broken.number


def utc_now() -> datetime:
    """The moment, in UTC."""
    return datetime.now(UTC)


class Journal:
    """The one writer of a study's journal, and a context manager. Its lock ends with its process.

    `append` may be called from any thread. A journal that was made here and got no event is removed again
    by `close`, with the folder and the `.gitignore` that were made for it.
    """

    def __init__(
        self,
        path: Path,
        fd: int,
        found: Scan,
        *,
        now: Callable[[], datetime],
        kinds: frozenset[str],
        made: list[Path],
    ) -> None:
        self.path = path
        self.repaired: str | None = None  # what was repaired at the tail, in words
        self._fd = fd
        self._events = found.events
        self._check = found.check
        self._good_bytes = found.good_bytes
        self._uncut = False  # a failed append could not be cut off yet
        self._now = now
        self._kinds = kinds
        self._made = made
        self._mutex = threading.Lock()
        try:
            self._repair(found)
        except BaseException:
            self._fd = -1  # `open` closes it
            raise

    @classmethod
    def open(
        cls, path: Path, *, now: Callable[[], datetime] = utc_now, kinds: frozenset[str] = KINDS
    ) -> Journal:
        """Open the journal at `path` for writing, or make it (0600, in a folder of 0700), and verify it.

        Raises EnvironmentProblem where another process holds it, or it cannot be written; BrokenJournal
        (a UsageProblem) where it is broken before its last line.
        """
        made: list[Path] = []
        fd = -1
        try:
            fd = files.open_locked(path, made)
            data = files.read_all(fd)
            journal = cls(path, fd, scan(data, kinds), now=now, kinds=kinds, made=made)
            if made:
                files.sync_folder(path.parent)
            files.write_gitignore(path.parent, made)
        except BaseException as error:
            files.remove_made(made, fd)
            if fd >= 0:
                os.close(fd)
            _explain(error, path)
        return journal

    @property
    def events(self) -> list[Event]:
        """A copy of all events, oldest first, as a reader of the file sees them."""
        return list(self._events)

    @property
    def side_dir(self) -> Path:
        """The study's folder for whole logs and timelines, made on demand (0700).

        Raises EnvironmentProblem.
        """
        folder = self.path.with_suffix("")
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise files.problem(error, folder, "made") from error
        return folder

    def append(self, kind: str, body: Mapping[str, Any]) -> Event:
        """Write one event, secrets masked, and sync it; returns it as a reader will see it.

        Raises EnvironmentProblem where it cannot be written (disk full, …): the file then holds the events
        that it held before, and a later append may succeed. Raises ValueError or TypeError for an event
        that no journal can hold: an unknown kind, a number that is not finite, an object that is no JSON.
        """
        with self._mutex:
            if self._fd < 0:
                raise ValueError(f"{self.path} is closed")
            if kind not in self._kinds:
                raise ValueError(f"unknown kind of event: {kind!r}")
            event = Event(len(self._events) + 1, _stamp(self._now()), kind, mask_secrets(dict(body)))
            written = encode(self._check, event)
            self._refuse_tampering()
            try:
                files.write_all(self._fd, written.line)
                os.fsync(self._fd)
            except BaseException as error:
                self._cut_back()
                _explain(error, self.path)
            self._events.append(written.event)
            self._check = written.check
            self._good_bytes += len(written.line)
            return written.event

    def close(self) -> None:
        """Give the lock back. Safe to call twice."""
        with self._mutex:
            if self._fd < 0:
                return
            fd, self._fd = self._fd, -1
            try:
                if not self._events:
                    files.remove_made(self._made, fd)
            finally:
                os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # One that was dropped without `close` must not keep its study locked.
        if getattr(self, "_fd", -1) >= 0:
            self.close()

    def _repair(self, found: Scan) -> None:
        """Cut a torn tail, or end a last line that lacks only its line end; on disk before we go on."""
        if found.torn_bytes:
            os.ftruncate(self._fd, found.good_bytes)
            plural = "byte" if found.torn_bytes == 1 else "bytes"
            self.repaired = f"{found.torn_bytes} {plural} of an unfinished last line"
        elif found.unended:
            try:
                files.write_all(self._fd, b"\n")
            except OSError:
                self._cut_back()
                raise
            self._good_bytes += 1
            self.repaired = "the missing end of the last line"
        # Also without a repair: the last line of a writer that was killed may not have reached the disk.
        os.fsync(self._fd)

    def _refuse_tampering(self) -> None:
        """The file must be as we left it: appending to anything else would break the chain for good."""
        try:
            found = os.fstat(self._fd)
            if found.st_size > self._good_bytes and self._uncut:
                os.ftruncate(self._fd, self._good_bytes)
                found = os.fstat(self._fd)
        except OSError as error:
            raise files.problem(error, self.path, "written") from error
        what = None
        if found.st_nlink == 0:
            what = "was deleted or replaced while the study runs"
        elif found.st_size != self._good_bytes:
            what = f"was changed by another program while the study runs ({found.st_size} bytes instead of "
            what += f"{self._good_bytes})"
        if what is not None:
            raise EnvironmentProblem(
                f"{self.path} {what}", hint="restore it if you can, then run the same command again"
            )
        self._uncut = False

    def _cut_back(self) -> None:
        """Cut what a failed write left. Where even that fails the next append or opening does it."""
        self._uncut = True
        try:
            os.ftruncate(self._fd, self._good_bytes)
            os.fsync(self._fd)
        except OSError:
            return
        self._uncut = False


def read_journal(path: Path, *, kinds: frozenset[str] = KINDS) -> list[Event]:
    """All whole events, without a lock, also while another process writes. Changes nothing.

    Raises UsageProblem where there is no such journal, BrokenJournal as `Journal.open` does, and
    EnvironmentProblem where it cannot be read.
    """
    before: bytes | None = None
    while True:
        try:
            files.refuse_special(path)
            data = path.read_bytes()
        except FileNotFoundError as error:
            raise UsageProblem(
                f"there is no journal {path}", hint="bisect status lists the studies"
            ) from error
        except OSError as error:
            raise files.problem(error, path, "read") from error
        try:
            return scan(data, kinds).events
        except BrokenLine as broken:
            # A writer that cut back a failed append while we read may have shown us parts of two lines.
            if data == before:
                raise BrokenJournal(path, broken) from None
            before = data
            time.sleep(0.02)


def _stamp(moment: datetime) -> str:
    if moment.tzinfo is None:
        raise ValueError("the journal's clock must say its time zone")
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _explain(error: BaseException, path: Path) -> NoReturn:
    """Raise it in the user's words where it is the file's or the machine's doing, else as it is."""
    if isinstance(error, BrokenLine):
        raise BrokenJournal(path, error) from None
    if isinstance(error, OSError):
        raise files.problem(error, path, "written") from error
    raise error
