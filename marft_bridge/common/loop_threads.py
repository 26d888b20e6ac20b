"""Plain functions of an event loop's apps -> threads that are waited for within limits, and then left behind.

A call is given up when its future is cancelled while it runs: a thread cannot be stopped, so what it runs goes on, and
nobody reads what it returns. Invariants: a call that was given up takes no place of the pool; neither the end of the
pool nor that of the interpreter waits longer than its limit for one, nor for a thread that such a call waits for.
"""

from __future__ import annotations

import concurrent.futures.thread as thread_pools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import Context
from functools import cache, partial
from typing import Any

GRACE_S = 5.0  # for calls that were given up, when their pool ends
UNREAD_S = 60.0  # for calls that nobody gave up and nobody waits for, as an app's last writes
_EXIT_S = 2.0  # for all other threads, when the interpreter ends and a call was left behind


class _Call(Future[Any]):
    """One call, and its result."""

    def __init__(self, threads: LoopThreads, function: Callable[[], Any]) -> None:
        super().__init__()
        self._threads = threads
        self._function: Callable[[], Any] | None = function

    def run(self) -> None:
        """Calls the function, unless the call was cancelled before."""
        function, self._function = self._function, None  # its arguments are held no longer than it runs
        if function is None or not self.set_running_or_notify_cancel():
            return
        try:
            result = function()
        except BaseException as error:  # noqa: BLE001 - raised where the result is read
            self.set_exception(error)
        else:
            self.set_result(result)

    def cancel(self) -> bool:
        """As a future's own, and gives up a call that runs: that is all that its cancellation can do."""
        is_cancelled = super().cancel()
        if not is_cancelled:
            self._threads.give_up(self)
        return is_cancelled


class LoopThreads(ThreadPoolExecutor):
    """A thread pool for `set_default_executor`, which takes no other class. It begins threads of its own, as those of
    the base class are waited for without a limit when the interpreter ends.

    Args:
        max_threads: calls that run at the same time; those that were given up are not counted.
        grace_s: for how long its end waits for calls that were given up.
    """

    def __init__(self, max_threads: int, *, grace_s: float = GRACE_S) -> None:
        super().__init__(max_threads)
        self._max_threads, self._grace_s = max_threads, grace_s
        self._changed = threading.Condition()  # guards the attributes below
        self._waiting: deque[_Call] = deque()
        self._running: dict[_Call, threading.Thread] = {}
        self._given_up: dict[_Call, threading.Thread] = {}
        self._thread_count = self._idle_count = 0  # without the threads of calls that were given up
        self._is_shut = False

    def allow(self, max_threads: int) -> None:
        """Lets so many calls run at the same time, or as many as before where that is more."""
        with self._changed:
            self._max_threads = max(self._max_threads, max_threads)

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """As of `ThreadPoolExecutor`."""
        call = _Call(self, partial(function, *args, **kwargs))
        with self._changed:
            if self._is_shut:
                raise RuntimeError("cannot schedule new futures after shutdown")
            self._waiting.append(call)
            self._find_thread()
        return call

    def give_up(self, call: _Call) -> None:
        """Lets another thread take the place of a call that runs."""
        with self._changed:
            if (thread := self._running.pop(call, None)) is None:
                return
            self._given_up[call] = thread
            self._thread_count -= 1
            if self._waiting:
                self._find_thread()

    def left_threads(self) -> list[threading.Thread]:
        """The threads in which a call still runs."""
        with self._changed:
            return [*self._running.values(), *self._given_up.values()]

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """As of `ThreadPoolExecutor`, but waits within limits."""
        with self._changed:
            self._is_shut = True
            cancelled_calls = list(self._waiting) if cancel_futures else []
            self._changed.notify_all()
        for call in cancelled_calls:
            call.cancel()
        if not wait:
            return
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._running, UNREAD_S)
            self._changed.wait_for(lambda: not self._given_up, self._grace_s)

    def _find_thread(self) -> None:
        """Has a thread take the call that came last: one that is idle, or a new one. The lock is held."""
        if len(self._waiting) <= self._idle_count:
            self._changed.notify_all()
        elif self._thread_count < self._max_threads:
            self._thread_count += 1
            # A daemon: the interpreter does not wait for it. In no context: it is no thread of whoever calls.
            thread = threading.Thread(target=self._run, name="graph-thread", daemon=True)
            Context().run(thread.start)

    def _run(self) -> None:
        thread: Any = threading.current_thread()
        _released.add(thread)
        thread._daemonic = False  # it stays one; but a thread that an app begins in it does not become one
        try:
            self._run_calls(thread)
        finally:
            _released.discard(thread)

    def _run_calls(self, thread: threading.Thread) -> None:
        while True:
            with self._changed:
                self._idle_count += 1
                self._changed.wait_for(lambda: self._waiting or self._is_shut)
                self._idle_count -= 1
                if not self._waiting:
                    self._thread_count -= 1
                    return
                call = self._waiting.popleft()
                self._running[call] = thread
            call.run()
            with self._changed:
                was_given_up = self._given_up.pop(call, None) is not None
                self._running.pop(call, None)
                self._changed.notify_all()
            del call
            if was_given_up:  # another thread has its place
                return


# ── the end of the interpreter ────────────────────────────────────────────────────────────────────────────────────

_released: set[threading.Thread] = set()  # that the interpreter does not wait for, though they are no daemons


def release_at_exit(find_threads: Callable[[], Iterable[threading.Thread]]) -> None:
    """Has the interpreter, when it ends, not wait for these threads, be they of a pool or not."""
    threading._register_atexit(lambda: _release(find_threads()))  # type: ignore[attr-defined]


@cache
def limit_exit() -> None:
    """Has the interpreter, when it ends, wait for 2 s at most. For a process that left a call behind: what it runs may
    wait for threads that it has begun, of which nobody knows."""
    release_at_exit(_threads_that_go_on)


def _threads_that_go_on() -> list[threading.Thread]:
    """Ends the threads of pools, as the interpreter would next, and waits for all -> those that have not ended."""
    with thread_pools._global_shutdown_lock:
        thread_pools._shutdown = True
    for queue in list(thread_pools._threads_queues.values()):
        queue.put(None)
    deadline_s = time.monotonic() + _EXIT_S
    while (threads := _waited_for()) and time.monotonic() < deadline_s:
        threads[0].join(0.05)
    return threads


def _release(threads: Iterable[threading.Thread]) -> None:
    _released.update(threads)
    for thread in list(_released):
        thread_pools._threads_queues.pop(thread, None)  # type: ignore[attr-defined]
        if hasattr(threading, "_shutdown_locks"):  # up to Python 3.12
            threading._shutdown_locks.discard(thread._tstate_lock)  # type: ignore[attr-defined]
    if _released and hasattr(threading, "_thread_shutdown"):  # from Python 3.13, and called after this
        threading._thread_shutdown = _join_others


def _join_others() -> None:
    """What the interpreter does at its end, but for the released threads."""
    while threads := _waited_for():
        for thread in threads:
            thread.join()


def _waited_for() -> list[threading.Thread]:
    passed_over = {*_released, threading.main_thread(), threading.current_thread()}
    return [
        thread
        for thread in threading.enumerate()
        if thread not in passed_over and (not thread.daemon or thread in thread_pools._threads_queues)
    ]
