"""A run, and a call of it -> the supersteps before the call, from the app's checkpointer, so that no fork runs them.

It is taken where it spares more supersteps, over all forks, than the one trial of it costs. Invariant: the trial, in
which the recorded run goes on from there with its recorded answers, came to the checkpoint's state and out the same;
where it did not, or something is kept that a checkpoint does not hold, the reason is given, and the run is replayed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langgraph.channels import UntrackedValue
from langgraph.checkpoint.base import BaseCheckpointSaver, CheckpointTuple
from langgraph.types import PregelTask, StateSnapshot

from marft_bridge.common.digests import canonical_json, text_sha256
from marft_bridge.common.errors import GraphError
from marft_bridge.common.library_internals import NO_WRITES, TASKS
from marft_bridge.recording.given_tasks import GivenTask, GivenTasks, TaskKey
from marft_bridge.recording.recorder import LIVE
from marft_bridge.recording.run_facts import value_to_text
from marft_bridge.recording.wrap import graph_to_original
from marft_bridge.recording.write_ledger import ENTRY, is_state
from marft_bridge.replay.held_threads import (
    copy_held_thread,
    held_checkpointer,
    is_plain_turn,
    put_tuples,
    read_own_checkpoints,
)
from marft_bridge.replay.private_memory import PrivateMemory, memory_of_run, private_memory
from marft_bridge.replay.recorded_run import RecordedCall, RecordedRun, load_recorded
from marft_bridge.replay.replayed_run import ReplayOptions, replay_run, to_comparable_output
from marft_bridge.replay.replayed_thread import ReplayedThread
from marft_bridge.rollouts.langgraph_json import ServerStore
from trace_store import conventions as c
from trace_store.records import ONE_TOOL_OF, SpanRow

NO_CHECKPOINTER = "the app has no checkpointer"
_GONE = "the app's checkpointer does not hold all of its checkpoints"
_UNSUPPORTED = {
    c.ROUTES_AFTER: "a router asked a model",
    c.CALLED_BY: "a functional task ran",
    c.HANDLES: "an error handler ran",
    c.CACHED: "a task got its writes from a cache",
}


@dataclass(frozen=True, slots=True)
class RunEntry:
    """Where forks enter a run."""

    checkpoint_id: str  # of the app's checkpointer: the last one before the forked call
    superstep_count: int  # before it, of which no node runs
    thread: ReplayedThread  # as it was when the run began
    tasks: GivenTasks  # of these supersteps


class _NoEntryError(Exception):
    """A run is not entered before a call; the text says why."""


def find_entry(
    graph: Any,
    run: RecordedRun,
    forked: RecordedCall,
    *,
    samples: int,
    options: ReplayOptions,
    settings: Mapping[str, Any],
    runner: asyncio.Runner,
) -> RunEntry | str:
    """Where forks of a run at one of its calls enter it, or why they run it from its beginning.

    Args:
        graph: the app's, which the forks run on.
        samples: forks that are made.
        settings: `config` and `context` of the app's runs, where the record lacks them.
        runner: the event loop that the app was opened on.
    """
    try:
        return _find_entry(graph, run, forked, samples=samples, options=options, settings=settings, runner=runner)
    except (_NoEntryError, GraphError) as error:
        return str(error).removeprefix("replay: ")


def _find_entry(
    graph: Any,
    run: RecordedRun,
    forked: RecordedCall,
    *,
    samples: int,
    options: ReplayOptions,
    settings: Mapping[str, Any],
    runner: asyncio.Runner,
) -> RunEntry:
    held = held_checkpointer(graph)
    if held is None:
        raise _NoEntryError(NO_CHECKPOINTER)
    _refuse_run(graph, run, options)
    steps = _Supersteps(run, forked)
    if not steps.spared:
        raise _NoEntryError("no superstep lies before the call")
    if samples * len(steps.spared) <= len(steps.trial):
        text = f"{samples} x {len(steps.spared)} supersteps before the call, {len(steps.trial)} from there on"
        raise _NoEntryError(f"it is no cheaper: {text}")
    steps.refuse_unsupported()
    tuples = _read_supersteps(held, run, steps.forked, runner=runner)
    thread = _copy_thread(graph, run, tuples[0], runner=runner)
    tasks = GivenTasks(
        _match_tasks(graph, tuples, steps),
        answers={call.action_id: call.answer for call in run.calls if call.answer is not None},
        offered_tools=_find_offered_tools(run, steps.rows),
    )
    _refuse_failed_trial(
        graph, run, tuples[-1], thread=thread, tasks=tasks, options=options, settings=settings, runner=runner
    )
    return RunEntry(str(tuples[-1].checkpoint["id"]), len(steps.spared), thread=thread, tasks=tasks)


def _refuse_run(graph: Any, run: RecordedRun, options: ReplayOptions) -> None:
    """Raises where something besides the checkpoints may count, or they may not be those of the run."""
    original = graph_to_original(graph)
    episode = run.trajectory.episode
    if options.tools == "run":
        raise _NoEntryError("its tools run again")
    if not is_plain_turn(run):
        raise _NoEntryError("it did not begin with a new input at the end of its thread")
    if episode.split != LIVE or episode.adapters:
        raise _NoEntryError("its nodes were answered by served models")
    if run.had_store or not isinstance(vars(original).get("store"), ServerStore | None):
        raise _NoEntryError("the app keeps a store of LangGraph's")
    if vars(original).get("cache") is not None:
        raise _NoEntryError("the app keeps a cache of LangGraph's")
    if any(isinstance(channel, UntrackedValue) for channel in original.channels.values()):
        raise _NoEntryError("its state has a channel that checkpoints leave out")
    if not c.follows_todays_rule(run.root.convention):
        raise _NoEntryError("its dependencies were recorded by an older rule")


class _Supersteps:
    """The supersteps of a run, before a call of it and from it on."""

    def __init__(self, run: RecordedRun, forked: RecordedCall) -> None:
        by_id = {span.span_id: span for span in run.spans}
        outermost = {span.span_id: _to_outermost(span, by_id) for span in run.spans if span is not run.root}
        step_of = {span_id: int(execution.attributes[c.STEP]) for span_id, execution in outermost.items()}
        self.forked = step_of[forked.action_id]
        self.spared = {step for step in step_of.values() if step < self.forked}
        self.trial = {step for step in step_of.values() if step >= self.forked}
        self.rows = [span for span in run.spans if step_of.get(span.span_id, self.forked) < self.forked]
        self._rows_of: dict[str, list[SpanRow]] = {}
        for row in self.rows:
            namespace = str(outermost[row.span_id].attributes.get(c.CHECKPOINT_NS))
            self._rows_of.setdefault(namespace, []).append(row)

    def refuse_unsupported(self) -> None:
        """Raises where the supersteps before the call have something that their checkpoints do not tell all of."""
        for key, reason in _UNSUPPORTED.items():  # in all of them first: a node failed before its error handler ran
            if any(row.attributes.get(key) for row in self.rows):
                raise _NoEntryError(f"{reason} before the call")
        for row in self.rows:
            if "|" in str(row.attributes.get(c.CHECKPOINT_NS)):
                raise _NoEntryError("a graph inside ran before the call")
            if row.operation == c.INVOKE_AGENT and row.status == "error":
                raise _NoEntryError("a node failed before the call")

    def to_rows(self, namespace: str) -> list[SpanRow]:
        """The spans of a task before the call, each after the one around it."""
        rows = self._rows_of.get(namespace, [])
        ids = {row.span_id for row in rows}
        ordered: list[SpanRow] = []
        while rows:
            inner_ids = ids - {row.span_id for row in ordered}
            ready = [row for row in rows if row.parent_span_id not in inner_ids]
            ordered += sorted(ready, key=lambda row: (row.start_ns, row.span_id))
            rows = [row for row in rows if row.parent_span_id in inner_ids]
        return ordered


def _to_outermost(span: SpanRow, by_id: Mapping[str, SpanRow]) -> SpanRow:
    """The execution of a node of the outermost graph that a span lies in, which may be the span itself."""
    while span.parent_span_id is not None and (outer := by_id[span.parent_span_id]).parent_span_id is not None:
        span = outer
    if span.operation != c.INVOKE_AGENT or c.STEP not in span.attributes:
        raise _NoEntryError("it has a call or a tool outside its nodes")
    return span


# -- what the app's checkpointer holds ------------------------------------------------------------------------------


def _read_supersteps(
    held: BaseCheckpointSaver[Any], run: RecordedRun, forked_step: int, *, runner: asyncio.Runner
) -> list[CheckpointTuple]:
    """The run's checkpoints from its first to the one that the superstep of the forked call began at."""
    first = read_own_checkpoints(held, run, 1, runner=runner)
    if not first or first[0].metadata.get("source") != "input":
        raise _NoEntryError(_GONE)
    count = forked_step - int(first[0].metadata["step"])
    tuples = read_own_checkpoints(held, run, count, runner=runner)
    steps = [saved.metadata.get("step") for saved in tuples]
    if steps != list(range(forked_step - count, forked_step)):
        raise _NoEntryError(_GONE)
    return tuples


