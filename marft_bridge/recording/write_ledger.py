"""Writes of LangGraph tasks -> for each task: who triggered it, who sent to it, and whose values it could read.

A `WriteLedger` follows one run. Every task's writes are noted when LangGraph commits them, and a task that starts
gets its `Sources`. Tasks are named by our checkpoint namespace (`node:task_id`, chained by `|` through subgraphs);
"the graph" of a task is its namespace without the last segment. Invariants: only writes of earlier supersteps count,
so tasks of one superstep never depend on each other; a trigger counts once, for the superstep that it fires; values
that a subgraph only passes through keep their writers. Writers that cannot be told apart are all kept, marked as
possible. A router that asked a model is a task of its own here, which wrote what it chose.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from langgraph.channels import EphemeralValue
from langgraph.channels.named_barrier_value import NamedBarrierValue, NamedBarrierValueAfterFinish
from langgraph.types import Send

from marft_bridge.common.library_internals import (
    ERROR,
    INTERRUPT,
    NO_WRITES,
    RESUME,
    RETURN,
    TASKS,
    task_path_str,
    writes_sort_key,
)
from marft_bridge.common.node_names import enclosing_task
from marft_bridge.recording.key_writers import KeyWrite, KeyWriters, OwnerOf, Writers, channel_to_rule

ENTRY = "__start__"  # LangGraph's own task that writes the input; not a node of the app
_NOT_STATE = frozenset({ERROR, INTERRUPT, NO_WRITES, RESUME, RETURN, TASKS})
_SCAN_LIMIT = 1000  # values of a functional task's arguments that are searched, at most


def graph_of(checkpoint_ns: str) -> str:
    """The graph instance that a task belongs to."""
    return checkpoint_ns.rpartition("|")[0]


def is_entry(checkpoint_ns: str) -> bool:
    """Whether a task is LangGraph's own one that writes a graph's input."""
    return checkpoint_ns.rpartition("|")[2].startswith(ENTRY + ":")


@dataclass(slots=True)
class Sources:
    """What triggered a task, and whose values it can read, as known when it starts."""

    triggered_by: list[str] = field(default_factory=list)
    sent_by: list[str] = field(default_factory=list)  # the sender of a Send; several where it cannot be told apart
    readable: dict[str, Writers] = field(default_factory=dict)  # state key -> whose values it holds
    argument_writers: list[str] = field(default_factory=list)  # functional tasks whose results it was called with
    maybe_argument_writers: list[str] = field(default_factory=list)  # functional tasks returned when it was called
    caller: str | None = None  # the task that called it as a function


class TaskStart(NamedTuple):  # one for each task: a frozen dataclass takes three times as long to make
    """A task that starts, in LangGraph's terms."""

    ns: str
    node: str
    step: int
    path: tuple[Any, ...]
    subscribed: Sequence[str]  # all channels that can trigger it
    input: Any
    graph: str  # the graph instance that it belongs to
    is_entry: bool  # it is LangGraph's own task that writes the graph's input


@dataclass(slots=True)
class _Trigger:
    """The writes of a channel that fires tasks, since it was last consumed, and the writers that fired it last."""

    required_names: frozenset[str]  # for a join: the names that must have been written
    pending_writes: list[tuple[int, str | None, Any]] = field(default_factory=list)  # (step, writer, value)
    fired_step: int | None = None
    fired_by: list[str] = field(default_factory=list)

    def consume(self, step: int) -> list[str]:
        """The writers that fire `step`: none while a join still waits for others."""
        if self.fired_step == step:
            return self.fired_by
        if len(self.pending_writes) == 1 and not self.required_names:  # nearly always
            written_step, writer, _ = self.pending_writes[0]
            if written_step < step:
                self.pending_writes = []
                self.fired_step, self.fired_by = step, [] if writer is None else [writer]
                return self.fired_by
        ready_writes = [entry for entry in self.pending_writes if entry[0] < step]
        if self.required_names and not self.required_names <= {value for _, _, value in ready_writes}:
            return []
        self.pending_writes = [entry for entry in self.pending_writes if entry[0] >= step]
        self.fired_step, self.fired_by = step, list(dict.fromkeys(ns for _, ns, _ in ready_writes if ns is not None))
        return self.fired_by


