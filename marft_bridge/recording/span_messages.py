"""LangChain's messages -> messages of the GenAI conventions, as `gen_ai.input.messages` and its like hold them.

    {"role": "assistant", "parts": [{"type": "text", "content": ...}, {"type": "tool_call", "id": ..., ...}]}

Invariant: texts, ids, names and arguments come through unchanged, and each once: the blocks of a provider's own content
that repeat the message's tool calls are left out. A block of a kind that the conventions have no part for (an image)
is passed on as it is.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from json.encoder import encode_basestring_ascii as text_to_json
from typing import Any, cast

from langchain_core.messages import AIMessage, BaseMessage, ChatMessage, FunctionMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, Generation

Message = dict[str, Any]

encode_json = json.JSONEncoder(default=str).encode
"""A value as JSON text; a value that JSON has no form for becomes its `str`. Raises what that raises, and for keys that
are no text."""

_ROLES = {"human": "user", "ai": "assistant", "AIMessageChunk": "assistant", "HumanMessageChunk": "user"}
# Blocks of content that repeat what a message holds as its tool calls.
_REPEATED_CALLS = frozenset({"tool_use", "tool_call", "tool_call_chunk", "function_call", "invalid_tool_call"})
_SCAN_LIMIT = 1000  # values that are searched for messages, at most
_CACHED = 1024  # classes of messages
_THOUGHTS = {"reasoning": "reasoning", "thinking": "thinking"}  # type of a block -> its key of the text


def to_json(value: Any) -> str:
    """As `encode_json`; but keys become text too, and what cannot be shown is named by its class. Never raises."""
    try:
        return encode_json(value)
    except Exception:  # noqa: BLE001 - an app's own objects may raise anything
        try:
            return encode_json(_to_plain(value))
        except Exception:  # noqa: BLE001 - lists without an end, in each other
            return encode_json(f"a {type(value).__name__} that cannot be shown")


def _to_plain(value: Any) -> Any:
    """The value with texts where JSON has no form for a part of it or a key."""
    if isinstance(value, dict):
        return {to_shown(key): _to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float)) else to_shown(value)


def to_shown(value: Any) -> str:
    """The `str` of a value; where it has none, what it is. Never raises."""
    try:
        return str(value)
    except Exception:  # noqa: BLE001 - as above
        return f"a {type(value).__name__} that cannot be shown"


def message_to_parts(message: BaseMessage) -> Message:
    """One of LangChain's messages, of a prompt or an answer."""
    name = {} if message.name is None else {"name": message.name}
    return {"role": _role_of(message), "parts": list(_message_to_parts(message, known_class(type(message)))), **name}


def messages_to_text(messages: Sequence[BaseMessage]) -> str:
    """LangChain's messages as the JSON text of a list, as `to_json` writes it in several times the time."""
    return f"[{', '.join(map(_message_to_text, messages))}]"


def _message_to_text(message: BaseMessage) -> str:
    content = message.content
    if not content or not isinstance(content, str) or message.name is not None or not _is_text_only(message):
        return to_json(message_to_parts(message))
    role = text_to_json(_role_of(message))
    return f'{{"role": {role}, "parts": [{{"type": "text", "content": {text_to_json(content)}}}]}}'


def text_to_message(role: str, text: str) -> Message:
    """A plain text as a message of one part."""
    return {"role": role, "parts": [{"type": "text", "content": text}]}


def generation_to_message(generation: Generation) -> BaseMessage | None:
    """The message of a chat model's answer; None for the plain text of a completion."""
    if type(generation) is ChatGeneration or isinstance(generation, ChatGeneration):  # pydantic takes long to tell
        return generation.message
    return None


def find_messages(value: Any) -> Iterator[BaseMessage]:
    """The messages in a value that is made of lists and dicts, in no fixed order."""
    pending, seen = [value], 0
    while pending and seen < _SCAN_LIMIT:
        value, seen = pending.pop(), seen + 1
        if isinstance(value, BaseMessage):
            yield value
        elif isinstance(value, dict):
            pending.extend(value.values())
        elif isinstance(value, (list, tuple)):
            pending.extend(value)


@functools.lru_cache(maxsize=_CACHED)
def known_class(cls: type[BaseMessage]) -> type[BaseMessage]:
    """The class that says how a message is read. (LangChain's classes take long to tell an instance.)"""
    known_classes = (ToolMessage, FunctionMessage, AIMessage, ChatMessage)
    return next((known_class for known_class in known_classes if issubclass(cls, known_class)), BaseMessage)


def _role_of(message: BaseMessage) -> str:
    if known_class(type(message)) is ChatMessage:
        return cast(ChatMessage, message).role
    return _ROLES.get(message.type, message.type)


def _is_text_only(message: BaseMessage) -> bool:
    """Whether a message whose content is a text has no other part."""
    message_class = known_class(type(message))
    if message_class is AIMessage:
        return not _calls_of(message)
    return message_class is not ToolMessage and message_class is not FunctionMessage


def _refusal_of(message: Any) -> str:
    """What langchain-openai keeps of an answer with which the model refuses: its content is empty."""
    refusal = message.additional_kwargs.get("refusal")
    return refusal if isinstance(refusal, str) else ""


def _calls_of(message: Any) -> list[Any]:
    return [*message.tool_calls, *message.invalid_tool_calls]


def _message_to_parts(message: Any, message_class: type[BaseMessage]) -> Iterator[dict[str, Any]]:
    if message_class is ToolMessage:
        yield {"type": "tool_call_response", "id": message.tool_call_id, "response": message.content}
        return
    if message_class is FunctionMessage:
        yield {"type": "tool_call_response", "id": None, "response": message.content}
        return
    content = message.content or _refusal_of(message) or message.content
    calls = _calls_of(message) if message_class is AIMessage else []
    if isinstance(content, str):
        if content or not calls:  # a text of no characters is a text, unless the message says something else
            yield {"type": "text", "content": content}
    else:
        for block in content:
            yield from _block_to_parts(block)
    for call in calls:  # of an invalid one, arguments are its text
        yield {"type": "tool_call", "id": call["id"], "name": call["name"], "arguments": call["args"]}


def _block_to_parts(block: str | Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if isinstance(block, str):
        yield {"type": "text", "content": block}
        return
    kind = block.get("type")
    if isinstance(block.get("text"), str) and kind in (None, "text"):
        yield {"type": "text", "content": block["text"]}
    elif kind in _THOUGHTS and isinstance(block.get(_THOUGHTS[kind]), str):
        yield {"type": "reasoning", "content": block[_THOUGHTS[kind]]}
    elif kind not in _REPEATED_CALLS:
        yield dict(block) if kind is not None else {"type": "generic", **block}
