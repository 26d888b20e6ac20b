"""An episode of a store -> the runs that come before it, replayed, and what they leave for it.

Needed are those of its thread that it goes on with. Where its graph has a store of LangGraph's, the other runs of its
thread and of its user may have left something there. Invariants: a needed run that does not come out the same ends it;
one that is not needed leaves nothing then; one record at a time is in memory, and the thread of a branch as long as a
run of it is to come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from marft_bridge.common.errors import GraphError
from marft_bridge.replay.divergence import Divergence
from marft_bridge.replay.episodes import Ways, load_run
from marft_bridge.replay.private_memory import PrivateMemory
from marft_bridge.replay.recorded_run import RecordedRun
from marft_bridge.replay.replayed_run import ReplayOptions, replay_run
from marft_bridge.replay.replayed_thread import ReplayedThread
from trace_store.store import TraceStore

LoadRun = Callable[[str], RecordedRun]
"""The run of an episode, by its id. Raises GraphError where it cannot be replayed."""


@dataclass(frozen=True, slots=True)
class EarlierRun:
    """A run that is replayed before another one. Its record is loaded when it is its turn."""

    episode_id: str
    started_ns: int
    branch: str  # the first run of its thread
    is_needed: bool  # the other one goes on with it


@dataclass(frozen=True, slots=True)
class RunWithEarlier:
    """A run, and what is replayed before it."""

    run: RecordedRun
    earlier: Sequence[EarlierRun] = ()  # by their start
    branch: str = ""  # of the run
    missing: str | None = None  # why the runs that it goes on with cannot be replayed; None where they can

    @property
    def way(self) -> list[EarlierRun]:
        """The runs that it goes on with, the oldest first."""
        return [earlier for earlier in self.earlier if earlier.is_needed]


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


def load_with_earlier(store: TraceStore, episode_id: str, ways: Ways | None = None) -> RunWithEarlier:
    """A run, with the ids of the runs before it. Raises GraphError where one that is needed is not in the store.

    `ways`: of the same store, for who loads several runs.
    """
    ways = Ways(store) if ways is None else ways
    way = ways.way_to(episode_id)
    run = load_run(store, episode_id)
    earlier = [EarlierRun(run_id, ways.started_ns(run_id), way[0], is_needed=True) for run_id in way[:-1]]
    if run.had_store:
        earlier += _find_beside(ways, way)
    earlier.sort(key=attrgetter("started_ns", "episode_id"))
    return RunWithEarlier(run, earlier, way[0])


def _find_beside(ways: Ways, way: Sequence[str]) -> list[EarlierRun]:
    """Without those whose own way is not in the store: they cannot be repeated."""
    beside_ids = ways.ids_beside(way)
    ways.read(beside_ids)
    runs = []
    for episode_id in beside_ids:
        with suppress(GraphError):
            branch = ways.way_to(episode_id)[0]
            runs.append(EarlierRun(episode_id, ways.started_ns(episode_id), branch, is_needed=False))
    return runs


def replay_earlier(
    graph: Any,
    run: RunWithEarlier,
    options: ReplayOptions,
    *,
    load: LoadRun,
    settings: Mapping[str, Any] | None = None,
    runner: asyncio.Runner | None = None,
) -> RepeatedRuns:
    """Replays what comes before a run.

    Args:
        load: called for one earlier run after the other, each time when the one before it is done.
        settings: `config` and `context` of the runs, where the record lacks them.
        runner: the event loop that the app was opened on; None: one for each run.

    Raises:
        EarlierRunError: one that is needed does not come out the same.
        GraphError: the record of one that is needed cannot be replayed.
    """
    repeated = RepeatedRuns(ReplayedThread())
    threads = {run.branch: repeated.thread}
    last_ids = {earlier.branch: earlier.episode_id for earlier in run.earlier}
    for earlier in run.earlier:
        if earlier.branch not in threads:
            threads[earlier.branch] = ReplayedThread(PrivateMemory(repeated.thread.memory))
        fault = _replay_one(
            graph, earlier, threads[earlier.branch], options=options, load=load, settings=settings, runner=runner
        )
        if fault is not None:
            repeated.skipped.append(earlier.episode_id)
        if earlier.episode_id == last_ids[earlier.branch]:
            del threads[earlier.branch]
    return repeated


def _replay_one(
    graph: Any,
    earlier: EarlierRun,
    thread: ReplayedThread,
    *,
    options: ReplayOptions,
    load: LoadRun,
    settings: Mapping[str, Any] | None,
    runner: asyncio.Runner | None,
) -> Divergence | str | None:
    """Replays one; why it left nothing, where it is not needed and did not come out the same."""
    try:
        recorded = load(earlier.episode_id)
    except GraphError:
        if earlier.is_needed:
            raise
        return None  # of one that cannot be repeated nothing can be known
    memory_before = PrivateMemory() if earlier.is_needed else thread.memory.copy()
    fault: Divergence | str | None
    try:
        fault = replay_run(
            graph, recorded, thread=thread, options=options, arguments=settings, runner=runner
        ).divergence
    except GraphError as error:
        fault = str(error).removeprefix("replay: ")
    if fault is not None and earlier.is_needed:
        raise EarlierRunError(earlier.episode_id, fault)
    if fault is not None:
        thread.memory.restore(memory_before)
    return fault
