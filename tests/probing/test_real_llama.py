"""The prober against a real llama-server with a model that really recalls."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llm_bisect.model import EngineState, Outcome, ProbeRequest, ProbeResult, Progress
from llm_bisect.probing.classify import boot_facts
from llm_bisect.probing.prober import Prober
from llm_bisect.runners.models import builtin_model
from llm_bisect.runners.realclock import RealClock
from llm_bisect.spaces.engine_files import load_engine

pytestmark = pytest.mark.llama

CONTEXT = 16384


class Llama:
    """A llama-server that the test starts and stops."""

    def __init__(self, binary: Path, model: Path, folder: Path, *more: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.boot, self.api_key = f"boot-{port}", None
        self.base_url = f"http://127.0.0.1:{port}"
        self.path = folder / "llama.log"
        argv = [
            binary,
            "-m",
            model,
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "-c",
            str(CONTEXT),
            "-np",
            "1",
        ]
        argv += ["-fit", "off", "--cache-ram", "0", "-lv", "4", *more]
        with self.path.open("wb") as log:
            self.process = subprocess.Popen(
                argv, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
            )
        for _ in range(600):
            try:
                with urllib.request.urlopen(self.base_url + "/health", timeout=2):  # noqa: S310
                    return
            except OSError:
                time.sleep(0.05)
        self.stop()
        raise RuntimeError(self.log_text()[-2000:])

    def log_text(self, since: int = 0) -> str:
        return self.path.read_bytes()[since:].decode("utf-8", "replace")

    def log_mark(self) -> int:
        return os.path.getsize(self.path)  # noqa: PTH202

    def state(self) -> EngineState:
        code = self.process.poll()
        return EngineState(running=code is None, exit_code=code)

    def memory(self) -> None:
        return None

    def stop(self, timeout_s: float = 20.0) -> None:
        self.process.kill()
        self.process.wait(timeout_s)


@pytest.fixture(scope="module")
def llama(llama_server: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Llama]:
    """One server for the tests that leave it alive."""
    engine = Llama(llama_server, builtin_model("recall"), tmp_path_factory.mktemp("llama"))
    yield engine
    engine.stop()


def ask(engine: Llama, **asked: Any) -> ProbeResult:
    on_progress = asked.pop("on_progress", None)
    stop = asked.pop("stop", threading.Event())
    asked = {"probe": "p", "salt": f"{asked}", "deadline_s": 120.0, **asked}
    prober = Prober(load_engine("llamacpp"))
    return prober.probe(engine, ProbeRequest(**asked), clock=RealClock(), stop=stop, on_progress=on_progress)


@pytest.mark.parametrize("tokens", [300, 2000, 8000])
def test_needles_are_recalled_at_every_depth(llama: Llama, tokens: int) -> None:
    """Exactly as many tokens as asked, none from a cache, three needles back."""
    result = ask(llama, prompt_tokens=tokens)
    assert result.outcome is Outcome.PASS
    assert result.prompt_tokens == tokens == result.tokens_processed
    assert result.cached_tokens == 0
    assert [check.found for check in result.recall] == [True, True, True]
    assert result.prefill_tps and result.decode_tps
    assert result.engine_alive


def test_one_salt_twice_is_computed_twice(llama: Llama) -> None:
    """The first question never comes from the cache, even of the very same prompt."""
    for _ in range(2):
        result = ask(llama, prompt_tokens=1500, salt="same")
        assert result.outcome is Outcome.PASS
        assert result.cached_tokens == 0


def test_longer_than_the_context(llama: Llama) -> None:
    """Refused with the engine's figures, at once, and it lives on."""
    result = ask(llama, prompt_tokens=CONTEXT + 1000)
    assert result.outcome is Outcome.CONTEXT_EXCEEDED
    assert result.evidence.facts["context_tokens"] == CONTEXT
    assert result.engine_alive


def test_our_deadline_tells_how_far_it_came(llama: Llama) -> None:
    """The prompt was on its way; hanging up made the engine idle again, and it answers the next probe."""
    seen: list[Progress] = []
    result = ask(llama, prompt_tokens=16000, deadline_s=3.0, on_progress=lambda told, _: seen.append(told))
    assert result.outcome is Outcome.TIMEOUT_CLIENT
    assert result.tokens_processed is not None and 0 < result.tokens_processed < 16000
    assert result.engine_alive
    assert [told.tokens for told in seen if told.tokens] == sorted(
        told.tokens for told in seen if told.tokens
    )
    assert ask(llama, prompt_tokens=1000).outcome is Outcome.PASS


def test_stopping_aborts_the_request(llama: Llama) -> None:
    """And says nothing about the candidate."""
    stop = threading.Event()
    threading.Timer(0.5, stop.set).start()
    assert ask(llama, prompt_tokens=16000, stop=stop).outcome is Outcome.ABORTED


def test_its_boot_facts_are_read(llama: Llama) -> None:
    """Context, buffers and slots, from the log of a real boot."""
    facts = boot_facts(load_engine("llamacpp"), llama.log_text())
    assert facts.number("context_tokens") == CONTEXT
    assert facts.number("slots") == 1
    assert facts.number("kv_buffer_mib") == pytest.approx(32.0)  # 2 KiB a token
    assert (facts.number("compute_buffer_mib") or 0) > 0


def test_a_server_that_is_killed_in_the_middle(llama_server: Path, tmp_path: Path) -> None:
    """Seen as dead within moments; nobody's limit did it, so it moves no bracket."""
    engine = Llama(llama_server, builtin_model("recall"), tmp_path)
    try:
        threading.Timer(0.7, engine.process.kill).start()
        result = ask(engine, prompt_tokens=16000)
        assert result.outcome is Outcome.INFRA
        assert not result.engine_alive
        assert result.tokens_processed is not None
    finally:
        engine.stop()


def test_a_model_that_recalls_nothing(llama_server: Path, tmp_path: Path) -> None:
    """Random weights answer 200 and lose every needle; the prefill shape measures them."""
    engine = Llama(llama_server, builtin_model("tiny-llama"), tmp_path)
    try:
        result = ask(engine, prompt_tokens=1000)
        assert result.outcome is Outcome.RECALL_FAILED
        assert not any(check.found for check in result.recall)
        result = ask(engine, prompt_tokens=1000, shape="prefill")
        assert result.outcome is Outcome.PASS
        assert result.completion_tokens == 1
    finally:
        engine.stop()
