"""A run that its app started, and the earlier runs of its thread -> how each fork of it is started.

The earlier runs are replayed once, on checkpointers and stores in memory; each fork goes on from a copy of what they
left. Invariants: nothing that the app keeps of its threads or in its stores is read or written; where an earlier run
does not come out the same, or did not leave the thread where this one began, no fork runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from langgraph.checkpoint.base import BaseCheckpointSaver

from marft_bridge.common.errors import GraphError
from marft_bridge.forks.given_tools import ToolChoice
from marft_bridge.recording.recorder import LIVE
from marft_bridge.recording.redaction import REDACTED
from marft_bridge.recording.wrap import graph_to_original
from marft_bridge.replay.earlier_runs import EarlierRunError, RunWithEarlier, load_with_earlier, replay_earlier
from marft_bridge.replay.episodes import EARLIER
from marft_bridge.replay.private_memory import memory_of_run
from marft_bridge.replay.recorded_run import RecordedRun
from marft_bridge.replay.replayed_run import (
    ReplayedThread,
    ReplayOptions,
    add_checkpointer,
    run_to_arguments,
    translate_interrupts,
)
from trace_store import conventions as c
from trace_store.records import SpanRow
from trace_store.store import TraceStore


@dataclass(frozen=True, slots=True)
class ThreadStart:
    """The start of a run, which may be repeated any number of times. See `EpisodeRequest.start`."""

    recorded: RecordedRun
    thread: ReplayedThread  # as the earlier runs left it; no fork runs on it
    settings: Mapping[str, Any] = field(default_factory=dict)  # `config` and `context`, where the record lacks them

    @property
    def subject_id(self) -> str | None:
        """See `RecordedStart`."""
        return self.recorded.trajectory.episode.subject_id

    @property
    def checkpoints(self) -> Mapping[str, str]:
        """See `RecordedStart`."""
        return {now: before for before, now in self.thread.checkpoints.items()}

    async def run(self, graph: Any, callbacks: Sequence[Any]) -> Any:
        """See `RecordedStart`. Needs a block of `private_memory`."""
        thread = self.thread.copy()
        arguments = run_to_arguments(self.recorded, thread, self.settings)
        arguments["config"]["callbacks"] = list(callbacks)
        value = translate_interrupts(self.recorded.graph_input, thread)
        with memory_of_run(thread.memory):
            return await add_checkpointer(graph, self.recorded, thread.memory).ainvoke(value, **arguments)


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
        run = load_with_earlier(store, episode_id)
    except GraphError as error:
        raise GraphError(f"fork: {str(error).removeprefix('replay: ')}") from None
    if not is_started_by_app(run.run):
        return replace(run, earlier=())
    refusal = f"fork: episode {episode_id}"
    if (reason := _unknown_start(run.run, [run.run.root])) is not None:
        raise GraphError(f"{refusal} {reason}")
    for each in run.way:
        if (reason := _unknown_start(each, each.spans)) is not None:
            raise GraphError(f"{refusal} goes on with {EARLIER}, {each.episode_id}, which {reason}")
    usable = [each for each in run.earlier if each.is_needed or _unknown_start(each.run, each.run.spans) is None]
    return replace(run, earlier=usable)


def _unknown_start(run: RecordedRun, repeated: Sequence[SpanRow]) -> str | None:
    """Why a run cannot be started as it was, or the spans of it that are repeated cannot; None where they can."""
    if run.is_dated or c.INPUT not in run.root.attributes:
        return "was started by its app, and its record does not say how; record it again"
    if run.root.attributes.get(c.EDITED):
        return "begins after its thread was edited by update_state, and what was written there is not recorded"
    values = [value for span in repeated for key, value in span.attributes.items() if key != c.OUTPUT]
    if any(REDACTED in str(value) for value in values):
        return "has a redacted record, so it cannot be repeated as it was"
    return None


def run_to_start(
    graph: Any, run: RunWithEarlier, *, tools: ToolChoice, settings: Mapping[str, Any], runner: asyncio.Runner
) -> ThreadStart:
    """Replays what comes before a run, for its forks.

    Args:
        graph: the app's, which the forks run on.
        tools: whether the tools of the earlier runs give their recorded results, or run.
        settings: `config` and `context` of the app's runs, where the record lacks them.
        runner: the event loop that the app was opened on.

    Raises:
        GraphError: one that it goes on with does not come out the same, or it did not begin where that ends.
    """
    options = ReplayOptions(tools, allow_connections=True)  # as the nodes of the fork itself may
    refusal = f"fork: episode {run.run.episode_id} goes on with {EARLIER}"
    try:
        repeated = replay_earlier(graph, run, options, settings=settings, runner=runner)
    except EarlierRunError as error:
        raise GraphError(f"{refusal}, {error.episode_id}, which does not come out the same: {error.fault}") from None
    if run.way and not _begins_where_thread_ends(graph, run.run, repeated.thread):
        raise GraphError(f"{refusal}, {run.way[-1].episode_id}, whose replay did not come to where it begins")
    return ThreadStart(run.run, repeated.thread, settings)


def _begins_where_thread_ends(graph: Any, run: RecordedRun, thread: ReplayedThread) -> bool:
    """Whether the checkpoint that a run began at is known, and the newest one unless it was named."""
    episode = run.trajectory.episode
    checkpoint_id = thread.checkpoints.get(episode.from_checkpoint or "")
    held = vars(graph_to_original(graph))["checkpointer"]
    saver = thread.memory.stand_in(held) if isinstance(held, BaseCheckpointSaver) else thread.memory.saver
    newest = saver.get_tuple({"configurable": {"thread_id": episode.thread_id, "checkpoint_ns": ""}})
    is_newest = newest is not None and newest.config["configurable"]["checkpoint_id"] == checkpoint_id
    return checkpoint_id is not None and (episode.forked or is_newest)
