"""How many learners a run has -> its trainer, alone or with the processes that follow it.

This process leads; the others are started here, one for each further learner, or by torchrun. Invariant: none of those
started here outlives this one, however it ends (`serving.process_guard`); one that ends before its time is one line
that says which, and why. With one learner there is no process group and no other process.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from marft_bridge.common.errors import ConfigError
from marft_bridge.serving import process_guard
from marft_bridge.serving.vllm_log import last_lines
from marft_bridge.training import learner_process
from trace_store.files import open_to_write
from trace_store.records import Episode
from trainers.config import TrainerOptions
from trainers.errors import LostProcessError, TrainError
from trainers.marft import MarftTrainer, Progress

PROCESSORS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
_END_S = 5.0  # in which a process that was lost is seen to have ended
_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def torchrun_rank(learners: int) -> int | None:
    """Which of torchrun's processes this is, from 0; None where torchrun did not start it.

    Args:
        learners: train.learners; 1 leaves the number to torchrun.

    Raises:
        ConfigError: torchrun started another number, or processes on several machines.
    """
    if not all(name in os.environ for name in _TORCHRUN):
        return None
    rank, _, count, local_count = (int(os.environ[name]) for name in _TORCHRUN)
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


def follow_torchrun() -> None:
    """Follows the leader as one of torchrun's processes; returns when it lets go.

    Raises:
        TrainError: what stops a trainer, or the leader has ended.
    """
    from trainers.learners.follower import follow
    from trainers.learners.group import join_group, leave_group

    join_group(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), meeting_place="env://")
    follow()
    leave_group()


class Learners:
    """The processes that train together, led by this one.

    Args:
        devices: where each learner computes, by rank; one device is one learner.
        log_of: the file that takes what a learner of this number says, from 1.
    """

    def __init__(self, devices: Sequence[str], log_of: Callable[[int], Path]) -> None:
        self._devices, self._log_of = tuple(devices), log_of
        self._guards: list[subprocess.Popen[bytes]] = []
        self._folder: Path | None = None
        self._calls: Any = None

    def start(self) -> None:
        """Starts the other processes, which import what they need and wait, or joins those that torchrun started."""
        if len(self._devices) == 1:
            return
        if torchrun_rank(len(self._devices)) is not None:
            self._join("env://")
            for name in _TORCHRUN:  # else a model server that is started later takes itself for one of the learners
                os.environ.pop(name, None)
            return
        self._folder = Path(tempfile.mkdtemp(prefix="marft-learners-"))
        for rank in range(1, len(self._devices)):
            self._guards.append(
                _start_process(_meeting_place(self._folder), rank, len(self._devices), log=self._log_of(rank))
            )

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
    ) -> MarftTrainer:
        """The trainer, which this process has and all others follow.

        Args:
            checkpoint: what the other processes load at once; the caller loads it too. None for a run that begins.

        Raises:
            TrainError: see `MarftTrainer`; LostProcessError where a process did not come.
        """
        here: dict[str, Any] = {"seed": seed, "progress": progress, "lineage": lineage, "is_heldout": is_heldout}
        if len(self._devices) == 1:
            return MarftTrainer(options, model_dirs, agents, **here)
        from trainers.learners.group import workers_on
        from trainers.learners.leader import LeadingTrainer, say_build

        if self._folder is not None:
            self._wait_until_ready()
            self._join(_meeting_place(self._folder))
        options = _to_own_system(options, self._devices)
        say_build(
            self._calls,
            options,
            model_dirs,
            agents=agents,
            seed=seed,
            lineage=lineage,
            devices=self._devices,
            checkpoint=checkpoint,
        )
        return LeadingTrainer(
            options, model_dirs, agents, workers=workers_on(self._devices[0]), calls=self._calls, **here
        )

    def end(self, *, is_done: bool) -> None:
        """Ends all processes that were started here; returns when they are gone.

        Args:
            is_done: the run came to its end, so that the others wait for a call; else they may wait for anything.
        """
        if len(self._devices) == 1:
            return
        from trainers.learners.group import leave_group
        from trainers.learners.leader import say_end

        if is_done and self._calls is not None:
            say_end(self._calls)
        for guard in self._guards:
            assert guard.stdin is not None
            guard.stdin.close()  # the guard sees the end of its input and ends the process
        for guard in self._guards:
            guard.wait()
            if guard.stdout is not None:
                guard.stdout.close()
        leave_group()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def end_reason(self) -> str | None:
        """Which of the processes that were started here has ended, with the last line that it said; None: none has."""
        deadline = time.monotonic() + _END_S
        while self._guards and time.monotonic() < deadline:
            for rank, guard in enumerate(self._guards, start=1):
                if (code := guard.poll()) is not None:
                    said = last_lines(self._log_of(rank), 1)
                    reason = f": {said[0].removeprefix(f'learner {rank}: ')}" if said else ""
                    return f"learner {rank} of {len(self._devices)} ended with exit code {code}{reason}"
            time.sleep(0.05)
        return None

    def _join(self, meeting_place: str) -> None:
        from trainers.learners.calls import Calls
        from trainers.learners.group import join_group

        join_group(0, len(self._devices), meeting_place=meeting_place)
        self._calls = Calls()

    def _wait_until_ready(self) -> None:
        for guard in self._guards:
            assert guard.stdout is not None
            if guard.stdout.readline() != learner_process.READY:
                raise LostProcessError("a learner did not start")


@contextmanager
def open_learners(devices: Sequence[str], log_of: Callable[[int], Path]) -> Iterator[Learners]:
    """The learners of a run while the context lasts; see `Learners`.

    Raises:
        TrainError: one of them ended before its time; the message says which, and why.
    """
    learners = Learners(devices, log_of)
    is_done = False
    try:
        learners.start()
        yield learners
        is_done = True
    except LostProcessError as error:
        if (reason := learners.end_reason()) is None:
            raise
        raise TrainError(
            f"{reason}; the round's episodes are kept: `marft-bridge train --resume` goes on after the last update"
        ) from error
    finally:
        learners.end(is_done=is_done)


def _meeting_place(folder: Path) -> str:
    return f"file://{folder / 'group'}"


def _start_process(meeting_place: str, rank: int, count: int, *, log: Path) -> subprocess.Popen[bytes]:
    """A learner's process, below a guard that ends it with this one."""
    python_path = [str(Path(__file__).parents[2]), *filter(None, sys.path)]  # the same code, and the user's estimator
    argv = [sys.executable, "-P", "-m", learner_process.__name__, meeting_place, str(rank), str(count)]
    descriptor = open_to_write(log)
    try:
        os.truncate(descriptor, 0)
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(process_guard.__file__)), "--", *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=descriptor,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(python_path)},
            start_new_session=True,  # Ctrl-C reaches this process only, which then ends the others in order
        )
    finally:
        os.close(descriptor)


def _to_own_system(options: TrainerOptions, devices: Sequence[str]) -> TrainerOptions:
    """The options on the first device; on the CPU each learner has its part of the processors, unless they say more."""
    threads = options.system.threads
    if threads is None and devices[0] == "cpu":
        threads = max(1, PROCESSORS // len(devices))
    system = options.system.model_copy(update={"device": devices[0], "threads": threads})
    return options.model_copy(update={"system": system})
