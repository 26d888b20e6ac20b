"""The state of a graph run while it is being recorded: its callback runs, tasks, writes, answers and open spans.

One `OpenTrace` per root run, dropped when the run ends. Invariants: a task's sources are looked up once, when it
starts, and its writes are noted once, when they are committed; a task is forgotten two supersteps later, with the
graphs inside it, so that what a long run holds does not grow with the square of its length.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from langgraph.types import PregelExecutableTask

from marft_bridge.common.error_handlers import failed_task
from marft_bridge.common.node_names import enclosing_task, graph_run_apart, lacks_task_id, namespace_in_task
from marft_bridge.common.running_routers import own_namespace, router_ns
from marft_bridge.model_calls.token_capture import ExactTokens
from marft_bridge.recording.dependency_evidence import AnswerIndex, sources_to_input_writers
from marft_bridge.recording.episode_context import EpisodeContext
from marft_bridge.recording.format_check import DeclaredFormat
from marft_bridge.recording.key_writers import Writers
from marft_bridge.recording.langgraph_hooks import NodeKind, task_to_kind
from marft_bridge.recording.open_span import OpenSpan
from marft_bridge.recording.state_reads import Reads, state_keys
from marft_bridge.recording.thread_position import ThreadPosition
from marft_bridge.recording.tool_lineage import request_to_tools, tools_to_lineage, tools_to_single_lineage
from marft_bridge.recording.write_ledger import Sources, TaskStart, TaskWrites, WriteLedger, graph_of, is_entry

_BREAKPOINTS = ("interrupt_before", "interrupt_after")


@dataclass(slots=True)
class OpenTask:
    """A task that LangGraph runs: its sources, and what its node reads."""

    start: TaskStart
    sources: Sources
    reads: Reads | None
    inherits: bool  # it is a graph's entry, and its input the very state of the task around the graph
    kind: NodeKind = NodeKind.OTHER
    span: OpenSpan | None = None  # of its latest attempt


@dataclass(slots=True)
class OpenRouter:
    """A routing function of a task's node: it gets a span when it asks a model."""

    task: OpenTask  # its own
    node_span: OpenSpan
    first_write: int  # number of the task's writes when it began
    end_write: int  # when it ended
    run_id: UUID | None = None  # of its span


@dataclass(slots=True, eq=False)
class OpenRun:
    """One callback run: with a span of its own, or sharing its parent's."""

    trace: OpenTrace
    span: OpenSpan  # its own, or the nearest ancestor's
    owns_span: bool
    checkpoint_ns: str
    task: OpenTask | None = None  # the task around it, where its start was seen
    router: OpenRouter | None = None  # the router around it, where nothing in between has a span
    tokens: ExactTokens | None = None
    is_call: bool = False  # an LLM call
    part_of: OpenRun | None = None  # the call that it answers, where the model of that one asks another model
    is_root: bool = False  # the outermost run of its trace
    declared_format: DeclaredFormat | None = None  # the form declared for its answer


