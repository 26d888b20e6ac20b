"""A task of LangGraph's whose node is a function -> the same task, which knows what its function has read of the state.

The node's runnable is the first step of the task's runnable. The task gets a copy of the latter in which that step says
when the function begins and ends. Invariant: the function is called by LangGraph, with the state itself, and sees
neither a frame nor an object of ours around it; a runnable that it returns is run with the state as LangGraph does.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from collections.abc import Collection
from dataclasses import fields
from operator import attrgetter
from types import CodeType
from typing import Any

from langchain_core.runnables import Runnable
from langchain_core.runnables.config import run_in_executor
from langgraph.prebuilt import ToolNode
from langgraph.types import PregelExecutableTask

from marft_bridge.common.library_internals import RunnableCallable
from marft_bridge.recording.function_reads import callable_to_reads, plain_fields
from marft_bridge.recording.node_bytecode import ReadKeys
from marft_bridge.recording.state_reads import Reads

# Where LangGraph runs a plain function on an event loop, this code calls it, in a thread.
_IN_EXECUTOR: CodeType | None = next(
    (code for code in run_in_executor.__code__.co_consts if inspect.iscode(code) and code.co_name == "wrapper"), None
)


_TASK_FIELDS = [field.name for field in fields(PregelExecutableTask)]
_task_values = attrgetter(*_TASK_FIELDS)
_set_field = object.__setattr__


def watch_node(task: PregelExecutableTask) -> tuple[PregelExecutableTask, Reads]:
    """The task with the reads of its node; the same task where nothing can be known about them."""
    steps = getattr(task.proc, "steps", None)
    if not steps:
        return task, Reads()
    step = steps[0]
    if type(step) is ToolNode:
        return task, Reads(_tools_to_reads(step, task.input) or Reads().so_far())
    if type(step) is not RunnableCallable or step.explode_args:
        return task, Reads()
    reads = Reads()
    watched_proc = copy_of(task.proc)
    watched_proc.steps = [_WatchedStep(step, reads), *steps[1:]]
    return task_with(task, watched_proc), reads


def _tools_to_reads(node: Any, state: Any) -> ReadKeys | None:
    """LangGraph's own node reads the messages first; its tools get more where they declare it. None: not known."""
    key = getattr(node, "_messages_key", None)
    arguments = getattr(node, "_injected_args", None)
    wrappers = (getattr(node, "_wrap_tool_call", node), getattr(node, "_awrap_tool_call", node))
    cls: Any = type(state)
    keys: Collection[str] = state if cls is dict else plain_fields(cls)
    if not isinstance(arguments, dict) or not isinstance(key, str) or key not in keys or "__type" in keys:
        return None
    reads_messages_only = wrappers == (None, None) and not any(
        getattr(injected, "state", True) or getattr(injected, "runtime", True) for injected in arguments.values()
    )
    return ReadKeys(frozenset([key]), frozenset([key]) if reads_messages_only else None)


class _WatchedStep(Runnable[Any, Any]):
    """The first step of a task: LangGraph's own, with the reads of its function."""

    def __init__(self, step: Any, reads: Reads) -> None:
        self._step = step
        self._reads = reads

    def invoke(self, input: Any, config: Any = None, **kwargs: Any) -> Any:
        """As LangGraph's."""
        reads = self._reads
        reads.begin(callable_to_reads(self._step.func, input))
        reads.runs_inside(sys._getframe())
        step = copy_of(self._step)
        step.recurse = False
        has_returned = False
        try:
            result = step.invoke(input, config, **kwargs)
            has_returned = True
        finally:
            returned_runnable = has_returned and self._step.recurse and _is_runnable(result)
            reads.end(has_returned=has_returned, gave_state_on=returned_runnable)
        return result.invoke(input, config) if returned_runnable else result

    async def ainvoke(self, input: Any, config: Any = None, **kwargs: Any) -> Any:
        """As LangGraph's."""
        if not self._step.afunc:
            return self.invoke(input, config)
        reads, afunc = self._reads, self._step.afunc
        step = copy_of(self._step)
        step.recurse = False
        if _runs_in_executor(afunc):
            reads.begin(callable_to_reads(afunc.args[1], input))
            if _IN_EXECUTOR is not None:
                reads.runs_in_worker(_IN_EXECUTOR, input)
        else:
            reads.begin(callable_to_reads(afunc, input))
            step.afunc = functools.partial(_call_and_note, afunc, reads)
        has_returned = False
        try:
            result = await step.ainvoke(input, config, **kwargs)
            has_returned = True
        finally:
            returned_runnable = has_returned and self._step.recurse and _is_runnable(result)
            reads.end(has_returned=has_returned, gave_state_on=returned_runnable)
        return await result.ainvoke(input, config) if returned_runnable else result


def _is_runnable(result: Any) -> bool:
    return type(result) is not dict and isinstance(result, Runnable)  # LangChain's classes take long to tell


def _call_and_note(afunc: Any, reads: Reads, /, *args: Any, **kwargs: Any) -> Any:
    coroutine = afunc(*args, **kwargs)
    reads.runs_as(coroutine)
    return coroutine


def _runs_in_executor(afunc: Any) -> bool:
    """Whether it is what LangGraph makes of a plain function for its event loop."""
    return (
        type(afunc) is functools.partial
        and afunc.func is run_in_executor
        and len(afunc.args) == 2
        and not afunc.keywords
    )


def task_with(task: PregelExecutableTask, proc: Any) -> PregelExecutableTask:
    """The task with another runnable: `dataclasses.replace` of the same costs four times as much."""
    copied = object.__new__(PregelExecutableTask)
    for _ in map(_set_field, itertools.repeat(copied), _TASK_FIELDS, _task_values(task)):
        pass
    _set_field(copied, "proc", proc)
    return copied


def copy_of(runnable: Any) -> Any:
    """A shallow copy: `copy.copy` of the same costs ten times as much."""
    copied = object.__new__(type(runnable))
    copied.__dict__.update(runnable.__dict__)
    return copied
