"""The turns of one node -> the answers of its calls while its own app runs, so that every prompt is the app's.

Invariants: no model is asked; a tool that a turn calls gives back what it gave the team; an app that makes more calls
than there are turns, or a call that no turn is for, is cut short with a reason out of a fixed set.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any, NoReturn
from uuid import UUID

from langchain_core.messages import AIMessage, ToolCall

from marft_bridge.common.errors import GraphError
from marft_bridge.distillation.role_turns import Turn
from marft_bridge.model_calls.given_answers import GivenAnswer
from marft_bridge.model_calls.routing import current_routing
from marft_bridge.model_calls.token_capture import ExactTokens
from marft_bridge.recording.recorder import Recorder
from marft_bridge.replay.recorded_run import RecordedTool, arguments_to_json
from marft_bridge.replay.recorded_tools import RunIt
from trace_store import conventions as c
from trace_store.records import FROM_ENGINE

DISTILLED = f"distilled from the run of a team: no token ids and no log-probs {FROM_ENGINE}"
"""Why such an action is not trained on as a policy's own; re-tokenised, it may be imitated."""


class GivenTurns:
    """What the node says in one episode. See `EpisodeRequest.beginning`."""

    def __init__(self, node: str, turns: Sequence[Turn]) -> None:
        self.node, self.turns = node, turns
        self.turns_given = 0  # in the latest run

    def begin(self, recorder: Recorder) -> TurnAnswers:
        """The answers for one run, none of them given yet."""
        self.turns_given = 0
        return TurnAnswers(self, recorder)


class TurnAnswers:
    """The answers while the app runs. Safe for any number of threads. See `given_answers.Prefix`."""

    def __init__(self, script: GivenTurns, recorder: Recorder) -> None:
        self._script, self._recorder = script, recorder
        self._open_tools = [use.run for turn in script.turns for use in turn.tools]
        self._lock = threading.Lock()

    def answer_call(self, run_id: UUID | None) -> GivenAnswer:
        """The next turn. Raises GraphError, and cuts the episode short, where there is none for this call."""
        span = self._recorder.open_span_of(run_id)
        if span is None or run_id is None:
            _cut_short("the app calls a model where no recorder sees it")
        node = str(span.attributes.get(c.NODE) or "")
        if node != self._script.node:
            _cut_short(f"the app's node {node!r} calls a model too")
        offered = {_tool_name(json.loads(tool)) for tool in self._recorder.tools_of_call(run_id)}
        with self._lock:
            if self._script.turns_given == len(self._script.turns):
                _cut_short("the app asks its node again after the team's last message")
            turn = self._script.turns[self._script.turns_given]
            if missing := [use.run.name for use in turn.tools if use.run.name not in offered]:
                _cut_short(f"the app's node is offered no tool {missing[0]!r}")
            self._script.turns_given += 1
        return _turn_to_answer(turn, node)

    async def await_turn(self, run_id: UUID | None) -> None:
        """Waits for nothing: turns come one by one."""

    def take_tool(self, run_id: UUID) -> RecordedTool | RunIt:
        """What the tool run with this id gave the team; `RunIt` where no turn called it. See `forks.given_tools`."""
        span = self._recorder.open_span_of(run_id)
        if span is None:
            return RunIt()
        name, call_id = span.attributes.get(c.TOOL_NAME), span.attributes.get(c.TOOL_CALL_ID)
        arguments = arguments_to_json(span.attributes.get(c.TOOL_ARGUMENTS))
        with self._lock:
            candidates = [tool for tool in self._open_tools if tool.name == name and tool.arguments == arguments]
            tool = next((tool for tool in candidates if tool.call_id == call_id), next(iter(candidates), None))
            if tool is None:
                return RunIt()
            self._open_tools.remove(tool)
        span.set({c.REPLAYED_FROM: tool.span_id})
        return tool

    def judge_end(self, error: BaseException | None) -> Exception | None:  # noqa: ARG002 - as of `Prefix`
        """Nothing: who planned the episode reads `GivenTurns.turns_given`."""
        return None


def _cut_short(reason: str) -> NoReturn:
    routing = current_routing.get()
    if routing is not None:
        routing.note_cut(reason)
        routing.stop()  # a graph may go on after the error
    raise GraphError(reason)


def _tool_name(tool: Any) -> str:
    """The name of a tool as it was offered, in OpenAI's form or flat."""
    return str((tool.get("function") or tool).get("name"))


def _turn_to_answer(turn: Turn, node: str) -> GivenAnswer:
    reason = "tool_calls" if turn.tools else "stop"
    calls = [
        ToolCall(name=use.call["name"], args=use.call["arguments"], id=use.call["id"], type="tool_call")
        for use in turn.tools
    ]
    message = AIMessage(turn.text, tool_calls=calls, response_metadata={"finish_reason": reason})
    attributes = {c.FINISH_REASONS: [reason], c.UNTRAINABLE: DISTILLED}
    return GivenAnswer(message, ExactTokens(node=node, finish_reason=reason, given=attributes))
