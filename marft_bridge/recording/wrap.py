"""A compiled LangGraph graph -> the same graph, recorded.

`wrap` changes no result and needs no edit of the app. It returns a graph of the same class with the same nodes, so
every way of running it, copying it (`with_config`) or putting it into another graph works and is recorded; the
original graph is not touched. To record every graph of a process see `instrument`.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from langchain_core.callbacks import BaseCallbackManager
from langchain_core.runnables import RunnableConfig
from langgraph.pregel import Pregel

from marft_bridge.common.errors import ConfigError, GraphError
from marft_bridge.common.library_internals import var_child_runnable_config
from marft_bridge.config.record import RecordOptions
from marft_bridge.model_calls.clients.hooks import client_patches
from marft_bridge.recording.exit_line import count_for_exit
from marft_bridge.recording.langgraph_hooks import task_hooks
from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.redaction import Redact
from trace_store.journal import Journal, journal_of

log = logging.getLogger("marft_bridge")
_RUN_METHODS = frozenset(
    [
        *("invoke", "stream", "batch", "batch_as_completed", "transform", "stream_events"),
        *("ainvoke", "astream", "abatch", "abatch_as_completed", "atransform", "astream_events", "astream_log"),
    ]
)
"""The methods of a graph that run it."""


class RecordedGraph(Pregel[Any, Any, Any, Any]):
    """What `wrap` adds to a graph's own class, in front of it.

    LangGraph copies a graph by calling its class with the attributes of the instance, so each wrapped graph gets a
    class of its own, which holds the recorder.
    """

    recorder: ClassVar[Recorder]
    _original: ClassVar[Any]
    _detach: ClassVar[weakref.finalize[Any, Any]]  # runs once: at unwrap, or when the class is garbage-collected

    def unwrap(self) -> Any:
        """The original graph. This one, and copies of it, record nothing any more."""
        type(self)._detach()
        return type(self)._original

    def _with_recorder(self, config: RunnableConfig | None) -> RunnableConfig | None:
        return config_with_recorder(self, config, self.recorder) if type(self)._detach.alive else config

    def _record_runs_of(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """A method that the app put onto the graph itself, where it hides that of the class: the same, recorded.

        What it runs is the graph that it was made for, which no class of ours stands in front of: its config does. A
        method that is given none may have one of its own, which ours would take the place of: such a run is left alone.
        """
        place = _place_of_config(method)
        if place is None:
            log.warning("wrap: the graph's own %r takes no config: its runs are not recorded", name)
            return method
        unrecorded = False

        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal unrecorded
            by_place = len(args) > place
            config = args[place] if by_place else kwargs.get("config")
            if not _is_given(config):
                if not unrecorded:
                    log.warning("wrap: the graph's own %r was given no config: such runs are not recorded", name)
                unrecorded = True
                return method(*args, **kwargs)
            recorded = [*map(self._with_recorder, config)] if isinstance(config, list) else self._with_recorder(config)
            if by_place:
                return method(*args[:place], recorded, *args[place + 1 :], **kwargs)
            return method(*args, **{**kwargs, "config": recorded})

        return run

    # LangGraph's own `invoke` comes through `stream`; that of a class which runs another graph inside may not.
    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """As the graph's own; `batch` comes through here."""
        return super().invoke(input, self._with_recorder(config), **kwargs)

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """As the graph's own; `abatch` comes through here."""
        return await super().ainvoke(input, self._with_recorder(config), **kwargs)

    def stream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Iterator[Any]:
        """As the graph's own."""
        return super().stream(input, self._with_recorder(config), **kwargs)

    def astream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> AsyncIterator[Any]:
        """As the graph's own."""
        return super().astream(input, self._with_recorder(config), **kwargs)


def _place_of_config(method: Callable[..., Any]) -> int | None:
    """At which place a method is given its config; beyond all places where by name alone; None where not at all."""
    try:
        parameters = [*inspect.signature(method).parameters.values()]
    except (TypeError, ValueError):
        return None
    kinds = {parameter.kind for parameter in parameters}
    by_place = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    if "config" in by_place:
        return by_place.index("config")
    if not by_place and inspect.Parameter.VAR_POSITIONAL in kinds:
        return 1  # as the method that it stands for
    is_named = any(parameter.name == "config" for parameter in parameters)
    return sys.maxsize if is_named or inspect.Parameter.VAR_KEYWORD in kinds else None


def _is_given(config: Any) -> bool:
    """Whether a config, or those of a batch, came from the caller and hold something."""
    configs = config if isinstance(config, list) else [config]
    return bool(configs) and all(isinstance(run_config, Mapping) and run_config for run_config in configs)


