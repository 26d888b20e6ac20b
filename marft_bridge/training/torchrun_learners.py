"""What torchrun says in the environment -> the number of learners, and a group of the processes that it started.

Invariant: torchrun starts and ends these processes; all of them are on this machine.
"""

from __future__ import annotations

import os

from marft_bridge.common.errors import ConfigError
from marft_bridge.devices.machine import read_machine
from marft_bridge.training.learners import LearnerEnd

_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def torchrun_rank(learners: int) -> int | None:
    """Which of torchrun's processes this is, from 0; None where torchrun did not start it.

    Args:
        learners: train.learners; 1 leaves the number to torchrun.

    Raises:
        ConfigError: torchrun started another number, or processes on several machines.
    """
    if not all(name in os.environ for name in _VARIABLES):
        return None
    rank, _, count, local_count = (int(os.environ[name]) for name in _VARIABLES)
    if local_count != count:
        raise ConfigError(
            f"train: torchrun started {count} processes, {local_count} of them on this machine: start all on one"
        )
    if learners not in (1, count):
        raise ConfigError(
            f"train.learners is {learners}, but torchrun started {count} processes: leave one of the two numbers out"
        )
    return rank


def count_learners(learners: int) -> int:
    """How many learners a run has: train.learners, or as many as torchrun started."""
    return learners if torchrun_rank(learners) is None else int(os.environ["WORLD_SIZE"])


def refuse_torchrun(learners: int) -> None:
    """Refuses processes of torchrun where a Ray cluster has the learners.

    Raises:
        ConfigError: torchrun started this one.
    """
    if torchrun_rank(learners) is not None:
        raise ConfigError("train.engine is 'ray', which starts the learners itself: start the command without torchrun")


def follow_torchrun() -> None:
    """Follows the leader as one of torchrun's processes; returns when it lets go.

    Raises:
        TrainError: what stops a trainer, or the leader has ended.
    """
    # as the leader: it has CUDA count as the driver does, and leaves out cards, before the imports below look for one
    read_machine()
    from trainers.learners.follower import follow
    from trainers.learners.group import join_torchrun_group, leave_group

    join_torchrun_group(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    follow()
    leave_group()


class TorchrunLearners:
    """The other processes that torchrun started: followers that are there already. See `learners.Followers`."""

    wait_from_start = True

    def __init__(self, count: int) -> None:
        self._count = count

    def start(self) -> None:
        """Nothing: torchrun has started them."""

    def count_sharers(self) -> list[int]:
        """All are on this machine."""
        return [self._count] * self._count

    def join(self) -> None:
        """Joins them."""
        from trainers.learners.group import join_torchrun_group

        join_torchrun_group(0, self._count)
        for name in _VARIABLES:  # else a model server that is started later takes itself for one of the learners
            os.environ.pop(name, None)

    def end(self) -> None:
        """Nothing: torchrun ends them."""

    def first_end(self) -> LearnerEnd | None:
        """None: torchrun says which of its processes ended."""
        return None
