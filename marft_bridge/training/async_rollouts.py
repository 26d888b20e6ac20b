"""Planned rounds -> rollouts on a thread of their own, in order, while the main thread updates.

Only the rollouts leave the main thread: they can be stopped at any moment without losing a reported episode, which an
update cannot. Invariant: one round is played at a time, and each once; an error in a round is raised by `finish` of
that round.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from types import TracebackType
from typing import Self


class BackgroundRollouts:
    """Plays rounds in a thread beside the main one. Use it as a context manager.

    A `plan` makes the requests of a round when it is called, and returns the function that plays them.

    Args:
        stop: ends the running rollouts, from another thread; called when the block is left while some run.
    """

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollouts")
        self._rounds: dict[int, Future[None]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        while running := [future for future in self._rounds.values() if not future.done()]:
            self._stop()  # repeated: a round that was only about to begin is not ended by the first call
            with suppress(BaseException):
                running[0].result(timeout=1.0)

    def start(self, number: int, plan: Callable[[], Callable[[], None]]) -> None:
        """Plans a round now, and queues it to be played after those before it; a second call changes nothing."""
        if number not in self._rounds:
            self._rounds[number] = self._thread.submit(copy_context().run, plan())

    def finish(self, number: int, plan: Callable[[], Callable[[], None]]) -> None:
        """Waits for a round that was started; any other is planned and played here and now.

        Raises: the error of the rollouts.
        """
        future = self._rounds.pop(number, None)
        if future is None:
            plan()()
        else:
            future.result()
