"""The log of one boot: a file that grows, read by character marks without holding it in memory."""

from __future__ import annotations

import threading
from pathlib import Path

_STEP = 1 << 16


class LogFile:
    """Reads a growing log. Marks count characters; bytes that are no UTF-8 become U+FFFD."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        # (characters, bytes) before some line starts: a decoder may begin there
        self._checkpoints: list[tuple[int, int]] = [(0, 0)]

    def text(self, since: int = 0) -> str:
        """All from character `since` on; empty where there is no log yet."""
        with self._lock:
            chars, data = self._from(since)
        return data.decode("utf-8", errors="replace")[max(0, since - chars) :]

    def mark(self) -> int:
        """Characters in the log now."""
        with self._lock:
            chars, data = self._from(None)
        return chars + len(data.decode("utf-8", errors="replace"))

    def size_bytes(self) -> int:
        """Bytes in the log now."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def tail(self, limit: int = 4000) -> str:
        """The last `limit` characters (bytes, near enough)."""
        try:
            with self.path.open("rb") as file:
                file.seek(max(0, self.size_bytes() - limit))
                return file.read().decode("utf-8", errors="replace")
        except OSError:
            return ""

    def _from(self, since: int | None) -> tuple[int, bytes]:
        """Characters before, and bytes from, the last checkpoint at or before `since`."""
        self._advance()
        chars, offset = self._checkpoints[-1]
        if since is not None:
            chars, offset = max(point for point in self._checkpoints if point[0] <= max(0, since))
        try:
            with self.path.open("rb") as file:
                file.seek(offset)
                return chars, file.read()
        except OSError:
            return chars, b""

    def _advance(self) -> None:
        chars, offset = self._checkpoints[-1]
        if self.size_bytes() - offset < 2 * _STEP:
            return
        with self.path.open("rb") as file:
            file.seek(offset)
            while len(chunk := file.read(_STEP)) == _STEP:
                # no character spans a newline, so both sides decode alike alone and together
                chunk = chunk[: chunk.rfind(b"\n") + 1]
                if not chunk:
                    return
                chars += len(chunk.decode("utf-8", errors="replace"))
                offset += len(chunk)
                self._checkpoints.append((chars, offset))
                file.seek(offset)