def config_with_recorder(graph: Pregel[Any, Any, Any, Any], config: Any, recorder: Recorder) -> Any:
    """The config with the recorder among its callbacks; the same config where the run has it already.

    A config that cannot be read is returned as it is, and counted: the run goes on unrecorded.
    """
    try:
        inherited = var_child_runnable_config.get()
        if any(_has_recorder(active_config, recorder) for active_config in (config, graph.config, inherited)):
            return config
        return {**(config or {}), "callbacks": _with_handler((config or {}).get("callbacks"), recorder)}
    except Exception as error:  # noqa: BLE001 - whatever it is, it is not the app's
        recorder.note_failure("config_with_recorder", error)
        return config


def _has_recorder(config: Any, recorder: Recorder) -> bool:
    callbacks = (config or {}).get("callbacks") or ()
    handlers = callbacks.inheritable_handlers if isinstance(callbacks, BaseCallbackManager) else callbacks
    return any(handler is recorder for handler in handlers)


def _with_handler(callbacks: Any, recorder: Recorder) -> Any:
    if isinstance(callbacks, BaseCallbackManager):
        manager = callbacks.copy()
        manager.add_handler(recorder)
        return manager
    return [*(callbacks or ()), recorder]


def wrap(
    app: Any, store: str | Path | Recorder, options: RecordOptions | None = None, redact: Redact | None = None
) -> RecordedGraph:
    """Records every run of `app`.

    Args:
        app: a compiled LangGraph graph.
        store: path of the DuckDB store, or a recorder that several graphs share. A journal is written beside the
            store, which every command that reads the store shows; when the process ends, a line on stderr says so.
        options: what may be written and where else it goes, as the table `[record]` of `bridge.toml` says it.
        redact: a function (attribute name, text) -> text to write instead, called on every text after the patterns.

    A graph that is wrapped already is returned unchanged, with the recorder that it has.

    Raises:
        GraphError: `app` is not a compiled graph.
        ConfigError: options or a function are given where a recorder with its own is in use already.
    """
    if isinstance(app, RecordedGraph):
        if options is not None or redact is not None:
            raise ConfigError("wrap: this graph is recorded already, with the options that its recorder was given")
        return app
    return _graph_to_recorded(app, store_to_recorder(store, options, redact))


def graph_to_original(graph: Any) -> Any:
    """The graph that was wrapped, or `graph` itself if it was not. The wrapped graph goes on recording."""
    return type(graph)._original if isinstance(graph, RecordedGraph) else graph


def store_to_recorder(
    store: str | Path | Recorder, options: RecordOptions | None, redact: Redact | None = None
) -> Recorder:
    """`store` itself if it is a recorder, else a new one that writes its journal beside the store at this path.

    Raises:
        ConfigError: options or a function for a recorder that has its own.
    """
    if not isinstance(store, Recorder):
        path = Path(store).absolute()
        journal = Journal(journal_of(path))
        return Recorder(journal, options or RecordOptions(), redact, on_episode=count_for_exit(path))
    if options is not None or redact is not None:
        raise ConfigError("options and redact belong to the recorder, which exists already; make it with them")
    return store


def attach_hooks(recorder: Recorder) -> Callable[[], None]:
    """Installs what a recorder needs besides its callbacks; returns the function that undoes it once."""
    task_hooks.attach()
    if not recorder.hears_other_clients:
        return task_hooks.detach
    client_patches.attach()

    def detach() -> None:
        client_patches.detach()
        task_hooks.detach()

    return detach


def _graph_to_recorded(app: Any, recorder: Recorder) -> RecordedGraph:
    if not isinstance(app, Pregel):
        raise GraphError(
            f"wrap: a {type(app).__name__} is not a compiled graph; call .compile() on a builder, and record a graph "
            "inside another runnable with marft_bridge.instrument()"
        )
    graph_class = type(app)
    recorded_class: Any = type(
        f"Recorded{graph_class.__name__}", (RecordedGraph, graph_class), {"recorder": recorder, "_original": app}
    )
    recorded_class._detach = weakref.finalize(recorded_class, attach_hooks(recorder))
    recorded_graph: RecordedGraph = recorded_class.__new__(recorded_class)
    recorded_graph.__dict__.update(vars(app))
    for name in _RUN_METHODS & vars(app).keys():
        recorded_graph.__dict__[name] = recorded_graph._record_runs_of(name, vars(app)[name])
    return recorded_graph
