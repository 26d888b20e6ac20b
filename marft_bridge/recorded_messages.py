"""A recorded LLM call, in whichever shape its recorder wrote it -> prompt, answer and tools in the form of OpenAI's.

Read are LangChain's messages (our own recorder), and the parts of the OpenTelemetry GenAI conventions (what `ingest`
makes of other recorders'). Invariants: texts and arguments come through unchanged; what a chat template would not be
given as it was (images, thinking, several answers, tools that the record does not hold) is refused with a reason; the
number of different reasons is fixed. It knows nothing of templates and tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from langchain_core.utils.function_calling import convert_to_openai_tool

from marft_bridge.ingest.messages import to_message
from marft_bridge.ingest.reading import items, mapping, parsed, text, unflattened
from trace_store import conventions as c
from trace_store.records import SpanRow

ChatMessage = dict[str, Any]

_OPENINFERENCE_TOOLS = "llm.tools"  # flattened: llm.tools.0.tool.json_schema
# Blocks of a provider's own content that say once more what is among the message's tool calls.
_SAID_TWICE = frozenset({"tool_use", "function_call", "tool_call_chunk"})


class NotAChat(Exception):  # noqa: N818 - says what the call is
    """The call cannot be said again as a chat; the message is the reason, one of a few."""


@dataclass(frozen=True, slots=True)
class RecordedChat:
    """One call. Messages have `role` and `content`; arguments of tool calls are objects, as templates expect them."""

    prompt: tuple[ChatMessage, ...]
    answer: ChatMessage
    tools: tuple[dict[str, Any], ...]  # that the call offered; empty where it offered none


def span_to_chat(span: SpanRow, *, offers_tools: bool = False) -> RecordedChat:
    """The conversation that a chat span holds.

    Args:
        offers_tools: whether the call is known to have offered tools, which the span then has to hold.

    Raises:
        NotAChat: it is not all there, or not all text.
    """
    prompt = [part for message in _messages(span, c.INPUT_MESSAGES, "prompt") for part in _to_openai(message)]
    answers = _messages(span, c.OUTPUT_MESSAGES, "answer")
    if len(answers) > 1:
        raise NotAChat("one call with several answers")
    (answer,) = _to_openai(answers[0] | {"role": "assistant"}) or [{}]
    if not answer.get("content") and not answer.get("tool_calls"):
        raise NotAChat("the answer is empty")
    tools = _tools(span.attributes)
    if not tools and (offers_tools or "tool_calls" in answer):
        raise NotAChat("it offered tools that the record does not hold")
    return RecordedChat(tuple(prompt), answer, tools)


def _messages(span: SpanRow, key: str, what: str) -> list[dict[str, Any]]:
    """The messages under a name, each with its parts."""
    found = items(parsed(span.attributes.get(key)))
    if not found:
        raise NotAChat(f"its {what} was not recorded")
    return [_with_parts(value) for value in found]


def _with_parts(value: Any) -> dict[str, Any]:
    if isinstance(value, dict) and "parts" in value:
        return value
    message = to_message(value)
    if message is None:
        raise NotAChat("it holds something that is no chat message")
    body = mapping(value.get("data")) or value
    if body.get("invalid_tool_calls"):
        raise NotAChat("it holds a tool call whose arguments are no JSON object")
    return message | {"name": body.get("name")}


def _to_openai(message: Mapping[str, Any]) -> list[ChatMessage]:
    """A message with parts -> the messages that it is; results of several tools are several."""
    role, texts, results = text(message.get("role")), [], []
    calls: dict[Any, dict[str, Any]] = {}  # by id: LangChain may hold a call twice, as a block of the content too
    if role is None:
        raise NotAChat("it holds something that is no chat message")
    for part in items(message["parts"]):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("content"), str):
            texts.append(part["content"])
        elif kind == "tool_call":
            calls[part.get("id") or len(calls)] = _call(part)
        elif kind == "tool_call_response":
            results.append(
                {"role": "tool", "tool_call_id": part.get("id"), "content": _result(part.get("response"))}
                | _named(message)
            )
        elif kind not in _SAID_TWICE:
            raise NotAChat("it holds a part that is no text")
    if results and not texts and not calls:
        return results
    said: ChatMessage = {"role": role, "content": "\n".join(texts)} | _named(message)  # joined as vLLM joins them
    return [*results, said | ({"tool_calls": list(calls.values())} if calls else {})]


def _named(message: Mapping[str, Any]) -> dict[str, str]:
    """Who speaks, where the message says it."""
    name = text(message.get("name"))
    return {} if name is None else {"name": name}


def _call(part: Mapping[str, Any]) -> dict[str, Any]:
    arguments = part.get("arguments", part.get("args"))
    arguments = {} if arguments in (None, "") else parsed(arguments)
    if text(part.get("name")) is None or not isinstance(arguments, dict):
        raise NotAChat("it holds a tool call whose arguments are no JSON object")
    return {"id": part.get("id"), "type": "function", "function": {"name": part["name"], "arguments": arguments}}


def _result(response: Any) -> str:
    """What a tool gave back; blocks of text are joined as those of any message."""
    if isinstance(response, str):
        return response
    blocks = [block.get("text") if isinstance(block, dict) else block for block in items(response)]
    texts = [block for block in blocks if isinstance(block, str)]
    if not isinstance(response, list) or len(texts) < len(blocks):
        raise NotAChat("it holds a part that is no text")
    return "\n".join(texts)


def _with_schema(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool's parameters as the object that they are: OpenLLMetry writes them as text."""
    return tool | {"parameters": parsed(tool["parameters"])} if "parameters" in tool else tool


def _tools(attributes: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """The tools that a call offered, in OpenAI's form: as the GenAI conventions have them, or OpenInference."""
    offered = items(parsed(attributes.get(c.TOOL_DEFINITIONS)))
    if not offered:
        offered = [
            parsed(mapping(tool.get("tool")).get("json_schema"))
            for tool in unflattened(attributes, _OPENINFERENCE_TOOLS)
        ]
    try:
        return tuple(convert_to_openai_tool(_with_schema(tool)) for tool in offered)
    except Exception:  # noqa: BLE001 - whatever the schemas hold
        raise NotAChat("it offered tools in a form that cannot be read") from None
