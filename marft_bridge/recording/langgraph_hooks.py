"""LangGraph's own steps -> calls of the recorders of a run: a task starts, its writes are committed, it was cached.

LangGraph offers no callback for these, and its public streams leave the routing writes out. So `task_hooks` wraps six
functions of LangGraph while at least one recorder is attached: `PregelLoop.put_writes` and `output_writes` (commits
and cached results), and the runner's `run_with_retry` and `arun_with_retry` (a task with its input). Invariant: a
graph without a recorder in its callbacks runs as if it were not wrapped; one with a recorder gets the same objects, and
no error of ours. `trace_state` and `write_ledger` interpret the steps.
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from enum import Enum
from typing import Any, Literal, Protocol
from uuid import UUID

from langgraph.prebuilt import ToolNode
from langgraph.types import Command, PregelExecutableTask

from marft_bridge.common.library_internals import (
    PUSH,
    RECORDED,
    PregelLoop,
    PregelProtocol,
    RunnableCallable,
    configure_hooks,
    require_internals,
    runner,
)
from marft_bridge.common.node_names import lacks_task_id
from marft_bridge.common.running_routers import RenamedTask, make_router, running_router
from marft_bridge.common.running_task import RunningTask, running_task
from marft_bridge.recording.given_tasks import GivenTask, OpenGivenTasks, copy_writes, given_tasks_of_run
from marft_bridge.recording.node_hooks import watch_node
from marft_bridge.recording.router_hooks import watch_routers
from marft_bridge.recording.state_reads import Reads
from marft_bridge.recording.thread_position import ThreadPosition
from marft_bridge.recording.write_ledger import ENTRY

log = logging.getLogger("marft_bridge")

# A call inside a node with callbacks of its own inherits none: `llm.invoke(x, {"callbacks": [mine]})`. Then LangChain
# reads these variables, whose values are the recorders of the task around the call: as many as a task ever had.
_task_recorders: list[ContextVar[Any]] = []


class TaskListener(Protocol):
    """A callback handler that is told of the tasks of its graphs. Its methods must not raise."""

    def own_namespace(self, graph_run: UUID, checkpoint_ns: str) -> str:
        """LangGraph's namespace of a task of this graph -> ours; see `node_names.namespace_in_task`."""

    def note_task_start(self, graph_run: UUID, task: PregelExecutableTask, reads: Reads | None) -> None:
        """A task is about to run.

        Args:
            graph_run: callback run of the graph that the task belongs to.
            task: LangGraph's own.
            reads: says what the node reads of its state; None when its input is not the state.
        """

    def note_given_task(
        self, graph_run: UUID, task: PregelExecutableTask, given_task: GivenTask, open_tasks: OpenGivenTasks
    ) -> None:
        """A task is given what a recorded one wrote, and does not run."""

    def note_router_start(
        self, graph_run: UUID, task: PregelExecutableTask, ns: str, keys: Sequence[str] | None
    ) -> None:
        """A routing function of the task's node starts, under our namespace `ns`; `keys` as `router_hooks` has them."""

    def note_router_end(
        self, graph_run: UUID, task: PregelExecutableTask, ns: str, error: BaseException | None
    ) -> None:
        """It has ended, and written where it routes."""

    def note_task_writes(self, loop: Any, task: PregelExecutableTask, writes: Any, cached: bool) -> None:
        """LangGraph commits what `task` wrote in the graph that `loop` runs; `cached`: without running it."""

    def note_run_config(self, loop: Any) -> None:
        """A graph run begins, with a checkpointer or without; `loop` says how it was started."""

    def note_loop_start(self, loop: Any) -> None:
        """A graph run with a checkpointer begins: its checkpoint is loaded, its input not yet applied."""

    def note_checkpoint(self, loop: Any) -> None:
        """A graph run with a checkpointer has made the checkpoint that `loop` holds now."""


def loop_to_position(loop: Any) -> ThreadPosition | None:
    """Where a graph run begins on its thread, before its input is applied; None where nothing is kept of it."""
    if loop.checkpointer is None:
        return None
    is_command = isinstance(loop.input, Command)
    begins: Literal["turn", "resume"] = (
        "resume" if loop.input is None or (is_command and loop.input.resume is not None) else "turn"
    )
    if not loop._has_persisted_parent or not _is_of_graph(loop.checkpoint, loop):
        return ThreadPosition(begins, False, None)
    from_checkpoint, parent_config = loop.checkpoint["id"], loop.prev_checkpoint_config
    is_edited = loop.checkpoint_metadata.get("source") == "update"
    if is_edited and parent_config is not None:
        from_checkpoint = parent_config["configurable"].get("checkpoint_id")  # no run made the update itself
    is_addressed = bool(loop.config["configurable"].get("checkpoint_id"))
    return ThreadPosition(
        begins,
        is_addressed and (loop._addressed_checkpoint_superseded or loop.input is None),
        from_checkpoint,
        edited=is_edited,
    )


