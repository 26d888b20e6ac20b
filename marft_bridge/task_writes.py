"""Writes of LangGraph tasks -> for each task: who triggered it, who sent to it, and whose values it could read.

A `WriteLedger` follows one run. Every task's writes are noted when LangGraph commits them, and a task that starts
asks for its `Sources`. Tasks are named by their checkpoint namespace (`node:task_id`, chained by `|` through
subgraphs); "the graph" of a task is its namespace without the last segment. Invariants: only writes of earlier
supersteps count, so tasks of one superstep never depend on each other; a trigger counts once, for the superstep
that it fires; values that a subgraph only passes through keep their writers. What cannot be told apart is kept as
a bound and marked so. It knows nothing of spans, callbacks or what a node does inside.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from langgraph._internal._constants import ERROR, INTERRUPT, NO_WRITES, RESUME, RETURN, TASKS
from langgraph.channels import BinaryOperatorAggregate, Topic
from langgraph.channels.delta import DeltaChannel
from langgraph.channels.named_barrier_value import NamedBarrierValue, NamedBarrierValueAfterFinish
from langgraph.checkpoint.base import writes_sort_key
from langgraph.pregel._algo import task_path_str
from langgraph.types import Overwrite, Send

Writers = dict[str, bool]
"""Task -> whether it is known to have written (True), or may have (False)."""

ENTRY = "__start__"  # LangGraph's own task that writes the input; not a node of the app
_NOT_STATE = frozenset({ERROR, INTERRUPT, NO_WRITES, RESUME, RETURN, TASKS})
_SCAN_LIMIT = 1000  # values of a functional task's arguments that are looked at


def graph_of(checkpoint_ns: str) -> str:
    """The graph instance that a task belongs to."""
    return checkpoint_ns.rpartition("|")[0]


def is_entry(checkpoint_ns: str) -> bool:
    """Whether a task is LangGraph's own, that writes a graph's input."""
    return checkpoint_ns.rpartition("|")[2].startswith(ENTRY + ":")


@dataclass(slots=True)
class Sources:
    """Where a task comes from, as known when it starts."""

    triggered_by: list[str] = field(default_factory=list)
    sent_by: list[str] = field(default_factory=list)  # one task, or all that it may have been
    readable: dict[str, Writers] = field(default_factory=dict)  # state key -> whose values it holds
    given: list[str] = field(default_factory=list)  # functional tasks whose results it was called with
    maybe_given: list[str] = field(default_factory=list)  # functional tasks that had returned when it was called
    caller: str | None = None  # the task that called it as a function


@dataclass(frozen=True, slots=True)
class TaskStart:
    """A task that starts, in LangGraph's terms."""

    ns: str
    node: str
    step: int
    path: tuple[Any, ...]
    subscribed: Sequence[str]  # all channels that can trigger it
    input: Any


@dataclass(slots=True)
class _Trigger:
    """Who wrote a channel that fires tasks, since it was last consumed, and who fired its last superstep."""

    required: frozenset[str]  # for a join: the names that must have been written
    waiting: list[tuple[int, str | None, Any]] = field(default_factory=list)  # (step, writer, value)
    fired_step: int | None = None
    fired: list[str] = field(default_factory=list)

    def consume(self, step: int) -> list[str]:
        """The writers that fire `step`: none while a join still waits for others."""
        if self.fired_step == step:
            return self.fired
        ready = [entry for entry in self.waiting if entry[0] < step]
        if self.required and not self.required <= {value for _, _, value in ready}:
            return []
        self.waiting = [entry for entry in self.waiting if entry[0] >= step]
        self.fired_step, self.fired = step, list(dict.fromkeys(ns for _, ns, _ in ready if ns is not None))
        return self.fired


@dataclass(slots=True)
class _Graph:
    """One graph instance of the run."""

    triggers: dict[str, _Trigger] = field(default_factory=dict)
    # state key -> (step, writers after it), the newest last; two suffice, a reader is never more than one step late
    state: dict[str, list[tuple[int, Writers]]] = field(default_factory=dict)
    sends: list[tuple[int, Any, int, Send, str | None]] = field(default_factory=list)  # step, path, number, packet, ns
    returned: list[str] = field(default_factory=list)  # functional tasks that nothing later has waited for
    issuer: str | None = None  # the task inside that handed off to the graph around, by Command(graph=PARENT)

    def writers(self, key: str, step: int | None) -> Writers:
        """Whose values `key` holds for a task of `step`; None asks for the latest."""
        for written, writers in reversed(self.state.get(key, ())):
            if step is None or written < step:
                return writers
        return {}

    def set_writers(self, key: str, step: int, writers: Writers, keep: bool) -> None:
        """Notes writers of `key`; with `keep` the earlier ones stay visible, as under a reducer."""
        history = self.state.setdefault(key, [])
        if history and history[-1][0] == step:
            history[-1] = (step, {**history[-1][1], **writers})  # another task of this superstep, under a reducer
            return
        held = {**history[-1][1], **writers} if keep and history else dict(writers)
        history.append((step, held))
        del history[:-2]


