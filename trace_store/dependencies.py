"""Node executions and calls -> the dependency function D of the Flex-MG, as edges, and its topological order.

Sources: calls inside one node execution follow each other in time (`data`); between executions LangGraph's
trigger writes give `trigger` edges and the last writers of a channel give inexact `data` edges. Executions nest
(a subgraph is a node). Invariants: D is acyclic, two executions of one superstep never depend on each other, and
the result does not depend on the order of the input. Spans, attributes and token ids are not known here.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from trace_store.records import Edge, EdgeKind


class DependencyCycleError(ValueError):
    """D has a cycle, or the nesting of executions has one; the message names a member."""


@dataclass(frozen=True, slots=True)
class Call:
    """One LLM call whose execution counts. Times in nanoseconds, `start <= end`."""

    action_id: str
    start: int
    end: int


@dataclass(slots=True)
class Execution:
    """One node execution. `ns` is its checkpoint namespace, `calls` those made by the node itself."""

    ns: str
    step: int | None
    parent: str | None  # ns of the enclosing execution
    triggered_by: tuple[str, ...]
    reads_from: tuple[str, ...]
    calls: list[Call] = field(default_factory=list)


def executions_to_edges(episode_id: str, executions: Mapping[str, Execution]) -> list[Edge]:
    """All edges of one episode, one per pair of actions, unordered.

    A namespace in `triggered_by` or `reads_from` that is not among the executions lies outside the episode
    (its input, or a cached node), so it gives no edge. Raises DependencyCycleError for an execution inside itself.
    """
    return _Derivation(episode_id, executions).edges()


class _Derivation:
    """The edges found so far, with what is needed to find the next ones."""

    def __init__(self, episode_id: str, executions: Mapping[str, Execution]) -> None:
        self._episode_id = episode_id
        self._executions = executions
        self._found: dict[tuple[str, str], Edge] = {}
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
        # From the innermost executions outwards: the first and last actions of a subgraph follow from its inside.
        levels: dict[int, list[str]] = {}
        for ns, outer in self._outer.items():
            levels.setdefault(len(outer), []).append(ns)
        for depth in sorted(levels, reverse=True):
            for ns in levels[depth]:
                self._link_inside(ns)
            self._link_between(levels[depth], "trigger", lambda e: e.triggered_by, lambda e: e.triggered_by)
            # What a node without a call wrote depends on whatever it read, as well as on what triggered it.
            self._link_between(
                levels[depth], "data", lambda e: e.reads_from, lambda e: (*e.triggered_by, *e.reads_from)
            )
        return list(self._found.values())

    def _add(self, src: str, dst: str, kind: EdgeKind, exact: bool) -> None:
        if (src, dst) not in self._found:
            self._found[src, dst] = Edge(self._episode_id, src, dst, kind, exact)
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
                self._add(before.action_id, call.action_id, "data", True)
            done = nested.ended_between(last_own, call)
            ids = {before.action_id for before in done}
            for before in done:
                if not ids & self._successors.get(before.action_id, set()):
                    self._add(before.action_id, call.action_id, "data", True)
        if not own.calls:
            return
        starts = {call.action_id: call.start for call in nested.calls}
        for call in nested.calls:
            earlier = [starts[p] for p in self._predecessors.get(call.action_id, set()) if p in starts]
            after = max([own.latest_start_before(call), *earlier])
            for before in own.ended_between(after, call):
                self._add(before.action_id, call.action_id, "data", True)

    def _link_between(
        self,
        namespaces: Sequence[str],
        kind: EdgeKind,
        sources: Callable[[Execution], tuple[str, ...]],
        beyond: Callable[[Execution], tuple[str, ...]],
    ) -> None:
        new: list[tuple[str, str]] = []
        for ns in namespaces:
            firsts = self._ends(ns, self._predecessors)
            if not firsts:
                continue
            for source in self._with_calls(sources(self._executions[ns]), beyond):
                if not self._may_depend(ns, source):
                    continue
                new += [(src, dst) for src in self._ends(source, self._successors) for dst in firsts]
        # Added together, so that no edge changes which actions are first or last for the next one.
        for src, dst in new:
            self._add(src, dst, kind, kind == "trigger")

    def _with_calls(self, sources: Iterable[str], beyond: Callable[[Execution], tuple[str, ...]]) -> Iterable[str]:
        """The nearest executions, going back, that contain a call; safe against cycles."""
        waiting, seen = list(sources), set()
        while waiting:
            ns = waiting.pop()
            if ns in seen or ns not in self._executions:
                continue
            seen.add(ns)
            if self._executions[ns].calls or self._nested[ns]:
                yield ns
            else:
                waiting.extend(beyond(self._executions[ns]))

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
