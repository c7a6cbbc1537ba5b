"""The prober: one request of an exact length to one engine, and what came of it."""

from __future__ import annotations

import threading

from llm_bisect.model import ProbeRequest, ProbeResult
from llm_bisect.probing.dialects import dialect_for
from llm_bisect.probing.one_probe import BootKnown, Patience, Probe
from llm_bisect.probing.prompts import PromptMaker
from llm_bisect.probing.watch import OnProgress
from llm_bisect.probing.wire import Api
from llm_bisect.runners.protocol import Clock, Engine
from llm_bisect.spaces.engines import EngineDescription

__all__ = ["Prober"]

_BOOTS_KEPT = 64


class Prober:
    """Probes engines of one kind. It keeps, per boot, what does not change during a boot.

    grace_s: seconds after the deadline in which the stream stays open (at most 5 % of the deadline).
    liveness_s, idle_s: seconds of the runner's clock that the one-token request after a probe may take,
    and that an engine may take to become idle after we hung up. exit_wait_s: real seconds that an engine
    which closed the connection has to show that it died.
    """

    def __init__(
        self,
        engine_description: EngineDescription,
        *,
        grace_s: float = 30.0,
        liveness_s: float = 120.0,
        idle_s: float = 120.0,
        exit_wait_s: float = 10.0,
    ) -> None:
        self._about = engine_description
        self._patience = Patience(grace_s, liveness_s, idle_s, exit_wait_s)
        self._known: dict[tuple[str, str], BootKnown] = {}
        self._lock = threading.Lock()

    def probe(
        self,
        engine: Engine,
        request: ProbeRequest,
        *,
        clock: Clock,
        stop: threading.Event,
        on_progress: OnProgress | None = None,
    ) -> ProbeResult:
        """Ask `request` of `engine` and say what happened. Raises nothing that an engine could cause.

        on_progress is called from this thread whenever the request has moved on.
        """
        probe = Probe(
            self._about, self._for(engine), self._patience, engine, request, clock, stop, on_progress
        )
        return probe.run()

    def _for(self, engine: Engine) -> BootKnown:
        key = (engine.boot, engine.base_url)
        with self._lock:  # several engines may be probed at once
            known = self._known.get(key)
            if known is None:
                api = Api(engine.base_url, engine.api_key)
                dialect = dialect_for(self._about)
                maker = PromptMaker(lambda text, special: dialect.tokenize(api, text, special=special))
                known = BootKnown(engine.boot, engine.base_url, api, dialect, maker)
                while len(self._known) >= _BOOTS_KEPT:
                    del self._known[next(iter(self._known))]
                self._known[key] = known
            return known
