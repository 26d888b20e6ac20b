"""Episodes of a store, or a file of one -> the runs to replay, and the way to each on its thread.

Invariants: a run that goes on with another one is never replayed from nothing: without that one it is refused; a thread
is asked of the store once, however many of its runs are replayed.
"""

# ruff: noqa: S608 - a statement is put together from constants; every value is bound
from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

from marft_bridge.common.errors import GraphError
from marft_bridge.recording.recorder import LIVE
from marft_bridge.replay.recorded_run import RecordedRun, spans_to_run
from marft_bridge.runs.run_folder import RunFolder
from trace_store.manifest import MANIFEST
from trace_store.records import SpanRow
from trace_store.store import TraceStore
from trace_store.views import links_of

EARLIER = "an earlier run of its thread"
# Runs of an app's own, of the same thread or user, that began before.
_BESIDE = """
SELECT b.episode_id FROM episodes e JOIN episodes b ON b.started_ns < e.started_ns
  AND (b.thread_id = e.thread_id OR b.user_id = e.user_id)
WHERE e.episode_id = $1 AND b.split = $2 AND b.fork_action IS NULL AND NOT list_contains($3, b.episode_id)
ORDER BY b.started_ns, b.episode_id
"""
# Every run of the threads of some episodes, with what it goes on with. `resumed_id`: the run before that resumed from
# the same checkpoint, and came to no other one: it left answers and results there.
_THREADS = f"""
WITH asked AS (
  SELECT unnest($1::VARCHAR[]) AS episode_id
), thread_runs AS MATERIALIZED (
  SELECT episode_id, thread_id, begins, forked, fork_action, parent_episode, from_checkpoint, checkpoints, started_ns
  FROM episodes
  WHERE episode_id IN (SELECT episode_id FROM asked)
    OR thread_id IN (SELECT thread_id FROM episodes WHERE episode_id IN (SELECT episode_id FROM asked))
), resumed AS (
  SELECT e.episode_id, first(b.episode_id ORDER BY b.started_ns DESC, b.episode_id) AS resumed_id
  FROM thread_runs e JOIN thread_runs b
    ON b.thread_id = e.thread_id AND b.from_checkpoint = e.from_checkpoint AND b.started_ns < e.started_ns
  WHERE e.begins = 'resume' AND NOT e.forked AND b.begins = 'resume' AND b.fork_action IS NULL
  GROUP BY e.episode_id
)
SELECT e.episode_id, e.started_ns, CASE WHEN e.fork_action IS NOT NULL THEN e.parent_episode END, l.link,
  l.linked_episode, r.resumed_id, e.from_checkpoint IS NOT NULL
FROM thread_runs e JOIN ({links_of("thread_runs")}) l ON l.episode_id = e.episode_id
  LEFT JOIN resumed r ON r.episode_id = e.episode_id
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


def load_run(store: TraceStore, episode_id: str) -> RecordedRun:
    """The run of an episode of a store. Raises GraphError where it cannot be replayed, with the reason."""
    return spans_to_run(store.spans(episode_id))


class _ThreadRun(NamedTuple):
    """What the store says of one run."""

    started_ns: int
    forked_id: str | None  # the run that it leaves at a call; None: it is no such fork
    link: str | None  # see `episode_links`
    linked_id: str | None
    resumed_id: str | None  # see `_THREADS`
    has_beginning: bool  # it begins at a checkpoint


class Ways:
    """What the runs of a store go on with, as their threads were when they were first asked for."""

    def __init__(self, store: TraceStore) -> None:
        self._store = store
        self._runs: dict[str, _ThreadRun | None] = {}  # None: it is not in the store
        self._ids_before: dict[str, str | None] = {}

    def read(self, episode_ids: Iterable[str]) -> None:
        """Reads the threads of these episodes in one query. Without it a thread is read when it is first needed."""
        new_ids = [episode_id for episode_id in dict.fromkeys(episode_ids) if episode_id not in self._runs]
        if not new_ids:
            return
        self._runs.update(dict.fromkeys(new_ids))
        for episode_id, *columns in self._store.sql(_THREADS, (new_ids,)):
            self._runs[str(episode_id)] = _ThreadRun(*columns)

    def way_to(self, episode_id: str) -> list[str]:
        """The ids of the episodes on the way to one, itself last.

        Raises:
            GraphError: one of them is not in the store.
        """
        way: dict[str, None] = {}  # from the last one back
        earlier_id: str | None = episode_id
        while earlier_id is not None and earlier_id not in way:
            way[earlier_id] = None
            earlier_id = self._id_before(earlier_id)
        return list(reversed(way))

    def ids_beside(self, way: Sequence[str]) -> list[str]:
        """The ids of the runs that may have left something in a store of LangGraph's for the last one of a way, by
        start.

        Those are the other runs of its thread and of its user that began before it.
        """
        return [str(row[0]) for row in self._store.sql(_BESIDE, (self._origin_of(way[-1]), LIVE, list(way)))]

    def started_ns(self, episode_id: str) -> int:
        """When an episode began (Unix time in ns); 0 for one that is not in the store."""
        run = self._run(episode_id)
        return 0 if run is None else run.started_ns

    def _id_before(self, episode_id: str) -> str | None:
        """The episode that one goes on with; None: with nothing."""
        if episode_id not in self._ids_before:
            self._ids_before[episode_id] = self._find_before(episode_id)
        return self._ids_before[episode_id]

    def _find_before(self, episode_id: str) -> str | None:
        origin = self._run(self._origin_of(episode_id))
        if origin is not None and origin.resumed_id is not None:
            return origin.resumed_id
        if origin is not None and origin.link in _GOES_ON and origin.linked_id is not None:
            return origin.linked_id
        run = self._run(episode_id)
        if run is not None and run.has_beginning:
            raise GraphError(f"replay: episode {episode_id} goes on with a run of its thread that is not in the store")
        return None

    def _origin_of(self, episode_id: str) -> str:
        """The episode that a fork at a call leaves, or the fork that it leaves does, and so on; any other one is its
        own.

        All of them begin at the same point of their thread.
        """
        origin_id, passed_ids = episode_id, {episode_id}
        while (run := self._run(origin_id)) is not None and run.forked_id is not None:
            if run.forked_id in passed_ids:
                break
            origin_id = run.forked_id
            passed_ids.add(origin_id)
        return origin_id

    def _run(self, episode_id: str) -> _ThreadRun | None:
        self.read([episode_id])
        return self._runs[episode_id]
