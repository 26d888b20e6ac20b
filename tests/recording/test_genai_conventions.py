"""Owns: spans follow the GenAI conventions, release 0.1.0, and rows that were written before it still read.

- Every span has the name, the attributes and the kind that the conventions give it, and no name that they have dropped.
- A message of LangChain becomes one of the conventions, with the same texts, ids and arguments.
- The exported spans say which schema they follow, on the scope and on the resource; the journal says so on the root.
- `genai_1_44_rows.json` holds one run as it was recorded before: its D, texts, tool calls and chats are as today's.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langgraph.graph import START, StateGraph
from support.edge_rig import edges_of, node_of, recorded_traces, says
from support.ingest_rig import hand_made, request
from support.paths import ROOT
from support.tool_team import D_BY_HAND, THREAD, run_tool_team, tool_team

from marft_bridge.comparison.changes import _tool_calls_to_text
from marft_bridge.ingest.conventions import span_to_reading
from marft_bridge.ingest.otlp import protobuf_to_spans
from marft_bridge.ingest.recorded_chats import RecordedChat, UnusableChatError, span_to_chat
from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.span_attributes import provider_name, request_to_attributes
from marft_bridge.recording.span_messages import message_to_parts, messages_to_text
from marft_bridge.recording.wrap import wrap
from marft_bridge.rewards.facts import RunView, run_to_tool_calls
from marft_bridge.traces.drawing import messages_to_texts
from marft_bridge.view.store_queries import spans_to_tools
from trace_store import conventions as c
from trace_store.assemble import spans_to_trajectory
from trace_store.journal import Journal
from trace_store.records import SpanRow

# The names of release 0.1.0 that this recorder writes, by the operation of the span.
COMMON = {"gen_ai.operation.name", "gen_ai.conversation.id"}
NAMES = {
    "invoke_workflow": {*COMMON, "gen_ai.agent.name"},
    "invoke_agent": {*COMMON, "gen_ai.agent.name"},
    "chat": {*COMMON, "gen_ai.provider.name", "gen_ai.input.messages", "gen_ai.output.messages"},
    "execute_tool": {
        *COMMON,
        *("gen_ai.tool.name", "gen_ai.tool.type", "gen_ai.tool.call.id"),
        *("gen_ai.tool.call.arguments", "gen_ai.tool.call.result"),
    },
}


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(Journal(tmp_path / "journal"))


def todays_rows(recorder: Recorder) -> list[SpanRow]:
    run_tool_team(wrap(tool_team(), recorder))
    (spans,) = recorded_traces(recorder)
    return spans


def former_rows() -> list[SpanRow]:
    """One run of the same team, as this recorder wrote it when it followed the conventions of 1.44."""
    rows = json.loads((ROOT / "tests" / "recording" / "genai_1_44_rows.json").read_text())
    return [SpanRow(**row) for row in rows]


def test_every_span_has_the_attributes_of_its_operation_and_no_others_of_the_conventions(recorder: Recorder) -> None:
    for span in todays_rows(recorder):
        assert {key for key in span.attributes if key.startswith(("gen_ai.", "error."))} == NAMES[span.operation]
        assert span.attributes[c.CONVERSATION_ID] == THREAD
        assert span.convention == "genai-0.1.0/marft-2"


def test_spans_are_named_after_their_operation_and_what_it_is_of(recorder: Recorder) -> None:
    names = sorted(span.name for span in todays_rows(recorder))
    assert names == [
        *("chat", "chat", "chat", "execute_tool look_up"),
        *("invoke_agent plan", "invoke_agent worker", "invoke_agent worker", "invoke_agent worker"),
        *("invoke_agent worker/tools", "invoke_workflow weather"),
    ]


def test_the_journal_says_on_the_root_which_schema_its_spans_follow(recorder: Recorder) -> None:
    roots = [span for span in todays_rows(recorder) if c.SCHEMA in span.attributes]
    assert [(root.parent_span_id, root.attributes[c.SCHEMA]) for root in roots] == [
        (None, "https://opentelemetry.io/schemas/gen-ai/0.1.0")
    ]


def test_a_run_on_no_thread_has_no_conversation(recorder: Recorder) -> None:
    graph = tool_team()
    graph.checkpointer = None
    wrap(graph, recorder).invoke({"messages": [("user", "Oslo?")]})
    (spans,) = recorded_traces(recorder)
    assert not any(c.CONVERSATION_ID in span.attributes for span in spans)


def test_what_failed_says_the_class_of_its_error(recorder: Recorder) -> None:
    def breaks(state: dict[str, Any]) -> dict[str, Any]:
        raise ZeroDivisionError("a text that may say anything")

    graph = StateGraph(dict)
    graph.add_node("breaks", breaks)
    graph.add_edge(START, "breaks")
    with pytest.raises(ZeroDivisionError):
        wrap(graph.compile(), recorder).invoke({})
    (spans,) = recorded_traces(recorder)
    assert [span.attributes[c.ERROR_TYPE] for span in spans] == ["ZeroDivisionError", "ZeroDivisionError"]


MESSAGES: dict[str, tuple[BaseMessage, dict[str, Any]]] = {
    "user": (HumanMessage("hi"), {"role": "user", "parts": [{"type": "text", "content": "hi"}]}),
    "named": (
        HumanMessage("hi", name="ada"),
        {"role": "user", "parts": [{"type": "text", "content": "hi"}], "name": "ada"},
    ),
    "system": (SystemMessage("be kind"), {"role": "system", "parts": [{"type": "text", "content": "be kind"}]}),
    "other role": (
        ChatMessage("hm", role="critic"),
        {"role": "critic", "parts": [{"type": "text", "content": "hm"}]},
    ),
    "empty": (AIMessage(""), {"role": "assistant", "parts": [{"type": "text", "content": ""}]}),
    "calls": (
        AIMessage("so", tool_calls=[{"name": "f", "args": {"x": [1]}, "id": "1"}]),
        {
            "role": "assistant",
            "parts": [
                {"type": "text", "content": "so"},
                {"type": "tool_call", "id": "1", "name": "f", "arguments": {"x": [1]}},
            ],
        },
    ),
    "call that is no JSON": (
        AIMessage("", invalid_tool_calls=[{"name": "f", "args": "{x", "id": "1", "error": "no JSON"}]),
        {"role": "assistant", "parts": [{"type": "tool_call", "id": "1", "name": "f", "arguments": "{x"}]},
    ),
    "blocks": (
        AIMessage(
            content=[
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "reasoning", "reasoning": "oh"},
                "plain",
                {"type": "text", "text": "so", "index": 0},
                {"type": "tool_use", "id": "1", "name": "f", "input": {}},
            ],
            tool_calls=[{"name": "f", "args": {}, "id": "1"}],
        ),
        {
            "role": "assistant",
            "parts": [
                {"type": "reasoning", "content": "hm"},
                {"type": "reasoning", "content": "oh"},
                {"type": "text", "content": "plain"},
                {"type": "text", "content": "so"},
                {"type": "tool_call", "id": "1", "name": "f", "arguments": {}},
            ],
        },
    ),
    "image": (
        HumanMessage(content=[{"type": "image_url", "image_url": {"url": "https://a/b.png"}}, {"odd": 1}]),
        {
            "role": "user",
            "parts": [
                {"type": "image_url", "image_url": {"url": "https://a/b.png"}},
                {"type": "generic", "odd": 1},
            ],
        },
    ),
    "tool": (
        ToolMessage("rainy", tool_call_id="1", name="f"),
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "1", "response": "rainy"}], "name": "f"},
    ),
    "function": (
        FunctionMessage("rainy", name="f"),
        {"role": "function", "parts": [{"type": "tool_call_response", "id": None, "response": "rainy"}], "name": "f"},
    ),
}


@pytest.mark.parametrize("kind", MESSAGES)
def test_a_message_becomes_one_of_the_conventions(kind: str) -> None:
    message, expected = MESSAGES[kind]
    assert message_to_parts(message) == expected
    assert messages_to_text([message, message]) == json.dumps([expected, expected])


@pytest.mark.parametrize("text", ["", 'a "quote" \\ and\na line', "Grüße, \u2028 \x7f \ud800", "{}"])
@pytest.mark.parametrize("make", [HumanMessage, SystemMessage, AIMessage, lambda t: ChatMessage(t, role='a "role"')])
def test_a_plain_text_is_written_as_json_writes_it(make: Any, text: str) -> None:
    message = make(text)
    assert messages_to_text([message]) == json.dumps([message_to_parts(message)])
    assert messages_to_text([]) == "[]"


@pytest.mark.parametrize(
    ("provider", "name"),
    [("openai", "openai"), ("amazon_bedrock", "aws.bedrock"), ("google_genai", "gcp.gemini"), ("xai", "x_ai")],
)
def test_a_provider_goes_by_its_name_in_the_conventions(provider: str, name: str) -> None:
    assert provider_name(provider) == name
    assert provider_name(None) is None


def test_parameters_are_written_where_they_say_something() -> None:
    written = request_to_attributes({"n": 1, "stream": False, "temperature": 0.5, "stop": "\n", "top_k": 5})
    assert {key: value for key, value in written.items() if value is not None} == {
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_k": 5,
        "gen_ai.request.stop_sequences": ["\n"],
    }
    more = request_to_attributes({"n": 3, "stream": True, "max_completion_tokens": 9})
    assert (more[c.REQUEST_CHOICES], more[c.REQUEST_STREAM], more[c.REQUEST_MAX_TOKENS]) == (3, True, 9)


# -- rows from before ---------------------------------------------------------------------------------------------


def chat_or_reason(span: SpanRow) -> RecordedChat | str:
    try:
        return span_to_chat(span)
    except UnusableChatError as error:
        return str(error)


def tools_of(spans: list[SpanRow]) -> list[tuple[str, str, bool]]:
    trajectory = spans_to_trajectory(spans)
    calls = run_to_tool_calls(RunView(trajectory.episode.task, None, trajectory, spans=spans))
    return [(call.name, call.agent, call.ok) for call in calls]


def answers_of(spans: list[SpanRow]) -> list[str]:
    """What each action answered, or the tools that it called, in topological order."""
    by_id = {span.span_id: span for span in spans}
    return [
        action.completion or _tool_calls_to_text(by_id[action.action_id])
        for action in spans_to_trajectory(spans).actions
    ]


def in_order(spans: list[SpanRow]) -> list[SpanRow]:
    return sorted((span for span in spans if span.operation == c.CHAT), key=lambda span: span.start_ns)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (AIMessage(""), ""),
        (AIMessage("", tool_calls=[{"name": "f", "args": {}, "id": "1"}]), ""),
        (AIMessage([{"type": "reasoning", "reasoning": "hm"}, {"type": "text", "text": "so"}]), "so"),
    ],
)
def test_an_answer_without_a_text_is_an_empty_one_and_thoughts_are_no_part_of_it(
    answer: AIMessage, text: str, recorder: Recorder
) -> None:
    graph = StateGraph(dict)
    graph.add_node("asks", node_of(says(answer), [], {}))
    graph.add_edge(START, "asks")
    wrap(graph.compile(), recorder).invoke({})
    (spans,) = recorded_traces(recorder)
    assert [action.completion for action in spans_to_trajectory(spans).actions] == [text]


@pytest.mark.parametrize(("convention", "text"), [("genai-1.44/marft-2+genai", None), ("genai-0.1.0/marft-2", "")])
def test_a_stored_action_keeps_the_text_that_it_had(convention: str, text: str | None) -> None:
    parts = [{"type": "tool_call", "id": "1", "name": "f", "arguments": {}}]
    answer = {c.OUTPUT_MESSAGES: json.dumps([{"role": "assistant", "parts": parts}])}
    rows = [
        replace(span, convention=convention, attributes=span.attributes | (answer if span.operation == c.CHAT else {}))
        for span in former_rows()
    ]
    assert {action.completion for action in spans_to_trajectory(rows).actions} == {text}


@pytest.mark.parametrize("written", ["before", "today"])
def test_rows_of_both_times_give_the_same_game_the_same_texts_and_the_same_tools(
    written: str, recorder: Recorder
) -> None:
    spans = former_rows() if written == "before" else todays_rows(recorder)
    assert edges_of(spans_to_trajectory(spans)) == D_BY_HAND
    assert answers_of(spans) == ["look it up", 'look_up({"city": "Oslo"})', "rain, then"]
    assert tools_of(spans) == [("look_up", "worker", True)]
    chats = in_order(spans)
    assert list(spans_to_tools(spans)) == [chats[1].span_id]
    asked = [text for _, text in messages_to_texts(chats[2].attributes[c.INPUT_MESSAGES])]
    assert asked[:2] == ["what is it like in Oslo?", "look it up"]
    assert "look_up" in asked[2]
    assert "Oslo is rainy" in asked[3]


def test_chats_of_both_times_are_made_ids_of_in_the_same_way(recorder: Recorder) -> None:
    before, today = in_order(former_rows()), in_order(todays_rows(recorder))
    assert (
        chat_or_reason(before[0])
        == chat_or_reason(today[0])
        == RecordedChat(
            ({"role": "user", "content": "what is it like in Oslo?"},),
            {"role": "assistant", "content": "look it up"},
            (),
        )
    )
    assert chat_or_reason(before[1]) == chat_or_reason(today[1]) == "it offered tools that the record does not hold"
    assert chat_or_reason(before[2]).prompt[3]["content"] == "Oslo is rainy"  # type: ignore[union-attr]
    assert len(chat_or_reason(today[2]).prompt) == 4  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("convention", "is_todays"),
    [
        ("genai-1.44/marft-1", False),
        ("genai-1.44/marft-2", True),
        ("genai-0.1.0/marft-2", True),
        ("genai-1.44/marft-2+openinference", True),
        ("", False),
    ],
)
def test_rows_of_an_older_convention_are_held_to_todays_rule_of_d_where_it_was_theirs(
    convention: str, is_todays: bool
) -> None:
    assert c.follows_todays_rule(convention) is is_todays


# -- others' spans ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["gen_ai.agent.name", "gen_ai.workflow.name"])
def test_a_workflow_of_another_recorder_is_named_under_todays_name_and_the_former_one(key: str) -> None:
    attributes = {"gen_ai.operation.name": "invoke_workflow", key: "planner"}
    sent = request(hand_made("1", None, "a run", attributes=attributes))
    (span,) = protobuf_to_spans(sent.SerializeToString()).spans
    reading = span_to_reading(span)
    assert reading is not None
    assert (reading.name, reading.kind) == ("planner", "other")
