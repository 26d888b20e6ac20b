"""LangGraph's checkpoint namespaces -> ours, in which a routing function of conditional edges is an agent of its own.

LangGraph runs a node's routers inside the node's task, under the task's namespace `writer:<id>`. Ours is then
`writer:<id>:router`, and a graph that the router runs lies below it. A task of a graph that keeps its own state has
the ids of the tasks around it in ours (see `node_names.namespace_in_task`). Which router or task a name is asked in is
known from the context, which LangGraph and LangChain copy into their threads. Invariant: outside both, a namespace is
LangGraph's own, but for error handlers (see `error_handlers`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from marft_bridge.common.error_handlers import HANDLER_NODE, handler_to_own


@dataclass(frozen=True, slots=True)
class RunningRouter:
    """A routing function that runs now."""

    task_namespaces: tuple[str, ...]  # of the task after whose node it routes: LangGraph's and ours
    ns: str  # ours of the router


@dataclass(frozen=True, slots=True)
class RenamedTask:
    """A task that runs now, and whose namespace is not LangGraph's."""

    task_namespaces: tuple[str, ...]  # LangGraph's
    ns: str  # ours


# Innermost first: a router may run a graph with routers.
_running: ContextVar[tuple[RunningRouter | RenamedTask, ...]] = ContextVar("marft_running_routers", default=())


def router_ns(task_ns: str, number: int) -> str:
    """Our namespace of the `number`-th conditional edge (from 1) of the task with our namespace `task_ns`."""
    return f"{task_ns}:router" if number == 1 else f"{task_ns}:router_{number}"


def own_namespace(checkpoint_ns: str) -> str:
    """LangGraph's namespace, seen from where the caller runs -> ours. Ours stays as it is."""
    for running in _running.get():
        for task_ns in running.task_namespaces:
            if checkpoint_ns == task_ns or checkpoint_ns.startswith(task_ns + "|"):
                return handler_to_own(running.ns + checkpoint_ns[len(task_ns) :])
    return handler_to_own(checkpoint_ns) if HANDLER_NODE in checkpoint_ns else checkpoint_ns


def in_router() -> bool:
    """Whether the caller runs inside a router: elsewhere a namespace of ours is what the recorder knows it by."""
    running = _running.get()
    return bool(running) and any(type(entry) is RunningRouter for entry in running)


def make_router(task_ns: str, number: int) -> RunningRouter:
    """The `number`-th router of the task with LangGraph's namespace `task_ns`."""
    own_task_ns = own_namespace(task_ns)
    return RunningRouter((task_ns, own_task_ns), router_ns(own_task_ns, number))


@contextmanager
def running_router(router: RunningRouter | RenamedTask) -> Iterator[None]:
    """While the block runs, what is called in it belongs to the router, or to the task under its namespace of ours."""
    reset_token = _running.set((router, *_running.get()))
    try:
        yield
    finally:
        _running.reset(reset_token)
