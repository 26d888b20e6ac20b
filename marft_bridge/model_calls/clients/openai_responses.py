"""OpenAI's responses <-> chat completions, the form of the served model.

Invariants: an item, part or field without a counterpart is refused, never left out; the events of a stream add up to
the response that its last event holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import LLMResult

from marft_bridge.model_calls.clients.openai_chat import chat_to_message, is_system
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

_ENDS = ("response.completed", "response.incomplete", "response.failed")
_RENAMED_FIELDS = {"input", "instructions", "max_output_tokens", "text", "tools", "tool_choice"}
_OFF_FIELDS = {"stream", "store", "background"}  # what a service does where they are True; False asks for nothing
_TEXT_OPTIONS = {"format", "verbosity"}
_OTHER = "other"  # key of an item that has no counterpart in a chat, in `input_to_chat`


class OpenAIResponses:
    """See `wire.Wire`."""

    provider = "openai"

    def request_to_messages(self, body: Body) -> list[BaseMessage]:
        """The prompt, as LangChain messages; an item of another kind is kept as it is."""
        return [
            AIMessage([message[_OTHER]]) if _OTHER in message else _with_id(chat_to_message(message), message.get("id"))
            for message in input_to_chat(body)
        ]

    def replace_system(self, body: Mapping[str, Any], text: str) -> Body | None:
        """`text` in place of the instructions, or else of a system message that the input begins with; else None."""
        if body.get("instructions"):
            return {"instructions": text}
        items = body.get("input")
        if not isinstance(items, list) or not items or not is_system(items[0]):
            return None
        return {"input": [{**items[0], "content": text}, *items[1:]]}

    def request_to_parameters(self, body: Body) -> Body:
        """The other fields by the names of chat completions."""
        kept_fields = {name: body[name] for name in ("model", "temperature", "top_p", "stream") if name in body}
        return kept_fields | _rename_fields(body)

    def answer_to_result(self, answer: Body) -> LLMResult:
        """A whole answer as LangChain reports it. Raises ValueError for one that failed."""
        if answer.get("status") == "failed":
            raise ValueError(str((answer.get("error") or {}).get("message") or "the response failed"))
        items = answer.get("output") or ()
        messages = [item for item in items if item.get("type") == "message"]
        calls = [
            (item.get("call_id"), item.get("name") or "", item.get("arguments") or "")
            for item in items
            if item.get("type") == "function_call"
        ]
        text = "".join(
            part.get("text") or part.get("refusal") or "" for item in messages for part in item.get("content") or ()
        )
        usage = answer.get("usage") or {}
        message = make_message(
            text,
            calls,
            message_id=messages[-1].get("id") if messages else None,
            usage_metadata=make_usage(
                usage.get("input_tokens"),
                usage.get("output_tokens"),
                cache_read=(usage.get("input_tokens_details") or {}).get("cached_tokens"),
                reasoning=(usage.get("output_tokens_details") or {}).get("reasoning_tokens"),
            ),
        )
        return make_result(answer, [(message, _finish_reason(answer, has_calls=bool(calls)))])

    def events_to_answer(self, events: Sequence[Body]) -> Body | None:
        """The response that the last event holds."""
        return next((event.get("response") for event in reversed(events) if event.get("type") in _ENDS), None)

    def request_to_chat(self, body: Body, node: str) -> Body:
        """The request as a chat. Raises GraphError."""
        messages = input_to_chat(body)
        for message in messages:
            if _OTHER in message:
                raise refusal(node, f"an input of the type {message[_OTHER].get('type')!r}")
            _check_parts(message, node)
        other_fields = {
            name: value
            for name, value in body.items()
            if name not in _RENAMED_FIELDS and value is not None and not (value is False and name in _OFF_FIELDS)
        }
        text_options = {name: value for name, value in (body.get("text") or {}).items() if value is not None}
        if unknown_options := text_options.keys() - _TEXT_OPTIONS:
            raise refusal(node, f"'text.{min(unknown_options)}'")
        if "verbosity" in text_options:
            other_fields["verbosity"] = text_options["verbosity"]
        chat_messages = [{name: value for name, value in message.items() if name != "id"} for message in messages]
        return move_extras(other_fields) | _rename_fields(body) | {"messages": chat_messages}

    def chat_to_answer(self, chat: Body, body: Body) -> Body:
        """The answer as a response."""
        choice = (chat.get("choices") or [{}])[0]
        output = _Output(str(chat.get("id")))
        message = choice.get("message") or {}
        output.add_text(message_to_text(message))
        for number, call in enumerate(message.get("tool_calls") or ()):
            output.add_call({"index": number} | call)
        return output.to_response(chat, body, choice.get("finish_reason"), usage=chat.get("usage"))

    def open_stream(self, body: Body) -> _ResponseStream:
        """Converts the stream that answers the request `body`."""
        return _ResponseStream(body)

    def error_to_body(self, message: str) -> Body:
        """The body of a failed request."""
        return {"error": {"message": message, "type": "server_error", "param": None, "code": None}}


class _Output:
    """The output items of one response, as they grow."""

    def __init__(self, chat_id: str) -> None:
        self._chat_id = chat_id
        self._text = ""
        self._calls: dict[int, Body] = {}

    def add_text(self, text: str) -> None:
        self._text += text

    def add_call(self, part: Body) -> None:
        add_call_part(self._calls, part)

    def message(self, status: str) -> Body:
        """The item with the text so far."""
        content = [] if status == "in_progress" else [self.text_part()]
        return {
            "id": f"msg_{self._chat_id}",
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def text_part(self) -> Body:
        """The content of that item."""
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": []}

    def call(self, index: int, status: str) -> Body:
        """The item of a tool call; its arguments are empty while it is in progress."""
        call = self._calls[index]
        return {
            "id": f"fc_{call['id']}",
            "type": "function_call",
            "status": status,
            "call_id": call["id"],
            "name": call["function"]["name"],
            "arguments": "" if status == "in_progress" else call["function"]["arguments"],
        }

    def items(self, status: str) -> list[Body]:
        """All items: the text, where there is one or nothing else, then the calls."""
        calls = [self.call(index, status) for index in sorted(self._calls)]
        return [self.message(status), *calls] if self._text or not calls else calls

    def to_response(self, chat: Body, body: Body, finish_reason: str | None, usage: Body | None) -> Body:
        """The whole response."""
        was_cut = finish_reason == "length"
        return _frame(chat, body) | {
            "status": "incomplete" if was_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if was_cut else None,
            "output": self.items("incomplete" if was_cut else "completed"),
            "usage": None if usage is None else _to_usage(usage),
        }


class _ResponseStream:
    """See `wire.StreamForm`."""

    def __init__(self, body: Body) -> None:
        self._body = body
        self._chat: Body | None = None  # the first chunk
        self._output = _Output("")
        self._open_items: list[str | int] = []  # "text", or the number of a call, by their index in the output
        self._finish_reason: str | None = None
        self._usage: Body | None = None
        self._event_count = 0

    def chunk_to_events(self, chunk: Body) -> Iterator[bytes]:
        """The events of one chunk."""
        if self._chat is None:
            self._chat, self._output = chunk, _Output(str(chunk.get("id")))
            begun = _frame(chunk, self._body) | {"status": "in_progress", "output": [], "usage": None}
            yield self._event("response.created", response=begun)
            yield self._event("response.in_progress", response=begun)
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
            if text := message_to_text(delta):
                yield from self._text_events(text)
            for part in delta.get("tool_calls") or ():
                yield from self._call_events(part)

    def _text_events(self, text: str) -> Iterator[bytes]:
        if "text" not in self._open_items:
            yield from self._begin_text()
        self._output.add_text(text)
        yield self._item_event("response.output_text.delta", "text", content_index=0, delta=text, logprobs=[])

    def _begin_text(self) -> Iterator[bytes]:
        item, part = self._output.message("in_progress"), self._output.text_part()
        self._open_items.append("text")
        index = len(self._open_items) - 1
        yield self._event("response.output_item.added", output_index=index, item=item)
        yield self._item_event("response.content_part.added", "text", content_index=0, part=part)

    def _call_events(self, part: Body) -> Iterator[bytes]:
        number = part.get("index", 0)
        self._output.add_call(part)
        if number not in self._open_items:
            self._open_items.append(number)
            index = len(self._open_items) - 1
            yield self._event(
                "response.output_item.added", output_index=index, item=self._output.call(number, "in_progress")
            )
        arguments = (part.get("function") or {}).get("arguments")
        if arguments:
            yield self._item_event("response.function_call_arguments.delta", number, delta=arguments)

    def end(self) -> Iterator[bytes]:
        """Closes every item, and the response."""
        if not self._open_items:
            yield from self._begin_text()
        was_cut = self._finish_reason == "length"
        status = "incomplete" if was_cut else "completed"
        items = []
        for index, kind in enumerate(self._open_items):
            if isinstance(kind, int):
                item = self._output.call(kind, status)
                fields = {"arguments": item["arguments"], "name": item["name"]}
                yield self._item_event("response.function_call_arguments.done", kind, **fields)
            else:
                item, part = self._output.message(status), self._output.text_part()
                fields = {"content_index": 0, "text": part["text"], "logprobs": []}
                yield self._item_event("response.output_text.done", "text", **fields)
                yield self._item_event("response.content_part.done", "text", content_index=0, part=part)
            items.append(item)
            yield self._event("response.output_item.done", output_index=index, item=item)
        response = self._output.to_response(self._chat or {}, self._body, self._finish_reason, usage=self._usage)
        yield self._event(f"response.{status}", response=response | {"output": items})

    def error_to_events(self, message: str) -> Iterator[bytes]:
        """An error, as the package expects it inside a stream."""
        yield self._event("error", message=message, code="server_error", param=None)

    def _item_event(self, kind: str, item: str | int, **fields: Any) -> bytes:
        item_id = (
            self._output.message("in_progress")["id"] if item == "text" else self._output.call(int(item), "")["id"]
        )
        return self._event(kind, item_id=item_id, output_index=self._open_items.index(item), **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._event_count, **fields}
        self._event_count += 1
        return event_to_bytes(event, named=True)


def input_to_chat(body: Body) -> list[Body]:
    """Instructions and input as the messages of a chat, those of the model with their `id`.

    An item without a counterpart is `{"other": item}`. Calls of tools join the message of the model before them.
    """
    messages: list[Body] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    items = body.get("input") or ()
    for item in [{"role": "user", "content": items}] if isinstance(items, str) else items:
        kind = item.get("type") or "message"
        if kind == "message" and "role" in item:
            role = "system" if item["role"] == "developer" else item["role"]
            messages.append({"role": role, "content": _to_chat_content(item.get("content"))})
            if item.get("id"):
                messages[-1]["id"] = item["id"]
        elif kind == "function_call":
            if not messages or messages[-1].get("role") != "assistant":
                messages.append({"role": "assistant", "content": None})
            function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            content = _to_chat_content(item.get("output"))
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        else:
            messages.append({_OTHER: item})
    return messages


def _to_chat_content(content: Any) -> Any:
    """Text parts by the chat's name; a lone one as a text. Other parts as they are."""
    if not isinstance(content, list):
        return content
    parts = [
        {"type": "text", "text": part.get("text")} if part.get("type") in ("input_text", "output_text") else part
        for part in content
    ]
    is_one_text = len(parts) == 1 and parts[0]["type"] == "text"
    return parts[0]["text"] if is_one_text else parts