def _copy_thread(graph: Any, run: RecordedRun, first: CheckpointTuple, *, runner: asyncio.Runner) -> ReplayedThread:
    """The thread as it was when the run began."""
    if run.trajectory.episode.from_checkpoint is None and first.parent_config is None:
        return ReplayedThread()
    thread = copy_held_thread(graph, run, runner)
    if thread is None:
        raise _NoEntryError("the app's checkpointer does not hold its thread as it was when it began")
    return thread


def _match_tasks(graph: Any, tuples: Sequence[CheckpointTuple], steps: _Supersteps) -> dict[TaskKey, GivenTask]:
    """The tasks of each superstep but the last one's, with what they wrote and their spans."""
    memory = PrivateMemory()
    original = graph_to_original(graph)
    saver = memory.stand_in(original.__dict__["checkpointer"])
    put_tuples(saver, tuples)
    tasks: dict[TaskKey, GivenTask] = {}
    with private_memory(memory), memory_of_run(memory):
        for saved in tuples[:-1]:
            writes = _to_writes(saved)
            for task in _find_tasks(original, saved):
                if task.name == ENTRY:
                    continue
                namespace = f"{task.name}:{task.id}"
                rows = steps.to_rows(namespace)
                if not rows and task.id not in writes:
                    # It did not run: LangGraph writes checkpoints in the background, and a join, which it changes in
                    # place, may have become complete by then.
                    continue
                if not rows or task.id not in writes:
                    raise _NoEntryError(f"what {task.name} did or wrote before the call is not held")
                key = (int(saved.metadata["step"]) + 1, task.path)
                tasks[key] = GivenTask(namespace, writes[task.id], spans=rows)
    if sum(len(task.spans) for task in tasks.values()) != len(steps.rows):
        raise _NoEntryError("its checkpoints and its record have other tasks")
    return tasks


