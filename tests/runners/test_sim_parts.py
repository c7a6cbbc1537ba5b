"""Parts of the simulated rig by themselves: its tokens, its reading of a launch, its clock, its files."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_bisect.model import Launch, SimulatedRef, UsageProblem
from llm_bisect.runners.sim import rig, text
from llm_bisect.runners.sim.clock import VirtualClock
from llm_bisect.runners.sim.settings import ArgumentError, read_launch, without_key
from llm_bisect.runners.sim.state import SharedState, Snapshot
from llm_bisect.runners.simulated_runner import SCALE_VARIABLE, SimulatedRunner

pytestmark = pytest.mark.serial  # they look for servers by the name of a study


class Ticker:
    """An engine whose time the test sets."""

    def __init__(self) -> None:
        self.state: Snapshot | None = Snapshot(0.0, 1.0, 2.0, 0.0, 0.0, 1.0)

    def snapshot(self) -> Snapshot | None:
        return self.state

    def at(self, virtual_s: float, *, running: bool = False, ready: bool = True) -> None:
        self.state = Snapshot(virtual_s, 1.0, 2.0, 0.0, float(running), float(ready))


@given(st.text(max_size=300))
def test_ids_turn_back_into_the_text(words: str) -> None:
    """Encoding and decoding are each other's inverse, and the count is the number of ids."""
    whole = words.encode("utf-8", errors="replace").decode("utf-8")
    ids = text.encode(words)
    assert text.decode(ids) == whole
    assert text.count(words) == len(ids) and all(0 <= one < text.VOCABULARY for one in ids)


@given(st.lists(st.text(max_size=40), max_size=6))
def test_pieces_of_ids_join_like_their_texts(parts: list[str]) -> None:
    """A prompt made of ids that were counted part by part holds the text of all parts."""
    ids = [one for part in parts for one in text.encode(part)]
    assert text.decode(ids) == "".join(parts).encode("utf-8", errors="replace").decode("utf-8")


@given(st.integers(10_000, 99_999), st.integers(0, 40), st.integers(0, 40))
def test_a_fact_is_found_at_any_depth(digits: int, before: int, after: int) -> None:
    """What followed the words of the question where they stood before is the answer."""
    filler = "The mill stands still. "
    fact = f"The secret code for amber is {digits}. "
    prompt = filler * before + fact + filler * after + "\nThe secret code for amber is"
    assert text.answer_text(prompt).startswith(f" {digits}.")
    assert str(digits) not in text.answer_text(prompt.replace(fact, ""))
    assert str(digits) not in text.answer_text(
        prompt.replace("\nThe secret code for amber", "\nThe code of it")
    )


def test_lengths_are_read_as_vllm_reads_them() -> None:
    """k is 1,000, K is 1,024, the last flag wins, underscores are dashes, scripts are taken apart."""

    def length(*argv: str) -> int | None:
        return read_launch(argv, {}, ()).max_model_len

    assert length() is None
    assert length("--max-model-len", "180k") == 180_000
    assert length("--max-model-len=32K") == 32_768
    assert length("--max_model_len", "1M") == 1_048_576
    assert length("--max-model-len", "auto") == -1
    assert length("--max-model-len=1", "--max-model-len=2") == 2
    assert length("-c", "set -e; exec vllm serve /models/q --max-model-len 4096") == 4096


@pytest.mark.parametrize(
    "argv",
    [
        ("--max-model-len", "long"),
        ("--gpu-memory-utilization", "most"),
        ("--speculative-config", "{mtp}"),
        ("--speculative-config", '{"method":"mtp","num_speculative_tokens":0}'),
    ],
)
def test_what_no_parser_takes_is_refused(argv: tuple[str, ...]) -> None:
    """Values of the wrong kind end a boot before it begins."""
    with pytest.raises(ArgumentError):
        read_launch(argv, {}, ())


def test_only_what_is_needed_is_taken_from_a_launch() -> None:
    """Keys and tokens never reach the simulated process."""
    settings = read_launch((), {"HF_TOKEN": "hf_secret", "GENESIS_ENABLE_P103": "1"}, ("/a/b/patch.py",))
    assert dict(settings.env) == {"GENESIS_ENABLE_P103": "1"}
    assert settings.genesis == {"P103": True} and settings.patches == {"patch.py"}
    assert without_key(("--api-key", "k", "--port", "1", "--api-key=k")) == ["--port", "1"]


