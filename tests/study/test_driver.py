"""The driver with an engine in memory: events before side effects, trouble, budgets, stops, resumes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from llm_bisect.journal import events as kinds
from llm_bisect.journal.state import State, fold
from llm_bisect.journal.store import Event, Journal, read_journal
from llm_bisect.model import (
    Bound,
    EngineState,
    EnvironmentProblem,
    Evidence,
    Launch,
    MemorySample,
    Outcome,
    ProbeRequest,
    ProbeResult,
    Progress,
    Trend,
    Values,
)
from llm_bisect.runners.protocol import BootFailure, BootOrder
from llm_bisect.search.answer import answer_of
from llm_bisect.search.ceiling import contradictions, decide
from llm_bisect.search.plan import Ask, Plan
from llm_bisect.spaces.engine_files import load_engine
from llm_bisect.spaces.profile import Axis, ProbeSpec, Profile
from llm_bisect.study import Budget, Driver

PLAN = Plan(
    axis="mem-util",
    kind="ordered",
    target_tokens=60_000,
    own=0.93,
    points=tuple(round(0.85 + 0.005 * i, 3) for i in range(27)),
    trends={Bound.ADMISSION: Trend.RISES, Bound.MEMORY: Trend.FALLS},
    margin_mib=400.0,
)


class FakeClock:
    """Time that moves only when something takes time."""

    def __init__(self) -> None:
        self.at_s = 0.0
        self.slept: list[float] = []

    def now_s(self) -> float:
        return self.at_s

    def sleep(self, seconds: float, stop: threading.Event | None = None) -> None:
        self.slept.append(seconds)
        self.at_s += seconds


@dataclass
class FakeEngine:
    """An engine in memory that remembers that it was stopped."""

    boot: str
    util: float
    runner: FakeRunner
    base_url: str = "http://127.0.0.1:1"
    api_key: str | None = None
    running: bool = True

    def log_text(self, since: int = 0) -> str:
        return ""

    def log_mark(self) -> int:
        return 0

    def state(self) -> EngineState:
        return EngineState(running=self.running)

    def memory(self) -> MemorySample | None:
        return None

    def stop(self, timeout_s: float = 20.0) -> None:
        self.running = False
        self.runner.stopped.append(self.boot)


@dataclass
class FakeRunner:
    """Boots engines in memory; at most one may run."""

    name: str = "process"
    simulated: bool = False
    clock: FakeClock = field(default_factory=FakeClock)
    engines: list[FakeEngine] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    fail: Callable[[int], Exception | None] = lambda n: None
    adoptable: FakeEngine | None = None

    def preflight(self, launch: Launch, *, gpus: Sequence[str] = (), allow_pull: bool = False) -> None: ...

    def boot(self, order: BootOrder, stop: threading.Event) -> FakeEngine:
        assert not any(e.running for e in self.engines), "two engines at once"
        self.clock.at_s += 240
        if problem := self.fail(len(self.engines) + 1):
            self.engines.append(FakeEngine(order.boot, 0.0, self, running=False))
            raise problem
        engine = FakeEngine(order.boot, float(order.launch.command[1]), self)
        self.engines.append(engine)
        return engine

    def adopt(self, study: str, boot: str | None) -> FakeEngine | None:
        found, self.adoptable = self.adoptable, None
        return found if found is not None and found.boot == boot else None

    def fingerprint(self, launch: Launch) -> Mapping[str, str]:
        return {"memory.gpu": "fake"}

    def close(self) -> None: ...


class FakeProber:
    """Survives 60,000 tokens up to 0.945, with less memory the higher mem-util is."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, int]] = []
        self.override: dict[int, Outcome] = {}

    def probe(
        self,
        engine: FakeEngine,
        request: ProbeRequest,
        *,
        clock: FakeClock,
        stop: threading.Event,
        on_progress: Any,
    ) -> ProbeResult:
        self.seen.append((engine.util, request.prompt_tokens))
        clock.at_s += request.prompt_tokens / 100
        on_progress(Progress(tokens=request.prompt_tokens), None)
        free_mib = (0.9475 - engine.util) * 23_000 - (request.prompt_tokens - 60_000) * 0.03
        outcome = Outcome.PASS if free_mib > 0 else Outcome.OOM_PROBE
        outcome = self.override.get(len(self.seen), outcome)
        engine.running = outcome is not Outcome.OOM_PROBE
        return ProbeResult(
            outcome,
            Evidence("fake", ("a line",)),
            request.prompt_tokens,
            wall_s=request.prompt_tokens / 100,
            min_free_mib=free_mib if outcome is Outcome.PASS else None,
            engine_alive=engine.running,
        )


