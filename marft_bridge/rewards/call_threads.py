"""The threads that a call of a reward starts -> ended with the call, as far as Python can end a thread.

A thread belongs to the call whose code started it, however far down; so does a piece of work that such code gives to a
`ThreadPoolExecutor`, while the pool's threads belong to nobody: they serve whoever comes next. Invariants: what belongs
to a call is ended when the call has returned, raised or passed its limit; an exception is raised in a thread only while
that thread does something of the call, so that no thread of others, and no thread of a pool, is ever ended; what is in
a call into C that does not return keeps neither the run nor the process alive, and is counted.

Why by bookkeeping, and not in a process of its own: a reward is a function of this process. It may be a closure, read
what its module holds, take a final state that cannot be pickled, share a client; and a fork of a process with threads
(torch, DuckDB) may hang by itself. Why at `Thread.start`: a thread begins with an empty context up to Python 3.13, so
that nothing but its start tells whose it is; OpenTelemetry's instrumentation of threads patches the same two functions.
Not seen are threads of C libraries, and those of `_thread` itself.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import Context, ContextVar
from functools import cache, partial, wraps
from typing import Any

from marft_bridge.common.loop_threads import LoopThreads, release_at_exit

log = logging.getLogger("marft_bridge")

_GRACE_S = 0.05  # for what a call leaves behind to end by itself
_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0  # for which a request stands, and for which none does: at first, and at last
_ENDING_S = 60.0  # after which a thread is asked rarely: it is in C, and may be for good
_RARELY_S = 30.0  # from one request to the next, then
_SHOWN_NAMES = 4

_CALL: ContextVar[RewardCall | None] = ContextVar("reward_call", default=None)
"""The call whose code is running."""


class PastLimit(SystemExit):
    """Raised in a thread whose call is over. Python lets a thread end by it without a word."""


class _TakenBack(BaseException):
    """Raised in the thread that asks for it, see `_take_back`."""


class _Work:
    """Something that a thread does for a call: all that a thread of the call does, or one piece in a pool's thread."""

    def __init__(self, call: RewardCall, function: Callable[..., Any]) -> None:
        self.call, self._function = call, function
        self.thread: threading.Thread | None = None  # from when it begins
        self.is_finished = False
        self.name = "a piece of work in a pool"
        self.future: Future[Any] | None = None  # of a piece
        self.pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()  # held while an exception is raised in the thread

    def __call__(self, *arguments: Any, **names: Any) -> Any:
        token = _CALL.set(self.call)
        try:
            try:
                self.thread = threading.current_thread()
                self.call.refuse_if_over()
                return self._function(*arguments, **names)
            finally:
                # The first thing, and one that nothing can interrupt: no exception is raised in the thread after this.
                self.is_finished = True
        finally:
            # One may be on its way, and must not arrive in what the thread does next. Two cannot be: there is a pause
            # between them, in which a thread that runs Python takes the first.
            with self._lock:
                _take_back()
            self.call.forget(self)
            _CALL.reset(token)

    def is_over(self) -> bool:
        """Whether it neither goes on nor will begin."""
        return self.is_finished or (self.future is not None and self.future.done())

    def end(self, error: type[BaseException] | None = PastLimit) -> None:
        """Raises `PastLimit` in the thread if it still does this; None takes back what has not arrived. A call into C
        takes it when it returns."""
        with self._lock:
            if self.thread is not None and self.thread.ident is not None and not self.is_finished:
                _raise_in(self.thread.ident, error)

    def leave_pool(self) -> None:
        """Takes a piece that has not begun out of its pool, and the thread of one that has: the pool starts another."""
        if self.future is None or self.pool is None:
            return
        if not self.future.cancel() and self.thread is not None:
            self.pool._threads.discard(self.thread)  # type: ignore[attr-defined]  # shutdown() would wait for it


def _raise_in(thread_id: int, error: type[BaseException] | None) -> bool:
    """Has a thread raise an error when it next runs Python; None takes back one that has not arrived. Whether there is
    such a thread."""
    raised = None if error is None else ctypes.py_object(error)
    return bool(ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), raised))


