"""Node executions and calls -> the dependency function D of the Flex-MG, as edges, and its topological order.

An edge has a kind. `trigger`: a write of the one node made the other run. `send`: it ran on what the one sent. `data`:
it read a value that the one wrote, or its prompt holds the one's answer. `tool`: its prompt holds the result of a
tool that the one called. A pair may have several kinds. An edge is exact when the relation was observed between the
two node executions, and inexact where it is only an upper bound: what may have been read, and calls of one
execution that follow each other in time, since what a node does inside is not looked into. A node without a call
passes on what it depends on itself. Executions nest (a subgraph is a node). Invariants: D is acyclic, two
executions of one superstep never depend on each other, and the result does not depend on the order of the input.
Spans, attributes and token ids are not known here.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from trace_store.records import Edge, EdgeKind


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


@dataclass(slots=True)
class Execution:
    """One node execution. `ns` is its checkpoint namespace, `calls` those made by the node itself."""

    ns: str
    step: int | None  # None for one that runs whenever it is called: supersteps do not order it
    parent: str | None  # ns of the enclosing execution
    triggered_by: tuple[str, ...] = ()
    sent_by: tuple[str, ...] = ()  # one execution, or all that it may have been
    reads_from: tuple[str, ...] = ()
    may_read_from: tuple[str, ...] = ()
    calls: list[Call] = field(default_factory=list)

    def control(self) -> list[tuple[str, bool]]:
        """What made it run, and whether exactly that."""
        return [*((ns, True) for ns in self.triggered_by), *((ns, len(self.sent_by) == 1) for ns in self.sent_by)]

    def sources(self) -> list[tuple[str, bool]]:
        """Everything that it depends on, and whether exactly."""
        read = [*((ns, True) for ns in self.reads_from), *((ns, False) for ns in self.may_read_from)]
        return self.control() + read


_Beyond = Callable[[Execution], Iterable[tuple[str, bool]]]


def executions_to_edges(episode_id: str, executions: Mapping[str, Execution]) -> list[Edge]:
    """All edges of one episode, one per pair of actions and kind, unordered.

    A namespace or an action that is named as a source but is not among the executions lies outside the episode (its
    input, an earlier run of the thread, an attempt that failed), so it gives no edge. Raises DependencyCycleError for
    an execution inside itself.
    """
    return _Derivation(episode_id, executions).edges()


class _Derivation:
    """The edges found so far, with what is needed to find the next ones."""

    def __init__(self, episode_id: str, executions: Mapping[str, Execution]) -> None:
        self._episode_id = episode_id
        self._executions = executions
        self._found: dict[tuple[str, str, EdgeKind], bool] = {}  # -> exact
        self._successors: dict[str, set[str]] = {}
        self._predecessors: dict[str, set[str]] = {}
        # Calls of the executions inside each execution, however deep, without its own.
        self._nested: dict[str, list[Call]] = {ns: [] for ns in executions}
        self._outer: dict[str, tuple[str, ...]] = {}
        for ns, execution in executions.items():
            outer, above = [], execution.parent
            while above is not None and above in executions:
                if above == ns or above in outer:
                    raise DependencyCycleError(f"node execution {above} contains itself")
                outer.append(above)
                self._nested[above].extend(execution.calls)
                above = executions[above].parent
            self._outer[ns] = tuple(outer)

    def edges(self) -> list[Edge]:
        for ns in self._executions:
            if not self._nested[ns]:
                self._link_inside(ns)
        # From the innermost executions outwards: the first and last actions of a subgraph follow from its inside.
        levels: dict[int, list[str]] = {}
        for ns, outer in self._outer.items():
            levels.setdefault(len(outer), []).append(ns)
        for depth in sorted(levels, reverse=True):
            for ns in levels[depth]:
                if self._nested[ns]:
                    self._link_inside(ns)
            self._link_first_calls(levels[depth], "trigger", lambda e: [(ns, True) for ns in e.triggered_by])
            self._link_first_calls(levels[depth], "send", lambda e: [(ns, len(e.sent_by) == 1) for ns in e.sent_by])
            self._link_reads(levels[depth])
        self._link_prompts()
        return [Edge(self._episode_id, *key, exact) for key, exact in self._found.items()]

    def _add(self, src: str, dst: str, kind: EdgeKind, exact: bool) -> None:
        self._found[src, dst, kind] = exact or self._found.get((src, dst, kind), False)
        self._successors.setdefault(src, set()).add(dst)
        self._predecessors.setdefault(dst, set()).add(src)

    def _link_inside(self, ns: str) -> None:
        """Edges between the calls of one execution: each depends on the latest that ended before it began.

        "Ended before" is an interval order; what is added is its transitive reduction. Calls of nested
        executions take part opposite the node's own calls, but keep the edges that they have among each other.
        """
        own, nested = _Timeline(self._executions[ns].calls), _Timeline(self._nested[ns])
        for call in own.calls:
            last_own, last_nested = own.latest_start_before(call), nested.latest_start_before(call)
            for before in own.ended_between(max(last_own, last_nested), call):
                self._add(before.action_id, call.action_id, "data", False)
            done = nested.ended_between(last_own, call)
            ids = {before.action_id for before in done}
            for before in done:
                if not ids & self._successors.get(before.action_id, set()):
                    self._add(before.action_id, call.action_id, "data", False)
        if not own.calls:
            return
        starts = {call.action_id: call.start for call in nested.calls}
        for call in nested.calls:
            earlier = [starts[p] for p in self._predecessors.get(call.action_id, set()) if p in starts]
            after = max([own.latest_start_before(call), *earlier])
            for before in own.ended_between(after, call):
                self._add(before.action_id, call.action_id, "data", False)

    def _link_first_calls(
        self, namespaces: Sequence[str], kind: EdgeKind, sources: Callable[[Execution], Iterable[tuple[str, bool]]]
    ) -> None:
        """Edges into what an execution does first, from what its sources do last."""
        new: list[tuple[str, str, bool]] = []
        for ns in namespaces:
            firsts = self._ends(ns, self._predecessors)
            if firsts:
                # A trigger is passed on by what was triggered; what was sent may be made of anything.
                beyond = Execution.control if kind == "trigger" else Execution.sources
                found = self._last_calls(ns, sources(self._executions[ns]), beyond)
                new += [(src, dst, exact) for src, exact in found for dst in firsts]
        self._add_together(new, kind)

    def _link_reads(self, namespaces: Sequence[str]) -> None:
        """Edges into each call, from what wrote the values that its execution had read by then."""
        new: list[tuple[str, str, bool]] = []
        for ns in namespaces:
            execution = self._executions[ns]
            for call in execution.calls:
                known = execution.reads_from if call.reads_from is None else call.reads_from
                maybe = execution.may_read_from if call.may_read_from is None else call.may_read_from
                sources = [*((read, True) for read in known), *((read, False) for read in maybe)]
                new += [(src, call.action_id, exact) for src, exact in self._last_calls(ns, sources, Execution.sources)]
        self._add_together(new, "data")

    def _link_prompts(self) -> None:
        """Edges between calls that the messages of a prompt tell of."""
        calls = {call.action_id: call for execution in self._executions.values() for call in execution.calls}
        for call in calls.values():
            sources: tuple[tuple[EdgeKind, tuple[str, ...]], ...]
            sources = (("data", call.saw_answers), ("tool", call.saw_tool_results))
            for kind, seen in sources:
                for src in seen:
                    if src in calls and calls[src].end <= call.start:  # else a message of another call, under its id
                        self._add(src, call.action_id, kind, True)

    def _add_together(self, new: Iterable[tuple[str, str, bool]], kind: EdgeKind) -> None:
        """Added at once, so that no edge changes which actions are first or last for the next one."""
        for src, dst, exact in new:
            self._add(src, dst, kind, exact)

    def _last_calls(self, ns: str, sources: Iterable[tuple[str, bool]], beyond: _Beyond) -> Iterator[tuple[str, bool]]:
        """What the sources of `ns` did last, and whether it is exactly they; through executions without a call."""
        for source, exact in self._with_calls(sources, beyond).items():
            if self._may_depend(ns, source):
                yield from ((action, exact) for action in self._ends(source, self._successors))

    def _with_calls(self, sources: Iterable[tuple[str, bool]], beyond: _Beyond) -> dict[str, bool]:
        """The nearest executions, going back, that contain a call -> whether an exact way leads there."""
        reached: dict[str, bool] = {}
        found: dict[str, bool] = {}
        waiting = list(sources)
        while waiting:
            ns, exact = waiting.pop()
            if ns not in self._executions or (ns in reached and reached[ns] >= exact):
                continue
            reached[ns] = exact
            if self._executions[ns].calls or self._nested[ns]:
                found[ns] = exact
            else:
                waiting.extend((further, exact and sure) for further, sure in beyond(self._executions[ns]))
        return found

    def _may_depend(self, ns: str, source: str) -> bool:
        if ns == source or ns in self._outer[source] or source in self._outer[ns]:
            return False  # an execution and what it contains are ordered from the inside
        later, earlier = self._executions[ns], self._executions[source]
        same_superstep = later.step is not None and later.step == earlier.step
        return not (same_superstep and ns.rpartition("|")[0] == source.rpartition("|")[0])

    def _ends(self, ns: str, neighbours: Mapping[str, set[str]]) -> list[str]:
        """Actions inside an execution without a neighbour inside it: its first or its last ones."""
        inside = {call.action_id for call in (*self._executions[ns].calls, *self._nested[ns])}
        return [action for action in inside if not neighbours.get(action, set()) & inside]


class _Timeline:
    """Calls by their end, to ask which ended before another began. Calls of one instant are unordered."""

    def __init__(self, calls: Iterable[Call]) -> None:
        self.calls = sorted(calls, key=lambda call: (call.end, call.start))
        self._ends = [call.end for call in self.calls]
        self._latest = list(accumulate((call.start for call in self.calls), max))

    def latest_start_before(self, call: Call) -> int:
        """The latest start among the calls that ended before `call` began; -1 when none did."""
        n = bisect_right(self._ends, call.start)
        while n > 0 and self.calls[n - 1].start >= call.start:  # zero-length calls at this very instant
            n -= 1
        return self._latest[n - 1] if n else -1

    def ended_between(self, after: int, call: Call) -> list[Call]:
        """Calls that ended before `call` began, with no call in between that began at `after`."""
        window = self.calls[bisect_left(self._ends, after) : bisect_right(self._ends, call.start)]
        return [
            before for before in window if before.start < call.start and (before.end > after or before.start == after)
        ]


def topological_order(actions: Mapping[str, tuple[int, str]], edges: Iterable[Edge]) -> list[str]:
    """Action ids so that every edge points forwards; ties go by the value (start time, span id).

    Raises DependencyCycleError when there is no such order.
    """
    waiting_for = dict.fromkeys(actions, 0)
    after: dict[str, list[str]] = {}
    for edge in edges:
        waiting_for[edge.dst] += 1
        after.setdefault(edge.src, []).append(edge.dst)
    ready = [(key, action) for action, key in actions.items() if waiting_for[action] == 0]
    heapq.heapify(ready)
    order: list[str] = []
    while ready:
        _, action = heapq.heappop(ready)
        order.append(action)
        for later in after.get(action, ()):
            waiting_for[later] -= 1
            if waiting_for[later] == 0:
                heapq.heappush(ready, (actions[later], later))
    if len(order) < len(actions):
        stuck = min(action for action, count in waiting_for.items() if count)
        raise DependencyCycleError(f"the dependencies of action {stuck} form a cycle")
    return order