class Quiet:
    """A reporter that remembers what it was told."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.notices: list[str] = []

    def event(self, event: Event, state: State) -> None:
        self.events.append(event.kind)

    def progress(
        self, ask: Ask, elapsed_s: float, progress: Progress, memory: MemorySample | None
    ) -> None: ...

    def notice(self, text: str) -> None:
        self.notices.append(text)


def resolve(values: Values) -> Launch:
    return Launch("process", "llamacpp", ("engine", str(values.get("mem-util", 0.93))))


def make_driver(path: Path, runner: FakeRunner, prober: FakeProber, budget: Budget | None = None) -> Driver:
    profile = Profile(
        "fake",
        None,
        load_engine("llamacpp"),
        {},
        ProbeSpec(target_tokens=60_000),
        {"prompt": Axis("prompt", "prompt")},
    )
    return Driver(
        study="s",
        profile=profile,
        journal=Journal.open(path),
        runner=runner,  # type: ignore[arg-type]
        prober=prober,  # type: ignore[arg-type]
        policy=partial(decide, plan=PLAN),
        resolve=resolve,
        check_room=lambda: None,
        served=lambda engine: {"context_tokens": 180_000},
        next_p90_s=lambda state, ask: 1_000.0,
        contradictions=partial(contradictions, plan=PLAN),
        reporter=Quiet(),
        stop=threading.Event(),
        budget=budget or Budget(),
    )


def opened(driver: Driver) -> Driver:
    if driver.state.opened:
        driver.take_up()
    else:
        driver.open_with({"study": "s", "plan": PLAN.to_json(), "seed": 0}, {"memory.gpu": "fake"})
    return driver


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journals" / "s.jsonl"


def test_a_study_from_first_fact_to_answer(path: Path) -> None:
    """The whole study is in the journal, every engine is stopped, and the state is the fold of the file."""
    runner, prober = FakeRunner(), FakeProber()
    driver = opened(make_driver(path, runner, prober))
    state = driver.run()
    driver.journal.close()
    assert state.status == "answered"
    assert answer_of(state, PLAN)["recommended"] == 0.93
    assert not any(e.running for e in runner.engines)
    assert fold(read_journal(path)) == state
    assert prober.seen[:2] == [(0.93, 8_000), (0.93, 60_000)]


def test_events_come_before_their_side_effects(path: Path) -> None:
    """What a probe or a boot does is announced in the file before it happens."""
    runner, prober = FakeRunner(), FakeProber()
    driver = opened(make_driver(path, runner, prober))
    boot, probe = runner.boot, prober.probe

    def checked_boot(order: BootOrder, stop: threading.Event) -> FakeEngine:
        last = read_journal(path)[-1]
        assert (last.kind, last.body["boot"]) == (kinds.BOOT_STARTED, order.boot)
        return boot(order, stop)

    def checked_probe(engine: FakeEngine, request: ProbeRequest, **rest: Any) -> ProbeResult:
        last = read_journal(path)[-1]
        assert (last.kind, last.body["probe"]) == (kinds.PROBE_STARTED, request.probe)
        return probe(engine, request, **rest)

    runner.boot, prober.probe = checked_boot, checked_probe  # type: ignore[method-assign, assignment]
    assert driver.run().status == "answered"


def test_a_live_boot_serves_many_probes(path: Path) -> None:
    """The prompt ceiling is searched within one boot as far as it lives."""
    runner, prober = FakeRunner(), FakeProber()
    state = opened(make_driver(path, runner, prober)).run()
    assert len(state.boots) < len(state.trials)
    first_boot = [t for t in state.trials if t.boot == "b001"]
    assert len(first_boot) >= 2


def test_the_first_boot_that_the_machine_cannot_run_is_told_at_once(path: Path) -> None:
    """No fact yet and the environment is at fault: the sentence goes up, nothing runs."""
    runner = FakeRunner(fail=lambda n: EnvironmentProblem("no daemon"))
    with pytest.raises(EnvironmentProblem, match="no daemon"):
        opened(make_driver(path, runner, FakeProber())).run()


def test_trouble_is_waited_out_and_moves_nothing(path: Path) -> None:
    """The daemon is away for two boots in mid-study: growing pauses, and the same answer."""
    calm = opened(make_driver(path.with_name("calm.jsonl"), FakeRunner(), FakeProber())).run()
    runner = FakeRunner(fail=lambda n: EnvironmentProblem("daemon away") if n in (3, 4) else None)
    state = opened(make_driver(path, runner, FakeProber())).run()
    assert answer_of(state, PLAN) == answer_of(calm, PLAN)
    assert runner.clock.slept[:2] == [20.0, 40.0]


def test_trouble_that_stays_pauses_the_study(path: Path) -> None:
    """After several tries in a row the study pauses with what it saw, and can go on later."""
    runner = FakeRunner(fail=lambda n: EnvironmentProblem("daemon away") if n >= 3 else None)
    state = opened(make_driver(path, runner, FakeProber())).run()
    assert state.status == "environment" and "daemon away" in (state.why or "")
    again = FakeRunner()
    driver = opened(make_driver_again(path, again))
    assert driver.run().status == "answered"


def make_driver_again(path: Path, runner: FakeRunner) -> Driver:
    """A second process on the same journal: the first one's lock died with it."""
    import gc

    gc.collect()
    return make_driver(path, runner, FakeProber())


