"""Episodes of a store, or a file of one -> the runs to replay, each after those of its thread that it goes on with.

Invariant: a run that goes on with another one is never replayed from nothing: without that one it is refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from marft_bridge.common.errors import GraphError
from marft_bridge.replay.recorded_run import RecordedRun, spans_to_run
from marft_bridge.runs.run_folder import RunFolder
from marft_bridge.traces.episode_prefix import prefix_to_episode
from marft_bridge.traces.store_reader import open_for_reading
from trace_store.manifest import MANIFEST
from trace_store.records import SpanRow
from trace_store.store import TraceStore
from trace_store.threads import episodes_to_links

EARLIER = "an earlier run of its thread"
_GOES_ON = ("turn", "resume", "fork")


def load_runs(episode: str | Path, store: str | Path | None) -> list[RecordedRun]:
    """The run of one episode, after those that it goes on with. Raises a BridgeError where it cannot be read."""
    if store is None:
        return [file_to_run(Path(episode))]
    with open_for_reading(path_to_store(Path(store))) as reader:
        return episode_to_runs(reader, prefix_to_episode(reader, str(episode), command="replay"))


def path_to_store(path: Path) -> Path:
    """The store of a run folder; any other path as it is."""
    return RunFolder(path).store if path.is_dir() and not (path / MANIFEST).exists() else path


def file_to_run(path: Path) -> RecordedRun:
    """The run in a file that `traces show --json` wrote. Raises GraphError."""
    try:
        parts = json.loads(path.read_text(encoding="utf-8"))
        names = {field.name for field in fields(SpanRow)}
        spans = [SpanRow(**{name: span[name] for name in names}) for span in parts["spans"]]
    except OSError as error:
        hint = "an episode's id needs the store beside it"
        raise GraphError(f"replay: cannot read {str(path)!r}: {error.strerror}; {hint}") from None
    except (ValueError, TypeError, KeyError):
        raise GraphError(f"replay: {str(path)!r} is not what `traces show EPISODE --json` writes") from None
    run = spans_to_run(spans)
    if run.trajectory.episode.from_checkpoint is not None:
        raise GraphError(
            f"replay: episode {run.episode_id} goes on with a run that {str(path)!r} does not hold; name the store"
        )
    return run


def episode_to_runs(store: TraceStore, episode_id: str) -> list[RecordedRun]:
    """The runs of a thread up to an episode, the oldest first. Raises GraphError where one of them is not recorded."""
    return [spans_to_run(store.spans(each)) for each in episode_to_way(store, episode_id)]


def episode_to_way(store: TraceStore, episode_id: str) -> Sequence[str]:
    """The ids of the episodes on the way to one, itself last.

    Raises:
        GraphError: one of them is not in the store.
    """
    way = [episode_id]
    while (earlier_id := _id_before(store, way[0])) is not None:
        way.insert(0, earlier_id)
    return way


def _id_before(store: TraceStore, episode_id: str) -> str | None:
    """The episode that one goes on with; a fork at a call begins where its parent began. None: with nothing."""
    parent_id = episode_id
    while (forked_id := _forked_episode(store, parent_id)) is not None:
        parent_id = forked_id
    link = episodes_to_links(store, [parent_id]).get(parent_id)
    if link is not None and link.kind in _GOES_ON and link.linked_episode is not None:
        return link.linked_episode
    rows: list[Any] = store.sql("SELECT from_checkpoint FROM episodes WHERE episode_id = ?", [episode_id])
    if rows and rows[0][0] is not None:
        raise GraphError(f"replay: episode {episode_id} goes on with a run of its thread that is not in the store")
    return None


def _forked_episode(store: TraceStore, episode_id: str) -> str | None:
    """The parent of a fork at a call; None for any other episode."""
    rows: list[Any] = store.sql(
        "SELECT parent_episode FROM episodes WHERE episode_id = ? AND fork_action IS NOT NULL", [episode_id]
    )
    return None if not rows else str(rows[0][0])
