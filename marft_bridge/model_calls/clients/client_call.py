"""One call of a node through a client that is no LangChain chat model -> what recorders are told of a model call.

Recorders hear of it in the form of LangChain's callbacks, so that a span of it has the attributes of any other;
handlers of the app do not hear of it. Invariants: outside a recorded graph run, and beneath a LangChain chat model
(langchain-openai uses the openai package), a call is none; what the caller gets is the client's own, unchanged; a
failure in here is counted by the recorder, and never reaches the app.
"""

from __future__ import annotations

import contextvars
import json
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextvars import ContextVar
from types import FrameType
from typing import Any, Protocol
from uuid import UUID

from langchain_core.language_models import BaseLanguageModel

from marft_bridge.common.library_internals import var_child_runnable_config
from marft_bridge.model_calls.clients.wire import Body, Wire, bytes_to_events
from marft_bridge.model_calls.node_prompts import fields_with_prompt
from marft_bridge.model_calls.token_capture import ExactTokens, TokenListener, hand_over_tokens
from trace_store.json_text import read_json


class CallListener(TokenListener, Protocol):
    """A callback handler that is told of calls of other clients, in the form of LangChain's callbacks."""

    hears_other_clients: bool

    def note_lost_call(self, parent_run_id: UUID | None, error: Exception) -> None:
        """A call could not be told: its episode lacks a span."""

    on_chat_model_start: Callable[..., Any]
    on_llm_end: Callable[..., Any]
    on_llm_error: Callable[..., Any]


class StreamClosedError(Exception):
    """The caller closed a stream before its end."""


running_call: ContextVar[ClientCall | None] = ContextVar("marft_client_call", default=None)


class ClientCall:
    """One call while it is under way. It ends once: with an answer, an error, or the close of its stream."""

    def __init__(
        self, wire: Wire, body: Body, listeners: Sequence[CallListener], parent_run_id: UUID | None, metadata: Body
    ) -> None:
        self.wire, self.body = wire, body
        self.tokens: ExactTokens | None = None  # of a redirected call
        self.reads_http = True  # its answer is that of the HTTP response; False: it is given to `end_with`
        self._run_id = uuid.uuid4()
        self._listeners, self._parent_run_id, self._metadata = listeners, parent_run_id, metadata
        self._context = contextvars.copy_context()  # a stream may end in another one
        self._parts: list[bytes] = []
        self._is_stream = self._is_over = False

    @property
    def run_id(self) -> uuid.UUID:
        """The call's id, by which its listeners know it."""
        return self._run_id

    def put_prompt(self) -> Body:
        """Puts the prompt of the calling node, where it has one, into the request; returns the changed fields.

        Raises:
            GraphError: the call begins with no system message.
        """
        changed_fields = fields_with_prompt(self.body, self.wire.replace_system)
        self.body = {**self.body, **changed_fields}
        return changed_fields

    def start(self, parameters: Body) -> None:
        """Tells the listeners of the call; `parameters` are its fields with the model that really answers."""
        metadata = self._metadata | {"ls_provider": self.wire.provider, "ls_model_name": parameters.get("model")}

        def tell(listener: CallListener) -> None:
            listener.on_chat_model_start(
                {},
                [self.wire.request_to_messages(self.body)],
                run_id=self._run_id,
                parent_run_id=self._parent_run_id,
                metadata=metadata,
                invocation_params=self.wire.request_to_parameters(self.body) | parameters,
            )

        self._tell_all(tell)

    def watch_response(self, response: Any) -> None:
        """Takes the answer out of an HTTP response, now or while its caller reads it."""
        try:
            self._is_stream = "text/event-stream" in response.headers.get("content-type", "")
            self._parts = [response.content]
        except RuntimeError:  # not read yet
            self._parts = []
            self._watch_body(response)
        else:
            self.end()

    def _watch_body(self, response: Any) -> None:
        """Every way to read a response ends in these four methods."""
        iter_bytes, aiter_bytes = response.iter_bytes, response.aiter_bytes
        close, aclose = response.close, response.aclose

        def watched_iter(*args: Any, **kwargs: Any) -> Iterator[bytes]:
            try:
                for part in iter_bytes(*args, **kwargs):
                    self._parts.append(part)
                    yield part
            except Exception as error:
                self.fail(error)
                raise

        async def watched_aiter(*args: Any, **kwargs: Any) -> AsyncIterator[bytes]:
            try:
                async for part in aiter_bytes(*args, **kwargs):
                    self._parts.append(part)
                    yield part
            except Exception as error:
                self.fail(error)
                raise

        def watched_close() -> None:
            close()
            self.end()

        async def watched_aclose() -> None:
            await aclose()
            self.end()

        response.iter_bytes, response.aiter_bytes = watched_iter, watched_aiter
        response.close, response.aclose = watched_close, watched_aclose

    def end(self) -> None:
        """Ends the call with the answer that has arrived."""
        self.end_with(self._read_parts)

    def _read_parts(self) -> Any:
        stream = b"".join(self._parts)
        return self.wire.events_to_answer(bytes_to_events(stream)) if self._is_stream else read_json(stream)

    def end_with(self, read_answer: Callable[[], Body | None]) -> None:
        """Ends the call with an answer in the provider's form; None for a stream that was left early."""
        if self._is_over:
            return
        error: Exception | None = None
        try:
            answer = read_answer()
            result = None if answer is None else self.wire.answer_to_result(answer)
        except Exception as failure:  # noqa: BLE001 - an answer that only the app can read
            result, error = None, failure
        if result is None:
            self.fail(error or StreamClosedError("the stream was closed before its end"))
            return
        self._finish(lambda listener: listener.on_llm_end(result, run_id=self._run_id))

    def fail(self, error: BaseException) -> None:
        """Ends the call with an error."""
        if not self._is_over:
            self._finish(lambda listener: listener.on_llm_error(error, run_id=self._run_id))

    def _finish(self, tell: Callable[[CallListener], Any]) -> None:
        self._is_over = True
        self._parts = []
        if self.tokens is not None:
            self._context.run(hand_over_tokens, (self._run_id, tuple(self._listeners)), self.tokens)
        self._tell_all(tell)

    def _tell_all(self, tell: Callable[[CallListener], Any]) -> None:
        for listener in self._listeners:
            try:
                # In a copy: `announce_call` must not stay behind in the caller's context.
                self._context.copy().run(tell, listener)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is not the app's
                listener.note_lost_call(self._parent_run_id, error)


