"""LangGraph's own steps -> notes to the recorders of a run: a task starts, its writes are committed, it was cached.

LangGraph offers no callback for these, and its public streams leave the routing writes out. So `task_hooks` stands
in front of four functions of LangGraph while at least one recorder is attached: `PregelLoop.put_writes` and
`output_writes` (commits and cached results), and the runner's `run_with_retry` and `arun_with_retry` (a task with
its input). Invariant: a graph without a recorder in its callbacks runs as if nothing stood there; one with a
recorder gets equal values, and no error of ours. What the notes mean is known to `record` and `task_writes`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Protocol, cast
from uuid import UUID

from langchain_core.callbacks import AsyncCallbackHandler, AsyncCallbackManager, BaseCallbackHandler
from langchain_core.tracers.context import _configure_hooks
from langgraph._internal._constants import PUSH
from langgraph.pregel import _runner
from langgraph.pregel._loop import PregelLoop
from langgraph.pregel.protocol import PregelProtocol
from langgraph.types import PregelExecutableTask

from marft_bridge.state_reads import Reads, release_state, watch_state, watched_reads
from marft_bridge.task_writes import ENTRY

log = logging.getLogger("marft_bridge")

# A call inside a node that is given callbacks of its own inherits none: `llm.invoke(x, {"callbacks": [mine]})`. Then
# LangChain asks this variable, whose value is the recorder of the task around the call.
_task_recorder: ContextVar[BaseCallbackHandler | None] = ContextVar("marft_task_recorder", default=None)
_HOOK = (_task_recorder, True, None, None)


class SeesTasks(Protocol):
    """A callback handler that wants to know the tasks of its graphs. Its methods must not raise."""

    def note_task_start(self, graph_run: UUID, task: PregelExecutableTask, reads: Reads | None, inherits: bool) -> None:
        """A task is about to run.

        Args:
            graph_run: callback run of the graph that the task belongs to.
            task: LangGraph's own.
            reads: will note what the node reads of its state; None when its input cannot be watched.
            inherits: for a graph's entry: its input is the very state of the task around the graph.
        """

    def note_task_writes(self, loop: Any, task: PregelExecutableTask, writes: Any, cached: bool) -> None:
        """LangGraph commits what `task` wrote in the graph that `loop` runs; `cached`: without running it."""


class _NodeBegins(BaseCallbackHandler):
    """Sits behind all other handlers of one task, so that what they read of its input is not taken for the node's."""

    run_inline = True

    def __init__(self, reads: Reads) -> None:
        self._reads = reads

    def on_chain_start(self, *args: Any, **kwargs: Any) -> None:
        """The node's own code comes next; a retry begins anew."""
        self._reads.begin()


class _AsyncNodeBegins(AsyncCallbackHandler):
    """The same for a task that runs on an event loop, where handlers are called side by side."""

    def __init__(self, reads: Reads) -> None:
        self._reads = reads

    async def on_chain_start(self, *args: Any, **kwargs: Any) -> None:
        """As above, once the others have had their turn."""
        await asyncio.sleep(0)
        self._reads.begin()


def is_subgraph(task: PregelExecutableTask) -> bool:
    """Whether the node is a graph by itself, not a function that may call one."""
    steps = getattr(task.proc, "steps", None)
    return isinstance(steps[0] if steps else task.proc, PregelProtocol)


