"""Chat messages in the shapes that instrumentors write -> the shape of the OpenTelemetry GenAI conventions.

    {"role": "assistant", "parts": [{"type": "text", "content": ...}, {"type": "tool_call", "id": ..., ...}]}

Invariant: texts and ids come through unchanged; a part of an unknown type is passed on as it is. A value that is no
message gives None. Whose messages they are is not known here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from marft_bridge.ingest.reading import items, mapping, parsed, text
from trace_store import conventions as c

Message = dict[str, Any]
_ROLES = {"human": "user", "ai": "assistant", "AIMessageChunk": "assistant"}
_TOOL_CALL, _TOOL_RESULT = "tool_call", "tool_call_response"


def to_message(value: Any) -> Message | None:
    """A message as LangChain (both of its JSON forms), OpenAI or OpenInference write it."""
    if not isinstance(value, dict):
        return None
    body = _body(value)
    role = text(body.get("role")) or text(body.get("type")) or text(value.get("type"))
    if role is None:
        return None
    role = _ROLES.get(role, role)
    result_of = text(body.get("tool_call_id"))
    if result_of is not None:
        return {"role": role, "parts": [{"type": _TOOL_RESULT, "id": result_of, "response": body.get("content")}]}
    blocks = body.get("content") if body.get("content") not in (None, "") else body.get("contents")
    calls = body.get("tool_calls") or mapping(body.get("additional_kwargs")).get("tool_calls")
    return {"role": role, "parts": [*_content_parts(blocks), *_tool_call_parts(calls)]}


def to_messages(values: Any) -> list[Message]:
    """The messages among the values, in order."""
    return [message for value in items(values) if (message := to_message(value)) is not None]


def messages_text(messages: list[Message]) -> str | None:
    """Messages as an attribute holds them; None when there are none."""
    return json.dumps(messages, ensure_ascii=False) if messages else None


def langchain_prompt(inputs: Any) -> list[Message]:
    """What LangChain traces as the input of a model call: one list of messages, or several prompts."""
    found = mapping(inputs)
    batches = items(found.get("messages"))
    if batches:
        return to_messages(batches[0] if isinstance(batches[0], list) else batches)
    return [
        {"role": "user", "parts": [{"type": "text", "content": prompt}]}
        for prompt in items(found.get("prompts"))
        if isinstance(prompt, str)
    ]


def langchain_prompt_ids(inputs: Any) -> tuple[str, ...]:
    """The ids of the model's own messages in a traced prompt, in order."""
    batches = items(mapping(inputs).get("messages"))
    messages = batches[0] if batches and isinstance(batches[0], list) else batches
    bodies = [_body(message) for message in messages if isinstance(message, dict)]
    return tuple(
        body["id"] for body in bodies if str(body.get("type")).startswith(("ai", "AI")) and text(body.get("id"))
    )


def langchain_answer_ids(outputs: Any) -> tuple[str, ...]:
    """The ids of the messages in a traced result of a model call."""
    batches = items(mapping(outputs).get("generations"))
    bodies = [_body(mapping(mapping(item).get("message"))) for item in items(batches[0] if batches else None)]
    return tuple(body["id"] for body in bodies if text(body.get("id")))


def langchain_answer(outputs: Any) -> dict[str, Any]:
    """What LangChain traces as the result of a model call -> attributes under our names; empty for other values.

    Log-probs are the engine's own, in nats, when the app asked for them. Ids of tokens are never among it.
    """
    found = mapping(outputs)
    batches = items(found.get("generations"))
    generations = [item for item in items(batches[0] if batches else None) if isinstance(item, dict)]
    if not generations:
        return {}
    body = _body(mapping(generations[0].get("message")))
    metadata = mapping(body.get("response_metadata")) | mapping(generations[0].get("generation_info"))
    usage = mapping(body.get("usage_metadata"))
    answers = [to_message(item.get("message")) or _said(item.get("text")) for item in generations]
    finish = text(metadata.get("finish_reason"))
    tokens = items(mapping(metadata.get("logprobs")).get("content"))
    return {
        c.OUTPUT_MESSAGES: messages_text(answers),
        c.FINISH_REASONS: [finish] if finish else None,
        c.RESPONSE_MODEL: metadata.get("model_name"),
        c.RESPONSE_ID: metadata.get("id"),
        c.USAGE_INPUT_TOKENS: usage.get("input_tokens"),
        c.USAGE_OUTPUT_TOKENS: usage.get("output_tokens"),
        c.LOGPROBS: [mapping(token).get("logprob") for token in tokens] or None,
    }


def langchain_tool_call_id(output: Any) -> str | None:
    """The id of the call that a traced tool message answers; None when it is no tool message."""
    found = mapping(output)
    inner = found.get("output")
    message = inner if isinstance(inner, dict) else found
    return text(_body(message).get("tool_call_id"))


def _part_ids(messages: Any, kind: str) -> list[str]:
    return [
        part["id"]
        for message in items(parsed(messages))
        if isinstance(message, dict)
        for part in items(message.get("parts"))
        if isinstance(part, dict) and part.get("type") == kind and isinstance(part.get("id"), str)
    ]


def asked_tool_calls(messages: Any) -> list[str]:
    """The ids of the tool calls that these messages ask for."""
    return _part_ids(messages, _TOOL_CALL)


def answered_tool_calls(messages: Any) -> list[str]:
    """The ids of the tool calls whose results these messages hold."""
    return _part_ids(messages, _TOOL_RESULT)


class IdIndex:
    """Ids that an answer gave -> the call that gave it; an id that two calls gave names neither."""

    def __init__(self) -> None:
        self._calls: dict[str, str | None] = {}

    def add(self, ids: Iterable[str], span_id: str) -> None:
        """These ids are of this call's answer."""
        for key in ids:
            self._calls[key] = span_id if self._calls.get(key, span_id) == span_id else None

    def named(self, ids: Iterable[str]) -> list[str]:
        """The calls that gave these ids, each once."""
        return list(dict.fromkeys(call for key in ids if (call := self._calls.get(key)) is not None))


def _body(message: dict[str, Any]) -> dict[str, Any]:
    """The message's own fields, in whatever its tracer put around them."""
    return next((message[key] for key in ("kwargs", "data", "message") if isinstance(message.get(key), dict)), message)


def _said(words: Any) -> Message:
    return {"role": "assistant", "parts": _content_parts(words)}


def _content_parts(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "content": content}] if content else []
    parts = []
    for block in items(content):
        block = block.get("message_content", block) if isinstance(block, dict) else block
        if isinstance(block, str):
            parts.append({"type": "text", "content": block})
        elif isinstance(block, dict) and isinstance(block.get("text"), str):
            parts.append({"type": "text", "content": block["text"]})
        elif isinstance(block, dict):
            parts.append(block)
    return parts


def _tool_call_parts(calls: Iterable[Any] | None) -> list[dict[str, Any]]:
    parts = []
    for call in items(calls):
        call = mapping(mapping(call).get("tool_call")) or mapping(call)
        function: Mapping[str, Any] = mapping(call.get("function")) or call
        arguments = function.get("arguments") if function.get("arguments") is not None else function.get("args")
        if call:
            parts.append(
                {
                    "type": _TOOL_CALL,
                    "id": call.get("id"),
                    "name": function.get("name"),
                    "arguments": parsed(arguments) if parsed(arguments) is not None else arguments,
                }
            )
    return parts