class WriteLedger:
    """Who wrote what in one run. Safe to use from the threads that its tasks run in."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._graphs: dict[str, _Graph] = {}
        self._results: dict[int, tuple[Any, list[str]]] = {}  # id of a functional result -> it, and whose it is
        self._covers: dict[str, list[str]] = {}  # functional task -> those that had returned when it was called

    def _graph(self, name: str) -> _Graph:
        return self._graphs.setdefault(name, _Graph())

    # -- a task starts ----------------------------------------------------------------------------------------

    def task_started(self, task: TaskStart, keys: Sequence[str] | None = None) -> Sources:
        """What fired the task that starts now, and whose values lie in its reach: those of `keys`, None for all."""
        with self._lock:
            graph = self._graph(graph_of(task.ns))
            sources = Sources()
            if task.path[-1] is True:
                self._add_call(graph, task, sources)
            else:
                for channel in task.subscribed:
                    if channel in graph.triggers:
                        new = graph.triggers[channel].consume(task.step)
                        sources.triggered_by.extend(ns for ns in new if ns not in sources.triggered_by)
                if task.path[0] == "__pregel_push":
                    sources.sent_by = _senders(graph, task)
                else:
                    reach = graph.state if keys is None else keys
                    sources.readable = {key: graph.writers(key, task.step) for key in reach}
            return sources

    def _add_call(self, graph: _Graph, task: TaskStart, sources: Sources) -> None:
        sources.caller = graph_of(task.ns)  # LangGraph names it below the task that calls it
        for value in _values_in(task.input):
            found = self._results.get(id(value))
            if found is not None:
                target = sources.given if len(found[1]) == 1 else sources.maybe_given
                target.extend(ns for ns in found[1] if ns not in target)
        waited = list(graph.returned)
        sources.maybe_given += [ns for ns in waited if ns not in sources.given and ns not in sources.maybe_given]
        self._covers[task.ns] = waited

    # -- a task's writes are committed ------------------------------------------------------------------------

    def note_writes(
        self,
        ns: str,
        path: tuple[Any, ...],
        step: int,
        writes: Iterable[tuple[str, Any]],
        channels: Mapping[str, Any],
        fires: Callable[[str], bool],
        *,
        is_subgraph: bool = False,
        input_writers: Callable[[str], Writers] = lambda _: {},
    ) -> None:
        """Notes what a task wrote.

        Args:
            ns, path, step: the task.
            writes: (channel, value).
            channels: the graph's channels, by name.
            fires: whether a channel can trigger tasks.
            is_subgraph: the node is a graph by itself, so its writers are inside.
            input_writers: for a graph's entry: whose values its input holds, by key.
        """
        with self._lock:
            graph = self._graph(graph_of(ns))
            inside = self._graphs.get(ns) if is_subgraph else None
            issuer = self._graphs[ns].issuer if ns in self._graphs else None
            if issuer is not None:
                inside = None
            for number, (channel, value) in enumerate(writes):
                writer = None if is_entry(ns) else issuer or ns
                if channel == RETURN:
                    self._note_result(graph, ns, value)
                elif channel == TASKS and isinstance(value, Send):
                    graph.sends = [entry for entry in graph.sends if entry[0] >= step - 1]
                    graph.sends.append((step, writes_sort_key(task_path_str(path)), number, value, writer))
                elif channel not in _NOT_STATE:
                    spec = channels.get(channel)
                    if fires(channel):
                        required = spec.names if isinstance(spec, _JOINS) else ()
                        trigger = graph.triggers.setdefault(channel, _Trigger(frozenset(required)))
                        trigger.waiting.append((step, writer, value))
                    if not channel.startswith(("branch:", "join:", "__")) or channel == "__root__":
                        if is_entry(ns):
                            writers = input_writers(channel)
                        elif inside is not None and channel in inside.state:
                            writers = inside.writers(channel, None)
                        else:
                            writers = {issuer or ns: True}
                        graph.set_writers(channel, step, writers, _accumulates(spec) and not _replaces(value))

    def note_handoff(self, ns: str) -> None:
        """A task ended by a command for the graph around its own: that graph's writes are this task's."""
        with self._lock:
            deeper = self._graphs[ns].issuer if ns in self._graphs else None
            graph = self._graph(graph_of(ns))
            graph.issuer = deeper or ns

    def _note_result(self, graph: _Graph, ns: str, value: Any) -> None:
        if value is not None and not isinstance(value, (bool, int, float)):  # small ones are one object for all
            held = self._results.setdefault(id(value), (value, []))
            if ns not in held[1]:
                held[1].append(ns)
        covered = self._covers.get(ns, [])
        graph.returned = [other for other in graph.returned if other not in covered] + [ns]


_JOINS = (NamedBarrierValue, NamedBarrierValueAfterFinish)


def _accumulates(spec: Any) -> bool:
    return isinstance(spec, (BinaryOperatorAggregate, DeltaChannel)) or (isinstance(spec, Topic) and spec.accumulate)


def _replaces(value: Any) -> bool:
    """Whether a write under a reducer drops what was there."""
    if isinstance(value, Overwrite) or (isinstance(value, dict) and "__overwrite__" in value):
        return True
    items = value if isinstance(value, list) else [value]
    return any(getattr(item, "id", None) == "__remove_all__" for item in items)


def _senders(graph: _Graph, task: TaskStart) -> list[str]:
    """Who sent the packet that started `task`: LangGraph numbers packets by their senders' paths."""
    step = max((entry[0] for entry in graph.sends if entry[0] < task.step), default=None)
    pending = sorted((entry for entry in graph.sends if entry[0] == step), key=lambda entry: entry[1:3])

    def matches(packet: Send) -> bool:
        return packet.node == task.node and packet.arg is task.input

    number = task.path[1]
    if isinstance(number, int) and number < len(pending) and matches(pending[number][3]):
        found = [pending[number][4]]
    else:
        found = [entry[4] for entry in pending if matches(entry[3])]
        found = found or [entry[4] for entry in pending if entry[3].node == task.node]
    return list(dict.fromkeys(ns for ns in found if ns is not None))


def _values_in(call_input: Any) -> list[Any]:
    """The objects in a functional task's arguments, through lists, tuples and dicts."""
    found: list[Any] = []
    waiting = [call_input]
    while waiting and len(found) < _SCAN_LIMIT:
        value = waiting.pop()
        found.append(value)
        if isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, (list, tuple)):
            waiting.extend(value)
    return found
