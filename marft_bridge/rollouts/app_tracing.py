"""The tracers of the app and its environment -> silent while a command runs episodes.

A training runs thousands of episodes; what an app sends to LangSmith or to a collector of OpenTelemetry is meant for
its real runs. Invariants: the app sees its tracer at work (runs, spans and their ids exist), and none of it leaves
the process; what was recorded before the block is still sent; outside the block everything is as if untouched.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from langsmith import AsyncClient, Client
from opentelemetry.sdk.trace import SpanProcessor, Tracer

# Threads that outlive a block, such as a node's that took too long, stay silent: they carry this.
_is_silent: ContextVar[bool] = ContextVar("marft_app_tracing_off", default=False)
_lock = threading.Lock()
_open_blocks = 0  # of the whole process: threads without a context of ours are silent during them
_is_installed = False
_NO_PROCESSOR = SpanProcessor()

# Where runs enter the queue of a LangSmith client, whoever made them: callbacks, `traceable`, wrapped clients. What is
# queued already is sent by other methods.
_CLIENT_METHODS = ("create_run", "update_run", "batch_ingest_runs", "multipart_ingest")
_ASYNC_CLIENT_METHODS = ("create_run", "update_run")


@contextmanager
def app_tracing(kept: bool) -> Iterator[None]:
    """Silences LangSmith and every OpenTelemetry tracer of this process until the block ends, unless they are `kept`.

    Our own spans do not come this way (see `recording.open_span`). Metrics and log lines are left alone.
    """
    if kept:
        yield
        return
    global _open_blocks
    with _lock:
        _install_once()
        _open_blocks += 1
    reset_token = _is_silent.set(True)
    try:
        yield
    finally:
        _is_silent.reset(reset_token)
        with _lock:
            _open_blocks -= 1


def _is_off() -> bool:
    return _open_blocks > 0 or _is_silent.get()


def _install_once() -> None:
    """Puts the wrappers in place for the rest of the process; they do nothing while nothing is silent."""
    global _is_installed
    if _is_installed:
        return
    _is_installed = True
    for name in _CLIENT_METHODS:
        setattr(Client, name, _drop_call(getattr(Client, name)))
    for name in _ASYNC_CLIENT_METHODS:
        setattr(AsyncClient, name, _drop_async_call(getattr(AsyncClient, name)))
    setattr(Tracer, "start_span", _start_unsent_span(Tracer.start_span))  # noqa: B010 - mypy refuses an assignment
    logger_class = _event_logger_class()
    if logger_class is not None:
        logger_class.emit = _drop_event(logger_class.emit)


def _drop_call(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> None:
        if not _is_off():
            original(*args, **kwargs)

    return method


def _drop_async_call(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    async def method(*args: Any, **kwargs: Any) -> None:
        if not _is_off():
            await original(*args, **kwargs)

    return method


def _start_unsent_span(original: Callable[..., Any]) -> Callable[..., Any]:
    """A span without a processor records like any other, and reaches no exporter, whenever it ends."""

    @functools.wraps(original)
    def start_span(tracer: Tracer, *args: Any, **kwargs: Any) -> Any:
        if _is_off():
            tracer = copy.copy(tracer)
            tracer.span_processor = _NO_PROCESSOR  # type: ignore[assignment]  # it needs on_start and on_end only
        return original(tracer, *args, **kwargs)

    return start_span


def _event_logger_class() -> Any:
    """The class whose `emit` takes OpenTelemetry's events; None where this release keeps it elsewhere."""
    try:
        from opentelemetry.sdk import _logs
    except ImportError:
        return None
    return getattr(_logs, "Logger", None)


def _drop_event(original: Callable[..., None]) -> Callable[..., None]:
    """Drops events, as which some instrumentations send prompts and answers; a log line has no event name."""

    @functools.wraps(original)
    def emit(logger: Any, record: Any = None, **kwargs: Any) -> None:
        is_event = bool(kwargs.get("event_name") or getattr(record, "event_name", None))
        if not (is_event and _is_off()):
            original(logger, record, **kwargs)

    return emit
