"""OpenAI's chat completions <-> the form of the served model, which is nearly the same.

Invariant: the app sees the fields that it would have seen; token ids, and log-probs and counts that it did not request,
stay with the recorder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from langchain_core.messages import BaseMessage, FunctionMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.outputs import LLMResult

from marft_bridge.model_calls.clients.wire import (
    Body,
    add_call_part,
    event_to_bytes,
    make_message,
    make_result,
    make_usage,
    message_to_text,
    refusal,
)
from marft_bridge.model_calls.request_rules import move_extras

# What vLLM adds to a choice or an answer.
_ENGINE_FIELDS = ("token_ids", "stop_reason", "prompt_token_ids", "prompt_logprobs", "kv_transfer_params")
_TEXT_PARTS = ("text", "refusal")
_ROLES = ("system", "developer", "user", "assistant", "tool")


class OpenAIChat:
    """See `wire.Wire`."""

    provider = "openai"

    def request_to_messages(self, body: Body) -> list[BaseMessage]:
        """The prompt, as LangChain messages."""
        return [chat_to_message(message) for message in body.get("messages") or ()]

    def replace_system(self, body: Mapping[str, Any], text: str) -> Body | None:
        """The messages with `text` in place of the first, where that is a system message; else None."""
        messages = list(body.get("messages") or ())
        if not messages or not is_system(messages[0]):
            return None
        return {"messages": [{**messages[0], "content": text}, *messages[1:]]}

    def request_to_parameters(self, body: Body) -> Body:
        """All other fields: these are OpenAI's names."""
        return {name: value for name, value in body.items() if name != "messages"}

    def answer_to_result(self, answer: Body) -> LLMResult:
        """A whole answer as LangChain reports it."""
        usage = answer.get("usage") or {}
        counts = make_usage(
            usage.get("prompt_tokens"),
            usage.get("completion_tokens"),
            cache_read=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
            reasoning=(usage.get("completion_tokens_details") or {}).get("reasoning_tokens"),
        )
        choices = answer.get("choices") or [{}]
        return make_result(
            answer,
            [
                (_choice_to_message(choice, counts if len(choices) == 1 else None), choice.get("finish_reason"))
                for choice in choices
            ],
        )

    def events_to_answer(self, events: Sequence[Body]) -> Body | None:
        """The whole answer that the chunks of a stream amount to."""
        answer: Body = {}
        choices: dict[int, Body] = {}
        for chunk in events:
            answer |= {name: chunk[name] for name in ("id", "model", "usage") if chunk.get(name) is not None}
            for part in chunk.get("choices") or ():
                _add_part(choices.setdefault(part.get("index", 0), {"message": {}}), part)
        if not choices or any(choice.get("finish_reason") is None for choice in choices.values()):
            return None
        for choice in choices.values():
            calls = choice["message"].get("tool_calls", {})
            choice["message"]["tool_calls"] = [calls[number] for number in sorted(calls)]
        return answer | {"choices": [choices[number] for number in sorted(choices)]}

    def request_to_chat(self, body: Body, node: str) -> Body:
        """The same request, with roles that chat templates know. Raises GraphError."""
        if (body.get("n") or 1) > 1:
            raise refusal(node, f"n={body['n']} answers of one call")
        messages = [_check_message(message, node) for message in body.get("messages") or ()]
        return move_extras(body) | {"messages": messages}

    def chat_to_answer(self, chat: Body, body: Body) -> Body:
        """The answer without what the app did not request."""
        answer = _without_engine_fields(chat)
        answer["choices"] = [_visible_choice(choice, body) for choice in chat.get("choices") or ()]
        return answer

    def open_stream(self, body: Body) -> _ChatStream:
        """Converts the stream that answers the request `body`."""
        return _ChatStream(body)

    def error_to_body(self, message: str) -> Body:
        """The body of a failed request."""
        return {"error": {"message": message, "type": "server_error", "param": None, "code": None}}