def _check_parts(message: Body, node: str) -> None:
    content = message.get("content")
    for part in content if isinstance(content, list) else ():
        if part.get("type") != "text":
            raise refusal(node, f"a message with {part.get('type')!r}")


def _rename_fields(body: Body) -> Body:
    """Length, tools and format, by the names of chat completions."""
    fields: Body = {}
    if body.get("max_output_tokens") is not None:
        fields["max_tokens"] = body["max_output_tokens"]
    if body.get("tools"):
        fields["tools"] = [_to_chat_tool(tool) for tool in body["tools"]]
    choice = body.get("tool_choice")
    if choice is not None:
        is_function = isinstance(choice, dict) and choice.get("type") == "function"
        fields["tool_choice"] = (
            {"type": "function", "function": {"name": choice.get("name")}} if is_function else choice
        )
    answer_format = (body.get("text") or {}).get("format") or {}
    if answer_format.get("type") == "json_schema":
        schema = {name: value for name, value in answer_format.items() if name != "type"}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif answer_format.get("type") not in (None, "text"):
        fields["response_format"] = answer_format
    return fields


def _to_chat_tool(tool: Body) -> Body:
    if tool.get("type") != "function":
        return tool  # refused later by its type
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _frame(chat: Mapping[str, Any], body: Body) -> Body:
    """What a response says besides its output."""
    return {
        "id": f"resp_{chat.get('id')}",
        "object": "response",
        "created_at": chat.get("created") or 0,
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata") or {},
        "model": chat.get("model"),
        "parallel_tool_calls": body.get("parallel_tool_calls", True),
        "previous_response_id": None,
        "temperature": body.get("temperature"),
        "text": body.get("text") or {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": body.get("top_p"),
        "truncation": "disabled",
    }


def _to_usage(usage: Body) -> Body:
    prompt_tokens, sampled_tokens = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0
    return {
        "input_tokens": prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": sampled_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt_tokens + sampled_tokens,
    }


def _finish_reason(answer: Body, has_calls: bool) -> str | None:
    if answer.get("status") == "incomplete":
        reason = (answer.get("incomplete_details") or {}).get("reason")
        return "length" if reason == "max_output_tokens" else reason
    if answer.get("status") not in (None, "completed"):
        return None
    return "tool_calls" if has_calls else "stop"


def _with_id(message: BaseMessage, message_id: str | None) -> BaseMessage:
    message.id = message_id
    return message