def test_the_clock_adds_up_what_engines_lived() -> None:
    """Engines one after the other, each from its own zero, and pauses in between: never backwards."""
    clock, first, second = VirtualClock(1000.0), Ticker(), Ticker()
    assert clock.now_s() == 0
    clock.attach(first, 0.0)
    first.at(240.0)
    assert clock.now_s() == 240
    first.at(100.0)
    assert clock.now_s() == 240
    first.at(300.0)
    clock.detach(first)
    first.at(9_000.0)
    assert clock.now_s() == 300
    clock.sleep(60.0)
    second.at(50.0)
    clock.attach(second, 50.0)
    second.at(60.0)
    assert clock.now_s() == 370
    second.state = None
    assert clock.now_s() == 370


def test_sleep_moves_the_clock_where_nothing_works_and_waits_where_something_does() -> None:
    """An idle engine ages by a pause at once; a busy or booting one goes on by itself."""
    clock, engine = VirtualClock(1e6), Ticker()
    clock.attach(engine, 0.0)
    clock.sleep(600.0)
    assert clock.now_s() == 600
    for busy in (True, False):
        engine.at(0.0, running=busy, ready=busy)
        clock.sleep(600.0)
        assert clock.now_s() == 600
    stop = threading.Event()
    stop.set()
    engine.at(0.0)
    clock.sleep(600.0, stop)
    assert clock.now_s() == 600


def test_a_reader_never_sees_half_of_a_state(tmp_path: Path) -> None:
    """Numbers that are written together are read together, whatever the moment."""
    writer = SharedState(tmp_path / "state", create=True)
    reader = SharedState(tmp_path / "state")
    assert reader.read() is None
    done = threading.Event()

    def write() -> None:
        number = 0.0
        while not done.is_set():
            number += 1.0
            writer.write(Snapshot(number, number, number, number, number, number))

    thread = threading.Thread(target=write)
    thread.start()
    try:
        last = 0.0
        for _ in range(200):
            seen = reader.read()
            if seen is not None:
                assert {seen.free_mib, seen.total_mib, seen.running, seen.ready} == {seen.virtual_s}
                assert seen.virtual_s >= last
                last = seen.virtual_s
            time.sleep(0)
        assert last > 0
    finally:
        done.set()
        thread.join()


def test_files_that_do_not_fit_are_said(tmp_path: Path) -> None:
    """A card file with a missing, a foreign or an impossible figure, and one that is no card at all."""
    good = "kind: simulated-card\nname: x\ntitle: x\ntotal_mib: 100\ncuda_total_gib: 0.09\n"
    good += "startup_used_mib: 1\ncontext_mib: 1\n"
    path = tmp_path / "x.yml"
    path.write_text(good)
    assert rig.find_card(str(path)).total_mib == 100
    for wrong in (
        good.replace("total_mib: 100\n", ""),
        good + "colour: red\n",
        good.replace("total_mib: 100", "total_mib: 0"),
        good.replace("total_mib: 100", "total_mib: 10"),
        good.replace("total_mib: 100", "total_mib: much"),
        good.replace("simulated-card", "simulated-model"),
        "- a list",
        "kind: [",
    ):
        path.write_text(wrong)
        with pytest.raises(UsageProblem) as caught:
            rig.find_card(str(path))
        assert str(path) in caught.value.message


def test_every_card_and_model_file_can_be_read_and_survives_json() -> None:
    """What the repository ships is valid, and travels to the server process unchanged."""
    cards, models = rig.known("simulated-card"), rig.known("simulated-model")
    assert {"rtx3090", "rtx4090", "rtx5090"} <= set(cards) and models
    for name in cards:
        card = rig.find_card(name)
        assert card.name == name and rig.card_from(rig.plain(card)) == card
    for name in models:
        model = rig.find_model(name)
        assert model.name == name and rig.model_from(rig.plain(model)) == model


def test_the_fingerprint_changes_with_any_figure(tmp_path: Path) -> None:
    """Two cards, or one with another size, do not give the same hash."""
    runner = SimulatedRunner()
    model = "qwen3.6-27b-autoround-int4"

    def found(card: str) -> str:
        launch = Launch("simulated", "vllm", (), simulated=SimulatedRef(card, model))
        return runner.fingerprint(launch)["memory.model"]

    assert found("rtx3090") == found("rtx3090") != found("rtx3090-fresh")


@pytest.mark.parametrize("value", ["fast", "0", "-1", "nan"])
def test_a_scale_that_makes_no_sense_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """The variable that sets the speed of the rig takes positive numbers only."""
    monkeypatch.setenv(SCALE_VARIABLE, value)
    with pytest.raises(UsageProblem):
        SimulatedRunner()
