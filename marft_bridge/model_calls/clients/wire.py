"""What the code that is shared by all clients knows of one provider's form of a chat call.

A provider's request and answer are JSON bodies, its stream a sequence of JSON events. Each file beside this one that
implements `Wire` holds one form; the served model's own is that of OpenAI's chat completions, called `chat` here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

from langchain_core.messages import AIMessage, InvalidToolCall, ToolCall
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.outputs import ChatGeneration, LLMResult

from marft_bridge.common.errors import GraphError
from marft_bridge.common.server_events import EventReader, event_to_data
from trace_store.json_text import read_json

Body = dict[str, Any]
"""A JSON object."""


class StreamForm(Protocol):
    """The chunks of one streamed answer of the served model -> the provider's events, as the bytes of a stream."""

    def chunk_to_events(self, chunk: Body) -> Iterator[bytes]:
        """The events of one chunk."""

    def end(self) -> Iterator[bytes]:
        """The events after the last chunk."""

    def error_to_events(self, message: str) -> Iterator[bytes]:
        """The events of a stream that the server broke off."""


class Wire(Protocol):
    """One provider's form of a chat call."""

    provider: str  # as the GenAI conventions name it

    def request_to_messages(self, body: Body) -> list[Any]:
        """The prompt, as LangChain messages."""

    def replace_system(self, body: Mapping[str, Any], text: str) -> Body | None:
        """The fields of a request that change where `text` replaces its system message; None where it has none."""

    def request_to_parameters(self, body: Body) -> Body:
        """The other fields by OpenAI's names, as LangChain reports the parameters of a call."""

    def answer_to_result(self, answer: Body) -> LLMResult:
        """A whole answer as LangChain reports it."""

    def events_to_answer(self, events: Sequence[Body]) -> Body | None:
        """The whole answer that a stream amounts to; None for a stream that did not come to its end."""

    def request_to_chat(self, body: Body, node: str) -> Body:
        """The request in the served model's form. Raises GraphError for what the served model cannot do."""

    def chat_to_answer(self, chat: Body, body: Body) -> Body:
        """The served model's answer in the provider's form; `body` is the request."""

    def open_stream(self, body: Body) -> StreamForm:
        """Converts the stream that answers the request `body`."""

    def error_to_body(self, message: str) -> Body:
        """The body of a failed request."""


def refusal(node: str, wish: str) -> GraphError:
    """The error of a call that the served model cannot answer."""
    return GraphError(
        f"node {node!r} asks its model for {wish}, which the served model cannot do; take it out of the call, or leave "
        "the node out of graph.nodes"
    )


def bytes_to_events(stream: bytes) -> list[Body]:
    """The JSON events of a stream of server-sent events; what is cut off at its end is left out."""
    reader = EventReader()
    events = []
    for event in (*reader.feed(stream), reader.rest):
        text = (event_to_data(event) or b"").decode("utf-8", errors="replace")
        if text.startswith("{"):
            try:
                events.append(read_json(text))
            except ValueError:
                continue
    return events


def message_to_text(message: Mapping[str, Any]) -> Any:
    """What a message of a chat, or a streamed part of one, says: its content, or else its refusal."""
    return message.get("content") or message.get("refusal") or ""


def event_to_bytes(event: Mapping[str, Any], *, named: bool) -> bytes:
    """One server-sent event; `named`: with its type as the event's name."""
    head = f"event: {event['type']}\n" if named else ""
    return f"{head}data: {json.dumps(event)}\n\n".encode()


def add_call_part(calls: dict[int, Body], part: Mapping[str, Any]) -> None:
    """Adds one streamed part of a tool call, in the form of a chat, to the calls so far, by their index."""
    call = calls.setdefault(part.get("index", 0), {"id": None, "function": {"name": "", "arguments": ""}})
    call["id"] = part.get("id") or call["id"]
    for name, value in (part.get("function") or {}).items():
        if name in call["function"]:
            call["function"][name] += value or ""


def split_tool_calls(calls: Sequence[tuple[str | None, str, str]]) -> tuple[list[ToolCall], list[InvalidToolCall]]:
    """Calls as (id, name, arguments as JSON text) -> those with readable arguments, and the others."""
    tool_calls, invalid_calls = [], []
    for call_id, name, text in calls:
        try:
            arguments = read_json(text or "{}", strict=False)
        except ValueError as error:
            invalid_calls.append(
                InvalidToolCall(name=name, args=text, id=call_id, error=str(error), type="invalid_tool_call")
            )
            continue
        if isinstance(arguments, dict):
            tool_calls.append(ToolCall(name=name, args=arguments, id=call_id, type="tool_call"))
        else:
            invalid_calls.append(
                InvalidToolCall(name=name, args=text, id=call_id, error="not an object", type="invalid_tool_call")
            )
    return tool_calls, invalid_calls


def make_message(
    text: str, calls: Sequence[tuple[str | None, str, str]], *, message_id: str | None = None, **fields: Any
) -> AIMessage:
    """A message of the model; `calls` as in `split_tool_calls`."""
    tool_calls, invalid_calls = split_tool_calls(calls)
    return AIMessage(text, tool_calls=tool_calls, invalid_tool_calls=invalid_calls, id=message_id, **fields)


def make_usage(
    input_tokens: int | None,
    output_tokens: int | None,
    *,
    cache_read: int | None = None,
    cache_creation: int | None = None,
    reasoning: int | None = None,
) -> UsageMetadata | None:
    """Token counts as LangChain has them; None where the provider did not report the first two."""
    if input_tokens is None or output_tokens is None:
        return None
    usage = UsageMetadata(
        input_tokens=input_tokens, output_tokens=output_tokens, total_tokens=input_tokens + output_tokens
    )
    cache_counts = {"cache_read": cache_read, "cache_creation": cache_creation}
    if known_counts := {name: count for name, count in cache_counts.items() if count is not None}:
        usage["input_token_details"] = cast(InputTokenDetails, known_counts)
    if reasoning is not None:
        usage["output_token_details"] = {"reasoning": reasoning}
    return usage


def make_result(answer: Mapping[str, Any], messages: Sequence[tuple[AIMessage, str | None]]) -> LLMResult:
    """The result with these (message, finish reason), and id and model of `answer`."""
    generations = [
        ChatGeneration(message=message, generation_info={"finish_reason": finish_reason} if finish_reason else {})
        for message, finish_reason in messages
    ]
    return LLMResult(generations=[generations], llm_output={"id": answer.get("id"), "model_name": answer.get("model")})
