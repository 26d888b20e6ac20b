"""Owns: a reward whose run is ended, at whatever moment, is ended with it and leaves nothing to be warned of."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Coroutine
from typing import Any

import pytest

from marft_bridge.rewards.time_limit import within


def test_a_reward_that_was_cancelled_before_it_began_is_closed() -> None:
    """As the last tasks are when an event loop ends: Python warns of a coroutine that nobody ever awaited."""

    async def earn() -> float:
        return 1.0

    async def cancel_before_it_begins() -> Coroutine[Any, Any, float]:
        reward = earn()
        waiting = asyncio.create_task(within(5.0, reward))
        await asyncio.sleep(0)  # it has made the task of the reward, which has not begun
        assert inspect.getcoroutinestate(reward) == inspect.CORO_CREATED
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return reward

    assert inspect.getcoroutinestate(asyncio.run(cancel_before_it_begins())) == inspect.CORO_CLOSED
