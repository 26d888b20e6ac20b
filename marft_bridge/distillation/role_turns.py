r"""A recorded run of a team -> what one node says in its place: a block for each agent's message, the answer last.

    <reasoner>
    Add the two numbers.
    </reasoner>
    5

A block is headed by the agent's name on a line of its own; the answer stands behind the last block, bare. A call of a
tool ends a turn; a call that hands over to an agent, or asks one, is a line of JSON in its caller's block. Invariant: a
text that would not be read back as it was written is refused, with a reason out of a fixed set.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from marft_bridge.common.errors import GraphError
from marft_bridge.ingest.recorded_chats import UnusableChatError, span_to_answer
from marft_bridge.recording.redaction import REDACTED
from marft_bridge.replay.recorded_run import RecordedRun, RecordedTool, spans_to_run
from trace_store.records import SpanRow

_BLOCK = re.compile(r"<([^<>\n]+)>\n(?:(.*?)\n)??</\1>(?:\n|\Z)", re.DOTALL)


class UndistillableError(Exception):
    """A run cannot be said by one node; the message is the reason, without recorded text."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A tool call of a model, and the run of the tool that it led to."""

    call: Mapping[str, Any]  # id, name and arguments
    run: RecordedTool


@dataclass(frozen=True, slots=True)
class RoleMessage:
    """What one agent said in one call."""

    role: str
    text: str
    tools: tuple[ToolUse, ...] = ()


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer of the node."""

    text: str
    tools: tuple[ToolUse, ...] = ()


def spans_to_messages(spans: Sequence[SpanRow]) -> list[RoleMessage]:
    """The messages of a recorded run in the order of D, failed calls left out.

    Raises:
        UndistillableError: part of it was not recorded, is redacted or no text, or a tool was run without a call of it.
    """
    try:
        run = spans_to_run(spans)
    except GraphError as error:
        episode_id = spans[0].trace_id if spans else ""
        raise UndistillableError(str(error).removeprefix("replay: ").replace(f" {episode_id}", "")) from None
    by_id = {span.span_id: span for span in spans}
    open_tools = [tool for tool in run.tools if not tool.must_run]
    messages = [
        _span_to_message(by_id[action.action_id], action.node, open_tools)
        for action in run.trajectory.actions
        if by_id[action.action_id].status == "ok"
    ]
    if open_tools:
        raise UndistillableError(f"the team ran the tool {open_tools[0].name!r} without a model that called it")
    if not messages:
        raise UndistillableError("no model was called in it")
    _refuse_redacted(run, messages)
    return messages


def _span_to_message(span: SpanRow, role: str, open_tools: list[RecordedTool]) -> RoleMessage:
    """A call's message. The tools that it called are taken out of `open_tools`."""
    if not role or role != role.strip() or set(role) & set("<>\n"):
        raise UndistillableError("a call belongs to no agent whose name can head a block")
    try:
        answer = span_to_answer(span)
    except UnusableChatError as error:
        raise UndistillableError(f"of a call of the team: {error}") from None
    lines, tools = [str(answer["content"]).strip()], []
    for tool_call in answer.get("tool_calls", ()):
        call = {"id": tool_call["id"], **tool_call["function"]}
        run = next((tool for tool in open_tools if _is_run_of(tool, call)), None)
        if run is None:
            lines.append(json.dumps({"name": call["name"], "arguments": call["arguments"]}, ensure_ascii=False))
        else:
            open_tools.remove(run)
            tools.append(ToolUse(call, run))
    return RoleMessage(role, "\n".join(filter(None, lines)), tuple(tools))


def _is_run_of(tool: RecordedTool, call: Mapping[str, Any]) -> bool:
    if tool.name != call["name"]:
        return False
    if None in (tool.call_id, call["id"]):
        return bool(tool.arguments == call["arguments"])
    return bool(tool.call_id == call["id"])


def _refuse_redacted(run: RecordedRun, messages: Sequence[RoleMessage]) -> None:
    recorded = (
        [message.text for message in messages],
        [(tool.arguments, tool.result, tool.output) for tool in run.tools],
    )
    if REDACTED in json.dumps(recorded, default=str):
        raise UndistillableError("its record is redacted")


def messages_to_answers(messages: Sequence[RoleMessage]) -> list[int]:
    """The messages that may be the team's answer, the likeliest first: the last of each agent, from the end on.

    The very last one may be that of a router, which only ends the run.
    """
    last_of_agent: dict[str, int] = {}
    for index in reversed(range(len(messages))):
        last_of_agent.setdefault(messages[index].role, index)
    return [index for index in last_of_agent.values() if messages[index].text and not messages[index].tools]


def messages_to_turns(messages: Sequence[RoleMessage], answer: int, *, each_apart: bool) -> list[Turn]:
    """The node's turns up to the message that is the answer; what the team said after it is left out.

    Args:
        answer: place of that message.
        each_apart: whether every message is a turn; else only calls of tools end one.

    Raises:
        UndistillableError: a turn cannot be told from the marks of its blocks.
    """
    turns: list[Turn] = []
    blocks: list[tuple[str, str]] = []

    def end_turn(text: str, tools: tuple[ToolUse, ...] = ()) -> None:
        turn_text = "".join([*map(_to_block, blocks), text]).rstrip("\n")
        if text_to_blocks(turn_text) != (blocks, text):
            raise UndistillableError("a text of it holds the mark of a block")
        turns.append(Turn(turn_text, tools))
        blocks.clear()

    for message in messages[:answer]:
        blocks.append((message.role, message.text))
        if message.tools or each_apart:
            end_turn("", message.tools)
    end_turn(messages[answer].text)
    return turns


def _to_block(block: tuple[str, str]) -> str:
    role, text = block
    return f"<{role}>\n{text}\n</{role}>\n" if text else f"<{role}>\n</{role}>\n"


def text_to_blocks(text: str) -> tuple[list[tuple[str, str]], str]:
    """A turn as it was written -> (agent, text) of each block, and the answer behind them; "" where there is none."""
    blocks: list[tuple[str, str]] = []
    while (match := _BLOCK.match(text)) is not None:
        blocks.append((match[1], match[2] or ""))
        text = text[match.end() :]
    return blocks, text
