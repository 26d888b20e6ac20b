"""Episodes of a store, or a file of one -> the runs to replay, and the way to each on its thread.

Invariant: a run that goes on with another one is never replayed from nothing: without that one it is refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from marft_bridge.common.errors import GraphError
from marft_bridge.recording.recorder import LIVE
from marft_bridge.replay.recorded_run import RecordedRun, spans_to_run
from marft_bridge.runs.run_folder import RunFolder
from trace_store.manifest import MANIFEST
from trace_store.records import SpanRow
from trace_store.store import TraceStore
from trace_store.threads import episodes_to_links

EARLIER = "an earlier run of its thread"
# Runs of an app's own, of the same thread or user, that began before.
_BESIDE = """
SELECT b.episode_id FROM episodes e JOIN episodes b ON b.started_ns < e.started_ns
  AND (b.thread_id = e.thread_id OR b.user_id = e.user_id)
WHERE e.episode_id = $1 AND b.split = $2 AND b.fork_action IS NULL AND NOT list_contains($3, b.episode_id)
ORDER BY b.started_ns, b.episode_id
"""
# The run before that resumed from the same checkpoint, and came to no other one: it left answers and results there.
_RESUMED_BEFORE = """
SELECT b.episode_id FROM episodes e JOIN episodes b
  ON b.thread_id = e.thread_id AND b.from_checkpoint = e.from_checkpoint AND b.started_ns < e.started_ns
WHERE e.episode_id = ? AND e.begins = 'resume' AND NOT e.forked AND b.begins = 'resume' AND b.fork_action IS NULL
ORDER BY b.started_ns DESC, b.episode_id LIMIT 1
"""
_GOES_ON = ("turn", "resume", "fork")


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


def episode_to_way(store: TraceStore, episode_id: str) -> Sequence[str]:
    """The ids of the episodes on the way to one, itself last.

    Raises:
        GraphError: one of them is not in the store.
    """
    way = [episode_id]
    while (earlier_id := _id_before(store, way[0])) is not None and earlier_id not in way:
        way.insert(0, earlier_id)
    return way


def way_to_beside(store: TraceStore, way: Sequence[str]) -> list[str]:
    """The ids of the runs that may have left something in a store of LangGraph's for the last one of a way, by start.

    Those are the other runs of its thread and of its user that began before it.
    """
    return [str(row[0]) for row in store.sql(_BESIDE, (episode_to_origin(store, way[-1]), LIVE, list(way)))]


def _id_before(store: TraceStore, episode_id: str) -> str | None:
    """The episode that one goes on with; None: with nothing."""
    origin_id = episode_to_origin(store, episode_id)
    if rows := store.sql(_RESUMED_BEFORE, [origin_id]):
        return str(rows[0][0])
    link = episodes_to_links(store, [origin_id]).get(origin_id)
    if link is not None and link.kind in _GOES_ON and link.linked_episode is not None:
        return link.linked_episode
    rows = store.sql("SELECT from_checkpoint FROM episodes WHERE episode_id = ?", [episode_id])
    if rows and rows[0][0] is not None:
        raise GraphError(f"replay: episode {episode_id} goes on with a run of its thread that is not in the store")
    return None


def episode_to_origin(store: TraceStore, episode_id: str) -> str:
    """The episode that a fork at a call leaves, or the fork that it leaves does, and so on; any other one is its own.

    All of them begin at the same point of their thread.
    """
    query = "SELECT parent_episode FROM episodes WHERE episode_id = ? AND fork_action IS NOT NULL"
    origin_id, passed_ids = episode_id, {episode_id}
    while (rows := store.sql(query, [origin_id])) and str(rows[0][0]) not in passed_ids:
        origin_id = str(rows[0][0])
        passed_ids.add(origin_id)
    return origin_id
