"""The diagnostics log of a run: `<journal>/log.jsonl`, by structlog. The journal is the record; this is for
finding faults, and nothing is ever read back from it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from llm_bisect.model.secrets import mask_secrets

LONGEST_BYTES = 20 << 20
_NOISY = ("urllib3", "docker", "httpx", "httpcore", "optuna")


@contextlib.contextmanager
def diagnostics(folder: Path, study: str) -> Iterator[None]:
    """Log to `folder`/log.jsonl while the block runs, with the traceback of whatever ends it. A log that
    cannot be written (full disk) is given up silently: it must never end a study."""
    import structlog

    try:
        stream = (folder / "log.jsonl").open("a", encoding="utf-8", errors="backslashreplace")
    except OSError:
        yield
        return
    with stream:
        if stream.tell() > LONGEST_BYTES:
            stream.truncate(0)
        structlog.configure(
            processors=[
                structlog.contextvars.merge_contextvars,
                structlog.processors.add_log_level,
                structlog.processors.TimeStamper(fmt="iso", utc=True),
                structlog.processors.dict_tracebacks,
                lambda _logger, _method, event: mask_secrets(dict(event)),
                structlog.processors.JSONRenderer(),
            ],
            logger_factory=structlog.WriteLoggerFactory(file=stream),
        )
        for name in _NOISY:
            logging.getLogger(name).setLevel(logging.WARNING)
        log = structlog.get_logger()
        with structlog.contextvars.bound_contextvars(study=study):
            _write(log.info, "run begins")
            try:
                yield
            except BaseException as error:
                _write(log.error, "run failed", exc_info=error)
                raise
            _write(log.info, "run ends")


def note(event: str, **fields: object) -> None:
    """One line of diagnostics, where a run has opened the log."""
    import structlog

    if structlog.is_configured():
        _write(structlog.get_logger().info, event, **fields)


def _write(say: Callable[..., object], text: str, **more: object) -> None:
    with contextlib.suppress(OSError, ValueError):
        say(text, **more)
