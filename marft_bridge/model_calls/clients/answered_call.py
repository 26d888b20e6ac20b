"""A call of a node by a client that is no LangChain chat model -> an answer that is known, in the provider's own form.

For replays, and for the beginnings of forks. It stands where the client's HTTP connection would be, as `served_call`
does. Invariants: nothing is sent; while somebody answers, no call of a node goes to its provider.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol
from uuid import UUID

from langchain_core.messages import AIMessage

from marft_bridge.model_calls.clients.client_call import ClientCall
from marft_bridge.model_calls.clients.wire import Body

_HEADERS = {"content-type": "application/json"}
_STREAM_HEADERS = {"content-type": "text/event-stream"}
NO_ADDRESS = "http://127.0.0.1:9/v1"
"""What a client is told of where its answers come from. Nothing is sent there."""


class Answerer(Protocol):
    """Knows the answers of calls by their run ids."""

    def take_answer(self, run_id: UUID | None) -> AIMessage:
        """The answer; or raises."""

    async def atake_answer(self, run_id: UUID | None) -> AIMessage:
        """As `take_answer`."""


@dataclass(frozen=True, slots=True)
class KnownAnswer:
    """An `Answerer` of one call, whose answer is at hand."""

    message: AIMessage

    def take_answer(self, run_id: UUID | None) -> AIMessage:  # noqa: ARG002 - as `Answerer` has it
        """The answer."""
        return self.message

    async def atake_answer(self, run_id: UUID | None) -> AIMessage:  # noqa: ARG002 - as above
        """As `take_answer`."""
        return self.message


_answerers: list[Answerer] = []


def current_answerer() -> Answerer | None:
    """Who answers the calls of clients now; None where their providers do."""
    return _answerers[-1] if _answerers else None


@contextmanager
def answering(answerer: Answerer) -> Iterator[None]:
    """While the block runs, `answerer` answers the calls of all clients."""
    _answerers.append(answerer)
    try:
        yield
    finally:
        _answerers.remove(answerer)


class AnsweredCall:
    """One call, answered by an `Answerer`; see `served_call.ServedCall` for what its methods stand in for."""

    def __init__(self, call: ClientCall, answerer: Answerer) -> None:
        self.failure: Exception | None = None  # what is raised instead of the client's error
        self._call, self._answerer = call, answerer

    def send(self, request: Any, http: ModuleType) -> Any:
        """The answer to the client's HTTP request, as a response of its HTTP library."""
        try:
            message = self._answerer.take_answer(self._call.run_id)
        except Exception as error:  # noqa: BLE001 - raised again in place of the client's own
            return self._failed(error, request, http)
        return self._response(message, request, http)

    async def asend(self, request: Any, http: ModuleType) -> Any:
        """As `send`, for an asynchronous client."""
        try:
            message = await self._answerer.atake_answer(self._call.run_id)
        except Exception as error:  # noqa: BLE001 - as above
            return self._failed(error, request, http)
        return self._response(message, request, http)

    def _failed(self, error: Exception, request: Any, http: ModuleType) -> Any:
        self.failure = error
        # A status that no client tries again.
        return http.Response(400, headers=_HEADERS, json=self._call.wire.error_to_body(str(error)), request=request)

    def _response(self, message: AIMessage, request: Any, http: ModuleType) -> Any:
        wire, body = self._call.wire, self._call.body
        chat, delta = _message_to_chat(message, body), _message_to_delta(message)
        if not body.get("stream"):
            return http.Response(200, headers=_HEADERS, json=wire.chat_to_answer(chat, body), request=request)
        form = wire.open_stream(body)
        choice = {"index": 0, "delta": delta, "finish_reason": chat["choices"][0]["finish_reason"]}
        chunk = {**chat, "object": "chat.completion.chunk", "choices": [choice]}
        parts = [*form.chunk_to_events(chunk), *form.end()]
        return http.Response(200, headers=_STREAM_HEADERS, content=b"".join(parts), request=request)


def _message_to_chat(message: AIMessage, body: Body) -> Body:
    """The answer as a chat completion."""
    usage = message.usage_metadata
    counts = (usage["input_tokens"], usage["output_tokens"]) if usage is not None else (0, 0)
    reason = message.response_metadata.get("finish_reason") or ("tool_calls" if message.tool_calls else "stop")
    return {
        "id": message.id or "recorded",
        "created": 0,
        "object": "chat.completion",
        "model": message.response_metadata.get("model_name") or body.get("model") or "recorded",
        "choices": [{"index": 0, "message": _message_to_delta(message), "finish_reason": reason}],
        "usage": {"prompt_tokens": counts[0], "completion_tokens": counts[1], "total_tokens": sum(counts)},
    }


def _message_to_delta(message: AIMessage) -> Body:
    calls: list[Body] = [
        {
            "index": index,
            "id": call["id"],
            "type": "function",
            "function": {"name": call["name"], "arguments": json.dumps(call["args"])},
        }
        for index, call in enumerate(message.tool_calls)
    ]
    calls += [
        {
            "index": len(calls) + index,
            "id": call["id"],
            "type": "function",
            "function": {"name": call["name"], "arguments": call["args"]},
        }
        for index, call in enumerate(message.invalid_tool_calls)
    ]
    text = str(message.text)
    return {"role": "assistant", "content": text or None, **({"tool_calls": calls} if calls else {})}
