"""The event loop of an app's graphs, with its threads -> both ended within limits, and a line about what goes on.

Invariants: one thread pool serves a loop for the whole of its life, so that an app can use threads until its own exit
is over; a node that never returns, or that does not let itself be cancelled, keeps neither the loop nor the process.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
    """Where tasks stand is said; to ask where threads stand could crash the interpreter."""
    # A cancelled run waits in tasks of LangGraph, too; what it waits for is the app's.
    app_lines = Counter(line for task in tasks if (line := frames_to_place(_frames_of(task), code)) is not None)
    task_count = app_lines.total() or len(tasks)
    told_lines = [f"{line} ({count})" if count > 1 else line for line, count in app_lines.most_common(_SHOWN_PLACES)]
    told_lines += ["..."] if len(app_lines) > _SHOWN_PLACES else []
    lines = f": {', '.join(told_lines)}" if told_lines else ""
    kinds = ((len(threads), "threads"), (task_count, "tasks"))
    counts = " and ".join(f"{count} {kind}" for count, kind in kinds if count)
    return (
        f"{counts} of the app go on after its episodes, because what they run does not end{lines}; "
        "nothing waits for them"
    )


def _frames_of(task: asyncio.Task[Any]) -> list[tuple[str, int]]:
    """File and line of a task's coroutines as far as each awaits the next, the innermost first."""
    coroutine: Any = task.get_coro()
    places: list[tuple[str, int]] = []
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        places.append((frame.f_code.co_filename, frame.f_lineno))
        coroutine = getattr(coroutine, "cr_await", None)
    return places[::-1]
