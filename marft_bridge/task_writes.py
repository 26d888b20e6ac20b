"""Writes of LangGraph tasks -> which task triggered which, and from whom a task could read.

A `WriteLedger` follows one run. Every task's writes are noted when LangGraph commits them (before the next
superstep starts), and a task that starts asks what fired it. Invariant: tasks of one superstep never depend on
each other. Triggers are exact: the writers of the trigger channels since these were last consumed, so joins and
loops come out right. Reads are an upper bound: a StateGraph node may read every state key, and whether it did is
not seen here. Tasks are named by their checkpoint namespace (`node:task_id`, chained by `|` through subgraphs).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from langgraph.channels import BinaryOperatorAggregate
from langgraph.pregel._loop import PregelLoop
from langgraph.types import Send

_SENDS = "__pregel_tasks"  # the channel that carries Send objects
_ENTRY = "__start__"  # LangGraph's own task that writes the input; not a node of the app


def _graph_of(checkpoint_ns: str) -> str:
    """The graph instance that a task belongs to: its namespace without the last segment."""
    return checkpoint_ns.rpartition("|")[0]


def _is_control(channel: str) -> bool:
    return channel.startswith(("branch:", "join:", "__"))


class WriteLedger:
    """Who wrote what in one run. Not thread-safe by itself: LangGraph commits writes on one thread per graph."""

    def __init__(self) -> None:
        # (graph, trigger channel) -> writers, and the superstep that consumed them (None: not yet)
        self._triggers: dict[tuple[str, str], tuple[list[str], int | None]] = {}
        # (graph, state channel) -> writers whose values it still holds
        self._state: dict[tuple[str, str], list[str]] = {}

    def note_writes(self, checkpoint_ns: str, writes: Iterable[tuple[str, Any]], accumulating: Iterable[str]) -> None:
        """Notes what the task `checkpoint_ns` wrote. `accumulating` names the channels with a reducer."""
        graph, reducers = _graph_of(checkpoint_ns), set(accumulating)
        writer = [] if checkpoint_ns.rpartition("|")[2].startswith(_ENTRY + ":") else [checkpoint_ns]
        for channel, value in writes:
            if channel == _SENDS and isinstance(value, Send):
                self._add_trigger((graph, f"{_SENDS}:{value.node}"), writer)
            elif _is_control(channel):
                self._add_trigger((graph, channel), writer)
            elif channel in reducers:
                held = self._state.setdefault((graph, channel), [])
                held.extend(ns for ns in writer if ns not in held)
            else:
                self._state[(graph, channel)] = list(writer)

    def _add_trigger(self, key: tuple[str, str], writer: Sequence[str]) -> None:
        writers, consumed = self._triggers.get(key, ([], None))
        fresh = [] if consumed is not None else writers
        self._triggers[key] = ([*fresh, *(ns for ns in writer if ns not in fresh)], None)

    def task_started(
        self, checkpoint_ns: str, node: str, step: int, subscribed: Iterable[str]
    ) -> tuple[list[str], list[str]]:
        """What fired the task that starts now, and whose writes it can read: two lists of checkpoint namespaces."""
        graph = _graph_of(checkpoint_ns)
        channels = [f"{_SENDS}:{node}" if name in (_SENDS, "__pregel_push") else name for name in subscribed]
        fired: list[str] = []
        for channel in channels:
            writers, consumed = self._triggers.get((graph, channel), ([], None))
            if consumed is None or consumed == step:
                fired.extend(ns for ns in writers if ns not in fired)
                self._triggers[(graph, channel)] = (writers, step)
        readable: list[str] = []
        for (owner, _), writers in self._state.items():
            if owner == graph:
                readable.extend(ns for ns in writers if ns not in readable)
        return fired, [ns for ns in readable if ns != checkpoint_ns]


def accumulating_channels(loop: Any) -> list[str]:
    """The state channels of a running graph that have a reducer, so that earlier writers still show in them."""
    return [name for name, channel in loop.channels.items() if isinstance(channel, BinaryOperatorAggregate)]


@runtime_checkable
class SeesTaskWrites(Protocol):
    """A callback handler that wants to know what every task of its graphs wrote. It must not raise."""

    def note_task_writes(self, loop: Any, task: Any, writes: Any) -> None:
        """Called when LangGraph commits the writes of `task` in the graph that `loop` runs."""


class WriteHook:
    """Listens to the writes that LangGraph commits, while at least one recorder is attached.

    LangGraph offers no callback for a task's writes, and its public streams leave the routing ones out, so the
    hook stands in front of `PregelLoop.put_writes`. It runs only for graphs whose callbacks hold a recorder,
    changes nothing, and is taken away again when the last recorder lets go.
    """

    def __init__(self) -> None:
        self._users = 0
        self._original: Callable[..., None] | None = None

    def attach(self) -> None:
        """Starts listening; calls nest."""
        self._users += 1
        if self._original is not None:
            return
        original = self._original = PregelLoop.put_writes

        def put_writes(loop: Any, task_id: str, writes: Any, **kwargs: Any) -> None:
            for handler in getattr(loop.manager, "handlers", ()):
                if isinstance(handler, SeesTaskWrites):
                    task = getattr(loop, "tasks", {}).get(task_id)
                    handler.note_task_writes(loop, task, writes)
            original(loop, task_id, writes, **kwargs)

        PregelLoop.put_writes = put_writes  # type: ignore[assignment,method-assign]

    def detach(self) -> None:
        """Undoes one `attach`."""
        self._users -= 1
        if self._users == 0 and self._original is not None:
            PregelLoop.put_writes = self._original  # type: ignore[method-assign]
            self._original = None


write_hook = WriteHook()