class _ChatStream:
    """See `wire.StreamForm`."""

    def __init__(self, body: Body) -> None:
        self._body = body
        self._shows_usage = bool((body.get("stream_options") or {}).get("include_usage"))

    def chunk_to_events(self, chunk: Body) -> Iterator[bytes]:
        """The chunk, unless it only has counts that the app did not request."""
        if not chunk.get("choices") and not self._shows_usage:
            return
        visible_chunk = _without_engine_fields(chunk)
        visible_chunk["choices"] = [_visible_choice(choice, self._body) for choice in chunk.get("choices") or ()]
        if not self._shows_usage:
            visible_chunk.pop("usage", None)
        yield event_to_bytes(visible_chunk, named=False)

    def end(self) -> Iterator[bytes]:
        """The mark of the end."""
        yield b"data: [DONE]\n\n"

    def error_to_events(self, message: str) -> Iterator[bytes]:
        """An error, as the package expects it inside a stream."""
        yield event_to_bytes(OpenAIChat().error_to_body(message), named=False)


def is_system(message: Any) -> bool:
    """Whether a message of a request is a system message."""
    return isinstance(message, Mapping) and message.get("role") in ("system", "developer")


def chat_to_message(message: Body) -> BaseMessage:
    """One message of a chat request, as LangChain has it."""
    role, content = message.get("role"), message.get("content")
    content = "" if content is None else content
    if role in ("system", "developer"):
        return SystemMessage(content)
    if role == "assistant":
        return make_message(message_to_text(message), _wire_calls(message))
    if role == "tool":
        return ToolMessage(content, tool_call_id=str(message.get("tool_call_id") or ""))
    if role == "function":
        return FunctionMessage(content=content, name=str(message.get("name") or ""))
    return HumanMessage(content)


def _choice_to_message(choice: Body, usage: Any) -> Any:
    message = choice.get("message") or {}
    return make_message(message_to_text(message), _wire_calls(message), usage_metadata=usage)


def _wire_calls(message: Body) -> list[tuple[str | None, str, str]]:
    functions = [(call.get("id"), call.get("function") or {}) for call in message.get("tool_calls") or ()]
    if message.get("function_call"):  # the older form of one call, which has no id
        functions.append((None, message["function_call"]))
    return [(call_id, function.get("name") or "", function.get("arguments") or "") for call_id, function in functions]


def _add_part(choice: Body, part: Body) -> None:
    """Adds one streamed part of a choice to what came before it."""
    message, delta = choice["message"], part.get("delta") or {}
    for name in ("content", "refusal"):
        if delta.get(name) is not None:
            message[name] = message.get(name, "") + delta[name]
    for name, text in (delta.get("function_call") or {}).items():
        function = message.setdefault("function_call", {})
        function[name] = function.get(name, "") + (text or "")
    for call in delta.get("tool_calls") or ():
        add_call_part(message.setdefault("tool_calls", {}), call)
    choice["finish_reason"] = part.get("finish_reason") or choice.get("finish_reason")


def _check_message(message: Body, node: str) -> Body:
    if message.get("role") not in _ROLES:
        raise refusal(node, f"a message of the role {message.get('role')!r}")
    if message.get("audio") or message.get("function_call"):
        raise refusal(node, f"a message with {'audio' if message.get('audio') else 'function_call'!r}")
    content = message.get("content")
    for part in content if isinstance(content, list) else ():
        if part.get("type") not in _TEXT_PARTS:
            raise refusal(node, f"a message with {part.get('type')!r}")
    if message.get("refusal") and not content:  # chat templates know no refusal
        message = {name: value for name, value in message.items() if name != "refusal"} | {
            "content": message["refusal"]
        }
    return message | {"role": "system"} if message["role"] == "developer" else message


def _visible_choice(choice: Body, body: Body) -> Body:
    visible_choice = _without_engine_fields(choice)
    if not body.get("logprobs"):
        visible_choice["logprobs"] = None
    return visible_choice


def _without_engine_fields(answer: Body) -> Body:
    return {name: value for name, value in answer.items() if name not in _ENGINE_FIELDS}