class TaskHooks:
    """The hooks, put in and taken out again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._originals: list[tuple[Any, str, Callable[..., Any]]] = []

    def attach(self) -> None:
        """Starts listening; calls nest."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                _configure_hooks.append(_HOOK)
                self._stand_before(PregelLoop, "put_writes", _put_writes_and_note)
                self._stand_before(PregelLoop, "output_writes", _output_writes_and_note)
                self._stand_before(_runner, "run_with_retry", _run_watched)
                self._stand_before(_runner, "arun_with_retry", _arun_watched)

    def detach(self) -> None:
        """Undoes one `attach`."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                _configure_hooks.remove(_HOOK)
                while self._originals:
                    owner, name, original = self._originals.pop()
                    setattr(owner, name, original)

    def _stand_before(self, owner: Any, name: str, hook: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)
        self._originals.append((owner, name, original))
        setattr(owner, name, functools.wraps(original)(hook(original)))


task_hooks = TaskHooks()


def _put_writes_and_note(original: Callable[..., None]) -> Callable[..., None]:
    def put_writes(loop: Any, task_id: str, writes: Any, *, cached: bool = False) -> None:
        if not cached:
            _note_writes(loop, task_id, writes, cached=False)
        original(loop, task_id, writes, cached=cached)

    return put_writes


def _output_writes_and_note(original: Callable[..., None]) -> Callable[..., None]:
    def output_writes(loop: Any, task_id: str, writes: Any, *, cached: bool = False) -> None:
        if cached:  # out of a cache, or handed back by a resume; the others come through put_writes
            _note_writes(loop, task_id, writes, cached=True)
        original(loop, task_id, writes, cached=cached)

    return output_writes


def _run_watched(original: Callable[..., Any]) -> Callable[..., Any]:
    def run_with_retry(task: PregelExecutableTask, *args: Any, **kwargs: Any) -> Any:
        seers = _seers(task.config.get("callbacks"))
        if not seers:
            return original(task, *args, **kwargs)
        with _watched(task, seers) as watched:
            return original(watched, *args, **kwargs)

    return run_with_retry


def _arun_watched(original: Callable[..., Any]) -> Callable[..., Any]:
    async def arun_with_retry(task: PregelExecutableTask, *args: Any, **kwargs: Any) -> Any:
        seers = _seers(task.config.get("callbacks"))
        if not seers:
            return await original(task, *args, **kwargs)
        with _watched(task, seers) as watched:
            return await original(watched, *args, **kwargs)

    return arun_with_retry


def _seers(callbacks: Any) -> list[SeesTasks]:
    return [handler for handler in getattr(callbacks, "handlers", ()) if hasattr(handler, "note_task_writes")]


def _note_writes(loop: Any, task_id: str, writes: Any, *, cached: bool) -> None:
    seers = _seers(loop.manager)
    task = getattr(loop, "tasks", {}).get(task_id) if seers else None
    if task is not None:
        for seer in seers:
            seer.note_task_writes(loop, task, writes, cached)


@contextmanager
def _watched(task: PregelExecutableTask, seers: list[SeesTasks]) -> Iterator[PregelExecutableTask]:
    """The task with its reads noted while the block runs, and announced to all who see it."""
    around = watched_reads(task.input) if task.name == ENTRY else None
    watched, reads = task, None
    if task.name != ENTRY and task.path[0] != PUSH:  # what a Send or a call gives to a task is not read from the state
        watched, reads = _watch(task)
    manager: Any = task.config["callbacks"]
    for seer in seers:
        seer.note_task_start(manager.parent_run_id, task, reads, around is not None)
    token = _task_recorder.set(cast(BaseCallbackHandler, seers[0]))
    try:
        # A graph's entry copies its input into the graph's own state: that is no read of the node around it.
        with around.paused() if around is not None else nullcontext():
            yield watched
    finally:
        _task_recorder.reset(token)
        if reads is not None:
            release_state(watched.input)


def _watch(task: PregelExecutableTask) -> tuple[PregelExecutableTask, Reads | None]:
    reads = Reads()
    try:
        state = watch_state(task.input, reads)
    except Exception as error:  # noqa: BLE001 - a state that resists being watched is a bound, not a failure of the app
        log.debug("the state of %s cannot be watched: %s", task.name, error)
        return task, None
    if watched_reads(state) is not reads:
        return task, None
    manager: Any = task.config["callbacks"]
    manager = manager.copy()
    begins = _AsyncNodeBegins if isinstance(manager, AsyncCallbackManager) else _NodeBegins
    manager.add_handler(begins(reads), inherit=False)
    return replace(task, input=state, config={**task.config, "callbacks": manager}), reads
