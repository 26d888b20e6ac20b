"""A recorded LLM call, in the shape that its recorder wrote -> prompt, answer and tools in OpenAI's form.

It reads LangChain's messages (our own recorder), and the message parts of the OpenTelemetry GenAI conventions (the
form to which `ingest` brings other recorders' spans). Invariants: texts and arguments come through unchanged; a call
that a chat template could not render as it was (images, thinking, several answers, tools that the record lacks) is
refused with a reason out of a fixed set.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from langchain_core.utils.function_calling import convert_to_openai_tool

from marft_bridge.ingest.messages import to_message
from marft_bridge.ingest.reading import as_list, as_mapping, as_text, parse_json, unflatten
from trace_store import conventions as c
from trace_store.records import SpanRow

ChatMessage = dict[str, Any]

_OPENINFERENCE_TOOLS = "llm.tools"  # flattened: llm.tools.0.tool.json_schema
# Blocks of a provider's own content that repeat the message's tool calls.
_DUPLICATE_BLOCKS = frozenset({"tool_use", "function_call", "tool_call_chunk"})


class UnusableChatError(Exception):
    """The call cannot be rendered as a chat; the message is the reason, out of a fixed set, without recorded text."""


@dataclass(frozen=True, slots=True)
class RecordedChat:
    """One call. Messages have `role` and `content`; arguments of tool calls are objects, as templates expect them."""

    prompt: tuple[ChatMessage, ...]
    answer: ChatMessage
    tools: tuple[dict[str, Any], ...]  # offered to the model


def span_to_chat(span: SpanRow, *, offers_tools: bool = False, needs_tools: bool = True) -> RecordedChat:
    """The conversation that a chat span holds.

    Args:
        offers_tools: whether the call is known to have offered tools, which the span then has to hold.
        needs_tools: whether they have to be known where the answer calls one.

    Raises:
        UnusableChatError: part of it was not recorded, or is not text.
    """
    prompt = attributes_to_prompt(span.attributes)
    answer = span_to_answer(span)
    tools = attributes_to_tools(span.attributes)
    if needs_tools and not tools and (offers_tools or "tool_calls" in answer):
        raise UnusableChatError("it offered tools that the record does not hold")
    return RecordedChat(prompt, answer, tools)


def attributes_to_prompt(attributes: Mapping[str, Any]) -> tuple[ChatMessage, ...]:
    """The messages alone that a call was asked with. Raises UnusableChatError."""
    messages = _messages(attributes, c.INPUT_MESSAGES, "prompt")
    return tuple(part for message in messages for part in _to_openai(message))


def span_to_answer(span: SpanRow) -> ChatMessage:
    """The answer alone, whatever is known of the prompt and the tools. Raises UnusableChatError."""
    answers = _messages(span.attributes, c.OUTPUT_MESSAGES, "answer")
    if len(answers) > 1:
        raise UnusableChatError("one call with several answers")
    (answer,) = _to_openai(answers[0] | {"role": "assistant"}) or [{}]
    if not answer.get("content") and not answer.get("tool_calls"):
        raise UnusableChatError("the answer is empty")
    return answer


def _messages(attributes: Mapping[str, Any], key: str, title: str) -> list[dict[str, Any]]:
    """The messages of a span attribute, each with its parts."""
    messages = as_list(parse_json(attributes.get(key)))
    if not messages:
        raise UnusableChatError(f"its {title} was not recorded")
    return [_with_parts(value) for value in messages]


def _with_parts(value: Any) -> dict[str, Any]:
    if isinstance(value, dict) and "parts" in value:
        return value
    message = to_message(value)
    if message is None:
        raise UnusableChatError("it holds something that is no chat message")
    body = as_mapping(value.get("data")) or value
    if body.get("invalid_tool_calls"):
        raise UnusableChatError("it holds a tool call whose arguments are no JSON object")
    return message | {"name": body.get("name")}


def _to_openai(message: Mapping[str, Any]) -> list[ChatMessage]:
    """A message with parts -> OpenAI messages; the results of several tools become one message each."""
    role, texts, results = as_text(message.get("role")), [], []
    calls: dict[Any, dict[str, Any]] = {}  # by id: LangChain may hold a call twice, as a block of the content too
    if role is None:
        raise UnusableChatError("it holds something that is no chat message")
    for part in as_list(message["parts"]):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("content"), str):
            texts.append(part["content"])
        elif kind == "tool_call":
            calls[part.get("id") or len(calls)] = _call(part)
        elif kind == "tool_call_response":
            results.append(
                {"role": "tool", "tool_call_id": part.get("id"), "content": _result(part.get("response"))}
                | _name_field(message)
            )
        elif kind not in _DUPLICATE_BLOCKS:
            raise UnusableChatError("it holds a part that is no text")
    if results and not texts and not calls:
        return results
    content = "\n".join(texts)  # joined as vLLM joins them
    tool_calls = {"tool_calls": list(calls.values())} if calls else {}
    return [*results, {"role": role, "content": content, **_name_field(message), **tool_calls}]


def _name_field(message: Mapping[str, Any]) -> dict[str, str]:
    """The field `name` of a message that names its speaker; else nothing."""
    name = as_text(message.get("name"))
    return {} if name is None else {"name": name}


def _call(part: Mapping[str, Any]) -> dict[str, Any]:
    arguments = part.get("arguments", part.get("args"))
    arguments = {} if arguments in (None, "") else parse_json(arguments)
    if as_text(part.get("name")) is None or not isinstance(arguments, dict):
        raise UnusableChatError("it holds a tool call whose arguments are no JSON object")
    return {"id": part.get("id"), "type": "function", "function": {"name": part["name"], "arguments": arguments}}


def _result(response: Any) -> str:
    """A tool's result as text; its blocks are joined like those of a message."""
    if isinstance(response, str):
        return response
    blocks = [block.get("text") if isinstance(block, dict) else block for block in as_list(response)]
    texts = [block for block in blocks if isinstance(block, str)]
    if not isinstance(response, list) or len(texts) < len(blocks):
        raise UnusableChatError("it holds a part that is no text")
    return "\n".join(texts)


def _to_openai_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A definition in any recorder's form -> OpenAI's. Parameters may be JSON text, as OpenLLMetry writes them."""
    if "parameters" in tool:
        tool = tool | {"parameters": parse_json(tool["parameters"])}
    if tool.get("type") == "function" and "function" not in tool and isinstance(tool.get("name"), str):
        tool = {key: value for key, value in tool.items() if key != "type"}
        if "input_schema" not in tool:
            return {"type": "function", "function": tool}  # as it was sent
    return convert_to_openai_tool(tool)


def attributes_to_tools(attributes: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """The tools that a call offered, in OpenAI's form: as the GenAI conventions have them, or OpenInference.

    Empty where none are recorded. Raises UnusableChatError.
    """
    offered = as_list(parse_json(attributes.get(c.TOOL_DEFINITIONS)))
    if not offered:
        offered = [
            parse_json(as_mapping(tool.get("tool")).get("json_schema"))
            for tool in unflatten(attributes, _OPENINFERENCE_TOOLS)
        ]
    try:
        return tuple(map(_to_openai_tool, offered))
    except Exception:  # noqa: BLE001 - a schema may hold anything
        raise UnusableChatError("it offered tools in a form that cannot be read") from None
