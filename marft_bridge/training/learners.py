"""How many learners a run has -> its trainer, alone or with the processes that follow it.

This process leads; who starts the others, and where, is a `Followers`: child processes, torchrun, or a Ray cluster.
Invariant: one of them that ends before its time is one line that says which, and why. With one learner there is no
process group and no other process.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from marft_bridge.common.errors import ClusterError
from trace_store.records import Episode
from trainers.common.free_memory import give_back_card_memory
from trainers.config import TrainerOptions
from trainers.errors import LostProcessError, TrainError
from trainers.marft import MarftTrainer, Progress

PROCESSORS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
MAX_LOSSES = 3  # learners that are lost one after another without an update in between, and replaced
_RESUME_HINT = "the round's episodes are kept: the same command with --resume goes on after the last update"


@dataclass(frozen=True, slots=True)
class LearnerEnd:
    """A follower that ended before its time."""

    text: str  # which, and why
    may_be_replaced: bool = False  # it did nothing wrong, and another one may be started in its place


class LostLearnerError(TrainError):
    """A follower was lost that may be replaced."""


class Followers(Protocol):
    """The processes that follow this one, as whoever starts them sees them."""

    wait_from_start: bool
    """Whether they wait for this process from their start on, with their patience; else until they are called."""

    def start(self) -> None:
        """Starts them; they get ready meanwhile."""

    def count_sharers(self) -> list[int]:
        """By rank, how many learners are on the machine of each, this process as the first; once they are started."""

    def join(self) -> None:
        """Waits until they are ready, and makes this process the first of their process group.

        Raises:
            LostProcessError: one of them did not come.
        """

    def end(self) -> None:
        """Ends all that were started; returns when they are gone. Those that were let go have ended by themselves."""

    def first_end(self) -> LearnerEnd | None:
        """Which of them has ended, once something was not heard from any more; None where none has."""


class Learners:
    """The processes that train together, led by this one.

    Args:
        devices: where each learner computes, by rank; one device is one learner.
        followers: the others; None with one learner.
    """

    def __init__(self, devices: Sequence[str], followers: Followers | None) -> None:
        self._devices, self._followers = tuple(devices), followers
        self._calls: Any = None

    def start(self) -> None:
        """Starts the other processes, which import what they need and wait."""
        if self._followers is not None:
            self._followers.start()
            if self._followers.wait_from_start:
                self._calls = _join(self._followers)

    def make_trainer(
        self,
        options: TrainerOptions,
        model_dirs: Mapping[str, Path],
        agents: Sequence[str],
        *,
        seed: int,
        progress: Progress,
        lineage: Mapping[str, str],
        is_heldout: Callable[[Episode], bool],
        checkpoint: Path | None,
        start: Mapping[str, Path],
        learned_tasks: Sequence[str],
    ) -> MarftTrainer:
        """The trainer, which this process has and all others follow.

        Args:
            checkpoint: what the other processes load at once; the caller loads it too. None for a run that begins.
            start: the folder of the adapter that an agent of a run that begins goes on from; all processes load it.
            learned_tasks: digests of the tasks that these adapters were trained on, see `MarftTrainer.begin_from`.

        Raises:
            TrainError: see `MarftTrainer`; LostProcessError where a process did not come.
        """
        here: dict[str, Any] = {"seed": seed, "progress": progress, "lineage": lineage, "is_heldout": is_heldout}
        if self._followers is None:
            trainer = MarftTrainer(options, model_dirs, agents, **here)
            trainer.begin_from(start, learned_tasks)
            return trainer
        from trainers.learners.group import workers_on
        from trainers.learners.leader import LeadingTrainer, say_build

        if self._calls is None:
            self._calls = _join(self._followers)
        options, sharers = to_own_system(options, self._devices), self._followers.count_sharers()
        say_build(
            self._calls,
            options,
            model_dirs,
            agents=agents,
            seed=seed,
            lineage=lineage,
            devices=self._devices,
            sharers=sharers,
            checkpoint=checkpoint,
            start=start,
            learned_tasks=learned_tasks,
        )
        workers = workers_on(self._devices[0], sharers)
        trainer = LeadingTrainer(options, model_dirs, agents, workers=workers, calls=self._calls, **here)
        trainer.begin_from(start, learned_tasks)
        return trainer

    def end(self, *, is_done: bool) -> None:
        """Ends all processes that were started here; returns when they are gone.

        Args:
            is_done: the run came to its end, so that the others wait for a call; else they may wait for anything.
        """
        if self._followers is None:
            return
        from trainers.learners.group import leave_group
        from trainers.learners.leader import say_end

        if is_done and self._calls is not None:
            with suppress(LostProcessError):  # nothing was to be learned any more
                say_end(self._calls)
        self._followers.end()
        leave_group()


@contextmanager
def open_learners(devices: Sequence[str], followers: Followers | None) -> Iterator[Learners]:
    """The learners of a run while the context lasts; see `Learners`.

    Raises:
        TrainError: one of them ended before its time; the message says which, and why. LostLearnerError where it may
            be replaced.
    """
    learners = Learners(devices, followers)
    is_done = False
    try:
        learners.start()
        yield learners
        is_done = True
    except LostProcessError as error:
        if followers is None or (end := followers.first_end()) is None:
            raise
        if end.may_be_replaced:
            raise LostLearnerError(end.text) from error
        raise TrainError(f"{end.text}; {_RESUME_HINT}") from error
    finally:
        learners.end(is_done=is_done)


def go_on_after_losses(
    train: Callable[[], None], count_updates: Callable[[], int], notify: Callable[[str], None]
) -> None:
    """Runs `train`, which goes on from the last update, again after each loss of a learner; at most `MAX_LOSSES` times
    with no update in between.

    Args:
        count_updates: how many are done and kept.
        notify: takes one line for the user.

    Raises:
        TrainError: too many were lost.
        ClusterError: there is no place for another one.
    """
    loss, lost, updates = "", 0, count_updates()
    while True:
        try:
            train()
        except LostLearnerError as error:
            loss = str(error)  # not the error itself, which holds the lost trainer's models
        except ClusterError as error:
            if not loss or count_updates() > updates:  # the place of whoever was lost was filled
                raise
            raise ClusterError(f"{loss}; {error}; {_RESUME_HINT}") from error
        else:
            return
        last_updates, updates = updates, count_updates()
        lost = 1 if updates > last_updates else lost + 1
        if lost > MAX_LOSSES:
            raise TrainError(f"{loss}, the {lost}th loss without an update in between; {_RESUME_HINT}")
        notify(f"{loss}; going on from the last update with another one in its place")
        gc.collect()  # a trainer and those who report to it hold each other, and the models with them
        give_back_card_memory()


def _join(followers: Followers) -> Any:
    from trainers.learners.calls import Calls

    followers.join()
    return Calls()


def to_own_system(options: TrainerOptions, devices: Sequence[str]) -> TrainerOptions:
    """The options on the first device; on the CPU each learner has its part of the processors, unless they say more."""
    threads = options.system.threads
    if threads is None and devices[0] == "cpu":
        threads = max(1, PROCESSORS // len(devices))
    system = options.system.model_copy(update={"device": devices[0], "threads": threads})
    return options.model_copy(update={"system": system})
