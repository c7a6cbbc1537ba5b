"""The simulated vLLM over real HTTP: answers, refusals, deaths, hang-ups, counters, its cache."""

from __future__ import annotations

import http.client
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import llm_bisect
from llm_bisect.model import EngineState, Outcome
from llm_bisect.probing.classify import classify_boot
from llm_bisect.probing.facts import boot_facts
from llm_bisect.runners import ports
from llm_bisect.runners.protocol import BootFailure
from llm_bisect.runners.sim import rig
from llm_bisect.spaces.engine_files import load_engine

pytestmark = pytest.mark.serial  # they look for servers by the name of a study

FACT = "The secret code for amber is 48213. "
QUESTION = "\nThe secret code for amber is"
WAIT_S = 30.0


@dataclass
class Server:
    """One server process."""

    child: subprocess.Popen[bytes]
    port: int
    log: Path

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, str]:
        """Status and text of one request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def tokens(self, text: str) -> list[int]:
        status, body = self.ask("POST", "/tokenize", {"model": "q", "prompt": text})
        assert status == 200
        found: list[int] = json.loads(body)["tokens"]
        return found

    def prompt(self, tokens: int, salt: str = "a", question: str = QUESTION) -> list[int]:
        """Token ids of a prompt of that length which holds the fact and asks for it."""
        text = f"[{salt}] {FACT}" + f"The mill {salt} stands still. " * (tokens // 5)
        asked = self.tokens(question)
        return [*self.tokens(text)[: tokens - len(asked)], *asked]

    def complete(self, prompt: Any, **more: Any) -> tuple[int, str]:
        return self.ask("POST", "/v1/completions", {"model": "q", "prompt": prompt, "max_tokens": 12, **more})

    def metric(self, name: str) -> float:
        found = re.search(rf"^vllm:{name}{{[^}}]*}} (\S+)$", self.ask("GET", "/metrics")[1], re.M)
        assert found is not None
        return float(found[1])

    def until(self, reached: Callable[[], bool]) -> None:
        end = time.monotonic() + WAIT_S
        while not reached():
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.005)


Start = Callable[..., Server]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts servers of the study's launch with other flags, and ends them."""
    started: list[Server] = []

    def start_one(*flags: str, scale: float = 20_000.0, wait: bool = True, **env: str) -> Server:
        port = ports.free_port()
        argv = ["--model=/models/q", "--served-model-name=q", "--max-model-len=180000"]
        argv += ["--gpu-memory-utilization=0.93", "--kv-cache-dtype=turboquant_3bit_nc", "--max-num-seqs=1"]
        argv += ["--max-num-batched-tokens=4128", "--language-model-only"]
        argv += ["--speculative-config", '{"method":"mtp","num_speculative_tokens":3}', *flags]
        spec = {
            "card": rig.plain(rig.find_card("rtx3090")),
            "model": rig.plain(rig.find_model("qwen3.6-27b-autoround-int4")),
            "launch": {"argv": argv, "env": env, "mounts": ["/p/patch_inputs_embeds_optional.py"]},
            "scale": scale,
        }
        folder = tmp_path / f"server{len(started)}"
        folder.mkdir()
        (folder / "spec.json").write_text(json.dumps(spec))
        root = Path(llm_bisect.__file__).parents[1]
        words = [sys.executable, "-m", "llm_bisect.runners.sim.server", "--spec", str(folder / "spec.json")]
        with (folder / "log").open("wb") as out:
            child = subprocess.Popen(
                [*words, f"--port={port}"], env={"PYTHONPATH": str(root)}, stdout=out, stderr=out
            )
        server = Server(child, port, folder / "log")
        started.append(server)
        if wait:
            server.until(lambda: child.poll() is not None or _healthy(server))
        return server

    yield start_one
    for server in started:
        server.child.kill()
        server.child.wait()


def _healthy(server: Server) -> bool:
    try:
        return server.ask("GET", "/health")[0] == 200
    except OSError:
        return False


