"""Apps -> their recorded runs, and the replays of these."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.wrap import graph_to_original, wrap
from marft_bridge.replay.recorded_run import RecordedRun, spans_to_run
from marft_bridge.replay.replayed_run import Replayed, ReplayOptions, replay_run
from marft_bridge.replay.replayed_thread import ReplayedThread
from support.edge_rig import recorded_traces
from trace_store.journal import Journal

SAME = ReplayOptions()


def record_runs(
    graph: Any,
    inputs: Sequence[Any],
    folder: Path,
    *,
    is_async: bool = True,
    config: Mapping[str, Any] | None = None,
    context: Any = None,
) -> list[RecordedRun]:
    """Runs the graph on each input, one after the other; the runs as a replay reads them."""
    recorder = Recorder(Journal(folder / "journal"))
    recorded = wrap(graph_to_original(graph), recorder)
    arguments: dict[str, Any] = {"config": dict(config or {})}
    if context is not None:
        arguments["context"] = context

    async def invoke(graph_input: Any) -> None:
        await recorded.ainvoke(graph_input, **arguments)

    try:
        for graph_input in inputs:
            if is_async:
                asyncio.run(invoke(graph_input))
            else:
                recorded.invoke(graph_input, **arguments)
    finally:
        recorded.unwrap()
    assert recorder.failures == 0
    runs = [spans_to_run(spans) for spans in recorded_traces(recorder)]
    recorder.journal.close()
    return runs


def replay_all(graph: Any, runs: Sequence[RecordedRun], options: ReplayOptions = SAME) -> list[Replayed]:
    """Replays the runs of one thread, one after the other."""
    thread = ReplayedThread()
    return [replay_run(graph, run, thread=thread, options=options) for run in runs]


def differences(replayed: Sequence[Replayed]) -> list[str | None]:
    """What each replay does otherwise; None where it is the same."""
    return [None if one.divergence is None else str(one.divergence) for one in replayed]
