"""A whole process -> recorded: every LangGraph run in it, whatever module starts it, gets the recorder's callbacks.

`instrument` stands in front of the two methods that every way of running a graph ends in (`Pregel.stream` and
`Pregel.astream`) and adds one callback handler to the run's config. Invariants: what is not a graph run (a chain,
a lone model call) is not touched; a recorder is attached to a run once, however it came there; `uninstrument`
puts the methods back, or, where somebody else has wrapped them meanwhile, leaves ours there doing nothing.
A failure in here is counted and the run goes on unrecorded. It knows nothing of spans.
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

from marft_bridge.errors import BridgeError, ConfigError
from marft_bridge.record import Recorder
from marft_bridge.record_options import RecordOptions
from marft_bridge.recorded_graph import config_with_recorder, store_to_recorder
from marft_bridge.redaction import Redact
from marft_bridge.task_hooks import task_hooks

_METHODS = ("stream", "astream")


@dataclass(frozen=True, slots=True)
class _Active:
    """Who records this process, and which methods stand in front of LangGraph's."""

    recorder: Recorder
    store: Path | None  # None: a recorder was given
    replaced: dict[str, tuple[Callable[..., Any], Callable[..., Any]]]  # name -> LangGraph's, ours


_active: _Active | None = None
_paused = 0  # blocks of `instrument_paused` that are open
_lock = threading.Lock()


def instrument(
    store: str | Path | Recorder, options: RecordOptions | None = None, redact: Redact | None = None
) -> Recorder:
    """Records every LangGraph run of this process from now on; gives back the recorder, for its counts of losses.

    Args:
        store: path of the DuckDB store (its journal is written beside it), or a recorder.
        options: what may be written, as for `wrap`.
        redact: a function that hides what it is given, as for `wrap`.

    Raises:
        ConfigError: options or a function are given where a recorder with its own is in use already.
        BridgeError: the process is instrumented for another store already. For the same one, nothing changes.
    """
    global _active
    path = None if isinstance(store, Recorder) else Path(store).absolute()
    with _lock:
        if _active is not None:
            same = _active.recorder is store if path is None else _active.store == path
            if not same:
                raise BridgeError(
                    f"this process records into {_active.store or 'another recorder'} already; "
                    "call marft_bridge.uninstrument() first"
                )
            if options is not None or redact is not None:
                raise ConfigError("instrument: this process is recorded already, with the options it was given first")
            return _active.recorder
        recorder = store_to_recorder(store, options, redact)
        originals = {name: getattr(Pregel, name) for name in _METHODS}
        replaced = {name: (original, _in_front_of(original)) for name, original in originals.items()}
        _active = _Active(recorder, path, replaced)
        for name, (_, ours) in replaced.items():
            setattr(Pregel, name, ours)
        task_hooks.attach()
        return recorder


def uninstrument() -> None:
    """Ends what `instrument` began; does nothing when nothing records.

    Runs under way are recorded to their end, but their dependencies only up to here.
    """
    global _active
    with _lock:
        if _active is None:
            return
        for name, (original, ours) in _active.replaced.items():
            if getattr(Pregel, name) is ours:
                setattr(Pregel, name, original)
        _active = None
        task_hooks.detach()


@contextmanager
def instrument_paused() -> Iterator[None]:
    """Until the block ends, runs are not recorded process-wide: a command records what it runs into a store of its own,
    also where the app that it loads calls `instrument`."""
    global _paused
    with _lock:
        _paused += 1
    try:
        yield
    finally:
        with _lock:
            _paused -= 1


def _in_front_of(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(graph: Any, input: Any, config: Any = None, **kwargs: Any) -> Any:
        return original(graph, input, _recorded(graph, config), **kwargs)

    return method


def _recorded(graph: Any, config: Any) -> Any:
    """The config with the process's recorder among its callbacks; the same config where it is there already."""
    active = _active
    return config if active is None or _paused else config_with_recorder(graph, config, active.recorder)