def _events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_it_boots_and_says_what_vllm_says(start: Start) -> None:
    """The boot's facts are read from its log by the engine's own description, and the models are listed."""
    server = start(GENESIS_ENABLE_P103="1", GENESIS_ENABLE_P82="0")
    log = server.log.read_text()
    facts = boot_facts(load_engine("vllm"), log).facts
    assert facts["weights_gib"] == 16.87 and facts["kv_cache_gib"] == 4.4
    assert facts["kv_cache_tokens"] == 350_880 and facts["max_concurrency"] == 1.44
    assert facts["context_tokens"] == 180_000
    assert re.search(r"^\[Genesis\] P103 +APPLY", log, re.M) and re.search(
        r"^\[Genesis\] P82 +SKIP", log, re.M
    )
    assert log.startswith("[simulated]") and "Application startup complete." in log
    model = json.loads(server.ask("GET", "/v1/models")[1])["data"][0]
    assert (model["id"], model["max_model_len"]) == ("q", 180_000)
    state = json.loads(server.ask("GET", "/sim/state")[1])
    assert state["virtual_s"] == pytest.approx(240) and state["running"] == 0
    assert state["free_mib"] == pytest.approx(2325, abs=1) and state["total_mib"] == 24576


def test_tokens_are_exact_and_come_back_as_text(start: Start) -> None:
    """The count is the length of the ids, ids turn back into the text, and a completion counts the same."""
    server = start()
    text = "A gardener keeps the tools ünd 茶 in a shed. "
    ids = server.tokens(text)
    assert ids == server.tokens(text)
    assert json.loads(server.ask("POST", "/tokenize", {"prompt": text})[1])["count"] == len(ids)
    assert json.loads(server.ask("POST", "/detokenize", {"tokens": ids})[1])["prompt"] == text
    for prompt in (text, ids, [ids], [text]):
        status, body = server.complete(prompt)
        assert status == 200
        assert json.loads(body)["usage"]["prompt_tokens"] == len(ids)


