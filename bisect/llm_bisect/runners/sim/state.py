"""What the server shows of itself to its runner without being asked: a few numbers in a mapped file.

They stay readable when the server is dead, and reading them costs no request.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

_FORMAT = "=ddddddQ"
SIZE = struct.calcsize(_FORMAT)


@dataclass(frozen=True)
class Snapshot:
    """The rig at one moment."""

    virtual_s: float
    free_mib: float
    total_mib: float
    processed_tokens: float
    running: float
    ready: float


class SharedState:
    """Written by one process, read by another. A reader never sees half of a write."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        self.path = path
        if create:
            path.write_bytes(bytes(SIZE))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), SIZE)
        self._turn = 0

    def write(self, state: Snapshot) -> None:
        self._turn += 2
        numbers = (
            state.virtual_s,
            state.free_mib,
            state.total_mib,
            state.processed_tokens,
            state.running,
            state.ready,
        )
        at = struct.calcsize("=dddddd")
        struct.pack_into("=Q", self._map, at, self._turn - 1)  # odd: being written
        struct.pack_into("=dddddd", self._map, 0, *numbers)
        struct.pack_into("=Q", self._map, at, self._turn)

    def read(self) -> Snapshot | None:
        """The newest state; None before the first write, or while one is going on for too long."""
        at = struct.calcsize("=dddddd")
        for _ in range(1000):
            before = struct.unpack_from("=Q", self._map, at)[0]
            numbers = struct.unpack_from("=dddddd", self._map, 0)
            after = struct.unpack_from("=Q", self._map, at)[0]
            if before == after and not before % 2:
                return Snapshot(*numbers) if before else None
        return None

    def close(self) -> None:
        self._map.close()
