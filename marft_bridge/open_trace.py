"""What is known of a graph run while it is being recorded: its callback runs, its tasks, its writes and its answers.

One `OpenTrace` per root run, dropped when that ends. Invariant: a task's sources are asked for once, when it
starts, and its writes are noted once, when they are committed. Of spans it only holds those that are open.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from langgraph.types import PregelExecutableTask
from opentelemetry.sdk.trace import Span

from marft_bridge.action_links import AnswerIndex, around_to_input_writers
from marft_bridge.declared_format import DeclaredFormat
from marft_bridge.episode import EpisodeContext
from marft_bridge.exact_tokens import ExactTokens
from marft_bridge.lineage import request_to_tools, tools_to_lineage, tools_to_names
from marft_bridge.state_reads import Reads, state_keys
from marft_bridge.task_hooks import is_subgraph
from marft_bridge.task_writes import Sources, TaskStart, WriteLedger, Writers, graph_of

_BREAKPOINTS = ("interrupt_before", "interrupt_after")


@dataclass(slots=True)
class OpenTask:
    """A task that LangGraph runs: where it comes from, and what its node reads."""

    start: TaskStart
    sources: Sources
    reads: Reads | None
    inherits: bool
    span: Span | None = None  # of its latest attempt


@dataclass(slots=True)
class OpenRun:
    """One callback run: with a span of its own, or passing its parent's on."""

    trace: OpenTrace
    span: Span  # its own, or the nearest ancestor's
    owns_span: bool
    checkpoint_ns: str
    task: OpenTask | None = None  # the task around it, where LangGraph told us of it
    tokens: ExactTokens | None = None
    declared: DeclaredFormat | None = None  # of the answer, where this is a call


@dataclass(slots=True)
class OpenTrace:
    """One graph run."""

    root: UUID
    episode: EpisodeContext
    thread_id: str | None = None
    ledger: WriteLedger = field(default_factory=WriteLedger)
    answers: AnswerIndex = field(default_factory=AnswerIndex)
    tasks: dict[str, OpenTask] = field(default_factory=dict)  # by checkpoint_ns
    runs: dict[UUID, OpenRun] = field(default_factory=dict)
    spans: int = 0
    offered: dict[str, set[str]] = field(default_factory=dict)  # node -> tools that its calls offered, as JSON
    interrupted: bool = False  # a node called interrupt()
    loop: Any = None  # LangGraph's, of the outermost graph

    @property
    def was_interrupted(self) -> bool:
        """Whether the run waits for a resume: inside a node, or at a breakpoint."""
        return self.interrupted or getattr(self.loop, "status", None) in _BREAKPOINTS

    @property
    def lineage(self) -> dict[str, str]:
        """What the episode's prompts and samples depend on, as far as it is known by now."""
        return {**self.episode.lineage, **tools_to_lineage(self.offered), **tools_to_names(self.offered)}

    def note_tools(self, node: str, asked: Mapping[str, Any]) -> None:
        """A node calls its model with these parameters."""
        if tools := request_to_tools(asked):
            self.offered.setdefault(node, set()).update(tools)

    def start_task(self, task: PregelExecutableTask, reads: Reads | None, inherits: bool) -> OpenTask:
        """A task starts; see `task_hooks.SeesTasks.note_task_start`."""
        start = _task_to_start(task)
        keys = state_keys(task.input) if reads is not None else None
        started = OpenTask(start, self.ledger.task_started(start, keys), reads, inherits)
        self.tasks[start.ns] = started
        return started

    def note_writes(self, loop: Any, task: PregelExecutableTask, writes: Any) -> None:
        """What a task of the graph that `loop` runs wrote."""
        ns = task.config["configurable"]["checkpoint_ns"]
        # A task that ran is known; one that failed before it ran may still have writes, of its error.
        start = self.tasks[ns].start if ns in self.tasks else _task_to_start(task)
        self.ledger.note_writes(
            start.ns,
            start.path,
            start.step,
            writes,
            loop.channels,
            loop.trigger_to_nodes.__contains__,
            is_subgraph=is_subgraph(task),
            input_writers=functools.partial(self._input_writers, start.ns),
        )

    def _input_writers(self, entry: str, key: str) -> Writers:
        around, task = self.tasks.get(graph_of(entry)), self.tasks.get(entry)
        if around is None or task is None:
            return {}  # the outermost graph: its input comes from outside the episode
        return around_to_input_writers(around.sources, around.reads, task.inherits, key)


def _task_to_start(task: PregelExecutableTask) -> TaskStart:
    return TaskStart(
        ns=task.config["configurable"]["checkpoint_ns"],
        node=task.name,
        step=int(task.config["metadata"]["langgraph_step"]),
        path=task.path,
        subscribed=task.triggers,
        input=task.input,
    )
