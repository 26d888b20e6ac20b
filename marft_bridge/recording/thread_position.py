"""Where a run begins on its thread, and the checkpoints that it leaves -> attributes of its root span.

A run is linked to another by the id of the checkpoint that it loads, which is unique for ever, and never by the id of
its thread: another process, or a saver on a disk, makes no difference. Invariant: a checkpoint that another graph left
on the same thread is no link.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from trace_store import conventions as names

_MAX_CHECKPOINTS = 10_000  # of this process, that are remembered


@dataclass(slots=True)
class ThreadPosition:
    """How one run begins, and the checkpoints that it has written so far."""

    begins: Literal["turn", "resume"]  # with a new input, or going on with a run
    forked: bool  # from another checkpoint than the thread's last, or to replay
    from_checkpoint: str | None  # None for the first run of a thread
    edited: bool = False  # `update_state` changed what that checkpoint holds
    checkpoints: list[str] = field(default_factory=list)

    def to_attributes(self) -> dict[str, Any]:
        """Attributes of the root span; None where there is nothing."""
        return {
            names.BEGINS: self.begins,
            names.FORKED: self.forked,
            names.FROM_CHECKPOINT: self.from_checkpoint,
            names.CHECKPOINTS: " ".join(self.checkpoints) or None,
            names.EDITED: self.edited or None,
        }


class CheckpointWriters:
    """The episodes of this process by the checkpoints that they wrote: the newest ones. Not thread-safe."""

    def __init__(self) -> None:
        self._episodes: dict[str, str] = {}

    def add(self, checkpoint_id: str, episode_id: str) -> None:
        """Remembers who wrote a checkpoint."""
        self._episodes[checkpoint_id] = episode_id
        while len(self._episodes) > _MAX_CHECKPOINTS:
            self._episodes.pop(next(iter(self._episodes)))

    def parent_of(self, position: ThreadPosition) -> str | None:
        """The episode that a run resumes or forks, where this process ran it; a new turn has none."""
        if position.begins == "turn" and not position.forked:
            return None
        return self._episodes.get(position.from_checkpoint or "")
