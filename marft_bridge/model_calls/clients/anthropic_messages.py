"""Anthropic's messages <-> chat completions, the form of the served model.

Invariants: a block or field without a counterpart is refused, never left out; results of tools stand before the text of
the message that brings them, as the chat wants it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from langchain_core.messages import BaseMessage
from langchain_core.outputs import LLMResult

from marft_bridge.common.errors import GraphError
from marft_bridge.model_calls.clients.openai_chat import chat_to_message
from marft_bridge.model_calls.clients.wire import (
    Body,
    event_to_bytes,
    make_message,
    make_result,
    make_usage,
    message_to_text,
    refusal,
)
from marft_bridge.model_calls.provider_options import CACHE_HINT, options_to_openai
from marft_bridge.model_calls.request_rules import move_extras
from trace_store.json_text import read_json

_RENAMED_FIELDS = {"messages", "system", "stop_sequences", "tools", "tool_choice", "output_config", "top_k", "thinking"}
_KEPT_FIELDS = ("model", "temperature", "top_p", "top_k", "max_tokens", "stream")
_FAILED_RESULT = "Error:"
_OUTPUT_OPTIONS = {"format", "effort"}
_CUSTOM_TOOL = (None, "custom")
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
_FINISH_REASONS = {"end_turn": "stop", "stop_sequence": "stop"} | {
    stop_reason: finish_reason for finish_reason, stop_reason in _STOP_REASONS.items()
}


class AnthropicMessages:
    """See `wire.Wire`."""

    provider = "anthropic"

    def request_to_messages(self, body: Body) -> list[BaseMessage]:
        """The prompt, as LangChain messages; a block of another kind is kept as it is."""
        return [chat_to_message(message) for message in _to_chat_messages(body)]

    def replace_system(self, body: Mapping[str, Any], text: str) -> Body | None:
        """`text` in place of the system prompt; None where there is none."""
        return {"system": text} if body.get("system") else None

    def request_to_parameters(self, body: Body) -> Body:
        """The other fields by the names of chat completions."""
        kept_fields = {name: body[name] for name in _KEPT_FIELDS if body.get(name) is not None}
        try:
            return kept_fields | _rename_fields(body, "")
        except GraphError:  # tools that only Anthropic can read
            return kept_fields | {"tools": body.get("tools")}

    def answer_to_result(self, answer: Body) -> LLMResult:
        """A whole answer as LangChain reports it."""
        blocks = answer.get("content") or ()
        calls = [
            (block.get("id"), block.get("name") or "", json.dumps(block.get("input")))
            for block in blocks
            if block.get("type") == "tool_use"
        ]
        usage = answer.get("usage") or {}
        created, read = usage.get("cache_creation_input_tokens"), usage.get("cache_read_input_tokens")
        input_tokens = usage.get("input_tokens")
        if input_tokens is not None:  # those that its cache wrote and read are counted apart
            input_tokens += (created or 0) + (read or 0)
        message = make_message(
            "".join(block.get("text") or "" for block in blocks if block.get("type") == "text"),
            calls,
            usage_metadata=make_usage(
                input_tokens, usage.get("output_tokens"), cache_read=read, cache_creation=created
            ),
        )
        stop_reason = answer.get("stop_reason")
        return make_result(answer, [(message, _FINISH_REASONS.get(stop_reason or "", stop_reason))])

    def events_to_answer(self, events: Sequence[Body]) -> Body | None:
        """The message that the events of a stream amount to."""
        answer: Body | None = None
        for event in events:
            if event.get("type") == "message_start":
                answer = {**event["message"], "content": []}
            elif answer is not None:
                _add_event(answer, event)
        if answer is None or answer.get("stop_reason") is None:
            return None
        for block in answer["content"]:
            if "partial_json" in block:
                block["input"] = _read_arguments(block.pop("partial_json"))
        return answer

    def request_to_chat(self, body: Body, node: str) -> Body:
        """The request as a chat. Raises GraphError."""
        messages = _to_chat_messages(body)
        for message in messages:
            content = message.get("content")
            for part in content if isinstance(content, list) else ():
                if part.get("type") != "text":
                    raise refusal(node, f"a message with {part.get('type')!r}")
        other_fields = {
            name: value
            for name, value in body.items()
            if name not in _RENAMED_FIELDS and name != CACHE_HINT and value is not None
        }
        if (body.get("thinking") or {}).get("type") not in (None, "disabled"):
            raise refusal(node, "'thinking'")
        if body.get("top_k") is not None:
            other_fields["top_k"] = body["top_k"]
        output_options = {name: value for name, value in (body.get("output_config") or {}).items() if value is not None}
        if unknown_options := output_options.keys() - _OUTPUT_OPTIONS:
            raise refusal(node, f"'output_config.{min(unknown_options)}'")
        if "effort" in output_options:
            other_fields["reasoning_effort"] = output_options["effort"]
        return move_extras(other_fields) | _rename_fields(body, node) | {"messages": messages}

    def chat_to_answer(self, chat: Body, body: Body) -> Body:  # noqa: ARG002 - as `Wire` has it
        """The answer as a message."""
        choice = (chat.get("choices") or [{}])[0]
        message = choice.get("message") or {}
        text = message_to_text(message)
        content: list[Body] = [{"type": "text", "text": text}] if text else []
        content += [
            _to_block(call) | {"input": _read_arguments(call["function"].get("arguments") or "")}
            for call in message.get("tool_calls") or ()
        ]
        usage = chat.get("usage") or {}
        counts = {"input_tokens": usage.get("prompt_tokens") or 0, "output_tokens": usage.get("completion_tokens") or 0}
        return _frame(chat) | _end_of(choice) | {"content": content, "usage": counts}

    def open_stream(self, body: Body) -> _MessageStream:  # noqa: ARG002 - as above
        """Converts the stream that answers a request."""
        return _MessageStream()

    def error_to_body(self, message: str) -> Body:
        """The body of a failed request."""
        return {"type": "error", "error": {"type": "api_error", "message": message}}


class _MessageStream:
    """See `wire.StreamForm`."""

    def __init__(self) -> None:
        self._is_begun = False
        self._open_block: str | int | None = None  # "text", or the number of a call
        self._block_count = 0
        self._choice: Body = {}  # the last one, which says how the answer ended
        self._output_tokens = 0

    def chunk_to_events(self, chunk: Body) -> Iterator[bytes]:
        """The events of one chunk."""
        if not self._is_begun:
            self._is_begun = True
            counts = {"input_tokens": len(chunk.get("prompt_token_ids") or ()), "output_tokens": 0}
            begun = _frame(chunk) | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": counts}
            yield _event("message_start", message=begun)
        self._output_tokens = (chunk.get("usage") or {}).get("completion_tokens") or self._output_tokens
        for choice in chunk.get("choices") or ():
            if choice.get("finish_reason"):
                self._choice = choice
            delta = choice.get("delta") or {}
            if text := message_to_text(delta):
                yield from self._open("text", {"type": "text", "text": ""})
                yield self._delta({"type": "text_delta", "text": text})
            for call in delta.get("tool_calls") or ():
                yield from self._open(call.get("index", 0), _to_block(call) | {"input": {}})
                if arguments := (call.get("function") or {}).get("arguments"):
                    yield self._delta({"type": "input_json_delta", "partial_json": arguments})

    def end(self) -> Iterator[bytes]:
        """Closes the block and the message."""
        yield from self._close()
        yield _event("message_delta", delta=_end_of(self._choice), usage={"output_tokens": self._output_tokens})
        yield _event("message_stop")

    def error_to_events(self, message: str) -> Iterator[bytes]:
        """An error, as the package expects it inside a stream."""
        yield event_to_bytes(AnthropicMessages().error_to_body(message), named=True)

    def _open(self, kind: str | int, block: Body) -> Iterator[bytes]:
        if self._open_block != kind:
            yield from self._close()
            self._open_block = kind
            self._block_count += 1
            yield _event("content_block_start", index=self._block_count - 1, content_block=block)

    def _close(self) -> Iterator[bytes]:
        if self._open_block is not None:
            self._open_block = None
            yield _event("content_block_stop", index=self._block_count - 1)

    def _delta(self, delta: Body) -> bytes:
        return _event("content_block_delta", index=self._block_count - 1, delta=delta)


def _event(kind: str, **fields: Any) -> bytes:
    return event_to_bytes({"type": kind, **fields}, named=True)


def _frame(chat: Body) -> Body:
    return {"id": f"msg_{chat.get('id')}", "type": "message", "role": "assistant", "model": chat.get("model")}


def _end_of(choice: Body) -> Body:
    """How an answer ended. vLLM names the stop string that it met; a number there is a token's."""
    stop = choice.get("stop_reason")
    if isinstance(stop, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    return {"stop_reason": _STOP_REASONS.get(choice.get("finish_reason") or "", "end_turn"), "stop_sequence": None}


def _to_block(call: Body) -> Body:
    return {"type": "tool_use", "id": call.get("id"), "name": (call.get("function") or {}).get("name")}


def _read_arguments(text: str) -> Any:
    """The arguments of a tool call. What is no JSON object becomes an argument that the tool does not know."""
    try:
        arguments = read_json(text or "{}", strict=False)
    except ValueError:
        return {"arguments": text}
    return arguments if isinstance(arguments, dict) else {"arguments": arguments}


def _add_event(answer: Body, event: Body) -> None:
    """Adds one event of a stream to the message so far."""
    kind, delta = event.get("type"), event.get("delta") or {}
    if kind == "content_block_start":
        answer["content"].append(dict(event["content_block"]))
    elif kind == "content_block_delta":
        block = answer["content"][event["index"]]
        for name in ("text", "partial_json", "thinking"):
            if name in delta:
                block[name] = (block.get(name) or "") + delta[name]
    elif kind == "message_delta":
        answer |= delta
        usage = {name: count for name, count in (event.get("usage") or {}).items() if count is not None}
        answer["usage"] = {**(answer.get("usage") or {}), **usage}


def _to_chat_messages(body: Body) -> list[Body]:
    """System prompt and messages as those of a chat; blocks without a counterpart stay as they are."""
    messages: list[Body] = []
    if body.get("system"):
        messages.append({"role": "system", "content": _to_chat_content(body["system"])})
    for message in body.get("messages") or ():
        content = message.get("content")
        if not isinstance(content, list):
            messages.append({"role": message.get("role"), "content": content})
        elif message.get("role") == "assistant":
            messages.append(_to_chat_answer(content))
        else:
            results = [block for block in content if block.get("type") == "tool_result"]
            for block in results:
                content_of_result = _result_to_content(block)
                messages.append(
                    {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content_of_result}
                )
            rest = [block for block in content if block.get("type") != "tool_result"]
            if rest or not results:
                messages.append({"role": message.get("role"), "content": _to_chat_content(rest)})
    return messages


def _result_to_content(block: Body) -> Any:
    """What a tool gave. A chat has no field that says that it failed, so the text says it."""
    content = block.get("content") or ""
    if not block.get("is_error"):
        return _to_chat_content(content)
    if isinstance(content, list):
        return _to_chat_content([{"type": "text", "text": _FAILED_RESULT}, *content])
    return f"{_FAILED_RESULT} {content}".rstrip()


def _to_chat_answer(blocks: Sequence[Body]) -> Body:
    calls = [
        {
            "id": block.get("id"),
            "type": "function",
            "function": {"name": block.get("name"), "arguments": json.dumps(block.get("input"))},
        }
        for block in blocks
        if block.get("type") == "tool_use"
    ]
    content = _to_chat_content([block for block in blocks if block.get("type") != "tool_use"])
    message: Body = {"role": "assistant", "content": content or None}
    return message | ({"tool_calls": calls} if calls else {})


def _to_chat_content(content: Any) -> Any:
    """Text blocks without hints to a cache; a lone one as a text."""
    if not isinstance(content, list):
        return content
    parts = [{"type": "text", "text": block.get("text")} if block.get("type") == "text" else block for block in content]
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _rename_fields(body: Body, node: str) -> Body:
    """Stop strings, tools and format, by the names of chat completions."""
    fields: Body = {}
    if body.get("stop_sequences"):
        fields["stop"] = body["stop_sequences"]
    tools = [_without_cache_hint(tool) for tool in body.get("tools") or ()]
    if tools or body.get("tool_choice"):
        given = {"tools": tools or None, "tool_choice": body.get("tool_choice")}
        options = options_to_openai(given, node)
        fields |= {name: value for name, value in options.items() if value is not None}
    schema = (body.get("output_config") or {}).get("format") or {}
    if schema.get("type") == "json_schema":
        json_schema = {"name": "answer", "schema": schema.get("schema")}
        fields["response_format"] = {"type": "json_schema", "json_schema": json_schema}
    return fields


def _without_cache_hint(tool: Body) -> Body:
    """The tool; one that only has a schema without the type that says so."""
    is_custom = tool.get("type") in _CUSTOM_TOOL
    return {name: value for name, value in tool.items() if name != CACHE_HINT and not (is_custom and name == "type")}