def _find_tasks(graph: Any, saved: CheckpointTuple) -> Sequence[PregelTask]:
    """The tasks that follow a checkpoint."""
    try:
        snapshot: StateSnapshot = graph.get_state(saved.config)
    except Exception as error:  # noqa: BLE001 - the app's code may have changed since
        raise _NoEntryError(f"today's graph cannot read its checkpoints: {type(error).__name__}: {error}") from None
    return snapshot.tasks


def _to_writes(saved: CheckpointTuple) -> dict[str, list[tuple[str, Any]]]:
    """What the tasks after a checkpoint wrote, by their ids."""
    writes: dict[str, list[tuple[str, Any]]] = {}
    for task_id, channel, value in saved.pending_writes or []:
        task_writes = writes.setdefault(task_id, [])
        if channel == NO_WRITES:
            continue
        if channel.startswith("__") and channel not in (TASKS, "__root__"):
            raise _NoEntryError("a task before the call asked a person, failed, or ran as a function")
        task_writes.append((channel, value))
    return writes


# -- the tools that calls offered -----------------------------------------------------------------------------------


def _find_offered_tools(run: RecordedRun, rows: Sequence[SpanRow]) -> dict[str, list[str]]:
    """The tools that calls of these spans offered, by node, as they were sent: the episode's lineage tells the form."""
    lineage = run.trajectory.episode.lineage
    offered: dict[str, list[str]] = {}
    for row in rows:
        definitions = row.attributes.get(c.TOOL_DEFINITIONS) if row.operation == c.CHAT else None
        if definitions is None:
            continue
        node = str(row.attributes.get(c.NODE))
        digests = {digest for name, digest in lineage.items() if name.startswith(f"{ONE_TOOL_OF}{node}/")}
        for tool in load_recorded(definitions):
            sent = next((form for form in _to_sent_forms(tool) if text_sha256(form) in digests), None)
            if sent is None:
                raise _NoEntryError(f"the tools that {node} offered its model are not recorded as they were sent")
            offered.setdefault(node, []).append(sent)
    return offered


def _to_sent_forms(tool: Any) -> list[str]:
    """What may have been sent of a tool whose definition is recorded; see `tool_definitions`."""
    if not isinstance(tool, dict):
        return [canonical_json(tool)]
    fields = {key: value for key, value in tool.items() if key != "type"}
    forms: tuple[Mapping[str, Any], ...] = ({"type": "function", "function": fields}, fields, tool)
    return [canonical_json(form) for form in forms]


# -- the trial ------------------------------------------------------------------------------------------------------


def _refuse_failed_trial(
    graph: Any,
    run: RecordedRun,
    entered: CheckpointTuple,
    *,
    thread: ReplayedThread,
    tasks: GivenTasks,
    options: ReplayOptions,
    settings: Mapping[str, Any],
    runner: asyncio.Runner,
) -> None:
    """Raises where the recorded run, entered there, comes to another state than the checkpoint's, or out otherwise."""
    tried_thread = thread.copy()
    replayed = replay_run(
        graph, run, thread=tried_thread, options=options, arguments=settings, runner=runner, given_tasks=tasks
    )
    if replayed.divergence is not None:
        raise _NoEntryError(f"entered there, the recorded run does not come out the same: {replayed.divergence}")
    if thread.begins_at is not None and len(tried_thread.memory.held) > 1:
        raise _NoEntryError("a graph inside has a checkpointer or store of its own")
    saver = tried_thread.memory.stand_in(held_checkpointer(graph))
    history = saver.list({"configurable": {"thread_id": run.trajectory.episode.thread_id, "checkpoint_ns": ""}})
    states = (_to_state(saved) for saved in history if saved.metadata["step"] == entered.metadata["step"])
    if next(states, None) != _to_state(entered):  # the newest one first
        raise _NoEntryError("what the tasks before the call wrote does not make the state of the checkpoint")


def _to_state(saved: CheckpointTuple) -> Any:
    """The values of a state as JSON, without what triggers tasks: of a join, a checkpoint may hold later writes too."""
    values = {key: value for key, value in saved.checkpoint["channel_values"].items() if is_state(key)}
    return to_comparable_output(json.loads(value_to_text(values)))