def test_it_finds_what_stands_in_the_prompt_and_only_that(start: Start) -> None:
    """A fact comes back, streamed and whole; one that is not there does not."""
    server = start()
    status, body = server.complete(server.prompt(8_000), stream=True, stream_options={"include_usage": True})
    events = _events(body)
    assert status == 200
    answer = "".join(choice["text"] for event in events for choice in event["choices"])
    assert answer.startswith(" 48213.")
    assert events[-1]["usage"] == {
        "prompt_tokens": 8_000,
        "total_tokens": 8_012,
        "completion_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    whole = json.loads(server.complete(server.prompt(8_000, "b"))[1])
    assert whole["choices"][0]["text"].startswith(" 48213.")
    missing = json.loads(server.complete(server.prompt(5_000, "c", "\nThe secret code for violet is"))[1])
    assert "48213" not in missing["choices"][0]["text"]


def test_a_chat_is_answered(start: Start) -> None:
    """The chat endpoint finds the fact as well, for a question in words."""
    server = start()
    messages = [{"role": "user", "content": f"{FACT} What is the secret code for amber?"}]
    status, body = server.ask(
        "POST", "/v1/chat/completions", {"model": "q", "messages": messages, "max_tokens": 9}
    )
    assert status == 200
    assert "48213" in json.loads(body)["choices"][0]["message"]["content"]


def test_a_repeated_prefix_is_reported_as_cached(start: Start) -> None:
    """Whole blocks of a known prompt come from the cache; another salt, or no caching, gives none."""

    def cached(server: Server, prompt: list[int]) -> int:
        usage = json.loads(server.complete(prompt)[1])["usage"]
        found: int = usage["prompt_tokens_details"]["cached_tokens"]
        return found

    server, without = start(), start("--no-enable-prefix-caching")
    prompt = server.prompt(10_000)
    assert cached(server, prompt) == 0
    assert cached(server, prompt) == 2 * 4128
    assert cached(server, server.prompt(10_000, "other")) == 0
    assert 'enable_prefix_caching="True"' in server.ask("GET", "/metrics")[1]
    assert [cached(without, prompt) for _ in range(2)] == [0, 0]


def test_a_refused_boot_says_so_and_exits_1(start: Start) -> None:
    """200K at 0.93: vLLM's own sentence, from which the classifier reads the figures."""
    server = start("--max-model-len=200000")
    assert server.child.wait(WAIT_S) == 1
    log = server.log.read_text()
    assert "ValueError: To serve at least one request with the models's max seq len (200000)" in log
    failure = BootFailure(EngineState(False, 1), log, "exited")
    outcome, evidence = classify_boot(load_engine("vllm"), failure)
    assert outcome is Outcome.ADMISSION_REJECTED
    assert evidence.facts["estimated_max_model_len"] == 111_456
    facts = boot_facts(load_engine("vllm"), log).facts
    assert (facts["kv_needed_gib"], facts["kv_available_gib"]) == (3.31, 2.19)


@pytest.mark.parametrize(
    ("flags", "exit_code", "outcomes"),
    [
        (("--gpu-memory-utilization=0.99",), 1, {Outcome.INFRA, Outcome.CONFIG_ERROR, Outcome.OOM_BOOT}),
        (("--gpu-memory-utilization=0.73",), 1, {Outcome.ADMISSION_REJECTED}),
        (("--gpu-memory-utilization=0.87",), 1, {Outcome.ADMISSION_REJECTED}),
        (("--max-num-batched-tokens=2048",), 1, {Outcome.CONFIG_ERROR}),
        (("--max-model-len=300000",), 1, {Outcome.CONFIG_ERROR}),
        (("--max-num-seqs=many",), 2, {Outcome.CONFIG_ERROR}),
        (("--tensor-parallel-size=2",), 1, {Outcome.CONFIG_ERROR}),
    ],
)
def test_each_failed_boot_is_classified(
    start: Start, flags: tuple[str, ...], exit_code: int, outcomes: set[Outcome]
) -> None:
    """The words of each failure are such that the classifier knows them."""
    server = start(*flags)
    assert server.child.wait(WAIT_S) == exit_code
    failure = BootFailure(EngineState(False, exit_code), server.log.read_text(), "exited")
    assert classify_boot(load_engine("vllm"), failure)[0] in outcomes


@pytest.mark.parametrize("stream", [False, True])
def test_it_dies_of_memory_in_a_prefill(start: Start, stream: bool) -> None:
    """60K at 0.95: an allocation of 50 MiB fails, the request gets vLLM's error, the server exits with 0."""
    server = start("--gpu-memory-utilization=0.95")
    status, body = server.complete(server.prompt(60_000), stream=stream)
    dead = "EngineCore encountered an issue. See stack trace (above) for the root cause."
    if stream:
        assert status == 200 and _events(body)[-1]["error"]["message"] == dead
    else:
        assert status == 500
        assert json.loads(body)["error"] == {
            "message": dead,
            "type": "InternalServerError",
            "param": None,
            "code": 500,
        }
    assert server.child.wait(WAIT_S) == 0
    log = server.log.read_text()
    assert (
        "Tried to allocate 50.00 MiB. GPU 0 has a total capacity of 23.56 GiB of which 46.48 MiB is free"
        in log
    )
    for words in ("torch.empty_like(v)", "in chunk_fwd_o", "EngineDeadError", "num_computed_tokens=[53664]"):
        assert words in log
    assert log.index("OutOfMemoryError") < log.index("Shutting down")


def test_a_prompt_beyond_the_context_is_refused(start: Start) -> None:
    """Prompt and answer together must fit; the engine lives on."""
    server = start("--max-model-len=8000")
    status, body = server.complete(server.prompt(7_990))
    assert status == 400
    error = json.loads(body)["error"]
    assert error["type"] == "BadRequestError"
    assert "maximum context length is 8000 tokens" in error["message"]
    assert server.complete(server.prompt(7_988))[0] == 200


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", {"model": "other", "prompt": "x"}, 404),
        ("/v1/completions", {"model": "q", "prompt": []}, 400),
        ("/v1/completions", {"model": "q", "prompt": 7}, 400),
        ("/v1/completions", {"model": "q", "prompt": [-1]}, 400),
        ("/v1/completions", {"model": "q", "prompt": "x", "max_tokens": 0}, 400),
        ("/v1/completions", ["no object"], 400),
        ("/v1/chat/completions", {"model": "q", "messages": []}, 400),
        ("/nothing", {}, 404),
    ],
)
def test_bad_requests_are_refused_and_harm_nothing(start: Start, path: str, body: Any, status: int) -> None:
    """Each gets an error of its own, and the next request is served."""
    server = start()
    assert server.ask("POST", path, body)[0] == status
    assert server.complete("Hello")[0] == 200


