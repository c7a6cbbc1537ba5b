"""A fake engine that speaks vLLM's API: one token per byte, and a behaviour that each test chooses."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from llm_bisect.model import EngineState, MemorySample

_NEEDLE = re.compile(r"The secret code for (\w+) is (\d+)\.")
_QUESTION = re.compile(r"The secret code for (\w+) is$")


class FakeClock:
    """Real time, `pace` times as fast."""

    def __init__(self, pace: float = 1.0) -> None:
        self.pace = pace

    def now_s(self) -> float:
        return time.monotonic() * self.pace

    def sleep(self, seconds: float, stop: threading.Event | None = None) -> None:
        time.sleep(seconds / self.pace)


class Handler(BaseHTTPRequestHandler):
    """HTTP/1.1 with chunks, as vLLM answers."""

    protocol_version = "HTTP/1.1"
    server: FakeServer  # type: ignore[assignment]

    def log_message(self, *args: object) -> None:
        """Nothing: the log is the test's."""

    def do_GET(self) -> None:
        fake = self.server
        if self.path == "/v1/models":
            self.reply(200, {"data": [{"id": "fake"}]})
        elif self.path == "/metrics" and fake.metrics is not None:
            self.text(200, fake.metrics())
        else:
            self.reply(404, {"error": "not here"})

    def do_POST(self) -> None:
        fake = self.server
        fake.headers_seen.append(dict(self.headers))
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            fake.tokenized += 1
            ids = list(body["prompt"].encode())
            if len(ids) > fake.tokenizes_up_to:
                self.reply(400, {"error": {"message": "maximum context length", "type": "BadRequestError"}})
                return
            self.reply(200, {"count": len(ids), "tokens": ids})
            return
        if self.path != "/v1/completions":
            self.reply(404, {"detail": "Not Found"})
            return
        prompt = bytes(body["prompt"]).decode()
        fake.asked.append((prompt, body["max_tokens"]))
        if body["max_tokens"] == 1 and prompt == "Hello":
            fake.alive(self)
        else:
            fake.behave(self, prompt, len(fake.asked))

    def text(self, status: int, text: str, kind: str = "text/plain") -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def reply(self, status: int, data: object) -> None:
        self.text(status, json.dumps(data), "application/json")

    def start(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def chunk(self, text: str) -> None:
        data = text.encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def event(self, data: object) -> None:
        self.chunk(f"data: {json.dumps(data)}\n\n")

    def close_stream(self) -> None:
        self.chunk("data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def drop(self) -> None:
        """Close the connection here and now."""
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def answer(self, text: str, prompt: str, *, cached: int = 0, counted: int | None = None) -> None:
        """A whole good answer."""
        self.start()
        self.event({"choices": [{"text": text, "finish_reason": None}]})
        self.event({"choices": [{"text": "", "finish_reason": "stop"}]})
        usage = {
            "prompt_tokens": counted or len(prompt),
            "completion_tokens": len(text),
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        self.event({"choices": [], "usage": usage})
        self.close_stream()


def recall(prompt: str) -> str:
    """What a model with a perfect memory goes on with."""
    asked = _QUESTION.search(prompt)
    known = dict(_NEEDLE.findall(prompt))
    return f" {known[asked[1]]}." if asked and asked[1] in known else " I do not know."


def well(handler: Handler, prompt: str, number: int) -> None:
    """A good engine: the first request of a prompt is computed, follow-ups come from its cache."""
    first = handler.server.first_prompt
    same = first is not None and prompt[:500] == first[:500]
    handler.server.first_prompt = prompt
    handler.answer(recall(prompt), prompt, cached=len(prompt) - 40 if same else 0)


def one_token(handler: Handler) -> None:
    handler.answer("x", "Hello")


class FakeServer(ThreadingHTTPServer):
    """Counts what it is asked; `behave`, `alive` and `metrics` are the test's."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.behave: Callable[[Handler, str, int], None] = well
        self.alive: Callable[[Handler], None] = one_token
        self.metrics: Callable[[], str] | None = None
        self.asked: list[tuple[str, int]] = []
        self.tokenized = 0
        self.tokenizes_up_to = 1 << 30
        self.headers_seen: list[dict[str, str]] = []
        self.first_prompt: str | None = None
        self.closing = threading.Event()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no error here."""


class FakeEngine:
    """The engine's side that the prober sees."""

    def __init__(self, server: FakeServer) -> None:
        self.server = server
        self.boot = "boot-1"
        self.base_url = f"http://127.0.0.1:{server.server_address[1]}"
        self.api_key: str | None = None
        self.log = "INFO Application startup complete.\n"
        self.now = EngineState(running=True)
        self.samples: list[MemorySample] = []

    def log_text(self, since: int = 0) -> str:
        return self.log[since:]

    def log_mark(self) -> int:
        return len(self.log)

    def state(self) -> EngineState:
        return self.now

    def memory(self) -> MemorySample | None:
        return (self.samples.pop(0) if len(self.samples) > 1 else self.samples[0]) if self.samples else None

    def stop(self, timeout_s: float = 20.0) -> None:
        self.now = EngineState(running=False, exit_code=0, stopped_by_us=True)

    def dies(self, log: str, exit_code: int = 1, *, oom_killed: bool = False) -> None:
        self.log += log
        self.now = EngineState(running=False, exit_code=exit_code, oom_killed=oom_killed)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    """A fake vLLM on a free port."""
    fake = FakeServer()
    thread = threading.Thread(target=fake.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    yield fake
    fake.closing.set()
    fake.shutdown()
    fake.server_close()


@pytest.fixture
def engine(server: FakeServer) -> FakeEngine:
    """An engine in front of the fake server."""
    return FakeEngine(server)


@pytest.fixture
def clock() -> FakeClock:
    """Real seconds."""
    return FakeClock()
