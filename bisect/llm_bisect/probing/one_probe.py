"""One probe: build the prompt, ask, judge the answer, ask the other needles, and see whether the engine
still lives."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llm_bisect.model import EngineState, Evidence, Outcome, ProbeRequest, ProbeResult, RecallCheck
from llm_bisect.probing.classify import classify_probe
from llm_bisect.probing.dialects import Dialect, NoTokenizer
from llm_bisect.probing.logs import evidence
from llm_bisect.probing.prompts import Needle, Prompt, PromptMaker
from llm_bisect.probing.watch import Ending, Limits, MemoryLow, OnProgress, run_request
from llm_bisect.probing.wire import Api, CallFailed
from llm_bisect.runners.protocol import Clock, Engine
from llm_bisect.spaces.engines import EngineDescription

CACHED_TOKENS = 64  # this much may come from a cache without making a measurement worthless …
CACHED_SHARE = 0.02  # … or this share of the prompt
WRONG_SHARE = 0.01  # the engine may count this share more or fewer tokens than were sent
_ANSWER_CHARS = 300
_LEAST_REAL_S = 3.0  # for follow-ups and the one-token request, however fast the runner's clock goes
_SETTLED_S = 0.3  # real seconds without a new log line: a dead engine's log is complete


@dataclass
class BootKnown:
    """What is known of one boot, for all its probes."""

    boot: str
    base_url: str
    api: Api
    dialect: Dialect
    maker: PromptMaker
    reuses: bool | None = None  # a second question on one prompt is cheap


@dataclass(frozen=True)
class Patience:
    """See Prober."""

    grace_s: float
    liveness_s: float
    idle_s: float
    exit_wait_s: float


class Probe:
    """The state of one probe while it runs."""

    def __init__(
        self,
        about: EngineDescription,
        known: BootKnown,
        patience: Patience,
        engine: Engine,
        request: ProbeRequest,
        clock: Clock,
        stop: threading.Event,
        on_progress: OnProgress | None,
    ) -> None:
        self.about, self.known, self.patience = about, known, patience
        self.engine, self.request, self.clock, self.stop = engine, request, clock, stop
        self.on_progress = on_progress
        self.log_from = engine.log_mark()
        self.memory = MemoryLow()
        self.notes: list[str] = []
        self.recall: list[RecallCheck] = []
        self.first: Ending | None = None

    def run(self) -> ProbeResult:
        """The whole probe. Raises nothing that an engine could cause."""
        if self.stop.is_set():
            return self._result(Outcome.ABORTED, evidence("aborted"))
        prompt = self._prompt()
        if isinstance(prompt, ProbeResult):
            return prompt
        max_tokens = self.request.max_tokens if prompt.needles else 1
        try:
            self.first = first = self._ask(prompt.first, max_tokens, may_reuse=False, watch=True)
        except CallFailed as error:
            return self._call_failed(error)
        if not first.complete:
            return self._failed(first)
        if first.late_s > 0:
            self.notes.append(
                f"answered {first.late_s:.0f} s after the deadline, while the stream was still open"
            )
        worthless = self._worthless(first, len(prompt.first))
        if worthless is not None:
            return self._result(Outcome.VOID, worthless, alive=self._lives())
        if prompt.needles:
            self._check(prompt.needles[0], first)
            ended = self._follow_ups(prompt, max_tokens)
            if ended is not None:
                return ended
        elif self.request.shape == "needle":
            self.notes.append("too short for a needle: only the prefill was tested")
        return self._judge(first)

    def _judge(self, first: Ending) -> ProbeResult:
        dead = self._liveness()
        if dead is not None:
            return dead
        if not all(check.found for check in self.recall):
            lost = ", ".join(f"{check.depth:g}" for check in self.recall if not check.found)
            proof = evidence(
                "needle_missing", [f"answered: {first.answer.text[:_ANSWER_CHARS]!r}"], {"depths": lost}
            )
            return self._result(Outcome.RECALL_FAILED, proof)
        slow_s = self.request.slow_s
        if slow_s is not None and first.wall_s > slow_s:
            facts: dict[str, str | int | float | bool] = {"wall_s": round(first.wall_s, 3), "slow_s": slow_s}
            return self._result(Outcome.SLOW, evidence("slower_than_allowed", facts=facts))
        return self._result(Outcome.PASS, evidence("answered"))

    # Asking

    def _prompt(self) -> Prompt | ProbeResult:
        depths = self.request.depths if self.request.shape == "needle" else ()
        salt = self.request.salt or f"{self.engine.boot}:{self.request.probe}"
        try:
            rotate = bool(depths) and not self._reuses()
            return self.known.maker.make(self.request.prompt_tokens, salt=salt, depths=depths, rotate=rotate)
        except NoTokenizer as error:
            proof = evidence("no_tokenizer", [f"The engine does not tokenise a text for us: {error}."])
            return self._result(Outcome.VOID, proof)
        except ValueError as error:
            return self._result(Outcome.VOID, evidence("prompt_too_short", [str(error)]))
        except CallFailed as error:
            return self._call_failed(error)

    def _reuses(self) -> bool:
        if self.known.reuses is None:
            try:
                self.known.reuses = self.known.dialect.reuses_prompts(self.known.api)
            except CallFailed:
                return True  # asked again at the next probe
        return self.known.reuses

    def _ask(
        self,
        ids: Sequence[int],
        max_tokens: int,
        *,
        may_reuse: bool,
        watch: bool = False,
        deadline_s: float | None = None,
    ) -> Ending:
        """One request. Raises CallFailed where it could not even be written (the model's name is not
        known)."""
        deadline_s = self.request.deadline_s if deadline_s is None else deadline_s
        body: tuple[str, Mapping[str, Any]] = self.known.dialect.request(
            self.known.api, ids, max_tokens, may_reuse=may_reuse
        )
        limits = Limits(
            deadline_s=deadline_s,
            silence_s=self.request.silence_s,
            grace_s=min(self.patience.grace_s, 0.05 * deadline_s) if watch else 0.0,
            least_real_s=0.0 if watch else _LEAST_REAL_S,
        )
        return run_request(
            self.engine,
            self.known.dialect,
            self.known.api,
            body,
            limits,
            clock=self.clock,
            stop=self.stop,
            memory=self.memory,
            total_tokens=len(ids),
            on_progress=self.on_progress if watch else None,
        )

    def _follow_ups(self, prompt: Prompt, max_tokens: int) -> ProbeResult | None:
        """Ask for the other needles of the same prompt, as long as that is cheap."""
        rest = prompt.needles[1:]
        if not rest:
            return None
        if not self._reuses():
            self.notes.append("one needle was asked: the engine keeps no prompt for a second question")
            return None
        first_s = self.first.wall_s if self.first is not None else 0.0
        for number, needle in enumerate(rest):
            try:
                question = self.known.dialect.tokenize(self.known.api, needle.question, special=False)
                ids = prompt.follow_up(question)
                budget_s = min(self.request.deadline_s, 60.0 + 2 * first_s)
                ending = self._ask(ids, max_tokens, may_reuse=True, deadline_s=budget_s)
            except (NoTokenizer, CallFailed):
                break  # whether it lives is seen next
            if not ending.complete:
                if ending.client_error == "timeout":
                    self.notes.append(f"no answer in time for the needle at {needle.depth:g}")
                    return None if self._becomes_idle() else self._stuck(ending)
                return self._failed(ending)
            self._check(needle, ending)
            cached = ending.answer.cached_tokens
            if number + 1 < len(rest) and cached is not None and cached < 0.5 * len(ids):
                left = ", ".join(f"{one.depth:g}" for one in rest[number + 1 :])
                self.notes.append(f"needles at {left} were not asked: the engine computed the prompt again")
                break
        return None

    def _check(self, needle: Needle, ending: Ending) -> None:
        self.recall.append(RecallCheck(depth=needle.depth, found=needle.found_in(ending.answer.text)))

    # Judging

    def _worthless(self, first: Ending, sent: int) -> Evidence | None:
        """Why this measured nothing, if so."""
        counted, cached = first.answer.prompt_tokens, first.answer.cached_tokens
        if counted is None and not first.answer.pieces and not first.answer.completion_tokens:
            return evidence("empty_answer", ["the engine said that it was done, and nothing else"])
        if counted is None:
            self.notes.append("the engine did not say how many tokens it was sent")
        if counted is not None and abs(counted - sent) > WRONG_SHARE * sent:
            facts: dict[str, str | int | float | bool] = {"sent_tokens": sent, "counted_tokens": counted}
            return evidence("wrong_length", [f"{sent} tokens were sent, {counted} counted"], facts)
        if cached is not None and cached > max(CACHED_TOKENS, CACHED_SHARE * sent):
            facts = {"sent_tokens": sent, "cached_tokens": cached}
            return evidence("cached_prefix", [f"{cached} of {sent} tokens came from a cache"], facts)
        return None

    def _failed(self, ending: Ending) -> ProbeResult:
        """A request that did not come back complete."""
        if ending.client_error == "aborted":
            return self._result(Outcome.ABORTED, evidence("aborted"), ending=ending)
        alive = True
        if ending.client_error in ("timeout", "silence"):
            log = self._log()
            alive = self._becomes_idle()
        elif ending.status is None or ending.status >= 500 or ending.status == 200:
            self._wait_for_exit(briefly=True)
            log = self._log()
            alive = self._state().running and self._lives()
            if not alive:
                self._wait_for_exit()
        else:
            log = self._log()
        state = self._state()
        outcome, proof = classify_probe(
            self.about,
            http_status=ending.status,
            http_body=ending.body,
            stream_error=ending.answer.error,
            client_error=ending.client_error,
            state=state,
            log=log if state.running else self._log(),
            context={} if ending.progressing is None else {"progressing": ending.progressing},
        )
        return self._result(outcome, proof, ending=ending, alive=alive)

    def _stuck(self, ending: Ending) -> ProbeResult:
        return self._result(Outcome.HANG, evidence("did_not_become_idle"), ending=ending, alive=False)

    def _call_failed(self, error: CallFailed) -> ProbeResult:
        """A short call before the request got no answer: the engine is dead or stuck."""
        self._wait_for_exit(briefly=error.why == "timeout")
        state = self._state()
        outcome, proof = classify_probe(
            self.about,
            http_status=None,
            http_body="",
            stream_error=None,
            client_error="silence" if error.why == "timeout" else error.why,
            state=state,
            # it may have died between two probes
            log=self._log().strip() or self.engine.log_text(),
        )
        return self._result(outcome, proof, alive=False)

    def _liveness(self) -> ProbeResult | None:
        """None where the engine still answers; health endpoints stay 200 while it hangs."""
        if self.stop.is_set():
            return None  # it has answered; what was measured stays measured
        ending = self._one_token(self.patience.liveness_s)
        if ending is not None and (ending.complete or ending.client_error == "aborted"):
            return None
        self._wait_for_exit()
        state = self._state()
        outcome, proof = classify_probe(
            self.about,
            http_status=ending.status if ending is not None else None,
            http_body=ending.body if ending is not None else "",
            stream_error=ending.answer.error if ending is not None else None,
            client_error=ending.client_error if ending is not None else "connection_reset",
            state=state,
            log=self._log(),
            context={"progressing": False},
        )
        if outcome in (Outcome.CONFIG_ERROR, Outcome.CONTEXT_EXCEEDED):
            outcome = Outcome.ENGINE_CRASHED  # it had answered a moment before
        self.notes.append("it answered, but not the one-token request after that")
        return self._result(outcome, proof, alive=False)

    def _one_token(self, within_s: float) -> Ending | None:
        try:
            ids = self.known.dialect.tokenize(self.known.api, "Hello", special=True)
            return self._ask(ids, 1, may_reuse=True, deadline_s=within_s)
        except (NoTokenizer, CallFailed):
            return None

    def _lives(self) -> bool:
        ending = self._one_token(self.patience.liveness_s)
        return ending is not None and ending.complete

    def _becomes_idle(self) -> bool:
        """After we hung up: True once the engine has dropped the request and answers again."""
        end_s = self.clock.now_s() + self.patience.idle_s
        while self.clock.now_s() < end_s and not self.stop.is_set():
            if not self._state().running:
                return False
            try:
                reading = self.known.dialect.look(self.known.api)
            except CallFailed:
                reading = None
            if reading is None or reading.busy is None:
                break  # it does not say: only an answer shows it
            if not reading.busy:
                break
            self.stop.wait(0.1)
        return self._lives()

    def _log(self) -> str:
        return self.engine.log_text(self.log_from)

    def _wait_for_exit(self, *, briefly: bool = False) -> None:
        """Wait (real time) until the engine is seen dead and its log is complete."""
        patience_s = min(1.5, self.patience.exit_wait_s) if briefly else self.patience.exit_wait_s
        end = time.monotonic() + patience_s
        while time.monotonic() < end and self._state().running:
            if self.stop.wait(0.05):
                break
        mark, since = self.engine.log_mark(), time.monotonic()
        while time.monotonic() - since < _SETTLED_S and time.monotonic() < end + 5:
            time.sleep(0.05)
            if self.engine.log_mark() != mark:
                mark, since = self.engine.log_mark(), time.monotonic()

    def _state(self) -> EngineState:
        return self.engine.state()

    # Telling

    def _result(
        self, outcome: Outcome, proof: Evidence, *, ending: Ending | None = None, alive: bool = True
    ) -> ProbeResult:
        """The result, with all that was measured before it ended."""
        told = ending or self.first
        answer = told.answer if told is not None else None
        sent = self.request.prompt_tokens
        finished = answer is not None and answer.finished and answer.error is None
        counted = (answer.prompt_tokens if answer is not None else None) or sent
        prefill = answer.prefill_tps if answer is not None else None
        decode = answer.decode_tps if answer is not None else None
        first_s = told.first_text_s if told is not None else None
        if prefill is None and finished and first_s:
            prefill = counted / first_s
        if decode is not None and decode <= 0:
            decode = None  # a single token has no speed
        if decode is None and finished and told is not None and answer is not None and first_s is not None:
            rest_s, more = told.wall_s - first_s, (answer.completion_tokens or answer.pieces) - 1
            decode = more / rest_s if rest_s > 0 and more > 0 else None
        lowest = self.memory.lowest
        return ProbeResult(
            outcome=outcome,
            evidence=proof,
            prompt_tokens=counted,
            wall_s=told.wall_s if told is not None else 0.0,
            first_token_s=first_s,
            tokens_processed=counted if finished else told.tokens if told is not None else None,
            cached_tokens=answer.cached_tokens if answer is not None else None,
            completion_tokens=answer.completion_tokens if answer is not None else None,
            prefill_tps=prefill,
            decode_tps=decode,
            min_free_mib=lowest.free_mib if lowest is not None else None,
            memory_source=lowest.source if lowest is not None else None,
            others_grew_mib=self.memory.others_grew_mib,
            recall=tuple(sorted(self.recall, key=lambda check: check.depth)),
            http_status=told.status if told is not None else None,
            engine_alive=alive and self._state().running,
            notes=tuple(self.notes),
        )