class _Packet(NamedTuple):
    """A Send, with what LangGraph numbers the packets of a superstep by."""

    order: Any  # the sender's place among the tasks
    number: int  # of the write among the sender's own
    send: Send
    writer: str | None


class _Packets:
    """The packets that the tasks of one superstep sent, in LangGraph's order. Sorted when one is first asked for:
    each of N packets becomes a task, and looking through all of them for each would take N squared steps."""

    def __init__(self) -> None:
        self._packets: list[_Packet] = []
        self._is_sorted = False
        # Each once, by node and id of what was sent, and by node.
        self._writers_of_send: dict[tuple[str, int], dict[str | None, None]] = {}
        self._writers_to_node: dict[str, dict[str | None, None]] = {}

    def add(self, packet: _Packet) -> None:
        """Notes one more packet."""
        self._packets.append(packet)
        self._is_sorted = False

    def find_senders(self, node: str, task_input: Any, number: Any) -> Iterable[str | None]:
        """The tasks that may have sent the packet with this number, on which the node runs with this input."""
        if not self._is_sorted:
            self._sort()
        if isinstance(number, int) and number < len(self._packets):
            packet = self._packets[number]
            if packet.send.node == node and packet.send.arg is task_input:
                return [packet.writer]
        return self._writers_of_send.get((node, id(task_input))) or self._writers_to_node.get(node) or ()

    def _sort(self) -> None:
        self._packets.sort(key=lambda packet: packet[:2])
        self._is_sorted = True
        self._writers_of_send, self._writers_to_node = {}, {}
        for packet in self._packets:
            # An id is that of one object: the packets hold on to what was sent.
            self._writers_of_send.setdefault((packet.send.node, id(packet.send.arg)), {})[packet.writer] = None
            self._writers_to_node.setdefault(packet.send.node, {})[packet.writer] = None


@dataclass(slots=True)
class _Graph:
    """One graph instance of the run."""

    triggers: dict[str, _Trigger] = field(default_factory=dict)
    state: dict[str, KeyWriters] = field(default_factory=dict)
    packets: dict[int, _Packets] = field(default_factory=dict)  # superstep -> what its tasks sent
    returned_tasks: list[str] = field(default_factory=list)  # functional tasks that nothing later has waited for
    issuer: str | None = None  # the task inside that handed off to the graph around, by Command(graph=PARENT)

    def note_send(self, step: int, packet: _Packet) -> None:
        """Notes a packet that a task of `step` sent; those of long before have become tasks."""
        packets = self.packets.get(step)
        if packets is None:
            self.packets = {sent: packets for sent, packets in self.packets.items() if sent >= step - 1}
            packets = self.packets[step] = _Packets()
        packets.add(packet)

    def find_senders(self, task: TaskStart) -> list[str]:
        """The tasks that may have sent the packet of `task`."""
        step = max((sent_step for sent_step in self.packets if sent_step < task.step), default=None)
        if step is None:
            return []
        writers = self.packets[step].find_senders(task.node, task.input, task.path[1])
        return [ns for ns in writers if ns is not None]

    def writers(self, key: str, step: int | None) -> Writers:
        """Whose values `key` holds for a task of `step`; None asks for the latest."""
        return self.state[key].before(step) if key in self.state else {}

    def owner_of(self, key: str) -> OwnerOf | None:
        """Who wrote each message of `key`."""
        return self.state[key].owner_of if key in self.state else None

    def note_write(self, key: str, step: int, write: KeyWrite, channel: Any) -> None:
        """Notes a write of `key`, whose channel is LangGraph's `channel`."""
        if key not in self.state:
            self.state[key] = KeyWriters(channel_to_rule(channel))
        self.state[key].note(step, write, channel)


class TaskWrites(NamedTuple):
    """What a task wrote, in LangGraph's terms.

    `writes` are (channel, value), in the order in which the task wrote them. `routers` are its node's routers that
    asked a model: the namespace of each and the range of its writes.
    """

    task: TaskStart
    writes: Sequence[tuple[str, Any]]
    is_subgraph: bool = False  # the node is itself a graph, so that its writers are inside it
    routers: Sequence[tuple[str, range]] = ()
    # For a graph's entry: whose values its input holds under a key, given whether the value is still that of the graph
    # around, which the task around may have changed before it passed its state on.
    input_writers: Callable[[str, bool], Writers] = lambda _key, _is_same: {}
    passes_input_on: bool = False  # for a graph's entry: its input is the state of the task around the graph


