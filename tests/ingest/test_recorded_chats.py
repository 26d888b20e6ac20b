"""Owns: a recorded LLM call, whoever recorded it, is read as the messages, answer and tools of OpenAI's API.

Texts and arguments come through unchanged; what is not all there, or not all text, is refused, for a few reasons.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from support.sample_spans import SampleTrace

from marft_bridge.ingest.recorded_chats import UnusableChatError, span_to_chat
from trace_store import conventions as c
from trace_store.records import SpanRow

SCHEMA = {"name": "add", "description": "adds", "parameters": {"type": "object"}}
ADD = {"type": "function", "function": SCHEMA}
REASONING = {"role": "assistant", "parts": [{"type": "reasoning", "content": "hm"}]}


def span(prompt: Any, answer: Any, **more: Any) -> SpanRow:
    """A chat span with these messages."""
    sample = SampleTrace()
    said: dict[str, Any] = {
        key: None if value is None else json.dumps(value) for key, value in (("INPUT", prompt), ("OUTPUT", answer))
    }
    sample.call("x", "root", 1, 2, **{f"{key}_MESSAGES": value for key, value in said.items()})
    row = sample.spans()[0]
    return replace(row, attributes=row.attributes | more)


LANGCHAIN = [
    {"type": "system", "data": {"type": "system", "content": "add"}},
    {"type": "human", "data": {"type": "human", "content": [{"type": "text", "text": "two"}, "plus"], "name": "ada"}},
]
PARTS = [
    {"role": "system", "parts": [{"type": "text", "content": "add"}]},
    {
        "role": "user",
        "name": "ada",
        "parts": [{"type": "text", "content": "two"}, {"type": "text", "content": "plus"}],
    },
]
FOUR = [{"role": "assistant", "content": "four", "tool_calls": []}]


@pytest.mark.parametrize("prompt", [LANGCHAIN, PARTS], ids=["langchain", "parts"])
def test_messages_of_both_shapes_are_those_of_the_api(prompt: Any) -> None:
    found = span_to_chat(span(prompt, FOUR))
    assert found.prompt == (
        {"role": "system", "content": "add"},
        {"role": "user", "content": "two\nplus", "name": "ada"},
    )
    assert (found.answer, found.tools) == ({"role": "assistant", "content": "four"}, ())


def test_a_tool_call_is_read_once_with_its_arguments_as_an_object_and_results_one_by_one() -> None:
    block = {"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1}}
    v1 = {"type": "tool_call", "id": "1", "name": "add", "args": {"a": 1}}
    calls = [{"type": "tool_call", "id": "1", "name": "add", "args": {"a": 1}}]
    asks = {"type": "ai", "data": {"type": "ai", "content": [{"type": "text", "text": "so"}, block, v1]}}
    asks["data"] |= {"tool_calls": calls}  # type: ignore[operator]
    parts = [{"type": "tool_call_response", "id": "1", "response": ["2", {"text": "3"}]}]
    parts.append({"type": "tool_call_response", "id": "2", "response": "x"})
    only_a_block = {"role": "assistant", "content": [v1]}
    found = span_to_chat(span([asks, {"role": "tool", "parts": parts}, only_a_block], FOUR))
    asked = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert found.prompt == (
        {"role": "assistant", "content": "so", "tool_calls": [asked]},
        {"role": "tool", "tool_call_id": "1", "content": "2\n3"},
        {"role": "tool", "tool_call_id": "2", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [asked]},
    )


@pytest.mark.parametrize(
    "offered",
    [
        {c.TOOL_DEFINITIONS: json.dumps([{"type": "function", **SCHEMA}])},
        {c.TOOL_DEFINITIONS: json.dumps([ADD])},
        {c.TOOL_DEFINITIONS: json.dumps([SCHEMA | {"parameters": '{"type": "object"}'}])},
        {"llm.tools.0.tool.json_schema": json.dumps(ADD)},
        {
            c.TOOL_DEFINITIONS: json.dumps(
                [{"name": "add", "description": "adds", "input_schema": {"type": "object"}}],
            )
        },
    ],
    ids=["genai", "openai", "text", "openinference", "anthropic"],
)
def test_the_tools_that_a_call_offered_are_read_from_every_recorder(offered: dict[str, Any]) -> None:
    assert span_to_chat(span(PARTS, FOUR, **offered)).tools == (ADD,)


CALLS = [{"role": "assistant", "content": "", "tool_calls": [{"id": "1", "name": "add", "args": {}}]}]
IMAGE = [{"role": "user", "parts": [{"type": "image_url", "image_url": "x"}]}]
TORN = [{"type": "ai", "data": {"type": "ai", "content": "", "invalid_tool_calls": [{"name": "add"}]}}]
ODD_CALL = [{"role": "assistant", "parts": [{"type": "tool_call", "id": "1", "name": "add", "arguments": "{"}]}]


@pytest.mark.parametrize(
    ("prompt", "answer", "more", "reason"),
    [
        (None, FOUR, {}, "its prompt was not recorded"),
        (PARTS, None, {}, "its answer was not recorded"),
        (["two plus two"], FOUR, {}, "it holds something that is no chat message"),
        ([{"parts": []}], FOUR, {}, "it holds something that is no chat message"),
        (PARTS, FOUR * 2, {}, "one call with several answers"),
        (PARTS, [{"role": "assistant", "content": ""}], {}, "the answer is empty"),
        (IMAGE, FOUR, {}, "it holds a part that is no text"),
        (
            PARTS,
            [REASONING],
            {},
            "a part that is no text",
        ),
        (TORN, FOUR, {}, "a tool call whose arguments are no JSON object"),
        (ODD_CALL, FOUR, {}, "a tool call whose arguments are no JSON object"),
        (PARTS, CALLS, {}, "it offered tools that the record does not hold"),
        (PARTS, FOUR, {c.TOOL_DEFINITIONS: "[3]"}, "it offered tools in a form that cannot be read"),
    ],
)
def test_a_call_that_cannot_be_said_again_is_refused(
    prompt: Any, answer: Any, more: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnusableChatError, match=reason):
        span_to_chat(span(prompt, answer, **more))


def test_a_call_of_a_node_that_is_known_to_offer_tools_needs_them() -> None:
    with pytest.raises(UnusableChatError, match="it offered tools that the record does not hold"):
        span_to_chat(span(PARTS, FOUR), offers_tools=True)
    assert span_to_chat(span(PARTS, FOUR), offers_tools=False).tools == ()
