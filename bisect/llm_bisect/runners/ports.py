"""Free ports on the loopback address."""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

_LOWEST, _HIGHEST = 20000, 32000
_handed_out: set[int] = set()


def free_port() -> int:
    """A loopback port that nothing listens on and that this process has not handed out before.

    It lies below the range from which the kernel takes ports for outgoing connections, so that one of
    those cannot take it between this call and the engine's bind.
    """
    highest = min(_HIGHEST, _ephemeral_from() - 1)
    for _ in range(2000):
        port = _LOWEST + secrets.randbelow(max(1, highest - _LOWEST))
        if port not in _handed_out and is_free(port):
            _handed_out.add(port)
            return port
    _handed_out.clear()
    with socket.socket() as probe:  # a crowded machine: let the kernel choose
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_free(port: int, address: str = "127.0.0.1") -> bool:
    """True where `address:port` can be bound now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True


def _ephemeral_from() -> int:
    try:
        low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32768
    return low if low > _LOWEST + 1000 else 32768