class WriteLedger:
    """The writes of one run, by task. Safe to use from the threads that its tasks run in."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._graphs: dict[str, _Graph] = {}
        self._kept_states: dict[str, dict[str, KeyWriters]] = {}  # of graphs that keep their own, by LangGraph's name
        self._results: dict[int, tuple[Any, list[str]]] = {}  # id of a functional result -> (result, its tasks)
        self._returned_before: dict[str, list[str]] = {}  # functional task -> those returned when it was called

    def _graph(self, name: str) -> _Graph:
        graph = self._graphs.get(name)
        if graph is None:
            graph = self._graphs[name] = _Graph()
        return graph

    # -- a task starts ----------------------------------------------------------------------------------------

    def start_task(self, task: TaskStart, keys: Sequence[str] | None = None) -> Sources:
        """The sources of a task that starts now. `keys` are those that it can read; None: all of the state."""
        with self._lock:
            graph = self._graph(task.graph)
            sources = Sources()
            if task.path[-1] is True:
                self._add_call(graph, task, sources)
                return sources
            triggered_by, triggers, state, step = sources.triggered_by, graph.triggers, graph.state, task.step
            for channel in task.subscribed:
                trigger = triggers.get(channel)
                if trigger is not None:
                    for ns in trigger.consume(step):
                        if ns not in triggered_by:
                            triggered_by.append(ns)
            if task.path[0] == "__pregel_push":
                sources.sent_by = graph.find_senders(task)
            else:
                for key in state if keys is None else keys:
                    key_writers = state.get(key)
                    sources.readable[key] = {} if key_writers is None else key_writers.before(step)
            return sources

    def _add_call(self, graph: _Graph, task: TaskStart, sources: Sources) -> None:
        sources.caller = task.graph  # LangGraph puts its namespace below that of the task that calls it
        for value in _find_values(task.input):
            result = self._results.get(id(value))
            if result is not None:
                target = sources.argument_writers if len(result[1]) == 1 else sources.maybe_argument_writers
                target.extend(ns for ns in result[1] if ns not in target)
        returned_tasks = list(graph.returned_tasks)
        sources.maybe_argument_writers += [
            ns
            for ns in returned_tasks
            if ns not in sources.argument_writers and ns not in sources.maybe_argument_writers
        ]
        self._returned_before[task.ns] = returned_tasks

    # -- a task's writes are committed ------------------------------------------------------------------------

    def note_writes(self, commit: TaskWrites, channels: Mapping[str, Any], can_trigger: Callable[[str], bool]) -> None:
        """Notes what a task wrote, in a graph with these `channels`, of which some trigger tasks."""
        task = commit.task
        with self._lock:
            graph = self._graph(task.graph)
            issuer = self._issuer(task.ns)
            own_writer = None if task.is_entry else issuer or task.ns
            order: Any = None  # the task's place among the senders of packets, once it has sent one
            for number, (channel, value) in enumerate(commit.writes):
                if channel in _NOT_STATE and channel != TASKS:
                    if channel == RETURN:
                        self._note_result(graph, task.ns, value)
                    continue
                writer = _router_of(number, commit.routers) or own_writer if commit.routers else own_writer
                if channel == TASKS:
                    if isinstance(value, Send):
                        if order is None:
                            order = writes_sort_key(task_path_str(task.path))
                        graph.note_send(task.step, _Packet(order, number, send=value, writer=writer))
                    continue
                spec = channels.get(channel)
                if can_trigger(channel):
                    trigger = graph.triggers.get(channel)
                    if trigger is None:
                        trigger = graph.triggers[channel] = _Trigger(_required_names(spec))
                    trigger.pending_writes.append((task.step, writer, value))
                if is_state(channel):
                    graph.note_write(channel, task.step, self._key_write(commit, number, issuer), channel=spec)

    def _issuer(self, ns: str) -> str | None:
        graph = self._graphs.get(ns)
        return None if graph is None else graph.issuer

    def _key_write(self, commit: TaskWrites, number: int, issuer: str | None) -> KeyWrite:
        """One write of the state, with its writers."""
        task, (key, value) = commit.task, commit.writes[number]
        inner_graph = self._graphs.get(task.ns) if commit.is_subgraph and issuer is None else None
        owner_of = None
        if task.is_entry:
            outer_graph = self._graphs.get(graph_of(enclosing_task(task.graph))) if commit.passes_input_on else None
            is_same = outer_graph is not None and key in outer_graph.state and outer_graph.state[key].holds(value)
            writers = commit.input_writers(key, is_same)
            owner_of = outer_graph.owner_of(key) if outer_graph is not None else None
        elif inner_graph is not None and key in inner_graph.state:
            writers, owner_of = inner_graph.writers(key, None), inner_graph.owner_of(key)
        else:
            writers = {issuer or task.ns: True}
        return KeyWrite(task.path, number, value, writers=writers, owner_of=owner_of)

    # -- a router runs ----------------------------------------------------------------------------------------

    def start_router(self, commit: TaskWrites, keys: Sequence[str] | None) -> Sources:
        """The sources of a router that starts after a node which wrote this. `keys`: those that it is given; None: all.

        It is given the state with the node's own writes, which are not committed yet.
        """
        task = commit.task
        with self._lock:
            graph, issuer = self._graph(task.graph), self._issuer(task.ns)
            own_writes: dict[str, list[KeyWrite]] = {}
            for number, (channel, _) in enumerate(commit.writes):
                if channel not in _NOT_STATE and is_state(channel):
                    own_writes.setdefault(channel, []).append(self._key_write(commit, number, issuer))
            readable = {}
            # The node's result is given too, whichever of its keys the router's schema has.
            for key in dict.fromkeys([*(graph.state if keys is None else keys), *own_writes]):
                key_writers = graph.state.get(key) or KeyWriters(channel_to_rule(None))
                readable[key] = key_writers.with_fresh(task.step, own_writes.get(key, []))
            return Sources(triggered_by=[task.ns], readable=readable)

    def continue_graph(self, name: str, kept_as: str) -> None:
        """Notes a graph that goes on with the state which its earlier runs in this episode left under `kept_as`."""
        with self._lock:
            if name not in self._graphs:
                self._graphs[name] = _Graph(state=self._kept_states.setdefault(kept_as, {}))

    def forget_graph(self, name: str) -> None:
        """Forgets a graph inside a task whose writes were noted long ago."""
        with self._lock:
            self._graphs.pop(name, None)

    def note_handoff(self, ns: str) -> None:
        """Notes that a task ended with a command for the graph around its own, whose writes are then this task's."""
        with self._lock:
            self._graph(graph_of(ns)).issuer = ns

    def _note_result(self, graph: _Graph, ns: str, value: Any) -> None:
        if value is not None and not isinstance(value, (bool, int, float)):  # equal numbers may be one object
            result = self._results.setdefault(id(value), (value, []))
            if ns not in result[1]:
                result[1].append(ns)
        returned_before = self._returned_before.get(ns, [])
        graph.returned_tasks = [task for task in graph.returned_tasks if task not in returned_before] + [ns]


def _router_of(number: int, routers: Sequence[tuple[str, range]]) -> str | None:
    return next((ns for ns, written in routers if number in written), None)


_JOINS = (NamedBarrierValue, NamedBarrierValueAfterFinish)


def _required_names(channel: Any) -> frozenset[str]:
    """The names that must have been written to a join; none for any other channel."""
    if type(channel) is EphemeralValue:  # most triggers: LangGraph's classes take long to tell
        return frozenset()
    return frozenset(channel.names) if isinstance(channel, _JOINS) else frozenset()


def is_state(channel: str) -> bool:
    """Whether a channel holds a key of the state, and does not only trigger tasks."""
    return not channel.startswith(("branch:", "join:", "__")) or channel == "__root__"


def _find_values(call_input: Any) -> list[Any]:
    """The objects in a functional task's arguments, through lists, tuples and dicts."""
    values: list[Any] = []
    pending = [call_input]
    while pending and len(values) < _SCAN_LIMIT:
        value = pending.pop()
        values.append(value)
        if isinstance(value, dict):
            pending.extend(value.values())
        elif isinstance(value, (list, tuple)):
            pending.extend(value)
    return values