def _take_back() -> None:
    """Takes back a request that has not arrived in this thread, and the interpreter's mark that one is under way.

    The mark is one for all threads. CPython sets it also when a request is taken back, and takes it away only when one
    arrives. While it stands every thread looks for requests at every call and every turn of a loop; and where calls are
    traced (`sys.settrace`: debuggers, coverage, Hypothesis), CPython 3.11 never comes to the end of a call.
    """
    with suppress(_TakenBack):
        while _raise_in(threading.get_ident(), _TakenBack):  # in place of one that is on its way; it arrives at a turn
            pass


class RewardCall:
    """One call of a reward function, and what its code has threads do."""

    def __init__(self, leftovers: Leftovers) -> None:
        _follow_threads()
        self._leftovers = leftovers
        self.is_late = False  # whether it ended by its limit
        self.is_counted = threading.Event()  # set when what it left running is counted, or it ended by its limit
        self._is_over = False
        self._works: set[_Work] = set()
        self._lock = threading.Lock()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """What is started in this block, in its thread or task, belongs to the call."""
        token = _CALL.set(self)
        try:
            yield
        finally:
            with suppress(ValueError):  # a coroutine that is closed is closed in another context
                _CALL.reset(token)

    def remaining(self) -> list[_Work]:
        """What still goes on, or may begin."""
        with self._lock:
            return [work for work in self._works if not work.is_over()]

    def finish_thread(self) -> None:
        """Says that what the calling thread does for the call is over, though it has not ended yet: on a busy machine
        that may take a while, and what it still does is ours."""
        with self._lock:
            own_works = [work for work in self._works if work.thread is threading.current_thread()]
        for work in own_works:
            work.is_finished = True

    def forget(self, work: _Work) -> None:
        """Drops what is over."""
        self._works.discard(work)

    def refuse_if_over(self) -> None:
        """Raises PastLimit in what belongs to the call, where the call is over."""
        if self._is_over:
            raise PastLimit

    def add(self, work: _Work) -> bool:
        """Whether the work is the call's from now on. Not where the call is over: a context may outlive it, in a
        connection that others use. But what belongs to the call then begins nothing more: it raises PastLimit."""
        with self._lock:
            if not self._is_over:
                self._works.add(work)
                return True
            is_own = any(own.thread is threading.current_thread() for own in self._works if not own.is_finished)
        if is_own:
            raise PastLimit
        return False

    def end(self, *, is_late: bool) -> None:
        """Ends all that goes on. Returns at once: a thread of its own does it."""
        with self._lock:
            self.is_late, self._is_over = is_late, True
        works = self.remaining()
        for work in works:
            work.leave_pool()
        if self.remaining():
            self._leftovers.add(self)
            ender = threading.Thread(target=self._end_works, name="reward-end", daemon=True)
            Context().run(ender.start)  # in no context of a call

    def _end_works(self) -> None:
        if not self.is_late:
            time.sleep(_GRACE_S)
            if works := self.remaining():
                self._leftovers.note(works)
        self.is_counted.set()
        deadline_s, pause_s = time.monotonic() + _ENDING_S, _PAUSE_S
        while works := self.remaining():
            for work in works:
                work.leave_pool()
                work.end()
            time.sleep(pause_s)  # whoever runs Python now and then takes it meanwhile
            for work in works:
                work.end(None)
            _take_back()  # for its mark; who is in C is asked again
            time.sleep(pause_s if time.monotonic() < deadline_s else _RARELY_S)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