def _is_of_graph(checkpoint: Any, loop: Any) -> bool:
    """Whether all that a checkpoint knows of are nodes and channels of this graph: those of another one are not."""
    nodes = (name for name in checkpoint["versions_seen"] if not name.startswith("__"))
    channels = (name for name in checkpoint["channel_versions"] if not name.startswith("__"))
    return all(name in loop.nodes for name in nodes) and all(name in loop.specs for name in channels)


class NodeKind(Enum):
    """What LangGraph runs as a node."""

    GRAPH = "itself a graph, not a function that may call one"
    TOOLS = "LangGraph's own, which runs all tools of a message at once"
    OTHER = "anything else"


def task_to_kind(task: PregelExecutableTask) -> NodeKind:
    """What the node of a task is."""
    steps = getattr(task.proc, "steps", None)
    node = steps[0] if steps else task.proc
    if task.name == ENTRY or type(node) is RunnableCallable:  # most nodes: LangChain's classes take long to tell
        return NodeKind.OTHER
    if isinstance(node, PregelProtocol):
        return NodeKind.GRAPH
    return NodeKind.TOOLS if isinstance(node, ToolNode) else NodeKind.OTHER


class TaskHooks:
    """Installs the wrappers around LangGraph's functions, and removes them again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._user_count = 0
        self._originals: list[tuple[Any, str, Callable[..., Any]]] = []

    def attach(self) -> None:
        """Installs the wrappers; calls nest. Raises BridgeError for a LangGraph whose internals have moved."""
        require_internals(*RECORDED)
        with self._lock:
            self._user_count += 1
            if self._user_count == 1:
                configure_hooks.extend(map(_variable_to_hook, _task_recorders))
                self._wrap_function(PregelLoop, "put_writes", _put_writes_and_note)
                self._wrap_function(PregelLoop, "output_writes", _output_writes_and_note)
                self._wrap_function(PregelLoop, "_first", _note_start_and_begin)
                self._wrap_function(PregelLoop, "_put_checkpoint", _put_checkpoint_and_note)
                self._wrap_function(runner, "run_with_retry", _run_watched)
                self._wrap_function(runner, "arun_with_retry", _arun_watched)

    def detach(self) -> None:
        """Undoes one `attach`."""
        with self._lock:
            self._user_count -= 1
            if self._user_count == 0:
                for variable in _task_recorders:
                    configure_hooks.remove(_variable_to_hook(variable))
                while self._originals:
                    owner, name, original = self._originals.pop()
                    setattr(owner, name, original)

    def variables(self, count: int) -> list[ContextVar[Any]]:
        """The variables that LangChain reads recorders from: at least `count`."""
        if len(_task_recorders) < count:
            with self._lock:
                while len(_task_recorders) < count:
                    variable: ContextVar[Any] = ContextVar(f"marft_task_recorder_{len(_task_recorders)}", default=None)
                    if self._user_count > 0:
                        configure_hooks.append(_variable_to_hook(variable))
                    _task_recorders.append(variable)
        return _task_recorders

    def _wrap_function(self, owner: Any, name: str, hook: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)
        self._originals.append((owner, name, original))
        setattr(owner, name, functools.wraps(original)(hook(original)))


task_hooks = TaskHooks()


def _variable_to_hook(variable: ContextVar[Any]) -> tuple[ContextVar[Any], bool, None, None]:
    return (variable, True, None, None)


def _put_writes_and_note(original: Callable[..., None]) -> Callable[..., None]:
    def put_writes(loop: Any, task_id: str, writes: Any, *, cached: bool = False) -> None:
        if not cached:
            _note_writes(loop, task_id, writes, cached=False)
        original(loop, task_id, writes, cached=cached)

    return put_writes


def _output_writes_and_note(original: Callable[..., None]) -> Callable[..., None]:
    def output_writes(loop: Any, task_id: str, writes: Any, *, cached: bool = False) -> None:
        if cached:  # from a cache, or restored by a resume; other writes come through put_writes
            _note_writes(loop, task_id, writes, cached=True)
        original(loop, task_id, writes, cached=cached)

    return output_writes


def _note_start_and_begin(original: Callable[..., Any]) -> Callable[..., Any]:
    def first(loop: Any, *args: Any, **kwargs: Any) -> Any:
        for listener in _task_listeners(loop.manager):
            listener.note_run_config(loop)
            if loop.checkpointer is not None:
                listener.note_loop_start(loop)
        return original(loop, *args, **kwargs)

    return first


def _put_checkpoint_and_note(original: Callable[..., None]) -> Callable[..., None]:
    def put_checkpoint(loop: Any, *args: Any, **kwargs: Any) -> None:
        original(loop, *args, **kwargs)
        if loop.checkpointer is not None:
            for listener in _task_listeners(loop.manager):
                listener.note_checkpoint(loop)

    return put_checkpoint


def _run_watched(original: Callable[..., Any]) -> Callable[..., Any]:
    def run_with_retry(task: PregelExecutableTask, *args: Any, **kwargs: Any) -> Any:
        listeners = _task_listeners(task.config.get("callbacks"))
        if not listeners:
            return original(task, *args, **kwargs)
        if _give_writes(task, listeners):
            return None
        watched_task = _watch_task(task, listeners)
        with _RunsTask(task, listeners):
            return original(watched_task, *args, **kwargs)

    return run_with_retry


def _arun_watched(original: Callable[..., Any]) -> Callable[..., Any]:
    async def arun_with_retry(task: PregelExecutableTask, *args: Any, **kwargs: Any) -> Any:
        listeners = _task_listeners(task.config.get("callbacks"))
        if not listeners:
            return await original(task, *args, **kwargs)
        if _give_writes(task, listeners):
            return None
        watched_task = _watch_task(task, listeners)
        with _RunsTask(task, listeners):
            return await original(watched_task, *args, **kwargs)

    return arun_with_retry


class _RunsTask:
    """While the block runs, what is called in it, and what is started there, is known to be the task's."""

    __slots__ = ("_listeners", "_renamed", "_task", "_task_token", "_tokens")

    def __init__(self, task: PregelExecutableTask, listeners: list[TaskListener]) -> None:
        self._task, self._listeners = task, listeners

    def __enter__(self) -> None:
        config, listeners = self._task.config, self._listeners
        manager: Any = config["callbacks"]
        graph_run, checkpoint_ns = manager.parent_run_id, config["configurable"]["checkpoint_ns"]
        is_inside = running_task.get() is not None
        self._task_token = running_task.set(RunningTask(graph_run, checkpoint_ns, {}))
        recorders = itertools.chain(listeners, itertools.repeat(None))
        variables = task_hooks.variables(len(listeners))
        self._tokens: list[Token[Any]] = [
            variable.set(recorder) for variable, recorder in zip(variables, recorders, strict=False)
        ]
        self._renamed: Any = None
        # In a graph that a task runs, LangGraph's namespace lacks that task's where the config of the run does.
        if lacks_task_id(checkpoint_ns) or (is_inside and "|" not in checkpoint_ns):
            own_ns = listeners[0].own_namespace(graph_run, checkpoint_ns)
            if own_ns != checkpoint_ns:
                self._renamed = running_router(RenamedTask((checkpoint_ns,), own_ns))
                self._renamed.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._renamed is not None:
            self._renamed.__exit__(None, None, None)
        for token in self._tokens:
            token.var.reset(token)
        running_task.reset(self._task_token)