def test_progress_shows_while_a_prompt_is_computed(start: Start) -> None:
    """The pool's use rises with the chunks; the counter of prompt tokens moves when all is done."""
    server = start(scale=1_500.0)
    prompt = server.prompt(60_000)
    hung_up = _send(server, prompt)
    seen: set[int] = set()
    pool = 350_880
    while server.metric("num_requests_running") == 0:
        time.sleep(0.002)
    while server.metric("num_requests_running") == 1:
        seen.add(round(server.metric("kv_cache_usage_perc") * pool))
        assert server.metric("prompt_tokens_total") in (0, 60_000)
    hung_up.close()
    assert {tokens % 4128 for tokens in seen if tokens < 57_793} == {0}
    assert len(seen) > 3
    assert server.metric("prompt_tokens_total") == 60_000


def test_a_hang_up_frees_the_engine(start: Start) -> None:
    """A request whose client has gone is dropped, and the next one does not wait for it."""
    server = start(scale=300.0)
    client = _send(server, server.prompt(60_000))
    server.until(lambda: server.metric("num_requests_running") == 1)
    client.close()
    server.until(lambda: server.metric("num_requests_running") == 0)
    assert "Aborted request(s) cmpl-" in server.log.read_text()
    assert server.metric("prompt_tokens_total") == 0
    assert server.complete("Hello")[0] == 200


def test_a_second_request_waits_for_the_first(start: Start) -> None:
    """One request at a time: the other one is shown as waiting, and served afterwards."""
    server = start(scale=1_500.0)
    first = _send(server, server.prompt(50_000))
    server.until(lambda: server.metric("num_requests_running") == 1)
    second = _send(server, server.tokens("Hello"))
    server.until(lambda: server.metric("num_requests_waiting") == 1)
    server.until(lambda: server.metric("request_success_total") == 2)
    first.close()
    second.close()


def test_asked_to_stop_it_stops_at_once(start: Start) -> None:
    """SIGTERM ends it with status 0, also in the middle of a request and of a boot."""
    busy, booting = start(scale=300.0), start(scale=0.1, wait=False)
    _send(busy, busy.prompt(60_000))
    busy.until(lambda: busy.metric("num_requests_running") == 1)
    booting.until(lambda: "non-default args" in booting.log.read_text())
    for server in (busy, booting):
        server.child.terminate()
        assert server.child.wait(WAIT_S) == 0


def test_a_taken_port_is_said(start: Start) -> None:
    """A second server on the same port ends with the words that mean it."""
    server = start()
    spec = server.log.with_name("spec.json")
    words = [sys.executable, "-m", "llm_bisect.runners.sim.server", "--spec", str(spec)]
    root = str(Path(llm_bisect.__file__).parents[1])
    ended = subprocess.run(
        [*words, "--port", str(server.port)], env={"PYTHONPATH": root}, capture_output=True, timeout=WAIT_S
    )
    assert ended.returncode == 1 and b"Address already in use" in ended.stdout


def _send(server: Server, prompt: list[int]) -> socket.socket:
    """Send a streamed request and read nothing."""
    body = json.dumps({"model": "q", "prompt": prompt, "max_tokens": 4, "stream": True}).encode()
    client = socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S)
    client.sendall(
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    )
    return client
