"""The event loop of an app's graphs, with its threads -> both ended within limits, and a line about what goes on.

Invariants: one thread pool serves a loop for the whole of its life, so that an app can use threads until its own exit
is over; a node that never returns, or that does not let itself be cancelled, keeps neither the loop nor the process.
"""

from __future__ import annotations

import asyncio
import ctypes
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from marft_bridge.common.loop_threads import GRACE_S, LoopThreads, limit_exit
from marft_bridge.rollouts.user_code import UserCode, frames_to_place

_SHOWN_PLACES = 4


@contextmanager
def open_graph_loop(
    threads: LoopThreads, code: UserCode, say: Callable[[str], None], *, grace_s: float = GRACE_S
) -> Iterator[asyncio.Runner]:
    """An event loop until the block ends, whose plain functions run in these threads.

    Args:
        threads: are ended with the loop.
        code: that of the app, to name the lines that go on.
        say: takes the line about what the loop left behind.
        grace_s: for how long tasks may take to end when they are cancelled.
    """
    stubborn_tasks: list[asyncio.Task[Any]] = []
    try:
        with asyncio.Runner() as runner:
            runner.get_loop().set_default_executor(threads)
            try:
                yield runner
            finally:
                stubborn_tasks = runner.run(_end_tasks(grace_s))
    finally:
        stuck_threads = threads.left_threads()
        if stubborn_tasks or stuck_threads:
            limit_exit()
            say(_left_to_line(stuck_threads, stubborn_tasks, code))


async def _end_tasks(grace_s: float) -> list[asyncio.Task[Any]]:
    """Cancels all other tasks -> those that go on all the same. They are hidden from the runner, which would wait for
    them without a limit when it closes."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if not tasks:
        return []
    _, stubborn_tasks = await asyncio.wait(tasks, timeout=grace_s)
    for task in stubborn_tasks:
        asyncio._unregister_task(task)
        # Never freed: its coroutines would be closed then, in another context and at any moment, and complain.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(task))
    return list(stubborn_tasks)


def _left_to_line(threads: Sequence[threading.Thread], tasks: Sequence[asyncio.Task[Any]], code: UserCode) -> str:
    thread_frames = sys._current_frames()
    thread_places = [frames_to_place(_stack_of(thread_frames.get(thread.ident or 0)), code) for thread in threads]
    # A cancelled run waits in tasks of LangGraph, too; what it waits for is the app's.
    task_places = [place for task in tasks if (place := frames_to_place(_frames_of(task), code)) is not None]
    task_count = len(task_places) or len(tasks)
    places = Counter(place for place in (*thread_places, *task_places) if place is not None)
    shown = [f"{place} ({count})" if count > 1 else place for place, count in places.most_common(_SHOWN_PLACES)]
    shown += ["..."] if len(places) > _SHOWN_PLACES else []
    lines = f": {', '.join(shown)}" if shown else ""
    kinds = ((len(threads), "threads"), (task_count, "tasks"))
    counts = " and ".join(f"{count} {kind}" for count, kind in kinds if count)
    return (
        f"{counts} of the app go on after its episodes, because what they run does not end{lines}; "
        "nothing waits for them"
    )


def _stack_of(frame: FrameType | None) -> Iterator[tuple[str, int]]:
    """File and line of a thread's frames, the innermost first."""
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def _frames_of(task: asyncio.Task[Any]) -> list[tuple[str, int]]:
    """File and line of a task's coroutines as far as each awaits the next, the innermost first."""
    coroutine: Any = task.get_coro()
    places: list[tuple[str, int]] = []
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        places.append((frame.f_code.co_filename, frame.f_lineno))
        coroutine = getattr(coroutine, "cr_await", None)
    return places[::-1]
