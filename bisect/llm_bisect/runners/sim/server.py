"""The simulated vLLM as a process: `python -m llm_bisect.runners.sim.server --spec FILE --port N`.

The spec is JSON: card, model, launch (argv, env, mounts), served (shapes that reached ready here), scale
(seconds of the rig in one real second), started_s, state (path of the shared state), dies_with_stdin.
Exit status as vLLM's: 0 after a death while serving and after SIGTERM, 1 where the boot fails, 2 for
arguments that its parser refuses.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from llm_bisect.runners.sim.serving import Rig, Spec
from llm_bisect.runners.sim.settings import ArgumentError, read_launch

_LAST_WORDS_S = 0.1  # real seconds between an engine's death and the end of its process


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until told to stop, or until the engine dies. Returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        path, port = Path(_value(arguments, "--spec")), int(_value(arguments, "--port"))
        spec = Spec.read(path)
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        print(f"usage: --spec FILE --port N: {error!r}", file=sys.stderr)
        return 2
    if spec.dies_with_stdin:
        threading.Thread(target=_die_with_stdin, daemon=True).start()
    try:
        settings = read_launch(spec.argv, spec.env, spec.mounts)
    except ArgumentError as error:
        print(f"vllm serve: error: {error}", flush=True)
        return 2
    rig = Rig(spec, settings)

    def on_signal(number: int, frame: object) -> None:
        rig.ended.set()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    ready = rig.boot()
    if rig.ended.is_set():
        return 0
    return _serve(rig, port) if ready else 1


def _serve(rig: Rig, port: int) -> int:
    from llm_bisect.runners.sim.api import make_server

    try:
        server = make_server(rig, port)
    except OSError as error:
        rig.say(f"OSError: [Errno {error.errno}] {error.strerror}")
        return 1
    rig.say(rig.lines.ready(rig.engine.virtual_s, port))
    rig.ready = True
    rig.show()
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    while not rig.ended.is_set() and not rig.died.wait(0.02):
        pass
    # the last answers are on their way
    time.sleep(_LAST_WORDS_S if rig.died.is_set() else 0.0)
    rig.say(rig.lines.shutdown(rig.engine.virtual_s))
    server.socket.close()
    return 0


def _value(arguments: Sequence[str], flag: str) -> str:
    for index, word in enumerate(arguments):
        if word == flag:
            return arguments[index + 1]
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    raise ValueError(f"{flag} is missing")


def _die_with_stdin() -> None:
    """The other end of stdin is held by the runner alone: it closes when that process dies."""
    with contextlib.suppress(OSError, ValueError):
        while os.read(0, 4096):
            pass
    os._exit(0)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)
