"""The tool runs of a recorded episode -> those whose results a fork gives again, each to its own run.

Given again are the tools that began before the first answer that is sampled anew was there, so that none of them can
have read it; a tool that only itself can do again (it calls models, or gives back an object of the app's) runs. One
that the app cancelled waits until it is cancelled again. Every later tool runs. Ids that a run draws stand for each
other in arguments, and results have those of the fork (see `replay.drawn_ids`). Invariants: no result is given twice,
or to a tool run of another node or another tool call; before anything is sampled, a tool that the record does not have
is a divergence, and it does not run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal
from uuid import UUID

from marft_bridge.common.errors import GraphError
from marft_bridge.model_calls.routing import current_routing
from marft_bridge.recording.recorder import Recorder
from marft_bridge.replay.divergence import Divergence
from marft_bridge.replay.drawn_ids import DrawnIds
from marft_bridge.replay.recorded_run import RecordedRun, RecordedTool, arguments_to_json, is_drawn_id
from marft_bridge.replay.recorded_tools import RunIt, recorded_tools, tool_divergence, tool_to_now, tools_like
from trace_store import conventions as c

TakeTool = Callable[[UUID], RecordedTool | RunIt]
"""`PrefixAnswers.take_tool`."""
ToolChoice = Literal["recorded", "run"]
"""Whether tools before the fork give their recorded results, or run again."""


@dataclass(frozen=True, slots=True)
class PrefixTools:
    """The tool runs of the parent."""

    given: Sequence[RecordedTool]  # by their start
    later: Sequence[RecordedTool]  # that run in a fork too; with the answers at hand, they may come early
    drawn_ids: Set[str] = frozenset()  # of tool calls, that the app drew itself: each run of it draws others

    def leave_out(self, copied_ids: Set[str]) -> PrefixTools:
        """The rest of them, where these runs are of tasks that do not run."""
        return replace(self, given=[tool for tool in self.given if tool.span_id not in copied_ids])

    def begin(self, recorder: Recorder, ids: DrawnIds) -> GivenTools:
        """The results for one run, none of them given yet; `ids`: which ids of the record are which of this run."""
        return GivenTools(self, recorder, ids)


class GivenTools:
    """The tool results of one fork while it is run. Its caller holds a lock."""

    def __init__(self, tools: PrefixTools, recorder: Recorder, ids: DrawnIds) -> None:
        self._open_tools, self._later_tools = list(tools.given), list(tools.later)
        self._ids = ids
        self._drawn_ids = tools.drawn_ids
        self._recorded_ids: dict[str, str] = {}  # id of a tool call that was drawn in this fork -> in the record
        self._recorder = recorder

    def take(self, run_id: UUID, *, is_live: bool) -> RecordedTool | RunIt | Divergence:
        """What the tool run with this id does; `is_live`: an answer was sampled anew, so that it may be a new one."""
        span = self._recorder.open_span_of(run_id)
        if span is None:
            return RunIt()  # outside any graph: not recorded either
        name, node = str(span.attributes[c.TOOL_NAME]), str(span.attributes.get(c.NODE) or "")
        call_id = span.attributes.get(c.TOOL_CALL_ID)
        arguments = arguments_to_json(span.attributes.get(c.TOOL_ARGUMENTS))
        same_tools = self._find_same(self._open_tools, name, node, call_id=call_id, arguments=arguments)
        if same_tools:
            tool = same_tools[0]
            self._open_tools.remove(tool)
            if call_id is not None and tool.call_id is not None:
                self._recorded_ids[call_id] = tool.call_id
            self._ids.note_pair(tool.arguments, arguments)
            if tool.must_run:
                return RunIt()
            span.set({c.REPLAYED_FROM: tool.span_id})
            return tool_to_now(tool, self._ids)
        if is_live or self._find_same(self._later_tools, name, node, call_id=call_id, arguments=arguments):
            return RunIt()
        open_tools = tools_like(self._open_tools, name, node, call_id=call_id)
        return tool_divergence(node, name, arguments, open_tools=open_tools, ids=self._ids)

    def _find_same(
        self, tools: Sequence[RecordedTool], name: str, node: str, *, call_id: str | None, arguments: Any
    ) -> list[RecordedTool]:
        """Those of these recorded runs that a run is: of its node, its tool call and its arguments."""
        of_call = [
            tool
            for tool in tools
            if (tool.name, tool.node) == (name, node) and self._is_same_call(tool.call_id, call_id)
        ]
        return self._ids.find_same(of_call, arguments, to_json=lambda tool: tool.arguments)

    def _is_same_call(self, recorded_id: str | None, call_id: str | None) -> bool:
        """Whether two tool calls are one: by their ids, or where the app drew both, by which have come so far."""
        if call_id is None or call_id == recorded_id or call_id in self._drawn_ids:
            return call_id == recorded_id
        if recorded_id not in self._drawn_ids or not is_drawn_id(call_id):
            return False
        known_id = self._recorded_ids.get(call_id)
        return known_id == recorded_id if known_id is not None else recorded_id not in self._recorded_ids.values()


def run_to_tools(
    run: RecordedRun, sampled_ids: Sequence[str], is_redacted: Callable[[RecordedTool], bool]
) -> PrefixTools:
    """The tools of a run, where the calls of these actions are made anew.

    Raises:
        GraphError: a result that would be given again is redacted.
    """
    anew_ids = set(sampled_ids)
    live_from_ns = min(call.ended_ns for call in run.calls if call.action_id in anew_ids)
    started_ns = {span.span_id: span.start_ns for span in run.spans}
    given = [tool for tool in run.tools if started_ns[tool.span_id] < live_from_ns]
    for tool in given:
        if not tool.must_run and is_redacted(tool):
            raise GraphError(
                f"fork: the record of episode {run.episode_id} is redacted (tool {tool.name} of node {tool.node}), so"
                " its result cannot be given again as it was; let tools run with --tools run"
            )
    answered_ids = {tool_call["id"] for call in run.calls if call.answer for tool_call in call.answer.tool_calls}
    call_ids = {tool.call_id for tool in run.tools if tool.call_id is not None} - answered_ids
    drawn_ids = frozenset(call_id for call_id in call_ids if is_drawn_id(call_id))
    given_ids = {tool.span_id for tool in given}
    return PrefixTools(given, [tool for tool in run.tools if tool.span_id not in given_ids], drawn_ids)


# -- in place of LangChain's tools ----------------------------------------------------------------------------------


class _ToolsOfForks:
    """Asks the fork in whose context a tool runs; see `recorded_tools.ToolSource`."""

    def take_tool(self, run_id: UUID) -> RecordedTool | RunIt:
        routing = current_routing.get()
        take_tool: TakeTool | None = getattr(None if routing is None else routing.prefix, "take_tool", None)
        return RunIt() if take_tool is None else take_tool(run_id)

    def tool_running(self) -> AbstractContextManager[Any]:
        return nullcontext()


@contextmanager
def given_tools() -> Iterator[None]:
    """While the block runs, tools of forks give what their prefixes say; all other tools run."""
    with recorded_tools(_ToolsOfForks()):
        yield
