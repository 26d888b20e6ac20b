"""Followers as child processes of this machine, each below a guard.

Invariant: none of them outlives this process, however it ends (`serving.process_guard`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from threading import Thread

from marft_bridge.serving import process_guard
from marft_bridge.serving.vllm_log import last_lines
from marft_bridge.training import learner_process
from marft_bridge.training.learners import LearnerEnd
from trace_store.files import open_to_write
from trainers.errors import LostProcessError

_END_S = 5.0  # in which a process that was lost is seen to have ended
_LOOK_S = 0.1


class ChildLearners:
    """See `learners.Followers`.

    Args:
        count: learners, this process among them.
        log_of: the file that takes what a learner of this number says, from 1.
    """

    wait_from_start = False

    def __init__(self, count: int, log_of: Callable[[int], Path]) -> None:
        self._count, self._log_of = count, log_of
        self._guards: list[subprocess.Popen[bytes]] = []
        self._folder = Path(tempfile.mkdtemp(prefix="marft-learners-"))

    def start(self) -> None:
        """Starts the processes, which import what they need and wait until `join` calls them."""
        for rank in range(1, self._count):
            self._guards.append(_start_process(self._folder, rank, self._count, log=self._log_of(rank)))

    def count_sharers(self) -> list[int]:
        """All are on this machine."""
        return [self._count] * self._count

    def join(self) -> None:
        """Joins them in one process group, as its first process; one that has ended, or ends meanwhile, is noticed."""
        from trainers.learners.group import join_group

        for guard in self._guards:
            assert guard.stdout is not None
            if guard.stdout.readline() != learner_process.READY:
                raise LostProcessError("a learner did not start")
        self._refuse_ended()  # a model server may have started since it was ready
        learner_process.call_in(self._folder).touch()
        meeting_place = learner_process.meeting_place_in(self._folder)
        self._watch(lambda: join_group(0, self._count, meeting_place=meeting_place))

    def _watch(self, join: Callable[[], None]) -> None:
        """Returns when `join` has; where a process ends before, nobody waits for it with torch's patience.

        Raises:
            LostProcessError: a process has ended; a thread that still waits in `join` ends by itself.
        """
        joined: Future[None] = Future()

        def run() -> None:
            try:
                join()
            except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                joined.set_exception(error)
            else:
                joined.set_result(None)

        Thread(target=run, name="join-learners", daemon=True).start()
        while not wait([joined], timeout=_LOOK_S).done:
            self._refuse_ended()
        joined.result()

    def _refuse_ended(self) -> None:
        if any(guard.poll() is not None for guard in self._guards):
            raise LostProcessError("a learner has ended before all had met")

    def end(self) -> None:
        """Ends them; returns when they are gone."""
        for guard in self._guards:
            assert guard.stdin is not None
            guard.stdin.close()  # the guard sees the end of its input and ends the process
        for guard in self._guards:
            guard.wait()
            if guard.stdout is not None:
                guard.stdout.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def first_end(self) -> LearnerEnd | None:
        """Which of them has ended, with the last line that it said; those that only noticed it count last."""
        deadline, witness = time.monotonic() + _END_S, None
        while time.monotonic() < deadline:
            polled = {rank: guard.poll() for rank, guard in enumerate(self._guards, start=1)}
            codes = {rank: code for rank, code in polled.items() if code is not None}
            for rank, code in codes.items():
                if code != learner_process.LOST:
                    return self._to_end(rank, code)
            if witness is None and codes:
                witness = next(iter(codes))
            if len(codes) == len(self._guards):
                break
            time.sleep(0.05)
        return None if witness is None else self._to_end(witness, learner_process.LOST)

    def _to_end(self, rank: int, code: int) -> LearnerEnd:
        said = last_lines(self._log_of(rank), 1)
        reason = f": {said[0].removeprefix(f'learner {rank}: ')}" if said else ""
        return LearnerEnd(f"learner {rank} of {self._count} ended with exit code {code}{reason}")


def _start_process(folder: Path, rank: int, count: int, *, log: Path) -> subprocess.Popen[bytes]:
    """A learner's process, below a guard that ends it with this one."""
    python_path = [str(Path(__file__).parents[2]), *filter(None, sys.path)]  # the same code, and the user's estimator
    argv = [sys.executable, "-P", "-m", learner_process.__name__, str(folder), str(rank), str(count)]
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
