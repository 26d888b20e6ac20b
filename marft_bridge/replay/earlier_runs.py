"""An episode of a store -> the runs that come before it, replayed, and what they leave for it.

Needed are those of its thread that it goes on with. Where its graph has a store of LangGraph's, the other runs of its
thread and of its user may have left something there. Invariants: a needed run that does not come out the same ends it;
one that is not needed leaves nothing then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from marft_bridge.common.errors import GraphError
from marft_bridge.replay.divergence import Divergence
from marft_bridge.replay.episodes import episode_to_way, way_to_beside
from marft_bridge.replay.private_memory import PrivateMemory
from marft_bridge.replay.recorded_run import RecordedRun, spans_to_run
from marft_bridge.replay.replayed_run import ReplayedThread, ReplayOptions, replay_run
from trace_store.store import TraceStore


@dataclass(frozen=True, slots=True)
class EarlierRun:
    """A run that is replayed before another one."""

    run: RecordedRun
    branch: str  # the first run of its thread
    is_needed: bool  # the other one goes on with it


@dataclass(frozen=True, slots=True)
class RunWithEarlier:
    """A run, and what is replayed before it."""

    run: RecordedRun
    earlier: Sequence[EarlierRun] = ()  # by their start
    branch: str = ""  # of the run

    @property
    def way(self) -> list[RecordedRun]:
        """The runs that it goes on with, the oldest first."""
        return [each.run for each in self.earlier if each.is_needed]


@dataclass(frozen=True, slots=True)
class RepeatedRuns:
    """What the earlier runs left."""

    thread: ReplayedThread
    skipped: list[str] = field(default_factory=list)  # ids of runs that are not needed, and did not come out the same


class EarlierRunError(GraphError):
    """An earlier run that is needed did not come out the same, or cannot be replayed."""

    def __init__(self, episode_id: str, fault: Divergence | str) -> None:
        self.episode_id, self.fault = episode_id, fault
        super().__init__(f"{episode_id} is not the same: {fault}")


def load_with_earlier(store: TraceStore, episode_id: str) -> RunWithEarlier:
    """A run, with the runs before it. Raises GraphError where one that is needed is not in the store."""
    way = episode_to_way(store, episode_id)
    run = spans_to_run(store.spans(episode_id))
    earlier = [EarlierRun(spans_to_run(store.spans(each)), way[0], is_needed=True) for each in way[:-1]]
    if run.had_store:
        earlier += _load_beside(store, way_to_beside(store, way))
    earlier.sort(key=lambda each: (each.run.root.start_ns, each.run.episode_id))
    return RunWithEarlier(run, earlier, way[0])


def _load_beside(store: TraceStore, episode_ids: Sequence[str]) -> list[EarlierRun]:
    """Without those that cannot be repeated: of them nothing can be known."""
    beside = []
    for episode_id in episode_ids:
        try:
            run, branch = spans_to_run(store.spans(episode_id)), episode_to_way(store, episode_id)[0]
        except GraphError:
            continue
        beside.append(EarlierRun(run, branch, is_needed=False))
    return beside


def replay_earlier(
    graph: Any,
    run: RunWithEarlier,
    options: ReplayOptions,
    *,
    settings: Mapping[str, Any] | None = None,
    runner: asyncio.Runner | None = None,
) -> RepeatedRuns:
    """Replays what comes before a run.

    Args:
        settings: `config` and `context` of the runs, where the record lacks them.
        runner: the event loop that the app was opened on; None: one for each run.

    Raises:
        EarlierRunError: one that is needed does not come out the same.
    """
    repeated = RepeatedRuns(ReplayedThread())
    threads = {run.branch: repeated.thread}
    for each in run.earlier:
        thread = threads.setdefault(each.branch, ReplayedThread(PrivateMemory(repeated.thread.memory)))
        memory_before = PrivateMemory() if each.is_needed else thread.memory.copy()
        fault: Divergence | str | None
        try:
            fault = replay_run(
                graph, each.run, thread=thread, options=options, arguments=settings, runner=runner
            ).divergence
        except GraphError as error:
            fault = str(error).removeprefix("replay: ")
        if fault is not None and each.is_needed:
            raise EarlierRunError(each.run.episode_id, fault)
        if fault is not None:
            thread.memory.restore(memory_before)
            repeated.skipped.append(each.run.episode_id)
    return repeated
