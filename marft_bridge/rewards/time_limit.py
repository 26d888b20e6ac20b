"""A reward that is being computed -> its outcome within a time limit, whatever it raises, and however it hangs.

Invariant: what a reward raises is told apart from what comes from outside: the cancellation of its task, and the user's
Ctrl-C, which go on to whoever waits for the run.
"""

from __future__ import annotations

import asyncio
import inspect
import signal
import threading
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any, TypeVar

from marft_bridge.rewards.contract import Absent

_CANCELLATIONS = 3  # after which a coroutine that catches them is closed
_PAUSE_S = 0.1  # for each to take effect
_Value = TypeVar("_Value")


def comes_from_outside(error: BaseException) -> bool:
    """Whether an error that arrived in a task is the task's cancellation or a Ctrl-C of the user, and not raised by
    what the task runs."""
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0
    if not isinstance(error, KeyboardInterrupt) or threading.current_thread() is not threading.main_thread():
        return False  # a signal arrives in the main thread only
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        return True  # it may be: Python's own handler raises wherever the program is
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    # While a loop runs in the main thread, asyncio cancels its task at the first Ctrl-C, and raises at the second.
    return frame is not None and frame.tb_frame.f_globals.get("__name__") == "asyncio.runners"


async def within(seconds: float, awaitable: Awaitable[_Value]) -> _Value:
    """The value of an awaitable.

    Raises:
        Absent: it took longer than `seconds`; it has been ended.
        BaseException: what it raised.
    """
    task = asyncio.ensure_future(_to_outcome(awaitable))
    try:
        await asyncio.wait({task}, timeout=seconds)
    except BaseException:
        task.cancel()
        await asyncio.wait({task}, timeout=_PAUSE_S)
        if inspect.iscoroutine(awaitable) and inspect.getcoroutinestate(awaitable) == inspect.CORO_CREATED:
            awaitable.close()  # its task was cancelled before it began, as all are when a loop ends
        raise
    if not task.done():
        await _end_task(task)
        raise Absent(f"took longer than {seconds:g} s")
    value, error = task.result()
    if error is not None:
        raise error
    return value  # type: ignore[return-value]  # without an error it is the coroutine's


async def _to_outcome(awaitable: Awaitable[_Value]) -> tuple[_Value | None, BaseException | None]:
    """What it returned or raised: asyncio would let a SystemExit or KeyboardInterrupt of a task end the loop."""
    try:
        return await awaitable, None
    except BaseException as error:
        if comes_from_outside(error):
            raise
        return None, error


async def _end_task(task: asyncio.Task[Any]) -> None:
    for _ in range(_CANCELLATIONS):
        task.cancel()
        await asyncio.wait({task}, timeout=_PAUSE_S)
        if task.done():
            return
    with suppress(RuntimeError):  # it catches that as well: then it goes on until the loop ends
        task.get_coro().close()
    task.cancel()
