"""Node executions and calls -> the dependency function D of the Flex-MG, as edges, and its topological order.

An edge has a kind. `trigger`: a write of the one node made the other run. `send`: it ran on what the one sent. `data`:
it read a value that the one wrote, or its prompt holds the one's answer. `tool`: its prompt holds the result of a
tool that the one called. A pair may have several kinds. An edge is exact when the relation was observed between the
two node executions, and inexact where it is only an upper bound: what may have been read, what one execution did one
after another (`inside`), since what a node does inside is not looked into, and what a failure may have left behind that
was caught inside. A node without a call passes on what it depends on itself. Executions nest (a subgraph is a node).
A call that begins when its execution has ended (work that the node left behind) is the node's, but nothing ran because
of it: only a call with its answer in the prompt depends on it. Invariants: D is acyclic, two executions of one
superstep never depend on each other, and the result does not depend on the order of the input.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from trace_store.inside import Part, parts_to_links
from trace_store.records import Edge, EdgeKind
from trace_store.source_walk import Source, SourceWalk


class DependencyCycleError(ValueError):
    """D has a cycle, or the nesting of executions has one; the message names a member."""


@dataclass(frozen=True, slots=True)
class Call:
    """One LLM call whose execution counts. Times in nanoseconds, `start <= end`.

    Reads are those of its execution up to this call; None where only those of the whole execution are known.
    """

    action_id: str
    start: int
    end: int
    reads_from: tuple[str, ...] | None = None
    may_read_from: tuple[str, ...] | None = None
    saw_answers: tuple[str, ...] = ()  # actions whose answers are in its prompt
    saw_tool_results: tuple[str, ...] = ()  # actions whose tools' results are in its prompt
    tools: tuple[str, ...] = ()  # the tool runs of its execution that it lies in, outermost first


@dataclass(slots=True)
class Execution:
    """One node execution. `ns` is its checkpoint namespace, `calls` those made by the node itself.

    Times in nanoseconds.
    """

    ns: str
    step: int | None  # None for a called one, a router, an error handler: supersteps do not order them
    parent: str | None  # ns of the enclosing execution
    start: int = 0
    end: int = 0
    is_caught_failure: bool = False  # it failed, and what ran it went on: what follows may depend on it
    is_called: bool = False  # a function of the enclosing execution called it, and it knows whose results it was given
    tools: tuple[str, ...] = ()  # the tool runs of the enclosing execution that it lies in, outermost first
    tool_times: dict[str, tuple[int, int]] = field(default_factory=dict)  # its tool runs -> (start, end)
    runs_side_by_side: bool = False  # its tools run at once, so that time tells nothing about them
    triggered_by: tuple[str, ...] = ()
    sent_by: tuple[str, ...] = ()  # one execution, or all that it may have been
    reads_from: tuple[str, ...] = ()
    may_read_from: tuple[str, ...] = ()
    calls: list[Call] = field(default_factory=list)

    def control_sources(self) -> list[tuple[str, bool]]:
        """The executions whose trigger or Send made it run, each with whether that is exact."""
        return [*((ns, True) for ns in self.triggered_by), *((ns, len(self.sent_by) == 1) for ns in self.sent_by)]

    def sources(self) -> list[tuple[str, bool]]:
        """The executions that it depends on, by control or by reading, each with whether that is exact."""
        read_sources = [*((ns, True) for ns in self.reads_from), *((ns, False) for ns in self.may_read_from)]
        return self.control_sources() + read_sources


_SourceFunction = Callable[[Execution], Iterable[Source]]


@dataclass(frozen=True, slots=True)
class _Target:
    """What depends, and how."""

    kind: EdgeKind
    sources_of: _SourceFunction  # leads on through executions without a call
    call: str | None = None  # one call; None: the first actions of the execution


@dataclass(frozen=True, slots=True)
class _Link:
    """An execution, or a call of it, depends on another execution, which has calls."""

    ns: str
    source: str
    target: _Target
    exact: bool


def executions_to_edges(episode_id: str, executions: Mapping[str, Execution]) -> list[Edge]:
    """All edges of one episode, one per pair of actions and kind, unordered.

    A namespace or an action that is named as a source but is not among the executions lies outside the episode (its
    input, an earlier run of the thread, an attempt that failed), so it gives no edge. Raises DependencyCycleError for
    an execution inside itself.
    """
    return _Derivation(episode_id, executions).edges()


class _Derivation:
    """The edges derived so far, with the indexes by which the next ones are derived."""

    def __init__(self, episode_id: str, executions: Mapping[str, Execution]) -> None:
        self._episode_id = episode_id
        self._executions = executions
        self._exact_by_edge: dict[tuple[str, str, EdgeKind], bool] = {}
        self._successors: dict[str, set[str]] = {}
        self._predecessors: dict[str, set[str]] = {}
        # Calls of the executions inside each execution, however deep, without its own.
        self._nested: dict[str, list[Call]] = {ns: [] for ns in executions}
        self._ancestors: dict[str, tuple[str, ...]] = {}
        self._children: dict[str, list[Execution]] = {}
        for ns, execution in executions.items():
            if execution.parent is not None:
                self._children.setdefault(execution.parent, []).append(execution)
            enclosing_executions, outer = [], execution.parent
            while outer is not None and outer in executions:
                if outer == ns or outer in enclosing_executions:
                    raise DependencyCycleError(f"node execution {outer} contains itself")
                enclosing_executions.append(outer)
                self._nested[outer].extend(execution.calls)
                outer = executions[outer].parent
            self._ancestors[ns] = tuple(enclosing_executions)
        self._failures: dict[str, list[str]] = {}  # action -> the caught failures that it lies in
        for ns, execution in executions.items():
            for call in self._calls_within(execution) if execution.is_caught_failure else ():
                self._failures.setdefault(call.action_id, []).append(ns)
        self._walks: dict[_SourceFunction, SourceWalk] = {}
        self._late_actions = {
            call.action_id
            for ns, execution in executions.items()
            for call in execution.calls
            if any(executions[outer_ns].end < call.start for outer_ns in (ns, *self._ancestors[ns]))
        }

    def edges(self) -> list[Edge]:
        for ns in self._executions:
            if not self._nested[ns]:
                self._link_inside(ns)
        # From the innermost executions outwards: the first and last actions of a subgraph follow from its inside.
        levels: dict[int, list[str]] = {}
        for ns, ancestors in self._ancestors.items():
            levels.setdefault(len(ancestors), []).append(ns)
        links_by_depth = self._sources_by_depth()
        for depth in sorted(levels, reverse=True):
            for ns in levels[depth]:
                if self._nested[ns]:
                    self._link_inside(ns)
            self._link_sources(links_by_depth.get(depth, ()))
        self._link_prompts()
        return [Edge(self._episode_id, *key, exact) for key, exact in self._exact_by_edge.items()]

    def _add(self, src: str, dst: str, kind: EdgeKind, exact: bool) -> None:
        self._exact_by_edge[src, dst, kind] = exact or self._exact_by_edge.get((src, dst, kind), False)
        self._successors.setdefault(src, set()).add(dst)
        self._predecessors.setdefault(dst, set()).add(src)

    def _link_inside(self, ns: str) -> None:
        """Edges between what one execution did one after another: calls, tools, and the graphs that it ran."""
        execution = self._executions[ns]
        tool_parts: dict[tuple[str, ...], list[Part]] = {}
        for call in execution.calls:
            part = Part(call.start, call.end, (call.action_id,), last_actions=(call.action_id,))
            tool_parts.setdefault(call.tools, []).append(part)
        for (tools, _, is_called), members in self._inner_graphs(ns).items():
            actions = [call.action_id for member in members for call in self._calls_within(member)]
            start, end = min(member.start for member in members), max(member.end for member in members)
            tool_parts.setdefault(tools, []).append(self._make_part(actions, start, end, is_called=is_called))
        # From the innermost tool outwards; a tool that calls a tool directly has parts of both.
        tool_paths = {run[:depth] for run in tool_parts for depth in range(len(run) + 1)}
        for tools in sorted(tool_paths, key=len, reverse=True):
            parts = tool_parts.get(tools, [])
            if tools or not execution.runs_side_by_side:
                for earlier_part, later_part in parts_to_links(parts, self._successors):
                    for src in earlier_part.last_actions:
                        for dst in later_part.first_actions:
                            self._add(src, dst, "data", exact=False)
            if tools and parts:
                actions = [action for part in parts for action in part.actions]
                start, end = execution.tool_times[tools[-1]]
                tool_parts.setdefault(tools[:-1], []).append(self._make_part(actions, start, end))

    def _inner_graphs(self, ns: str) -> dict[tuple[tuple[str, ...], str, bool], list[Execution]]:
        """The executions right inside one, by graph run; one that was called as a function stands alone."""
        graphs: dict[tuple[tuple[str, ...], str, bool], list[Execution]] = {}
        for inner_execution in self._children.get(ns, ()):
            graph = inner_execution.ns if inner_execution.is_called else inner_execution.ns.rpartition("|")[0]
            graphs.setdefault((inner_execution.tools, graph, inner_execution.is_called), []).append(inner_execution)
        return {key: members for key, members in graphs.items() if any(map(self._has_calls, members))}

    def _has_calls(self, execution: Execution) -> bool:
        return bool(execution.calls or self._nested[execution.ns])

    def _calls_within(self, execution: Execution) -> list[Call]:
        return [*execution.calls, *self._nested[execution.ns]]

    def _make_part(self, actions: Sequence[str], start: int, end: int, is_called: bool = False) -> Part:
        first_actions = self._boundary_of(actions, self._predecessors)
        last_actions = self._boundary_of(actions, self._successors)
        return Part(
            start,
            end,
            first_actions=tuple(first_actions),
            last_actions=tuple(last_actions),
            inner_actions=tuple(actions),
            is_called=is_called,
        )

    def _sources_by_depth(self) -> dict[int, list[_Link]]:
        """What each execution and call depends on, by the depth at which the inside of both ends is known."""
        links: dict[int, list[_Link]] = {}
        for ns, execution in self._executions.items():
            triggers = [(source, True) for source in execution.triggered_by]
            senders = [(source, len(execution.sent_by) == 1) for source in execution.sent_by]
            # A trigger is passed on by what was triggered; what was sent may be made of anything.
            new_links = [
                *self._find_links(ns, triggers, _Target("trigger", Execution.control_sources)),
                *self._find_links(ns, senders, _Target("send", Execution.sources)),
            ]
            for call in execution.calls:
                reads = execution.reads_from if call.reads_from is None else call.reads_from
                may_read = execution.may_read_from if call.may_read_from is None else call.may_read_from
                sources = [*((read, True) for read in reads), *((read, False) for read in may_read)]
                new_links += self._find_links(ns, sources, _Target("data", Execution.sources, call.action_id))
            for link in new_links:
                depth = min(len(self._ancestors[ns]), len(self._ancestors[link.source]))
                links.setdefault(depth, []).append(link)
        return links

    def _find_links(self, ns: str, sources: Iterable[tuple[str, bool]], target: _Target) -> Iterator[_Link]:
        for source, exact in self._with_calls(sources, target.sources_of).items():
            if self._may_depend(ns, source):
                yield _Link(ns, source, target, exact=exact)

    def _link_sources(self, links: Iterable[_Link]) -> None:
        """Edges from the last actions of each source, into the first ones of an execution or into one call."""
        new_edges: list[tuple[str, str, EdgeKind, bool]] = []
        first_actions = cache(lambda ns: self._boundary_of(self._actions_within(ns), self._predecessors))
        last_actions = cache(lambda ns: self._boundary_of(self._timely_actions(ns), self._successors))
        for link in links:
            call = link.target.call
            later_actions = first_actions(link.ns) if call is None else [call]
            for src in last_actions(link.source):
                exact = link.exact and not self._fails_inside(src, link.source)
                new_edges += [(src, dst, link.target.kind, exact) for dst in later_actions]
        # Added at once, so that no edge changes which actions are first or last for the next one.
        for src, dst, kind, exact in new_edges:
            self._add(src, dst, kind, exact=exact)

    def _fails_inside(self, action: str, ns: str) -> bool:
        """Whether an action of an execution lies in a failure that this one caught inside."""
        return any(ns in self._ancestors[failure] for failure in self._failures.get(action, ()))

    def _link_prompts(self) -> None:
        """Edges from the calls whose answers or tool results are messages of a prompt."""
        calls = {call.action_id: call for execution in self._executions.values() for call in execution.calls}
        for call in calls.values():
            sources: tuple[tuple[EdgeKind, tuple[str, ...]], ...]
            sources = (("data", call.saw_answers), ("tool", call.saw_tool_results))
            for kind, action_ids in sources:
                for src in action_ids:
                    if src in calls and calls[src].end <= call.start:  # else a message of another call, under its id
                        self._add(src, call.action_id, kind, exact=True)

    def _with_calls(self, sources: Iterable[Source], sources_of: _SourceFunction) -> dict[str, bool]:
        """The nearest executions, going back, that contain a call -> whether exact dependencies lead there."""
        if sources_of not in self._walks:
            self._walks[sources_of] = SourceWalk(
                list(self._executions),
                filter(self._timely_actions, self._executions),
                lambda ns: sources_of(self._executions[ns]),
            )
        return self._walks[sources_of].nearest(sources)

    def _may_depend(self, ns: str, source: str) -> bool:
        if ns == source or ns in self._ancestors[source] or source in self._ancestors[ns]:
            return False  # an execution and what it contains are ordered from the inside
        later, earlier = self._executions[ns], self._executions[source]
        same_superstep = later.step is not None and later.step == earlier.step
        return not (same_superstep and ns.rpartition("|")[0] == source.rpartition("|")[0])

    def _actions_within(self, ns: str) -> list[str]:
        return [call.action_id for call in self._calls_within(self._executions[ns])]

    def _timely_actions(self, ns: str) -> list[str]:
        """Actions inside an execution that began before its end."""
        actions = self._actions_within(ns)
        return [action for action in actions if action not in self._late_actions] if self._late_actions else actions

    def _boundary_of(self, actions: Iterable[str], neighbours: Mapping[str, set[str]]) -> list[str]:
        """Those of these actions without a neighbour among them: the first or the last ones."""
        inner_ids = set(actions)
        return [action for action in inner_ids if not neighbours.get(action, set()) & inner_ids]


def topological_order(actions: Mapping[str, tuple[int, str]], edges: Iterable[Edge]) -> list[str]:
    """Action ids so that every edge points forwards; ties go by the value (start time, span id).

    Raises DependencyCycleError when there is no such order.
    """
    predecessor_counts = dict.fromkeys(actions, 0)
    successors: dict[str, list[str]] = {}
    for edge in edges:
        predecessor_counts[edge.dst] += 1
        successors.setdefault(edge.src, []).append(edge.dst)
    ready_actions = [(key, action) for action, key in actions.items() if predecessor_counts[action] == 0]
    heapq.heapify(ready_actions)
    order: list[str] = []
    while ready_actions:
        _, action = heapq.heappop(ready_actions)
        order.append(action)
        for successor in successors.get(action, ()):
            predecessor_counts[successor] -= 1
            if predecessor_counts[successor] == 0:
                heapq.heappush(ready_actions, (actions[successor], successor))
    if len(order) < len(actions):
        cyclic_action = min(action for action, count in predecessor_counts.items() if count)
        raise DependencyCycleError(f"the dependencies of action {cyclic_action} form a cycle")
    return order