def test_a_failed_boot_is_the_probes_outcome(path: Path) -> None:
    """An engine that exits while booting ends the probe with the classified outcome and its last words."""
    log = "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"

    def fail(n: int) -> Exception | None:
        return BootFailure(EngineState(False, exit_code=1), log, "exited") if n == 1 else None

    state = opened(make_driver(path, FakeRunner(fail=fail), FakeProber())).run()
    first = state.trials[0]
    assert first.phase == "boot" and first.boot == "b001"


def test_the_budget_of_boots_is_kept(path: Path) -> None:
    """With three boots allowed the study pauses after three, with its bracket so far."""
    runner = FakeRunner()
    state = opened(make_driver(path, runner, FakeProber(), Budget(max_boots=3))).run()
    assert state.status == "budget-spent" and len(runner.engines) == 3
    assert answer_of(state, PLAN)["last_pass"] is not None
    assert not any(e.running for e in runner.engines)


def test_no_probe_starts_that_may_end_too_late(path: Path) -> None:
    """The time budget counts the next probe's 90th percentile."""
    runner = FakeRunner()
    state = opened(make_driver(path, runner, FakeProber(), Budget(limit_s=3_000.0))).run()
    assert state.status == "budget-spent"
    assert runner.clock.at_s <= 3_000.0


def test_a_stop_ends_the_study_cleanly(path: Path) -> None:
    """A stop during a probe: it is recorded as aborted, moves nothing, and no engine is left."""
    runner, prober = FakeRunner(), FakeProber()
    driver = opened(make_driver(path, runner, prober))
    prober.override[4] = Outcome.ABORTED
    probe = prober.probe

    def stopping(engine: FakeEngine, request: ProbeRequest, **rest: Any) -> ProbeResult:
        if len(prober.seen) == 3:
            driver.stop.set()
        return probe(engine, request, **rest)

    prober.probe = stopping  # type: ignore[method-assign]
    state = driver.run()
    assert state.status == "interrupted"
    assert state.trials[-1].outcome is Outcome.ABORTED
    assert len(state.observations) == 3
    assert not any(e.running for e in runner.engines)


@pytest.mark.parametrize("lives", [True, False])
def test_a_boot_that_outlived_a_crash_is_adopted(path: Path, lives: bool) -> None:
    """Killed in mid-probe: the probe is asked again, on the same boot where it still lives."""
    runner, prober = FakeRunner(), FakeProber()
    driver = opened(make_driver(path, runner, prober))

    def dies(*args: Any, **rest: Any) -> ProbeResult:
        raise KeyboardInterrupt  # stands for the kill: nothing after it is written

    prober.probe = dies  # type: ignore[method-assign]
    stop_of = FakeEngine.stop
    FakeEngine.stop = lambda self, timeout_s=20.0: None  # type: ignore[method-assign]
    try:
        with pytest.raises(KeyboardInterrupt):
            driver.run()
    finally:
        FakeEngine.stop = stop_of  # type: ignore[method-assign]
    driver.journal.close()
    survivor = runner.engines[0]
    survivor.running = lives
    second = FakeRunner(adoptable=survivor if lives else None)
    again = make_driver(path, second, FakeProber())
    assert again.state.pending is not None
    opened(again)
    assert again.state.probes_lost == 1
    assert (again.engine is survivor) == lives
    survivor.runner = second
    state = again.run()
    assert state.status == "answered"
    assert answer_of(state, PLAN)["recommended"] == 0.93


def test_an_engine_that_fell_back_to_the_cpu_is_trouble(path: Path) -> None:
    """A launch that wants a GPU and an engine that serves without one: no verdict, the engine is stopped."""
    runner = FakeRunner()
    driver = opened(make_driver(path, runner, FakeProber()))
    driver.resolve = lambda values: replace(resolve(values), wants_gpu=True)
    lost = "warning: no usable GPU found, --gpu-layers option will be ignored\n"
    log_text = FakeEngine.log_text
    FakeEngine.log_text = lambda self, since=0: lost  # type: ignore[method-assign, assignment]
    try:
        state = driver.run()
    finally:
        FakeEngine.log_text = log_text  # type: ignore[method-assign]
    assert state.status == "environment"
    assert {t.outcome for t in state.trials} == {Outcome.INFRA} and not state.observations
    assert not any(e.running for e in runner.engines)