@dataclass(slots=True)
class OpenTrace:
    """One graph run."""

    episode: EpisodeContext
    conversation_id: str | None = None  # the app's thread id
    position: ThreadPosition | None = None  # on its thread, where a checkpointer keeps one
    ledger: WriteLedger = field(default_factory=WriteLedger)
    answers: AnswerIndex = field(default_factory=AnswerIndex)
    tasks: dict[str, OpenTask] = field(default_factory=dict)  # by namespace; routers too
    routers: dict[str, OpenRouter] = field(default_factory=dict)  # by namespace
    recent_tasks: dict[str, list[tuple[int, str]]] = field(default_factory=dict)  # graph -> (step, ns) not forgotten
    runs: dict[OpenRun, UUID] = field(default_factory=dict)  # open ones, with their ids
    lock: threading.Lock = field(default_factory=threading.Lock)  # held while a run is added to these, and at the end
    has_ended: bool = False  # nothing can be added any more
    span_count: int = 0  # spans opened so far
    offered_tools: dict[str, set[str]] = field(default_factory=dict)  # node -> tools that its calls offered, as JSON
    interrupted: bool = False  # a node called interrupt()
    loop: Any = None  # LangGraph's, of the outermost graph
    apart_numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))  # see `start_graph_apart`
    apart_savers: dict[int, Any] = field(default_factory=dict)  # held: no later one has the id of one that is gone

    def forget_all(self) -> None:
        """Forgets what is of no use when the run has ended: work that a node has left behind may hold on to it."""
        self.ledger, self.answers, self.loop = WriteLedger(), AnswerIndex(), None
        for mapping in (self.tasks, self.routers, self.recent_tasks, self.offered_tools):
            mapping.clear()
        self.apart_savers.clear()

    @property
    def was_interrupted(self) -> bool:
        """Whether the run waits for a resume: inside a node, or at a breakpoint."""
        return self.interrupted or getattr(self.loop, "status", None) in _BREAKPOINTS

    @property
    def lineage(self) -> dict[str, str]:
        """The lineage of the episode's prompts and samples, as far as it is known by now."""
        return {
            **self.episode.lineage,
            **tools_to_lineage(self.offered_tools),
            **tools_to_single_lineage(self.offered_tools),
        }

    def note_tools(self, node: str, parameters: Mapping[str, Any]) -> None:
        """Notes the tools in the parameters of a node's model call."""
        if tools := request_to_tools(parameters):
            self.offered_tools.setdefault(node, set()).update(tools)

    def start_graph_apart(self, task_ns: str, loop: Any) -> str:
        """Notes a graph that a task runs as if it were the outermost one; returns its namespace.

        Without a namespace of its own what runs in it would be taken for tasks of the outermost graph. On a thread that
        a checkpointer keeps, it goes on with the state of its earlier runs.
        """
        ns = graph_run_apart(task_ns, next(self.apart_numbers))
        if loop.checkpointer is not None:
            self.apart_savers[id(loop.checkpointer)] = loop.checkpointer
            thread_id = loop.config["configurable"].get("thread_id")
            self.ledger.continue_graph(ns, kept_as=f"{id(loop.checkpointer)}/{thread_id}")
        return ns

    def start_task(self, task: PregelExecutableTask, reads: Reads | None, outer_ns: str) -> OpenTask:
        """Notes that a task starts; see `langgraph_hooks.TaskListener.note_task_start`.

        `outer_ns` is our namespace of the task that runs its graph, "" for the outermost graph.
        """
        start = self._task_to_start(task, outer_ns)
        sources = self.ledger.start_task(start, state_keys(task.input) if reads is not None else None)
        if (failed_ns := failed_task(start.ns)) is not None:
            self._add_failure(sources, failed_ns)
        inherits = start.is_entry and self._inherits(start)
        open_task = OpenTask(start, sources, reads, inherits=inherits, kind=task_to_kind(task))
        self._forget_tasks(start.graph, before=start.step - 1)
        self._keep_task(open_task)
        return open_task

    def _add_failure(self, sources: Sources, failed_ns: str) -> None:
        """Adds to the sources of an error handler the task that failed: it is given its input, and its error."""
        sources.triggered_by = [failed_ns]
        sources.maybe_argument_writers.append(failed_ns)
        if failed_ns in self.tasks:
            sources.sent_by = list(self.tasks[failed_ns].sources.sent_by)

    def _keep_task(self, task: OpenTask) -> None:
        start = task.start
        self.tasks[start.ns] = task
        self.recent_tasks.setdefault(start.graph, []).append((start.step, start.ns))

    def _forget_tasks(self, graph: str, before: int) -> None:
        """Forgets a graph's tasks of the supersteps before this one, which have ended, and the graphs inside them."""
        recent_tasks = self.recent_tasks.get(graph, [])
        ended_tasks = [ns for step, ns in recent_tasks if step < before]
        if not ended_tasks:
            return
        self.recent_tasks[graph] = [(step, ns) for step, ns in recent_tasks if step >= before]
        for ns in ended_tasks:
            self._forget_task(ns)
        if len(self.recent_tasks) > 1:
            self._forget_graphs_inside(ended_tasks)

    def _forget_graphs_inside(self, ended_tasks: Sequence[str]) -> None:
        inner_graphs = [name for name in list(self.recent_tasks) if _lies_in(name, ended_tasks)]
        for inner_graph in inner_graphs:
            for _, ns in self.recent_tasks.pop(inner_graph, []):
                self._forget_task(ns)
            self.ledger.forget_graph(inner_graph)

    def _forget_task(self, ns: str) -> None:
        self.tasks.pop(ns, None)
        if self.routers:
            self.routers.pop(ns, None)

    def _inherits(self, start: TaskStart) -> bool:
        outer_task = self.tasks.get(enclosing_task(start.graph))
        return outer_task is not None and outer_task.reads is not None and outer_task.start.input is start.input

    def start_router(
        self, task: PregelExecutableTask, ns: str, keys: Sequence[str] | None, outer_ns: str, node_span: OpenSpan
    ) -> None:
        """Notes that a router of a task's node starts; see `langgraph_hooks.TaskListener.note_router_start`."""
        sources = self.ledger.start_router(self._task_to_writes(task, task.writes, outer_ns=outer_ns), keys)
        start = self._task_to_start(task, outer_ns)._replace(ns=ns)
        router_task = OpenTask(start, sources, reads=None, inherits=False)
        self._keep_task(router_task)
        write_count = len(task.writes)
        self.routers[ns] = OpenRouter(router_task, node_span, first_write=write_count, end_write=write_count)

    def note_writes(self, loop: Any, task: PregelExecutableTask, writes: Any, outer_ns: str) -> None:
        """Notes what a task of the graph that `loop` runs wrote; `outer_ns` as for `start_task`."""
        commit = self._task_to_writes(task, writes, outer_ns=outer_ns)
        self.ledger.note_writes(commit, loop.channels, can_trigger=loop.trigger_to_nodes.__contains__)

    def _task_to_writes(self, task: PregelExecutableTask, writes: Any, outer_ns: str) -> TaskWrites:
        start = self._task_to_start(task, outer_ns)
        routers: list[tuple[str, range]] = []
        if self.routers:
            routers = [
                (router.task.start.ns, range(router.first_write, router.end_write))
                for router in self._routers_after(start.ns)
                if router.run_id is not None
            ]
        if not start.is_entry:
            open_task = self.tasks.get(start.ns)
            kind = task_to_kind(task) if open_task is None else open_task.kind
            return TaskWrites(start, list(writes), is_subgraph=kind is NodeKind.GRAPH, routers=routers)
        return TaskWrites(
            start,
            list(writes),
            routers=routers,
            input_writers=functools.partial(self._input_writers, start),
            passes_input_on=start.ns in self.tasks and self.tasks[start.ns].inherits,
        )

    def _routers_after(self, ns: str) -> Iterator[OpenRouter]:
        """The routers of a task that have run, in the order of its node's conditional edges."""
        for number in itertools.count(1):
            router = self.routers.get(router_ns(ns, number))
            if router is None:
                return
            yield router

    def _input_writers(self, entry: TaskStart, key: str, is_same: bool) -> Writers:
        outer_task, task = self.tasks.get(enclosing_task(entry.graph)), self.tasks.get(entry.ns)
        if outer_task is None or task is None:
            return {}  # the outermost graph: its input comes from outside the episode
        # A function may have changed its state before it passed it on.
        inherits = task.inherits and (outer_task.kind is NodeKind.GRAPH or is_same)
        writers = sources_to_input_writers(outer_task.sources, outer_task.reads, inherits, key=key)
        # The packet of a Send is the input of a graph, but a function makes any input of it.
        return writers if outer_task.kind is NodeKind.GRAPH or inherits else dict.fromkeys(writers, False)

    def _task_to_start(self, task: PregelExecutableTask, outer_ns: str) -> TaskStart:
        checkpoint_ns = task.config["configurable"]["checkpoint_ns"]
        ns = task_to_own(checkpoint_ns, outer_ns)
        open_task = self.tasks.get(ns)
        if open_task is not None:
            return open_task.start
        if lacks_task_id(checkpoint_ns) and ":" not in (graph := graph_of(checkpoint_ns)) and ns != checkpoint_ns:
            self.ledger.continue_graph(graph_of(ns), kept_as=graph)
        return TaskStart(
            ns=ns,
            node=task.name,
            step=int(task.config["metadata"]["langgraph_step"]),
            path=task.path,
            subscribed=task.triggers,
            input=task.input,
            graph=graph_of(ns),
            is_entry=is_entry(ns),
        )


def task_to_own(checkpoint_ns: str, outer_ns: str) -> str:
    """LangGraph's namespace of a task -> ours. `outer_ns` is ours of the task that runs its graph.

    The context alone does not do: LangGraph may commit writes outside that of the task around the graph.
    """
    return namespace_in_task(own_namespace(checkpoint_ns), outer_ns)


def _lies_in(graph: str, tasks: Sequence[str]) -> bool:
    """Whether one of these tasks runs the graph, or runs one around it."""
    return any(graph == ns or graph.startswith(f"{ns}|") for ns in tasks)
