"""HTTP to an engine, with every resource bounded: time, bytes, and the length of a line.

A request that is awaited for an hour must be given up from another thread at any moment, also before the
first byte of the answer. The standard library's connection allows that (its socket can be shut down), so
it is used here.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

BODY_BYTES = 8 * 1024 * 1024
LINE_BYTES = 1024 * 1024
KEPT_BYTES = 64 * 1024  # of an answer, for evidence
_CONNECT_S = 10.0


class CallFailed(Exception):
    """A short call got no usable answer: refused, reset, too late, too long, not HTTP."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why  # refused | timeout | connection_reset | garbage


class Api:
    """Short calls to one engine."""

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        parts = urlsplit(base_url)
        self.host = parts.hostname or "127.0.0.1"
        self.port = parts.port or 80
        self.prefix = parts.path.rstrip("/")
        self.headers = {"Content-Type": "application/json", "Accept": "*/*", "Connection": "close"}
        if api_key:
            self.headers["Authorization"] = f"Bearer {api_key}"

    def get(self, path: str, *, timeout_s: float = 5.0) -> tuple[int, bytes]:
        """Status and body. Raises CallFailed."""
        return self._call("GET", path, None, timeout_s, BODY_BYTES)

    def post(
        self, path: str, body: Mapping[str, Any], *, timeout_s: float = 60.0, limit_bytes: int = BODY_BYTES
    ) -> tuple[int, bytes]:
        """Status and body of a JSON request. Raises CallFailed."""
        return self._call("POST", path, json.dumps(body).encode(), timeout_s, limit_bytes)

    def _call(
        self, method: str, path: str, body: bytes | None, timeout_s: float, limit_bytes: int
    ) -> tuple[int, bytes]:
        # real seconds: this bounds a socket, it judges nothing
        end = time.monotonic() + timeout_s
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        try:
            connection.request(method, self.prefix + path, body=body, headers=self.headers)
            # the answer's head may drip as well as its body: a timer ends both
            timer = threading.Timer(timeout_s, _hang_up, [connection.sock])
            timer.daemon = True
            timer.start()
            try:
                response = connection.getresponse()
                data = bytearray()
                while chunk := response.read1(65536):
                    data += chunk
                    if len(data) > limit_bytes:
                        raise CallFailed("garbage")
            finally:
                timer.cancel()
            if time.monotonic() > end:
                raise CallFailed("timeout")
            return response.status, bytes(data)
        except CallFailed:
            raise
        except ConnectionRefusedError as error:
            raise CallFailed("refused") from error
        except TimeoutError as error:
            raise CallFailed("timeout") from error
        except (OSError, http.client.RemoteDisconnected, http.client.IncompleteRead) as error:
            raise CallFailed("timeout" if time.monotonic() > end else "connection_reset") from error
        except (http.client.HTTPException, ValueError) as error:
            raise CallFailed("garbage") from error
        finally:
            connection.close()


class Stream:
    """One streamed request in a thread of its own.

    `on_data` gets the payload of each `data:` line, in that thread. `done` is set when it has ended,
    however it did: then `status` (None: no answer), `error` (refused | connection_reset | empty_reply |
    garbage) and `kept` (the first bytes of the body) say how.
    """

    def __init__(
        self, api: Api, path: str, body: Mapping[str, Any], on_data: Callable[[bytes], None]
    ) -> None:
        self.status: int | None = None
        self.error: str | None = None
        self.kept = bytearray()
        self.done = threading.Event()
        self._api = api
        self._path = api.prefix + path
        self._body = json.dumps(body).encode()
        self._on_data = on_data
        self._connection = http.client.HTTPConnection(api.host, api.port, timeout=_CONNECT_S)
        self._socket: socket.socket | None = None
        self._given_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="probe-stream", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def give_up(self) -> None:
        """Hang up, which aborts the request in the engine. Safe at any moment and more than once."""
        self._given_up.set()
        _hang_up(self._socket)
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        try:
            self._connection.connect()
            self._socket = self._connection.sock
            if self._given_up.is_set():
                return
            self._connection.sock.settimeout(None)  # the watcher's clock decides how long
            headers = {**self._api.headers, "Accept": "text/event-stream"}
            self._connection.request("POST", self._path, body=self._body, headers=headers)
            response = self._connection.getresponse()
            self.status = response.status
            self._read(response)
        except ConnectionRefusedError:
            self.error = "refused"
        except http.client.RemoteDisconnected:
            self.error = "empty_reply"
        except (ConnectionError, TimeoutError, http.client.IncompleteRead):
            self.error = "connection_reset" if self._socket is not None else "refused"
        except (http.client.HTTPException, ValueError):
            self.error = "garbage"
        except OSError:
            self.error = "connection_reset"
        finally:
            self._connection.close()
            self.done.set()

    def _read(self, response: http.client.HTTPResponse) -> None:
        total, pending = 0, bytearray()
        while chunk := response.read1(65536):
            total += len(chunk)
            if len(self.kept) < KEPT_BYTES:
                self.kept += chunk[: KEPT_BYTES - len(self.kept)]
            if total > BODY_BYTES:
                self.error = "garbage"
                return
            pending += chunk
            *lines, rest = pending.split(b"\n")
            pending = bytearray(rest)
            for line in lines:
                self._line(bytes(line))
            if len(pending) > LINE_BYTES:
                self.error = "garbage"
                return
        self._line(bytes(pending))

    def _line(self, line: bytes) -> None:
        for mark in (b"data:", b"error:"):
            if line.startswith(mark):
                self._on_data(line[len(mark) :].strip())


def _hang_up(connected: socket.socket | None) -> None:
    if connected is None:
        return
    with contextlib.suppress(OSError):  # it had ended already
        connected.shutdown(socket.SHUT_RDWR)
