"""A task of LangGraph's whose node has conditional edges -> the same task, whose routers say when they run.

LangGraph runs the routing functions after the node, as steps of the task's runnable. The task gets a copy of that
runnable with these steps wrapped. Invariant: a router gets the same arguments and gives the same result; what it calls
runs inside `running_router`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from langgraph.types import PregelExecutableTask

from marft_bridge.common.library_internals import BranchSpec
from marft_bridge.recording.node_hooks import copy_of, task_with

WatchRouter = Callable[[int, list[str] | None], AbstractContextManager[None]]
"""Conditional edge of a node, from 1, and the state keys that it is given (None: all) -> what runs around it."""


def watch_routers(task: PregelExecutableTask, watch: WatchRouter) -> PregelExecutableTask:
    """The task with `watch` around each of its node's routers; the same task where it has none."""
    steps = getattr(task.proc, "steps", None) or ()
    routers = [step for step in steps if _is_router(step)]
    if not routers:
        return task
    watched_steps = {id(step): _watch_router(step, number, watch) for number, step in enumerate(routers, start=1)}
    watched_proc: Any = copy_of(task.proc)
    watched_proc.steps = [watched_steps.get(id(step), step) for step in steps]
    return task_with(task, watched_proc)


def _is_router(step: Any) -> bool:
    return isinstance(getattr(getattr(step, "func", None), "__self__", None), BranchSpec)


def _watch_router(step: Any, number: int, watch: WatchRouter) -> Any:
    keys = _router_keys(step)

    def route(*args: Any, **kwargs: Any) -> Any:
        with watch(number, keys):
            return step.func(*args, **kwargs)

    async def aroute(*args: Any, **kwargs: Any) -> Any:
        with watch(number, keys):
            return await step.afunc(*args, **kwargs)

    watched_step = copy_of(step)
    watched_step.func, watched_step.afunc = route, aroute
    return watched_step


def _router_keys(step: Any) -> list[str] | None:
    """The state keys that a router is given; None where that is not known, so that it may be all."""
    channels = getattr(step.kwargs.get("reader"), "keywords", {}).get("select")
    return [channels] if isinstance(channels, str) else channels
