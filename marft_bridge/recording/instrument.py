"""Every LangGraph run of this process, whatever module starts it -> the same run with the recorder's callbacks.

`instrument` wraps the two methods that every way of running a graph ends in (`Pregel.stream` and `Pregel.astream`) and
adds one callback handler to the run's config. Invariants: what is not a graph run (a chain, a lone model call) is not
touched; a recorder is attached to a run once, however it got there; `uninstrument` restores the methods, or, where
another library has wrapped them meanwhile, leaves ours in place, inactive. A failure in here is counted and the run
goes on unrecorded.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from langgraph.pregel import Pregel

from marft_bridge.common.errors import BridgeError, ConfigError
from marft_bridge.config.record import RecordOptions
from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.redaction import Redact
from marft_bridge.recording.wrap import attach_hooks, config_with_recorder, store_to_recorder

_METHODS = ("stream", "astream")


@dataclass(frozen=True, slots=True)
class _Instrumentation:
    """The recorder of this process, and the methods of LangGraph that are wrapped for it."""

    recorder: Recorder
    store: Path | None  # None: a recorder was given
    methods: dict[str, tuple[Callable[..., Any], Callable[..., Any]]]  # name -> LangGraph's, ours
    detach_hooks: Callable[[], None]


_instrumentation: _Instrumentation | None = None
_open_pauses = 0  # blocks of `instrument_paused` that are open
_lock = threading.Lock()


def instrument(
    store: str | Path | Recorder, options: RecordOptions | None = None, redact: Redact | None = None
) -> Recorder:
    """Records every LangGraph run of this process from now on; returns the recorder, for its counts of losses.

    Args:
        store: path of the DuckDB store (its journal is written beside it), or a recorder.
        options: what may be written, as for `wrap`.
        redact: a redaction function, as for `wrap`.

    Raises:
        ConfigError: options or a function are given where a recorder with its own is in use already.
        BridgeError: the process is instrumented for another store already. For the same one, nothing changes.
    """
    global _instrumentation
    store_path = None if isinstance(store, Recorder) else Path(store).absolute()
    with _lock:
        if _instrumentation is not None:
            is_same = _instrumentation.recorder is store if store_path is None else _instrumentation.store == store_path
            if not is_same:
                raise BridgeError(
                    f"this process records into {_instrumentation.store or 'another recorder'} already; "
                    "call marft_bridge.uninstrument() first"
                )
            if options is not None or redact is not None:
                raise ConfigError("instrument: this process is recorded already, with the options it was given first")
            return _instrumentation.recorder
        recorder = store_to_recorder(store, options, redact)
        originals = {name: getattr(Pregel, name) for name in _METHODS}
        methods = {name: (original, _record_runs(original)) for name, original in originals.items()}
        _instrumentation = _Instrumentation(recorder, store_path, methods, detach_hooks=attach_hooks(recorder))
        for name, (_, replacement) in methods.items():
            setattr(Pregel, name, replacement)
        return recorder


def uninstrument() -> None:
    """Ends what `instrument` began; does nothing when nothing records.

    Runs under way are recorded to their end, but their dependencies only up to here.
    """
    global _instrumentation
    with _lock:
        if _instrumentation is None:
            return
        for name, (original, replacement) in _instrumentation.methods.items():
            if getattr(Pregel, name) is replacement:
                setattr(Pregel, name, original)
        _instrumentation.detach_hooks()
        _instrumentation = None


@contextmanager
def instrument_paused() -> Iterator[None]:
    """Suspends the recording of the process until the block ends: a command records its runs into a store of its own,
    also where the app that it loads calls `instrument`."""
    global _open_pauses
    with _lock:
        _open_pauses += 1
    try:
        yield
    finally:
        with _lock:
            _open_pauses -= 1


def _record_runs(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(graph: Any, input: Any, config: Any = None, **kwargs: Any) -> Any:
        return original(graph, input, _add_recorder(graph, config), **kwargs)

    return method


def _add_recorder(graph: Any, config: Any) -> Any:
    """The config with the process's recorder among its callbacks; the same config where it is there already."""
    instrumentation = _instrumentation  # read once: another thread may call `uninstrument` meanwhile
    if instrumentation is None or _open_pauses:
        return config
    return config_with_recorder(graph, config, instrumentation.recorder)
