"""Owns: the threads of an event loop keep nobody waiting.

- A call that was given up takes no place, however many there are, and its thread ends with it.
- What was not given up is waited for, and threads are used again.
- A context reaches a thread as it does in any pool.
"""

from __future__ import annotations

import asyncio
import threading
import time
from contextvars import ContextVar

import pytest

from marft_bridge.common.loop_threads import LoopThreads

MARK: ContextVar[int] = ContextVar("mark", default=0)


def test_calls_that_were_given_up_take_no_place_and_end_their_threads() -> None:
    released, threads = threading.Event(), LoopThreads(2, grace_s=0.1)

    async def play() -> None:
        asyncio.get_running_loop().set_default_executor(threads)
        for _ in range(4):  # every one fills the pool, while another waits for a place
            hung = [asyncio.ensure_future(asyncio.to_thread(released.wait)) for _ in range(2)]
            late = asyncio.ensure_future(asyncio.to_thread(pow, 2, 3))
            await asyncio.sleep(0.05)
            assert not late.done()
            for call in hung:
                call.cancel()
            assert await asyncio.wait_for(late, 10) == 8
        # The pool's own, which is idle, may not have come back from its last call yet.
        assert len(threads.left_threads()) in (8, 9)

    began = time.monotonic()
    asyncio.run(play())
    assert time.monotonic() - began < 20
    left = threads.left_threads()
    assert len(left) == 8
    released.set()
    for thread in left:
        thread.join(10)
    assert threads.left_threads() == []
    assert not any(thread.is_alive() for thread in left)


def test_threads_are_used_again_and_what_runs_is_waited_for_at_the_end() -> None:
    threads, done = LoopThreads(3), list[int]()
    idents = {threads.submit(threading.get_ident).result(10) for _ in range(20)}
    assert len(idents) <= 3
    burst = [threads.submit(lambda n=n: (time.sleep(0.01), n)[1]) for n in range(30)]
    assert [call.result(10) for call in burst] == list(range(30))
    for number in range(5):
        threads.submit(lambda n=number: (time.sleep(0.2), done.append(n)))
    threads.shutdown()
    assert sorted(done) == list(range(5))
    with pytest.raises(RuntimeError, match="cannot schedule new futures after shutdown"):
        threads.submit(pow, 2, 3)


def test_an_error_and_the_context_of_a_call_come_through() -> None:
    async def play() -> int:
        asyncio.get_running_loop().set_default_executor(LoopThreads(1))
        MARK.set(7)
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(divmod, 1, 0)
        return await asyncio.to_thread(MARK.get)

    assert asyncio.run(play()) == 7


def test_a_thread_that_an_app_begins_in_one_is_no_daemon() -> None:
    threads = LoopThreads(1)
    assert not threads.submit(lambda: threading.Thread(target=print).daemon).result(10)
    threads.shutdown()


def test_a_call_that_waits_may_be_cancelled_and_never_runs() -> None:
    threads, released, ran = LoopThreads(1), threading.Event(), list[int]()
    first = threads.submit(released.wait)
    waiting = threads.submit(ran.append, 1)
    assert waiting.cancel()
    released.set()
    assert first.result(10)
    threads.shutdown()
    assert ran == []
