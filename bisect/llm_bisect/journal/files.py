"""Files and folders of the journals: made on disk for certain, nothing left behind, errors in words."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

from llm_bisect.journal import lock
from llm_bisect.model import EnvironmentProblem

GITIGNORE = "*\n!.gitignore\n!reference/\n!reference/**\n"

_ELSEWHERE = "give another folder with --journals or $BISECT_JOURNALS"
_FREE = "free some space there, then run the same command again: it continues"
_ADVICE = {
    errno.ENOSPC: _FREE,
    errno.EDQUOT: _FREE,
    errno.EFBIG: "raise the limit on the size of files (ulimit -f), then run the same command again",
    errno.EIO: "check the disk (dmesg), then run the same command again",
    errno.ENOLCK: "its file system cannot lock files: give a local folder with --journals",
    errno.EOPNOTSUPP: "its file system cannot lock files: give a local folder with --journals",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENAMETOOLONG: "give the study a shorter --study name",
}
_OPEN_TRIES = 5


def open_locked(path: Path, made: list[Path]) -> int:
    """Open or create the file, with its lock, for appending; the folder is made where there is none.

    What was made on the way is added to `made`, outermost first. Raises EnvironmentProblem and OSError.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    for _ in range(_OPEN_TRIES):
        make_folder(path.parent, made)
        refuse_special(path)
        is_new = not os.path.lexists(path)
        fd = os.open(path, flags | os.O_CREAT, 0o600)
        try:
            lock.take(fd, path)
            # Whoever made it may have removed it again between our opening and our lock.
            if path.exists() and os.path.samestat(os.fstat(fd), path.stat()):
                if is_new:
                    made.append(path)
                return fd
        except OSError:
            if is_new:  # a file system without locks
                path.unlink(missing_ok=True)
            os.close(fd)
            raise
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
    raise EnvironmentProblem(
        f"{path} is made and removed again by another process", hint="run the same command again"
    )


def make_folder(folder: Path, made: list[Path]) -> None:
    """Make it (0700) with all that is missing above it, each on disk for certain.

    Raises EnvironmentProblem where something of that name, or above it, is no folder; and OSError.
    """
    missing = []
    for one in (folder, *folder.parents):
        if one.exists():
            if not one.is_dir():
                raise EnvironmentProblem(f"{one} is not a folder: no journal fits into it", hint=_ELSEWHERE)
            break
        missing.append(one)
    for one in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another study's process was faster
            one.mkdir(mode=0o700)
            made.append(one)
        sync_folder(one.parent)


def refuse_special(path: Path) -> None:
    """Raise EnvironmentProblem for a folder, a pipe or a device: opening one could block or do harm."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "not an ordinary file"
        raise EnvironmentProblem(
            f"{path} is {what}, not a journal", hint="give the study another --study name"
        )


def write_gitignore(folder: Path, made: list[Path]) -> None:
    """Keep journals out of the user's commits. Only in a folder that holds nothing but journals: anywhere
    else it would hide the user's own files from git. A folder that stays without it is no reason to fail."""
    ignore = folder / ".gitignore"
    try:
        if not all(_is_of_a_journal(entry) for entry in folder.iterdir()):
            return
        fd = os.open(ignore, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except OSError:
        return
    made.append(ignore)
    try:
        write_all(fd, GITIGNORE.encode())
    except OSError:
        ignore.unlink(missing_ok=True)
    finally:
        os.close(fd)


def _is_of_a_journal(entry: Path) -> bool:
    if entry.suffix == ".jsonl":
        return True
    return entry.is_dir() and (entry.name == "reference" or entry.with_name(f"{entry.name}.jsonl").exists())


def remove_made(made: list[Path], fd: int) -> None:
    """Remove an empty journal that was made here, and its folder where nothing else has come into it."""
    if fd >= 0 and os.fstat(fd).st_size > 0:
        return
    with contextlib.suppress(OSError):
        for path in made:
            if path.suffix == ".jsonl":
                path.unlink(missing_ok=True)
        for path in made:
            if path.name == ".gitignore" and {*path.parent.iterdir()} == {path}:
                path.unlink()
        for path in reversed(made):
            if path.is_dir():
                path.rmdir()
    made.clear()


def read_all(fd: int) -> bytes:
    """The whole file, whatever the position."""
    chunks: list[bytes] = []
    at = 0
    while chunk := os.pread(fd, 1 << 20, at):
        chunks.append(chunk)
        at += len(chunk)
    return b"".join(chunks)


def write_all(fd: int, line: bytes) -> None:
    """One write; again only for the rest that the system did not take."""
    written = os.write(fd, line)
    while written < len(line):
        written += os.write(fd, line[written:])


def sync_folder(folder: Path) -> None:
    """A new name is on disk only when its folder is. Some file systems cannot sync one: no reason to fail."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(fd)


def problem(error: OSError, path: Path, doing: str) -> EnvironmentProblem:
    """What the machine refused, in words; `doing`: written, read, made."""
    where = path
    if error.errno in (errno.ENOTDIR, errno.EACCES, errno.EROFS, errno.EPERM) and error.filename is not None:
        where = Path(os.fsdecode(error.filename))
    said = os.strerror(error.errno) if error.errno else str(error)
    return EnvironmentProblem(
        f"{where} cannot be {doing}: {said[:1].lower()}{said[1:]}",
        hint=_ADVICE.get(error.errno or 0, _ELSEWHERE),
    )
