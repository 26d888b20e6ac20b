"""Chat messages as instrumentors write them -> messages of the OpenTelemetry GenAI conventions.

    {"role": "assistant", "parts": [{"type": "text", "content": ...}, {"type": "tool_call", "id": ..., ...}]}

Invariant: texts and ids come through unchanged; a part of an unknown type is passed on as it is. A value that is no
message gives None.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from marft_bridge.ingest.reading import as_list, as_mapping, as_text, parse_json
from trace_store import conventions as c

Message = dict[str, Any]
_ROLES = {"human": "user", "ai": "assistant", "AIMessageChunk": "assistant"}
_TOOL_CALL, _TOOL_RESULT = "tool_call", "tool_call_response"


def to_message(value: Any) -> Message | None:
    """A message as LangChain (both of its JSON forms), OpenAI or OpenInference write it."""
    if not isinstance(value, dict):
        return None
    body = _message_body(value)
    role = as_text(body.get("role")) or as_text(body.get("type")) or as_text(value.get("type"))
    if role is None:
        return None
    role = _ROLES.get(role, role)
    tool_call_id = as_text(body.get("tool_call_id"))
    if tool_call_id is not None:
        return {"role": role, "parts": [{"type": _TOOL_RESULT, "id": tool_call_id, "response": body.get("content")}]}
    extras = as_mapping(body.get("additional_kwargs"))
    blocks = body.get("content") if body.get("content") not in (None, "", []) else body.get("contents")
    if blocks in (None, "", []):
        blocks = body.get("refusal") or extras.get("refusal")
    calls = body.get("tool_calls") or extras.get("tool_calls")
    if not calls and (function := body.get("function_call") or extras.get("function_call")):
        calls = [{"function": function}]
    return {"role": role, "parts": [*_content_to_parts(blocks), *_calls_to_parts(calls)]}


def to_messages(values: Any) -> list[Message]:
    """The messages among the values, in order."""
    return [message for value in as_list(values) if (message := to_message(value)) is not None]


def messages_to_json(messages: list[Message]) -> str | None:
    """Messages as the JSON text of a span attribute; None for an empty list."""
    return json.dumps(messages, ensure_ascii=False) if messages else None


def langchain_inputs_to_messages(inputs: Any) -> list[Message]:
    """The inputs that LangChain traces for a model call (one list of messages, or several prompts) -> messages."""
    run_inputs = as_mapping(inputs)
    batches = as_list(run_inputs.get("messages"))
    if batches:
        return to_messages(batches[0] if isinstance(batches[0], list) else batches)
    return [
        {"role": "user", "parts": [{"type": "text", "content": prompt}]}
        for prompt in as_list(run_inputs.get("prompts"))
        if isinstance(prompt, str)
    ]


def langchain_inputs_to_answer_ids(inputs: Any) -> tuple[str, ...]:
    """The ids of earlier model answers in the traced inputs of a model call, in order."""
    batches = as_list(as_mapping(inputs).get("messages"))
    messages = batches[0] if batches and isinstance(batches[0], list) else batches
    bodies = [_message_body(message) for message in messages if isinstance(message, dict)]
    return tuple(
        body["id"] for body in bodies if str(body.get("type")).startswith(("ai", "AI")) and as_text(body.get("id"))
    )


def langchain_outputs_to_answer_ids(outputs: Any) -> tuple[str, ...]:
    """The ids of the messages in the traced outputs of a model call."""
    batches = as_list(as_mapping(outputs).get("generations"))
    bodies = [
        _message_body(as_mapping(as_mapping(item).get("message"))) for item in as_list(batches[0] if batches else None)
    ]
    return tuple(body["id"] for body in bodies if as_text(body.get("id")))


def langchain_outputs_to_attributes(outputs: Any) -> dict[str, Any]:
    """The outputs that LangChain traces for a model call -> attributes under our names; empty for other values.

    Log-probs are the engine's own, in nats, when the app asked for them. There are never token ids.
    """
    run_outputs = as_mapping(outputs)
    batches = as_list(run_outputs.get("generations"))
    generations = [item for item in as_list(batches[0] if batches else None) if isinstance(item, dict)]
    if not generations:
        return {}
    body = _message_body(as_mapping(generations[0].get("message")))
    metadata = as_mapping(body.get("response_metadata")) | as_mapping(generations[0].get("generation_info"))
    usage = as_mapping(body.get("usage_metadata"))
    answers = [to_message(item.get("message")) or _text_to_message(item.get("text")) for item in generations]
    finish_reason = as_text(metadata.get("finish_reason"))
    tokens = as_list(as_mapping(metadata.get("logprobs")).get("content"))
    return {
        c.OUTPUT_MESSAGES: messages_to_json(answers),
        c.FINISH_REASONS: [finish_reason] if finish_reason else None,
        c.RESPONSE_MODEL: metadata.get("model_name"),
        c.RESPONSE_ID: metadata.get("id"),
        c.USAGE_INPUT_TOKENS: usage.get("input_tokens"),
        c.USAGE_OUTPUT_TOKENS: usage.get("output_tokens"),
        c.LOGPROBS: [as_mapping(token).get("logprob") for token in tokens] or None,
    }


def langchain_output_to_tool_call_id(output: Any) -> str | None:
    """The id of the call that a traced tool message answers; None when it is no tool message."""
    run_output = as_mapping(output)
    nested = run_output.get("output")
    message = nested if isinstance(nested, dict) else run_output
    return as_text(_message_body(message).get("tool_call_id"))


def _messages_to_part_ids(messages: Any, kind: str) -> list[str]:
    return [
        part["id"]
        for message in as_list(parse_json(messages))
        if isinstance(message, dict)
        for part in as_list(message.get("parts"))
        if isinstance(part, dict) and part.get("type") == kind and isinstance(part.get("id"), str)
    ]


def messages_to_tool_call_ids(messages: Any) -> list[str]:
    """The ids of the tool calls that these messages request."""
    return _messages_to_part_ids(messages, _TOOL_CALL)


def messages_to_tool_result_ids(messages: Any) -> list[str]:
    """The ids of the tool calls whose results these messages hold."""
    return _messages_to_part_ids(messages, _TOOL_RESULT)


class IdIndex:
    """Ids of messages or tool calls -> the LLM call whose answer made them; an id of two calls maps to neither."""

    def __init__(self) -> None:
        self._calls: dict[str, str | None] = {}

    def add(self, ids: Iterable[str], span_id: str) -> None:
        """Records ids from the answer of the LLM call `span_id`."""
        for message_id in ids:
            self._calls[message_id] = span_id if self._calls.get(message_id, span_id) == span_id else None

    def ids_to_calls(self, ids: Iterable[str]) -> list[str]:
        """The LLM calls whose answers made these ids, each once."""
        return list(dict.fromkeys(call for message_id in ids if (call := self._calls.get(message_id)) is not None))


def _message_body(message: dict[str, Any]) -> dict[str, Any]:
    """The message's own fields, without the envelope of its tracer."""
    return next((message[key] for key in ("kwargs", "data", "message") if isinstance(message.get(key), dict)), message)


def _text_to_message(content: Any) -> Message:
    return {"role": "assistant", "parts": _content_to_parts(content)}


def _content_to_parts(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "content": content}] if content else []
    parts = []
    for block in as_list(content):
        block = block.get("message_content", block) if isinstance(block, dict) else block
        if isinstance(block, str):
            parts.append({"type": "text", "content": block})
        elif isinstance(block, dict) and isinstance(block.get("text"), str):
            parts.append({"type": "text", "content": block["text"]})
        elif isinstance(block, dict):
            parts.append(block)
    return parts


def _calls_to_parts(calls: Iterable[Any] | None) -> list[dict[str, Any]]:
    parts = []
    for call in as_list(calls):
        call = as_mapping(as_mapping(call).get("tool_call")) or as_mapping(call)
        function: Mapping[str, Any] = as_mapping(call.get("function")) or call
        arguments = function.get("arguments") if function.get("arguments") is not None else function.get("args")
        if call:
            parts.append(
                {
                    "type": _TOOL_CALL,
                    "id": call.get("id"),
                    "name": function.get("name"),
                    "arguments": parse_json(arguments) if parse_json(arguments) is not None else arguments,
                }
            )
    return parts
