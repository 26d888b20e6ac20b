"""A tool that an app runs -> a copy of it that gives back what is recorded, or runs, and says so either way.

The copy parses its arguments and reports to callbacks as the tool itself: only the function beneath is replaced.
Invariant: LangChain's methods are restored when the block ends.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import functools
import json
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol
from uuid import UUID

from langchain_core.tools import BaseTool
from langchain_core.tools.base import ToolException

from marft_bridge.replay.divergence import Divergence, value_difference
from marft_bridge.replay.drawn_ids import DrawnIds, number_ids
from marft_bridge.replay.recorded_run import RecordedTool

_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class RunIt:
    """The tool itself is to run."""


class ToolSource(Protocol):
    """Knows what the tools of a record gave back."""

    def take_tool(self, run_id: UUID) -> RecordedTool | RunIt:
        """What the tool run with this id did. Raises DivergedError where the record has no such run."""

    def tool_running(self) -> Any:
        """A context manager around a tool that runs itself."""


class _ToolRun:
    """One run of a tool: decided once, however many methods it goes through."""

    def __init__(self, source: ToolSource, run_id: UUID) -> None:
        self._source, self._run_id = source, run_id
        self._recorded: RecordedTool | RunIt | None = None

    def decide(self) -> RecordedTool | RunIt:
        if self._recorded is None:
            self._recorded = self._source.take_tool(self._run_id)
        return self._recorded

    def running(self) -> Any:
        return self._source.tool_running()


def tools_like(tools: Sequence[RecordedTool], name: str, node: str, *, call_id: str | None) -> list[RecordedTool]:
    """The recorded runs that a run of this tool may be: of its node and its call where there are such."""
    candidates = [tool for tool in tools if tool.name == name]
    candidates = [tool for tool in candidates if tool.node == node] or candidates
    if call_id is not None:
        candidates = [tool for tool in candidates if tool.call_id == call_id] or candidates
    return candidates


def tool_divergence(
    node: str, name: str, arguments: Any, *, open_tools: Sequence[RecordedTool], ids: DrawnIds | None = None
) -> Divergence:
    """What is said of a tool run that the record does not have.

    Args:
        arguments: of the run, as JSON.
        open_tools: those that it may have been.
        ids: which of the record stand for which of the run, as far as that is known; None: each for itself.
    """
    if not open_tools:
        text = f"it runs the tool {name}, and the record has no such run that is left"
        return Divergence("tool", node, None, text=text, replayed=json.dumps(arguments, default=str))
    recorded = open_tools[0].arguments
    difference = value_difference(number_ids(recorded), number_ids(arguments))
    if difference is None:  # but for ids that stand for others
        difference = value_difference(recorded if ids is None else ids.to_now(recorded), arguments)
    path, recorded_words, words = difference or ("", None, None)
    text = f"it runs the tool {name} with other arguments{f', at {path}' if path else ''}"
    return Divergence("tool", node, None, text=text, recorded=recorded_words, replayed=words)


def tool_to_now(tool: RecordedTool, ids: DrawnIds) -> RecordedTool:
    """What a recorded run gave, or raised, with the ids of now in place of the record's; new ones stay as they are."""
    ids.note_given([tool.result, tool.output])
    error = None if tool.error is None else replace(tool.error, text=ids.to_now(tool.error.text))
    return replace(tool, result=ids.to_now(tool.result), output=ids.to_now(tool.output), error=error)


@contextmanager
def recorded_tools(source: ToolSource) -> Iterator[None]:
    """While the block runs, every tool is asked of `source` first."""
    originals = {name: vars(BaseTool)[name] for name in ("run", "arun")}

    def stand_in(name: str) -> Callable[..., Any]:
        original = originals[name]

        @functools.wraps(original)
        def method(tool: BaseTool, *args: Any, **kwargs: Any) -> Any:  # for a coroutine function, calling is enough
            run_id = kwargs.pop("run_id", None) or uuid.uuid4()
            return original(_copy_with(tool, _ToolRun(source, run_id)), *args, run_id=run_id, **kwargs)

        return method

    with _lock:
        for name in originals:
            setattr(BaseTool, name, stand_in(name))
    try:
        yield
    finally:
        with _lock:
            for name, original in originals.items():
                setattr(BaseTool, name, original)


def _copy_with(tool: BaseTool, tool_run: _ToolRun) -> BaseTool:
    stand_in = copy.copy(tool)
    run, arun = tool._run, tool._arun

    @functools.wraps(run)  # LangChain reads from the signature what a tool wants to be given
    def recorded_run(*args: Any, **kwargs: Any) -> Any:
        recorded = tool_run.decide()
        if isinstance(recorded, RunIt):
            with tool_run.running():
                return run(*args, **kwargs)
        return _give_back(stand_in, recorded)

    @functools.wraps(arun)
    async def recorded_arun(*args: Any, **kwargs: Any) -> Any:
        recorded = tool_run.decide()
        if isinstance(recorded, RunIt):
            with tool_run.running():
                return await arun(*args, **kwargs)
        if recorded.was_cancelled:
            await asyncio.Event().wait()  # the app cancels it again: when, the app alone knows
        return _give_back(stand_in, recorded)

    # On the object alone, beside the fields: the class stays, by which LangChain tells which methods a tool has.
    stand_in.__dict__.update(_run=recorded_run, _arun=recorded_arun)
    return stand_in


def _give_back(tool: BaseTool, recorded: RecordedTool) -> Any:
    output = recorded.output or {}
    if recorded.was_cancelled:  # a sync tool is cancelled by nobody: it passed on that something it waited for was
        raise concurrent.futures.CancelledError
    if recorded.error is not None:
        raise recorded.error.to_exception()
    if "error" in output:
        tool.handle_tool_error = _error_to_content(output["error"])
        raise ToolException(recorded.result)
    content = output.get("content", output.get("value", recorded.result))
    return (content, output.get("artifact")) if tool.response_format == "content_and_artifact" else content


def _error_to_content(content: Any) -> Callable[[ToolException], Any]:
    return lambda _: content
