"""Keeps held-out tasks and training tasks apart: episodes on held-out tasks are not learned from, and tasks that were
learned from are not compared on.

A task is recognised by its id, and by its content: two tasks that differ only in their ids are one task, and an
episode that another program recorded has no more than the content. Invariants: no episode that passes is on a held-out
task, as far as ids and content tell; learned.json names a task before it is learned from.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from marft_bridge.common.errors import GraphError
from marft_bridge.common.files import write_atomically
from trace_store.records import HELDOUT, Episode, Trajectory
from trace_store.store import TraceStore

Task = Mapping[str, Any]
LEARNED_FILE = "learned.json"  # beside the store: digests of the tasks of stored episodes that were learned from

# The tasks that were trained on: from adapter_episodes, or, in folders older than that table, from the runs' rounds.
_TRAINED_ON = """
SELECT DISTINCT e.task_id, e.task::VARCHAR FROM episodes e
WHERE e.episode_id IN (SELECT episode_id FROM adapter_episodes)
   OR NOT EXISTS (SELECT 1 FROM adapter_episodes) AND e.run_id IN ('collect', 'train')
      AND EXISTS (SELECT 1 FROM adapters WHERE version > 0)
"""


class HeldOutTasks:
    """The tasks that are held out now.

    Args:
        tasks: with their ids.
        task_to_input: task -> graph input. Tasks with the same input count as one task, and an episode of another
            program's trace holds nothing but the input.
    """

    def __init__(self, tasks: Iterable[Task], task_to_input: Callable[[Any], Any]) -> None:
        self._task_to_input = task_to_input
        self._ids: set[str] = set()
        self._contents: set[str] = set()
        for task in tasks:
            self._ids.add(str(task["id"]))
            self._contents |= self._content_digests(task)

    def is_held_out(self, episode: Episode) -> bool:
        """Whether an episode ran on a held-out task, or in a comparison."""
        same_id = episode.split == HELDOUT or episode.task_id in self._ids
        return same_id or bool(self._content_digests(episode.task) & self._contents)

    def drop_held_out(
        self, trajectories: Iterable[Trajectory], title: str, notify: Callable[[str], None]
    ) -> list[Trajectory]:
        """The episodes that may be learned from, in their order; reports how many were dropped.

        Args:
            title: what the episodes are, for the report.
            notify: takes one line for the user.
        """
        candidates = list(trajectories)
        allowed = [trajectory for trajectory in candidates if not self.is_held_out(trajectory.episode)]
        if len(allowed) < len(candidates):
            notify(f"{len(candidates) - len(allowed)} of {len(candidates)} {title} left out: their tasks are held out")
        return allowed

    def drop_held_out_tasks(
        self, tasks: Sequence[dict[str, Any]], notify: Callable[[str], None]
    ) -> list[dict[str, Any]]:
        """The training tasks that are not held out under another id; reports how many were dropped.

        Raises:
            GraphError: every one is held out.
        """
        allowed = [task for task in tasks if not self._content_digests(task) & self._contents]
        if len(allowed) < len(tasks):
            dropped = len(tasks) - len(allowed)
            notify(f"{dropped} of {len(tasks)} training tasks left out: they are held out under another id")
        if not allowed:
            raise GraphError("graph.tasks: every training task is held out under another id; add tasks that differ")
        return allowed

    def _content_digests(self, task: Task) -> set[str]:
        return content_digests(task, self._task_to_input)


def content_digests(task: Task, task_to_input: Callable[[Any], Any]) -> set[str]:
    """The digests of a task's own content and of its graph input, without that of an empty one."""
    digests = {_content_digest(task)}
    try:
        graph_input = task_to_input(dict(task))
    except Exception:  # noqa: BLE001 - an error of the app, which is reported when the task runs
        graph_input = None
    if isinstance(graph_input, Mapping):
        digests.add(_content_digest(graph_input))
    return digests - {_EMPTY_CONTENT}


def record_learned_tasks(folder: Path, trajectories: Iterable[Trajectory]) -> None:
    """Adds the tasks of these episodes to learned.json, since episodes of `train.traces` are not in the folder's store.

    Only digests are written: a task may hold personal data that has to be erasable.
    """
    path = folder / LEARNED_FILE
    recorded = set(_read_learned(path))
    learned = recorded.union(*(_task_digests(t.episode.task_id, t.episode.task) for t in trajectories))
    if learned != recorded:
        write_atomically(path, json.dumps({"tasks": sorted(learned)}, indent=1) + "\n")


def take_over_learned_tasks(store: TraceStore, folder: Path) -> list[str]:
    """Adds to a folder's learned.json the tasks that adapters of another run folder, of this store, were trained on.

    Returns:
        Their digests: SHA-256 in hex, of what each says without its id, and of `id ` with its id.
    """
    digests = _store_to_learned(store)
    path = folder / LEARNED_FILE
    learned = digests.union(_read_learned(path))
    write_atomically(path, json.dumps({"tasks": sorted(learned)}, indent=1) + "\n")
    return sorted(digests)


def heldout_leaks(store: TraceStore, tasks: Sequence[Task]) -> list[str]:
    """The ids of those held-out tasks that an adapter of this run folder was trained on, in their order.

    There are some when `graph.heldout`, or the ids of the tasks, changed after training; a comparison on them would
    measure memorised answers.
    """
    learned = _store_to_learned(store)
    return [str(task["id"]) for task in tasks if _task_digests(str(task["id"]), task) & learned]


def _store_to_learned(store: TraceStore) -> set[str]:
    learned = set(_read_learned(store.path.parent / LEARNED_FILE))
    for task_id, task in store.sql(_TRAINED_ON):
        learned |= _task_digests(task_id, json.loads(task) if task else {})
    return learned


def _read_learned(path: Path) -> list[str]:
    return list(json.loads(path.read_text(encoding="utf-8"))["tasks"]) if path.exists() else []


def _task_digests(task_id: str, task: Mapping[str, Any]) -> set[str]:
    """The digests of a task's id, and of its content where it has any."""
    content = _content_digest(task)
    return {_sha256(f"id {task_id}"), *([] if content == _EMPTY_CONTENT else [content])}


def _content_digest(task: Mapping[str, Any]) -> str:
    """The digest of a task without its id: equal for tasks that differ in their ids only."""
    return _sha256(json.dumps({k: v for k, v in task.items() if k != "id"}, sort_keys=True, default=repr))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


_EMPTY_CONTENT = _content_digest({})
