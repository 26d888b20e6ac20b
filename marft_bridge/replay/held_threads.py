"""A thread that the app's own checkpointer still holds -> a copy of it in memory, as it was when a run began there.

`read_own_checkpoints` gives those that the run itself wrote. Invariants: the app's checkpointer is read and never
written; nothing that came after the run began is copied. A run that resumes is left out: what it was answered is by now
among the writes of the checkpoint that it began at.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from langgraph.checkpoint.base import BaseCheckpointSaver, CheckpointTuple

from marft_bridge.common.errors import GraphError
from marft_bridge.recording.wrap import graph_to_original
from marft_bridge.replay.private_memory import PrivateMemory
from marft_bridge.replay.recorded_run import RecordedRun
from marft_bridge.replay.replayed_thread import ReplayedThread
from trace_store import conventions as c

T = TypeVar("T")


def held_checkpointer(graph: Any) -> BaseCheckpointSaver[Any] | None:
    """The app's own checkpointer; None where it has none, or is given one by a server."""
    held = vars(graph_to_original(graph))["checkpointer"]
    return held if isinstance(held, BaseCheckpointSaver) else None


def is_plain_turn(run: RecordedRun) -> bool:
    """Whether a run began with a new input, at the end of its thread."""
    episode = run.trajectory.episode
    return episode.begins == "turn" and not episode.forked and c.INPUT_KIND not in run.root.attributes


def copy_held_thread(graph: Any, run: RecordedRun, runner: asyncio.Runner) -> ReplayedThread | None:
    """The thread up to the checkpoint that a run began at; None where the app does not hold it, or not as it was.

    Args:
        graph: the app's graph, wrapped or not.
        runner: the event loop that it was opened on.

    Raises:
        GraphError: the app's checkpointer cannot be read.
    """
    held, episode = held_checkpointer(graph), run.trajectory.episode
    if held is None or not is_plain_turn(run) or episode.from_checkpoint is None:
        return None
    tuples = _ask_saver(runner, partial(_read_async, held, run), partial(_read_sync, held, run))
    if not tuples:
        return None
    memory = PrivateMemory()
    saver = memory.stand_in(held)
    put_tuples(saver, tuples)
    begins_at = str(tuples[-1].checkpoint["id"])
    return ReplayedThread(memory, {episode.from_checkpoint: episode.from_checkpoint}, begins_at=begins_at)


def _ask_saver(runner: asyncio.Runner, ask_async: Callable[[], Coroutine[Any, Any, T]], ask: Callable[[], T]) -> T:
    """What a checkpointer answers, by the kind of methods that it has.

    Raises:
        GraphError: it cannot be read.
    """
    try:
        try:
            return runner.run(ask_async())
        except NotImplementedError:  # it has the other kind of methods only
            return ask()
    except Exception as error:
        raise GraphError(f"the app's checkpointer cannot be read: {type(error).__name__}: {error}") from error


def _read_sync(saver: BaseCheckpointSaver[Any], run: RecordedRun) -> list[CheckpointTuple]:
    """As `_read_async`."""
    first = saver.get_tuple(_first_of(run))
    if (config := _loaded_by(run, first)) is None or (loaded := saver.get_tuple(config)) is None:
        return []
    return [*saver.list(_thread_of(run), before=config), loaded]


async def _read_async(saver: BaseCheckpointSaver[Any], run: RecordedRun) -> list[CheckpointTuple]:
    """The checkpoints of all graphs of the thread up to the one that the run loaded, which is the last; or none."""
    first = await saver.aget_tuple(_first_of(run))
    if (config := _loaded_by(run, first)) is None or (loaded := await saver.aget_tuple(config)) is None:
        return []
    return [*[each async for each in saver.alist(_thread_of(run), before=config)], loaded]


def _thread_of(run: RecordedRun) -> Any:
    return {"configurable": {"thread_id": run.trajectory.episode.thread_id}}


def _first_of(run: RecordedRun) -> Any:
    """Names the first checkpoint that the run wrote."""
    return _checkpoint_of(run, str(run.trajectory.episode.checkpoints or "").partition(" ")[0])


def _checkpoint_of(run: RecordedRun, checkpoint_id: str) -> Any:
    """Names a checkpoint of the outermost graph of the run's thread."""
    thread_id = run.trajectory.episode.thread_id
    return {"configurable": {"thread_id": thread_id, "checkpoint_ns": "", "checkpoint_id": checkpoint_id}}


def _loaded_by(run: RecordedRun, first: CheckpointTuple | None) -> Any:
    """Names the checkpoint before the first one, which the run loaded, an edit by `update_state` included."""
    is_known = first is not None and first.checkpoint["id"] == _first_of(run)["configurable"]["checkpoint_id"]
    return first.parent_config if first is not None and is_known else None


def read_own_checkpoints(
    saver: BaseCheckpointSaver[Any], run: RecordedRun, count: int, *, runner: asyncio.Runner
) -> list[CheckpointTuple]:
    """The first checkpoints that a run wrote, with the writes of the tasks after each; fewer where they are gone.

    Raises:
        GraphError: the app's checkpointer cannot be read.
    """
    ids = str(run.trajectory.episode.checkpoints or "").split()[:count]
    configs = [_checkpoint_of(run, checkpoint_id) for checkpoint_id in ids]

    async def read() -> list[CheckpointTuple | None]:
        return [await saver.aget_tuple(config) for config in configs]

    tuples = _ask_saver(runner, read, lambda: [saver.get_tuple(config) for config in configs])
    pairs = zip(ids, tuples, strict=True)
    return [each for checkpoint_id, each in pairs if each is not None and each.checkpoint["id"] == checkpoint_id]


def put_tuples(saver: BaseCheckpointSaver[Any], tuples: Sequence[CheckpointTuple]) -> None:
    """Puts checkpoints and their writes into a checkpointer that stands in for the app's."""
    for each in sorted(tuples, key=lambda each: str(each.checkpoint["id"])):  # by their time
        _put_tuple(saver, each)


def _put_tuple(saver: BaseCheckpointSaver[Any], each: CheckpointTuple) -> None:
    position = each.config["configurable"]
    config: Any = {
        "configurable": {"thread_id": position["thread_id"], "checkpoint_ns": position.get("checkpoint_ns", "")}
    }
    if each.parent_config is not None:
        config["configurable"]["checkpoint_id"] = each.parent_config["configurable"]["checkpoint_id"]
    checkpoint = each.checkpoint
    written = saver.put(config, checkpoint, each.metadata, checkpoint["channel_versions"])
    for task_id, writes in _by_task(each.pending_writes or []).items():
        saver.put_writes(written, writes, task_id)


def _by_task(pending_writes: Sequence[tuple[str, str, Any]]) -> dict[str, list[tuple[str, Any]]]:
    writes: dict[str, list[tuple[str, Any]]] = {}
    for task_id, channel, value in pending_writes:
        writes.setdefault(task_id, []).append((channel, value))
    return writes
