"""vLLM's HTTP API over the rig, and the rig's own /sim/state."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

from llm_bisect.runners.sim import log, text
from llm_bisect.runners.sim.metrics import metrics_text
from llm_bisect.runners.sim.serving import ClientGone, EngineDied, Rig

_BODY_BYTES = 64 * 1024 * 1024
_QUIET = ("/metrics", "/sim/state", "/health")  # not in the access log: they are asked for all the time


class BadRequest(Exception):
    """The request is refused: HTTP status, type and text of the error."""

    def __init__(
        self, message: str, *, code: int = 400, kind: str = "BadRequestError", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.message, self.code, self.kind, self.param = message, code, kind, param


def make_server(rig: Rig, port: int) -> ThreadingHTTPServer:
    """A server on 127.0.0.1:`port`, bound but not yet serving. Raises OSError."""

    class Handler(_Handler):
        pass

    Handler.rig = rig
    return _Server(("127.0.0.1", port), Handler)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    allow_reuse_address = True

    def server_bind(self) -> None:
        # without the look-up of the host's name that the parent class makes
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        return None  # a client that hung up


class _Handler(BaseHTTPRequestHandler):
    rig: Rig
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = 600
    connection: socket.socket

    def do_GET(self) -> None:
        rig, path = self.rig, self.path.partition("?")[0]
        if path in ("/health", "/ping"):
            self._send(503 if rig.engine.dead else 200, b"")
        elif path == "/version":
            self._json(200, {"version": rig.spec.model.engine_version})
        elif path == "/v1/models":
            self._json(200, {"object": "list", "data": [self._model()]})
        elif path == "/load":
            self._json(200, {"server_load": rig.engine.running + rig.waiting})
        elif path == "/metrics":
            with rig.lock:
                body = metrics_text(rig.engine, rig.waiting)
            self._send(200, body.encode(), "text/plain; version=0.0.4; charset=utf-8")
        elif path == "/sim/state":
            state = rig.snapshot()
            self._json(
                200,
                {
                    "virtual_s": state.virtual_s,
                    "free_mib": state.free_mib,
                    "total_mib": state.total_mib,
                    "processed_tokens": int(state.processed_tokens),
                    "running": int(state.running),
                },
            )
        else:
            self._json(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        path = self.path.partition("?")[0]
        answer: Callable[[Mapping[str, Any]], None] | None = {
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
            "/v1/completions": self._completions,
            "/v1/chat/completions": self._chat,
        }.get(path)
        try:
            body = self._body()
            if answer is None:
                self._json(404, {"detail": "Not Found"})
                return
            self._check_model(body)
            answer(body)
        except BadRequest as bad:
            self._send(bad.code, log.error_body(bad.message, bad.kind, bad.code, bad.param))
        except ClientGone:
            self.close_connection = True

    # --- requests

    def _tokenize(self, body: Mapping[str, Any]) -> None:
        messages = body.get("messages")
        prompt = text.chat_text(messages) if isinstance(messages, list) else body.get("prompt")
        if not isinstance(prompt, str):
            raise BadRequest("prompt: Input should be a valid string", param="prompt")
        ids = text.encode(prompt)
        longest = self.rig.engine.boot.context_tokens
        self._json(200, {"count": len(ids), "max_model_len": longest, "tokens": ids, "token_strs": None})

    def _detokenize(self, body: Mapping[str, Any]) -> None:
        self._json(200, {"prompt": text.decode(_ids(body.get("tokens")))})

    def _completions(self, body: Mapping[str, Any]) -> None:
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        ids = text.encode(prompt) if isinstance(prompt, str) else _ids(prompt)
        self._answer(ids, _tokens(body, "max_tokens", 16), body, chat=False)

    def _chat(self, body: Mapping[str, Any]) -> None:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise BadRequest("messages: List should have at least 1 item", param="messages")
        ids = text.encode(text.chat_text(messages))
        room = max(1, self.rig.engine.boot.context_tokens - len(ids))
        asked = _tokens(body, "max_completion_tokens", 0) or _tokens(body, "max_tokens", min(256, room))
        self._answer(ids, asked, body, chat=True)

    def _answer(self, ids: list[int], new_tokens: int, body: Mapping[str, Any], *, chat: bool) -> None:
        rig, longest = self.rig, self.rig.engine.boot.context_tokens
        if not ids:
            raise BadRequest("Either prompt or prompt_embeds must be provided and non-empty.", param="prompt")
        if len(ids) + new_tokens > longest:
            raise BadRequest(log.too_long_text(longest, new_tokens), param="input_tokens")
        request = rig.new_id("chatcmpl" if chat else "cmpl")
        stream = _Answer(self, request, chat, body)
        try:
            rig.wait_turn(self._gone)
        except EngineDied:
            stream.failed()
            return
        try:
            stream.begin()
            cached = rig.prefill(request, ids, self._gone)
            self._decode(stream, ids, new_tokens, cached)
        except EngineDied:
            stream.failed()
        except (ClientGone, OSError):
            rig.say(rig.lines.aborted(rig.engine.virtual_s, request))
            raise ClientGone from None
        finally:
            rig.done()
        stream.close()

    def _decode(self, stream: _Answer, ids: list[int], new_tokens: int, cached: int) -> None:
        pending = text.answer_ids(text.decode(ids), new_tokens)
        for number in self.rig.decode(ids, new_tokens, self._gone):
            piece, pending = pending[:number], pending[number:]
            stream.piece(text.decode(piece), last=not pending)
        stream.end(len(ids), new_tokens, cached)

    # --- HTTP

    def _body(self) -> Mapping[str, Any]:
        try:
            length = int(self.headers.get("Content-Length") or 0)
        except ValueError:
            length = 0
        if length > _BODY_BYTES:
            self.close_connection = True
            raise BadRequest("the body is too long", code=413)
        try:
            data = json.loads(self.rfile.read(length))
        except (ValueError, RecursionError):
            data = None
        if not isinstance(data, dict):
            raise BadRequest("JSON decode error: the body is no JSON object", code=400)
        return data

    def _check_model(self, body: Mapping[str, Any]) -> None:
        name = body.get("model")
        if name is not None and name != self.rig.settings.served_name:
            raise BadRequest(
                f"The model `{name}` does not exist.", code=404, kind="NotFoundError", param="model"
            )

    def _model(self) -> dict[str, Any]:
        rig = self.rig
        return {
            "id": rig.settings.served_name,
            "object": "model",
            "owned_by": "vllm",
            "root": rig.settings.model_path,
            "max_model_len": rig.engine.boot.context_tokens,
        }

    def _gone(self) -> bool:
        """True where the client has closed the connection, or this process is about to end."""
        if self.rig.ended.is_set():
            return True
        readable, _, _ = select.select([self.connection], [], [], 0)
        if not readable:
            return False
        try:
            return self.connection.recv(1, socket.MSG_PEEK) == b""
        except OSError:
            return True

    def _json(self, status: int, data: Any) -> None:
        self._send(status, json.dumps(data, separators=(",", ":")).encode())

    def _send(self, status: int, body: bytes, kind: str = "application/json") -> None:
        with contextlib.suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_request(self, code: Any = "-", size: Any = "-") -> None:
        if self.path.partition("?")[0] in _QUIET:
            return
        status = code if isinstance(code, int) else 0
        self.rig.say(self.rig.lines.access(self.client_address, self.requestline, int(status)))

    def log_message(self, *args: Any) -> None:
        return None


class _Answer:
    """One completion on its way: streamed (the status is sent before the prompt is computed, as vLLM does,
    so that a death shows as an error inside a 200 answer) or whole."""

    def __init__(self, handler: _Handler, request: str, chat: bool, body: Mapping[str, Any]) -> None:
        self.handler, self.request, self.chat = handler, request, chat
        self.streams = body.get("stream") is True
        options = body.get("stream_options")
        self.with_usage = isinstance(options, dict) and options.get("include_usage") is True
        self.began = False
        self.text = ""
        self.model = handler.rig.settings.served_name
        self.created = int(time.time())

    def begin(self) -> None:
        if not self.streams:
            return
        handler = self.handler
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream; charset=utf-8")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        handler.wfile.flush()
        self.began = True

    def piece(self, more: str, *, last: bool) -> None:
        self.text += more
        if not self.streams:
            return
        reason = "length" if last else None
        if self.chat:
            choice: dict[str, Any] = {"index": 0, "delta": {"content": more}, "finish_reason": reason}
        else:
            choice = {"index": 0, "text": more, "logprobs": None, "finish_reason": reason}
        self._event(json.dumps({**self._head(), "choices": [choice]}))

    def end(self, prompt_tokens: int, new_tokens: int, cached: int) -> None:
        usage = {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + new_tokens,
            "completion_tokens": new_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        if self.streams:
            if self.with_usage:
                self._event(json.dumps({**self._head(), "choices": [], "usage": usage}))
            self._event("[DONE]")
            return
        if self.chat:
            choice: dict[str, Any] = {"index": 0, "message": {"role": "assistant", "content": self.text}}
        else:
            choice = {"index": 0, "text": self.text, "logprobs": None}
        choice["finish_reason"] = "length"
        self.handler._json(200, {**self._head(), "choices": [choice], "usage": usage})

    def failed(self) -> None:
        """The engine is dead."""
        body = log.error_body(log.DEAD, "InternalServerError", 500)
        if not self.began:
            self.handler.close_connection = True
            self.handler._send(500, body)
            return
        with contextlib.suppress(OSError):
            self._event(body.decode())
            self._event("[DONE]")

    def close(self) -> None:
        """The last chunk of a streamed answer."""
        if self.began:
            with contextlib.suppress(OSError):
                self.handler.wfile.write(b"0\r\n\r\n")

    def _head(self) -> dict[str, Any]:
        kind = "chat.completion" if self.chat else "text_completion"
        if self.chat and self.streams:
            kind += ".chunk"
        return {"id": self.request, "object": kind, "created": self.created, "model": self.model}

    def _event(self, data: str) -> None:
        payload = f"data: {data}\n\n".encode()
        self.handler.wfile.write(f"{len(payload):x}\r\n".encode() + payload + b"\r\n")
        self.handler.wfile.flush()


def _ids(value: object) -> list[int]:
    good = isinstance(value, list) and all(
        isinstance(one, int) and not isinstance(one, bool) for one in value
    )
    if not good:
        raise BadRequest("prompt: Input should be a valid string or a list of token ids", param="prompt")
    ids: list[int] = list(value)  # type: ignore[call-overload]
    wrong = next((one for one in ids if not 0 <= one < text.VOCABULARY), None)
    if wrong is not None:
        raise BadRequest(f"Token id {wrong} is out of vocabulary")
    return ids


def _tokens(body: Mapping[str, Any], name: str, otherwise: int) -> int:
    value = body.get(name)
    if value is None:
        return otherwise
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BadRequest(f"{name} must be at least 1, got {value}.", param=name)
    return value