def _task_listeners(callbacks: Any) -> list[TaskListener]:
    return [handler for handler in getattr(callbacks, "handlers", ()) if hasattr(handler, "note_task_writes")]


def _note_writes(loop: Any, task_id: str, writes: Any, *, cached: bool) -> None:
    listeners = _task_listeners(loop.manager)
    task = getattr(loop, "tasks", {}).get(task_id) if listeners else None
    if task is not None:
        for listener in listeners:
            listener.note_task_writes(loop, task, writes, cached=cached)


def _give_writes(task: PregelExecutableTask, listeners: list[TaskListener]) -> bool:
    """Gives a task what a recorded one wrote, where the run is given that; LangGraph then commits it."""
    open_tasks = given_tasks_of_run.get()
    given_task = None if open_tasks is None else open_tasks.take(task)
    if open_tasks is None or given_task is None:
        return False
    manager: Any = task.config["callbacks"]
    for listener in listeners:
        listener.note_given_task(manager.parent_run_id, task, given_task, open_tasks=open_tasks)
    task.writes.clear()
    task.writes.extend(copy_writes(given_task))
    return True


def _watch_task(task: PregelExecutableTask, listeners: list[TaskListener]) -> PregelExecutableTask:
    """Announces the task to its listeners; returns the one to run instead, which says what it reads and routes."""
    watched_task, reads = task, None
    if task.name != ENTRY and task.path[0] != PUSH:  # the input of a Send or a call is not read from the state
        watched_task, reads = watch_node(task)
    manager: Any = task.config["callbacks"]
    for listener in listeners:
        listener.note_task_start(manager.parent_run_id, task, reads)
    return watch_routers(watched_task, functools.partial(_announce_router, task, listeners))


@contextmanager
def _announce_router(
    task: PregelExecutableTask, listeners: list[TaskListener], number: int, keys: list[str] | None
) -> Iterator[None]:
    manager: Any = task.config["callbacks"]
    graph_run = manager.parent_run_id
    router = make_router(task.config["configurable"]["checkpoint_ns"], number)
    for listener in listeners:
        listener.note_router_start(graph_run, task, router.ns, keys=keys)
    failure: BaseException | None = None
    try:
        with running_router(router):
            yield
    except BaseException as error:
        failure = error
        raise
    finally:
        for listener in listeners:
            listener.note_router_end(graph_run, task, router.ns, error=failure)
