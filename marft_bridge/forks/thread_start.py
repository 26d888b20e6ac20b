"""A run that its app started, and the earlier runs of its thread -> how each fork of it is started.

The earlier runs are replayed once, on checkpointers and stores in memory; each fork goes on from a copy of what they
left. Invariants: nothing that the app keeps of its threads or in its stores is read or written; where an earlier run
does not come out the same, or did not leave the thread where this one began, no fork runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from langgraph.checkpoint.base import BaseCheckpointSaver

from marft_bridge.common.errors import GraphError
from marft_bridge.forks.given_tools import ToolChoice
from marft_bridge.recording.recorder import LIVE
from marft_bridge.recording.redaction import REDACTED
from marft_bridge.recording.wrap import graph_to_original
from marft_bridge.replay.episodes import EARLIER, episode_to_runs
from marft_bridge.replay.private_memory import PrivateMemory, memory_of_run
from marft_bridge.replay.recorded_run import RecordedRun
from marft_bridge.replay.replayed_run import (
    ReplayedThread,
    ReplayOptions,
    add_checkpointer,
    replay_run,
    run_to_arguments,
    translate_interrupts,
)
from trace_store import conventions as c
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


def episode_to_thread(store: TraceStore, episode_id: str) -> list[RecordedRun]:
    """The runs that a fork of an episode goes through: the earlier ones of its thread, and itself.

    Raises:
        GraphError: they cannot be repeated as they were, in the name of `fork`.
    """
    try:
        runs = episode_to_runs(store, episode_id)
    except GraphError as error:
        raise GraphError(f"fork: {str(error).removeprefix('replay: ')}") from None
    if is_started_by_app(runs[-1]):
        _refuse_unknown_start(runs)
    return runs


def _refuse_unknown_start(runs: Sequence[RecordedRun]) -> None:
    """Raises GraphError where the record does not say what a run was started with, or hides a part of it."""
    for run in runs:
        refusal = f"fork: episode {runs[-1].episode_id}"
        if run is not runs[-1]:
            refusal += f" goes on with {EARLIER}, {run.episode_id}, which"
        if run.is_dated or c.INPUT not in run.root.attributes:
            raise GraphError(f"{refusal} was started by its app, and its record does not say how; record it again")
        if run.root.attributes.get(c.EDITED):
            raise GraphError(
                f"{refusal} begins after its thread was edited by update_state, and what was written there is not"
                " recorded"
            )
        parts = run.spans if run is not runs[-1] else [run.root]
        hidden_keys = (c.OUTPUT,) if run is runs[-1] else ()
        values = [value for span in parts for key, value in span.attributes.items() if key not in hidden_keys]
        if any(REDACTED in str(value) for value in values):
            raise GraphError(f"{refusal} has a redacted record, so it cannot be repeated as it was")


def runs_to_start(
    graph: Any,
    runs: Sequence[RecordedRun],
    *,
    tools: ToolChoice,
    settings: Mapping[str, Any],
    runner: asyncio.Runner,
) -> ThreadStart:
    """Replays the runs before the last one of `runs`, for the forks of that.

    Args:
        graph: the app's, which the forks run on.
        tools: whether the tools of the earlier runs give their recorded results, or run.
        settings: `config` and `context` of the app's runs, where the record lacks them.
        runner: the event loop that the app was opened on.

    Raises:
        GraphError: one of them does not come out the same, or the last one did not begin where they end.
    """
    thread, forked = ReplayedThread(), runs[-1]
    options = ReplayOptions(tools, allow_connections=True)  # as the nodes of the fork itself may
    refusal = f"fork: episode {forked.episode_id} goes on with {EARLIER}"
    for run in runs[:-1]:
        try:
            replayed = replay_run(graph, run, thread=thread, options=options, arguments=settings, runner=runner)
        except GraphError as error:
            raise GraphError(f"{refusal}: {str(error).removeprefix('replay: ')}") from None
        if replayed.divergence is not None:
            raise GraphError(f"{refusal}, {run.episode_id}, which does not come out the same: {replayed.divergence}")
    if len(runs) > 1 and not _begins_where_thread_ends(graph, forked, thread):
        raise GraphError(f"{refusal}, {runs[-2].episode_id}, whose replay did not come to where it begins")
    return ThreadStart(forked, thread, settings)


def _begins_where_thread_ends(graph: Any, run: RecordedRun, thread: ReplayedThread) -> bool:
    """Whether the checkpoint that a run began at is known, and the newest one unless it was named."""
    episode = run.trajectory.episode
    checkpoint_id = thread.checkpoints.get(episode.from_checkpoint or "")
    newest = _to_saver(graph, thread.memory).get_tuple(
        {"configurable": {"thread_id": episode.thread_id, "checkpoint_ns": ""}}
    )
    is_newest = newest is not None and newest.config["configurable"]["checkpoint_id"] == checkpoint_id
    return checkpoint_id is not None and (episode.forked or is_newest)


def _to_saver(graph: Any, memory: PrivateMemory) -> Any:
    """The checkpointer that a graph runs with in a memory; see `add_checkpointer`."""
    held = vars(graph_to_original(graph))["checkpointer"]
    return memory.stand_in(held) if isinstance(held, BaseCheckpointSaver) else memory.saver
