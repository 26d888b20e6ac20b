"""Rounds whose episodes are wanted -> rollouts on a thread of their own, in order, while the trainer updates.

Only the rollouts leave the main thread: they can be stopped at any moment and lose nothing that was reported, which an
update cannot. Invariant: one round is played at a time, each once; an error of a round reaches whoever asks for that
round. It knows nothing of versions, stores or of what an update does.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from types import TracebackType
from typing import Self


class RoundsAhead:
    """Plays rounds beside whatever the main thread does. Use it as a context manager.

    Args:
        stop: ends the rollouts that run now, from another thread; called when the block is left while some do.
    """

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollouts")
        self._rounds: dict[int, Future[None]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        while running := [future for future in self._rounds.values() if not future.done()]:
            self._stop()  # again, should the round have been about to begin
            with suppress(BaseException):
                running[0].result(timeout=1.0)

    def start(self, number: int, plan: Callable[[], Callable[[], None]]) -> None:
        """Has a round planned now, and played as soon as those before it are; a second time changes nothing."""
        if number not in self._rounds:
            self._rounds[number] = self._thread.submit(copy_context().run, plan())

    def finish(self, number: int, plan: Callable[[], Callable[[], None]]) -> None:
        """Waits for a round that was started; plans and plays any other here and now.

        Raises: what playing it raised.
        """
        future = self._rounds.pop(number, None)
        if future is None:
            plan()()
        else:
            future.result()
