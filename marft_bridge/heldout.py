"""The tasks that are held out now -> what may not be learned from; and what was learned from -> what is not held out.

A task is known again by its id, and by its content: two tasks that differ in nothing but their ids are one task, and
an episode that another program recorded has the content only. Invariants: what is left is on no held-out task, as far
as ids and content tell; what a run folder learned from is written down before it is learned from. It knows nothing of
models, and of files only the one that it keeps.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from marft_bridge.errors import GraphError
from marft_bridge.files import write_atomically
from trace_store.records import HELDOUT, Episode, Trajectory
from trace_store.store import TraceStore

Task = Mapping[str, Any]
LEARNED_FILE = "learned.json"  # beside the store: digests of the tasks of stored episodes that were learned from

# What was trained on: as it was recorded, or, of folders from before that was, as their rounds tell.
_TRAINED_ON = """
SELECT DISTINCT e.task_id, e.task::VARCHAR FROM episodes e
WHERE e.episode_id IN (SELECT episode_id FROM adapter_episodes)
   OR NOT EXISTS (SELECT 1 FROM adapter_episodes) AND e.run_id IN ('collect', 'train')
      AND EXISTS (SELECT 1 FROM adapters WHERE version > 0)
"""


class HeldOut:
    """The tasks that are held out.

    Args:
        tasks: with their ids.
        task_to_input: task -> graph input. Tasks with one input are one task, whatever else they say; and the input is
            all that a foreign trace has.
    """

    def __init__(self, tasks: Iterable[Task], task_to_input: Callable[[Any], Any]) -> None:
        self._task_to_input = task_to_input
        self._ids: set[str] = set()
        self._marks: set[str] = set()
        for task in tasks:
            self._ids.add(str(task["id"]))
            self._marks |= self._marks_of(task)

    def holds(self, episode: Episode) -> bool:
        """Whether an episode ran on a held-out task, or to compare."""
        same_id = episode.split == HELDOUT or episode.task_id in self._ids
        return same_id or bool(self._marks_of(episode.task) & self._marks)

    def left_out_of(
        self, trajectories: Iterable[Trajectory], what: str, say: Callable[[str], None]
    ) -> list[Trajectory]:
        """The episodes that may be learned from, in their order; how many of `what` may not is said."""
        found = list(trajectories)
        kept = [trajectory for trajectory in found if not self.holds(trajectory.episode)]
        if len(kept) < len(found):
            say(f"{len(found) - len(kept)} of {len(found)} {what} left out: their tasks are held out")
        return kept

    def tasks_left_of(self, tasks: Sequence[dict[str, Any]], say: Callable[[str], None]) -> list[dict[str, Any]]:
        """The tasks to train on that are not held out under another id; how many are is said.

        Raises:
            GraphError: every one is.
        """
        kept = [task for task in tasks if not self._marks_of(task) & self._marks]
        if len(kept) < len(tasks):
            say(f"{len(tasks) - len(kept)} of {len(tasks)} training tasks left out: they are held out under another id")
        if not kept:
            raise GraphError("graph.tasks: every training task is held out under another id; add tasks that differ")
        return kept

    def _marks_of(self, task: Task) -> set[str]:
        """What tells a task by its content: its own, and that of the graph input that it becomes."""
        contents = {_content(task)}
        try:
            given = self._task_to_input(dict(task))
        except Exception:  # noqa: BLE001 - an error of the app, which is said when the task runs
            given = None
        if isinstance(given, Mapping):
            contents.add(_content(given))
        return contents - {_NOTHING}


def note_learned(folder: Path, trajectories: Iterable[Trajectory]) -> None:
    """Adds the tasks of these episodes to what the run folder learned from: those that lie elsewhere are not in its
    store. Digests only, since a task may hold what somebody has a right to have erased."""
    path = folder / LEARNED_FILE
    before = set(_learned(path))
    known = before.union(*(_digests(t.episode.task_id, t.episode.task) for t in trajectories))
    if known != before:
        write_atomically(path, json.dumps({"tasks": sorted(known)}, indent=1) + "\n")


def heldout_leaks(store: TraceStore, tasks: Sequence[Task]) -> list[str]:
    """The ids of those tasks that an adapter of this run folder was trained on, in their order.

    They come about when `graph.heldout`, or the ids of the tasks, changed after training; a comparison on them would
    show what was learned by heart.
    """
    learned = set(_learned(store.path.parent / LEARNED_FILE))
    for task_id, task in store.sql(_TRAINED_ON):
        learned |= _digests(task_id, json.loads(task) if task else {})
    return [str(task["id"]) for task in tasks if _digests(str(task["id"]), task) & learned]


def _learned(path: Path) -> list[str]:
    return list(json.loads(path.read_text(encoding="utf-8"))["tasks"]) if path.exists() else []


def _digests(task_id: str, task: Mapping[str, Any]) -> set[str]:
    """Of a task's id, and of its content where it has any."""
    content = _content(task)
    return {_sha256(f"id {task_id}"), *([] if content == _NOTHING else [content])}


def _content(task: Mapping[str, Any]) -> str:
    """Equal for tasks that differ in their ids only."""
    return _sha256(json.dumps({k: v for k, v in task.items() if k != "id"}, sort_keys=True, default=repr))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


_NOTHING = _content({})