class Leftovers:
    """What the calls of one reward function left behind."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._lock = threading.Lock()
        self._calls: list[RewardCall] = []  # those that are over and of which something may go on
        self._left_count = 0  # threads and pieces of work that went on when a call returned, and were not said yet
        self._is_logged = False

    def add(self, call: RewardCall) -> None:
        """Keeps a call that is over and of which something goes on."""
        with self._lock:
            self._calls.append(call)
        with _ALL_LOCK:
            _ALL.add(self)

    def endless_calls(self) -> list[RewardCall]:
        """The calls that are over and of which something still goes on."""
        with self._lock:
            self._calls = [call for call in self._calls if call.remaining()]
            return list(self._calls)

    def note(self, works: list[_Work]) -> None:
        """Counts what a call that returned, or raised, left running; logs the first."""
        with self._lock:
            is_first, self._is_logged = not self._is_logged, True
            self._left_count += len(works)
        if is_first:
            log.warning(
                "the reward %r returned and left running: %s. That is ended; start what is to stay when its module is "
                "loaded, not in a call",
                self.source,
                _to_names(works),
            )

    def take_lines(self) -> list[str]:
        """What calls left running since this was last asked, and what of all calls cannot be ended, for people."""
        for call in self.endless_calls():
            call.is_counted.wait(1.0)
        with self._lock:
            left_count, self._left_count = self._left_count, 0
        lines = []
        if left_count:
            lines.append(
                f"the reward {self.source!r} left {left_count} threads or pieces of work running when its calls "
                "returned; they were ended"
            )
        if works := [work for call in self.endless_calls() for work in call.remaining()]:
            lines.append(
                f"{len(works)} threads of the reward {self.source!r} go on after its calls, because what they run does "
                f"not return to Python: {_to_names(works)}; nothing waits for them"
            )
        return lines


_ALL: set[Leftovers] = set()  # those of this process with calls of which something went on
_ALL_LOCK = threading.Lock()


def _to_names(works: list[_Work]) -> str:
    names = Counter(sorted(work.name for work in works))  # the most frequent first, then by name
    shown = [f"{name} ({count})" if count > 1 else name for name, count in names.most_common(_SHOWN_NAMES)]
    return ", ".join(shown) + (", ..." if len(names) > _SHOWN_NAMES else "")


# ── whose a thread is ─────────────────────────────────────────────────────────────────────────────────────────────


@cache
def _follow_threads() -> None:
    """From now on this process sees which call starts a thread or gives work to a pool; nothing else changes."""
    start, submit_to_process = threading.Thread.start, ProcessPoolExecutor.submit

    @wraps(start)
    def start_thread(thread: threading.Thread) -> None:
        call = _CALL.get()
        if call is None or thread.ident is not None or _is_of_shared_pool(thread):
            return start(thread)
        work = _Work(call, thread.run)
        work.name = thread.name
        if not call.add(work):
            return start(thread)
        thread.daemon = True  # the interpreter waits for the others when it ends
        thread.run = partial(_run_once, thread, work)  # type: ignore[method-assign]
        try:
            start(thread)
        except BaseException:
            call.forget(work)
            raise

    @wraps(submit_to_process)  # type: ignore[arg-type]
    def submit_to_others(pool: ProcessPoolExecutor, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        token = _CALL.set(None)  # nor is the thread that looks after the pool's processes
        try:
            return submit_to_process(pool, function, *args, **kwargs)
        finally:
            _CALL.reset(token)

    threading.Thread.start = start_thread  # type: ignore[method-assign, assignment]
    for pool in (ThreadPoolExecutor, LoopThreads):  # the second has a method of its own
        pool.submit = _follow_pool(pool.submit)  # type: ignore[method-assign]
    ProcessPoolExecutor.submit = submit_to_others  # type: ignore[method-assign, assignment]
    release_at_exit(_threads_of_ended_calls)


def _follow_pool(submit: Callable[..., Future[Any]]) -> Callable[..., Future[Any]]:
    """The method of a pool that takes work, which sees from now on whose the work is."""

    @wraps(submit)
    def submit_piece(
        pool: ThreadPoolExecutor, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Future[Any]:
        call = _CALL.get()
        work = None if call is None else _Work(call, function)
        if call is None or work is None or not call.add(work):
            return submit(pool, function, *args, **kwargs)
        token = _CALL.set(None)  # a thread that the pool starts for it stays the pool's
        try:
            work.pool = pool
            work.future = submit(pool, work, *args, **kwargs)
        except BaseException:
            call.forget(work)
            raise
        finally:
            _CALL.reset(token)
        return work.future

    return submit_piece


def _is_of_shared_pool(thread: threading.Thread) -> bool:
    """anyio's workers serve all tasks of a loop, whichever had the first one started."""
    return type(thread).__module__.partition(".")[0] == "anyio"


def _run_once(thread: threading.Thread, work: _Work) -> None:
    del thread.run  # what was put there refers to the thread
    with suppress(PastLimit):
        work()


def _threads_of_ended_calls() -> set[threading.Thread]:
    """Threads of pools that are in a piece of a call that is over."""
    calls = [call for leftovers in list(_ALL) for call in leftovers.endless_calls()]
    works = [work for call in calls for work in call.remaining() if work.future is not None]
    return {work.thread for work in works if work.thread is not None}