def open_call(wire: Wire, read_body: Callable[[], Any]) -> ClientCall | None:
    """The call that is about to be made with a JSON body; None where it is no call of a graph run."""
    config = var_child_runnable_config.get()
    if config is None or running_call.get() is not None or _is_beneath_language_model():
        return None
    callbacks: Any = config.get("callbacks")
    listeners = [
        handler for handler in getattr(callbacks, "handlers", ()) if getattr(handler, "hears_other_clients", 0)
    ]
    parent_run_id = getattr(callbacks, "parent_run_id", None)
    try:
        body = plain_json(read_body())
    except Exception as error:  # noqa: BLE001 - the client will say so itself, if it is the app's mistake
        for listener in listeners:
            listener.note_lost_call(parent_run_id, error)
        return None
    return ClientCall(wire, body, listeners, parent_run_id=parent_run_id, metadata=dict(config.get("metadata") or {}))


def plain_json(value: Any) -> Any:
    """A copy of a request in JSON's own types: apps put the packages' objects into it, such as an earlier answer."""
    return json.loads(json.dumps(value, default=_to_plain))


def _to_plain(value: Any) -> Any:
    if isinstance(value, type):
        return value.model_json_schema() if hasattr(value, "model_json_schema") else str(value)
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json", exclude_unset=True, warnings=False)
    if hasattr(value, "__iter__"):
        return list(value)
    return str(value)


def _is_beneath_language_model() -> bool:
    """Whether a method of a LangChain model is among the callers: the call is that model's, which is recorded."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        is_method = frame.f_code.co_argcount > 0 and frame.f_code.co_varnames[0] == "self"
        if is_method and isinstance(frame.f_locals.get("self"), BaseLanguageModel):
            return True
        frame = frame.f_back
    return False
