"""A run that its app started, and the earlier runs of its thread -> how each fork of it is started.

The thread is copied from the app's own checkpointer where it is still there as it was, else the earlier runs are
replayed once; each fork goes on from a copy of it, in memory, and enters the run in its middle where `run_entry` has
that. Invariants: nothing that the app keeps of its threads or in its stores is written; where neither gives the thread
at which this run began, no fork runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from langgraph.checkpoint.base import BaseCheckpointSaver

from marft_bridge.common.errors import GraphError
from marft_bridge.forks.given_tools import ToolChoice
from marft_bridge.forks.recorded_prefix import RecordedPrefix
from marft_bridge.forks.run_entry import NO_CHECKPOINTER, RunEntry, find_entry
from marft_bridge.recording.given_tasks import giving_tasks
from marft_bridge.recording.recorder import LIVE
from marft_bridge.recording.redaction import REDACTED
from marft_bridge.recording.wrap import graph_to_original
from marft_bridge.replay.declared_classes import graph_to_classes
from marft_bridge.replay.earlier_runs import (
    EarlierRun,
    EarlierRunError,
    LoadRun,
    RunWithEarlier,
    load_with_earlier,
    replay_earlier,
)
from marft_bridge.replay.episodes import EARLIER, load_run
from marft_bridge.replay.held_threads import copy_held_thread
from marft_bridge.replay.private_memory import memory_of_run
from marft_bridge.replay.recorded_run import RecordedCall, RecordedRun
from marft_bridge.replay.replayed_run import ReplayOptions, replay_run
from marft_bridge.replay.replayed_thread import (
    ReplayedThread,
    add_memory,
    run_to_arguments,
    translate_interrupts,
)
from marft_bridge.rollouts.langgraph_json import ServerStore
from trace_store import conventions as c
from trace_store.records import SpanRow
from trace_store.store import TraceStore

_EDITED = "begins after its thread was edited by update_state, and what was written there is not recorded"


@dataclass(frozen=True, slots=True)
class ThreadStart:
    """The start of a run, which may be repeated any number of times. See `EpisodeRequest.start`."""

    recorded: RecordedRun
    thread: ReplayedThread  # as the earlier runs left it; no fork runs on it
    settings: Mapping[str, Any] = field(default_factory=dict)  # `config` and `context`, where the record lacks them
    replayed_count: int = 0  # runs that it goes on with, where these were replayed
    skipped_count: int = 0  # runs that shared its store, and did not come out the same
    entry: RunEntry | str = NO_CHECKPOINTER  # where the run is entered, or why it is run from its beginning

    def __str__(self) -> str:
        """Where the thread is from and where the run is entered, each behind a semicolon."""
        if isinstance(self.entry, RunEntry):
            count = self.entry.superstep_count
            supersteps = "1 superstep" if count == 1 else f"{count} supersteps"
            return f"{self._thread_text()}; {supersteps} from the app's checkpointer, up to {self.entry.checkpoint_id}"
        reason = "" if self.entry == NO_CHECKPOINTER else f"; run from its beginning: {self.entry}"
        return f"{self._thread_text()}{reason}"

    def _thread_text(self) -> str:
        if self.thread.begins_at is not None:
            return f"; its thread from the app's checkpointer, up to checkpoint {self.thread.begins_at}"
        text = "" if not self.replayed_count else f"; {_counted(self.replayed_count)} of its thread replayed"
        return text if not self.skipped_count else f"{text}; {self.skipped_count} that shared its store left out"

    @property
    def subject_id(self) -> str | None:
        """See `RecordedStart`."""
        return self.recorded.trajectory.episode.subject_id

    @property
    def checkpoints(self) -> Mapping[str, str]:
        """See `RecordedStart`."""
        return {now: before for before, now in self.thread.checkpoints.items()}

    def prefix_to_rest(self, prefix: RecordedPrefix) -> RecordedPrefix:
        """What is left to give again of what the forks repeat: not the calls of supersteps that they do not run."""
        return prefix.leave_out(self.entry.tasks.span_ids) if isinstance(self.entry, RunEntry) else prefix

    async def run(self, graph: Any, callbacks: Sequence[Any]) -> Any:
        """See `RecordedStart`. Needs a block of `private_memory`."""
        thread = self.thread.copy()
        classes = graph_to_classes(graph_to_original(graph))
        arguments = run_to_arguments(self.recorded, thread, self.settings, classes=classes)
        arguments["config"]["callbacks"] = list(callbacks)
        if self.recorded.trajectory.episode.thread_id is None:
            del arguments["config"]["configurable"]["thread_id"]  # a replay gives one, for whatever may ask for it
        value = translate_interrupts(self.recorded.graph_input(classes)[0], thread)
        tasks = self.entry.tasks if isinstance(self.entry, RunEntry) else None
        with memory_of_run(thread.memory), giving_tasks(tasks):
            result = await add_memory(graph, self.recorded, thread.memory).ainvoke(value, **arguments)
        if thread.begins_at is not None and _holds_more(thread):
            raise GraphError(
                "fork: a graph inside used a checkpointer or store of its own, and what that held then is not known;"
                " run the earlier runs of the thread again with --tools run"
            )
        return result


def _counted(runs: int) -> str:
    return "1 earlier run" if runs == 1 else f"{runs} earlier runs"


def is_started_by_app(run: RecordedRun) -> bool:
    """Whether its app started a run, or one before it on its thread: no task says with what."""
    episode = run.trajectory.episode
    return episode.split == LIVE or episode.begins == "resume" or episode.from_checkpoint is not None


def load_forked(store: TraceStore, episode_id: str) -> RunWithEarlier:
    """An episode to fork, and what is replayed before it.

    Raises:
        GraphError: it cannot be repeated as it was, in the name of `fork`.
    """
    try:
        run = load_run(store, episode_id)
    except GraphError as error:
        raise GraphError(f"fork: {str(error).removeprefix('replay: ')}") from None
    if not is_started_by_app(run):
        return RunWithEarlier(run)
    if (reason := _unknown_start(run, [run.root])) is not None:
        raise GraphError(f"fork: episode {episode_id} {reason}")
    try:
        with_earlier = load_with_earlier(store, episode_id)
        usable, missing = _sort_out(store, with_earlier)
    except GraphError as error:
        return RunWithEarlier(run, missing=str(error).removeprefix("replay: "))
    if run.root.attributes.get(c.EDITED):
        missing = f"episode {episode_id} {_EDITED}"
    return replace(with_earlier, earlier=usable, missing=missing)


def _sort_out(store: TraceStore, run: RunWithEarlier) -> tuple[list[EarlierRun], str | None]:
    """The earlier runs that are replayed, and why one that is needed cannot be; one record at a time is in memory.

    Raises:
        GraphError: the record of one that is needed cannot be read.
    """
    usable: list[EarlierRun] = []
    missing = None
    for earlier in run.earlier:
        try:
            reason = _reason_against(load_run(store, earlier.episode_id))
        except GraphError:
            if earlier.is_needed:
                raise
            continue  # of one that cannot be repeated nothing can be known
        if earlier.is_needed or reason is None:
            usable.append(earlier)
        if earlier.is_needed and reason is not None and missing is None:
            missing = f"episode {run.run.episode_id} goes on with {EARLIER}, {earlier.episode_id}, which {reason}"
    return usable, missing


def _reason_against(run: RecordedRun) -> str | None:
    """Why an earlier run cannot be replayed as it was; None where it can."""
    return _EDITED if run.root.attributes.get(c.EDITED) else _unknown_start(run, run.spans)


def _unknown_start(run: RecordedRun, repeated: Sequence[SpanRow]) -> str | None:
    """Why a run cannot be started as it was, or the spans of it that are repeated cannot; None where they can."""
    if run.is_dated or c.INPUT not in run.root.attributes:
        return "was started by its app, and its record does not say how; record it again"
    values = [value for span in repeated for key, value in span.attributes.items() if key != c.OUTPUT]
    if any(REDACTED in str(value) for value in values):
        return "has a redacted record, so it cannot be repeated as it was"
    return None


def run_to_start(
    graph: Any,
    run: RunWithEarlier,
    forked: RecordedCall,
    *,
    samples: int,
    tools: ToolChoice,
    load: LoadRun,
    settings: Mapping[str, Any],
    runner: asyncio.Runner,
) -> ThreadStart:
    """What the forks of a run begin with: the thread as the app's checkpointer holds it, or what a replay leaves of it.

    Args:
        graph: the app's, which the forks run on.
        forked: the call that they make again.
        samples: the number of forks.
        tools: whether the tools of the earlier runs give their recorded results, or run.
        load: called for the earlier runs one after the other, where they are replayed.
        settings: `config` and `context` of the app's runs, where the record lacks them.
        runner: the event loop that the app was opened on.

    Raises:
        GraphError: neither gives the thread as it was when the run began.
    """
    options = ReplayOptions(tools, allow_connections=True)  # as the nodes of the fork itself may
    entry = find_entry(graph, run.run, forked, samples=samples, options=options, settings=settings, runner=runner)
    if isinstance(entry, RunEntry):
        return ThreadStart(run.run, entry.thread, settings, entry=entry)
    held_thread = _find_held_thread(graph, run, options, settings=settings, runner=runner)
    if held_thread is not None:
        return ThreadStart(run.run, held_thread, settings, entry=entry)
    if run.missing is not None:
        raise GraphError(f"fork: {run.missing}")
    refusal = f"fork: episode {run.run.episode_id} goes on with {EARLIER}"
    try:
        repeated = replay_earlier(graph, run, options, load=load, settings=settings, runner=runner)
    except EarlierRunError as error:
        raise GraphError(f"{refusal}, {error.episode_id}, which does not come out the same: {error.fault}") from None
    if run.way and not _begins_where_thread_ends(graph, run.run, repeated.thread):
        raise GraphError(f"{refusal}, {run.way[-1].episode_id}, whose replay did not come to where it begins")
    return ThreadStart(
        run.run,
        repeated.thread,
        settings,
        replayed_count=len(run.way),
        skipped_count=len(repeated.skipped),
        entry=entry,
    )


def _find_held_thread(
    graph: Any, run: RunWithEarlier, options: ReplayOptions, *, settings: Mapping[str, Any], runner: asyncio.Runner
) -> ReplayedThread | None:
    """The thread in the app's checkpointer; None where the run, replayed from there, does not come out the same.

    What the app keeps besides (a store, threads of graphs inside) has moved on since, and is not known as it was.
    """
    if run.run.had_store or options.tools == "run":
        return None
    try:
        thread = copy_held_thread(graph, run.run, runner)
        if thread is None:
            return None
        tried_thread = thread.copy()
        replayed = replay_run(graph, run.run, thread=tried_thread, options=options, arguments=settings, runner=runner)
    except GraphError:
        return None
    return thread if replayed.divergence is None and not _holds_more(tried_thread) else None


def _holds_more(thread: ReplayedThread) -> bool:
    """Whether graphs used something that the app keeps besides the thread itself; a run that had no store, no store."""
    return sum(not isinstance(held, ServerStore) for held in thread.memory.held) > 1


def _begins_where_thread_ends(graph: Any, run: RecordedRun, thread: ReplayedThread) -> bool:
    """Whether the checkpoint that a run began at is known, and the newest one unless it was named."""
    episode = run.trajectory.episode
    checkpoint_id = thread.checkpoints.get(episode.from_checkpoint or "")
    held = vars(graph_to_original(graph))["checkpointer"]
    saver = thread.memory.stand_in(held) if isinstance(held, BaseCheckpointSaver) else thread.memory.saver
    newest = saver.get_tuple({"configurable": {"thread_id": episode.thread_id, "checkpoint_ns": ""}})
    is_newest = newest is not None and newest.config["configurable"]["checkpoint_id"] == checkpoint_id
    return checkpoint_id is not None and (episode.forked or is_newest)
