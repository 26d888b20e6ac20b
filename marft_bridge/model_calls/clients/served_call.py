"""A call of a node that has a route -> the same call to the served model, answered in the provider's own form.

It stands where the client's HTTP connection would be: the client builds its request and reads its answer as ever, so
that results, streams, retries and errors are of the client's own types. Invariants: what the served model cannot do is
refused before anything is sent; the engine's tokens go to the recorder only; a trained node's answer without usable
tokens fails its call.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import TYPE_CHECKING, Any

import httpx
from pydantic import SecretStr

from marft_bridge.common.errors import ServingError
from marft_bridge.common.server_events import EventReader, event_to_data
from marft_bridge.model_calls.clients.client_call import ClientCall
from marft_bridge.model_calls.clients.wire import Body
from marft_bridge.model_calls.request_rules import payload_to_routed
from marft_bridge.model_calls.routing import PROVIDER, Route, Routing, calling_node, current_routing, route_for_call
from marft_bridge.model_calls.scripted_answer import fixed_tokens
from marft_bridge.model_calls.token_capture import ExactTokens, add_wire_answer, require_tokens
from trace_store.json_text import read_json

if TYPE_CHECKING:
    from marft_bridge.model_calls.node_chat_model import NodeChat

_STREAM_HEADERS = {"content-type": "text/event-stream"}
_HEADERS = {"content-type": "application/json"}


def current_route() -> Route | None:
    """The route of the calling node on the served model; None where its own client answers. Counts those calls."""
    routing = current_routing.get()
    if routing is None or _served_chat(routing) is None:
        return None
    node = calling_node()
    if node not in routing.routes:
        routing.unrouted_calls[node] += 1
        return None
    return routing.routes[node]


def route_to_address() -> tuple[str, str]:
    """Base address and key of the server that answers the calling node, which has a route."""
    routing = current_routing.get()
    assert routing is not None
    chat = _served_chat(routing)
    assert chat is not None
    return _address_of(chat.model_for_server())


def _served_chat(routing: Routing) -> NodeChat | None:
    """The chat model that calls are redirected to; None where the routing has none, or one that answers itself."""
    from marft_bridge.model_calls.node_chat_model import NodeChat  # takes the openai package, which recording need not

    return routing.chat if isinstance(routing.chat, NodeChat) else None


def _address_of(chat: NodeChat) -> tuple[str, str]:
    key = chat.openai_api_key
    return (chat.openai_api_base or "").rstrip("/"), key.get_secret_value() if isinstance(key, SecretStr) else ""


class _ServedFailures:
    """Our own errors of the calls inside a block, which the packages in between would wrap in theirs."""

    def __init__(self) -> None:
        self._errors: ContextVar[list[BaseException] | None] = ContextVar("marft_served_failures", default=None)

    def note(self, error: BaseException) -> None:
        """Notes an error for the block around, if there is one."""
        errors = self._errors.get()
        if errors is not None:
            errors.append(error)

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Raises the first noted error in place of the one that the block raises."""
        errors: list[BaseException] = []
        reset_token = self._errors.set(errors)
        try:
            yield
        except Exception as error:
            if errors:
                raise errors[0] from error
            raise
        finally:
            self._errors.reset(reset_token)


served_failures = _ServedFailures()


class ServedCall:
    """One call of a node with a route."""

    def __init__(self, call: ClientCall, timeout: Any) -> None:
        """Plans the request. `timeout` is the call's own, in the client's form; None where it has none.

        Raises:
            GraphError: the served model cannot answer the call, or the episode has no token left.
        """
        routing = current_routing.get()
        assert routing is not None  # `current_route` gave a route
        chat = _served_chat(routing)
        assert chat is not None
        self.failure: ServingError | None = None  # what the answer was refused for
        self._call, self._wire = call, call.wire
        self._is_stream = bool(call.body.get("stream"))
        self._chat = chat.model_for_server()
        self._timeout = timeout
        self._node = calling_node()
        chat_request = self._wire.request_to_chat(call.body, self._node)
        chat_request.pop("stream", None)
        chat_request.pop("stream_options", None)
        _, route, self._seed = route_for_call()
        assert route is not None
        self._route = route
        payload, left_out_fields = payload_to_routed(
            chat_request, self._node, route, seed=self._seed, auto_tools=self._chat.auto_tools
        )
        chat.warn_left_out(self._node, left_out_fields)
        self._payload = payload | payload.pop("extra_body") | {"logprobs": True, "return_token_ids": True}
        if self._is_stream:
            self._payload |= {"stream": True, "stream_options": {"include_usage": True}}

    # -- one attempt; a client may make several ----------------------------------------------------------------

    def send(self, request: Any, http: ModuleType) -> Any:
        """The answer to the client's HTTP request, as a response of its HTTP library."""
        tokens = self._begin_attempt()
        if self._route.answer is not None:
            return self._fixed_response(request, http)
        client: Any = self._chat.http_client
        response = client.send(self._http_request(client), stream=True)
        if response.status_code != httpx.codes.OK:
            response.read()
            return self._error_response(response, request, http)
        if not self._is_stream:
            response.read()
            return self._whole_response(tokens, response.content, request=request, http=http)
        body = _body_classes(http)[0](self._stream_parts(tokens, response), response.close)
        return http.Response(200, headers=_STREAM_HEADERS, stream=body, request=request)

    async def asend(self, request: Any, http: ModuleType) -> Any:
        """As `send`, for an asynchronous client."""
        tokens = self._begin_attempt()
        if self._route.answer is not None:
            return self._fixed_response(request, http)
        client: Any = self._chat.http_async_client
        response = await client.send(self._http_request(client), stream=True)
        if response.status_code != httpx.codes.OK:
            await response.aread()
            return self._error_response(response, request, http)
        if not self._is_stream:
            await response.aread()
            return self._whole_response(tokens, response.content, request=request, http=http)
        body = _body_classes(http)[1](self._astream_parts(tokens, response), response.aclose)
        return http.Response(200, headers=_STREAM_HEADERS, stream=body, request=request)

    def _begin_attempt(self) -> ExactTokens:
        if self._route.answer is not None:
            tokens = fixed_tokens(self._node, self._route)
        else:
            max_tokens = self._payload["max_tokens"]
            tokens = ExactTokens(self._route, self._seed, node=self._node, max_tokens=max_tokens, provider=PROVIDER)
        self._call.tokens = tokens
        return tokens

    def _http_request(self, client: Any) -> Any:
        address, key = _address_of(self._chat)
        timeout = {} if self._timeout is None else {"timeout": _own_timeout(self._timeout)}
        url = f"{address}/chat/completions"
        return client.build_request(
            "POST", url, json=self._payload, headers={"Authorization": f"Bearer {key}"}, **timeout
        )

    def _error_response(self, response: httpx.Response, request: Any, http: ModuleType) -> Any:
        try:
            body = read_json(response.content)
            message = str((body.get("error") or {}).get("message") or body)
        except (ValueError, AttributeError):
            message = response.text
        return http.Response(
            response.status_code, headers=_HEADERS, json=self._wire.error_to_body(message), request=request
        )

    def _fixed_response(self, request: Any, http: ModuleType) -> Any:
        message = {"role": "assistant", "content": self._route.answer}
        chat = {"id": "fixed", "created": 0, "model": self._route.model, "object": "chat.completion"}
        if not self._is_stream:
            whole = chat | {
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                "usage": _no_usage(),
            }
            return self._json_response(whole, request, http)
        form = self._wire.open_stream(self._call.body)
        choice = {"index": 0, "delta": message, "finish_reason": "stop"}
        chunk = chat | {"object": "chat.completion.chunk", "choices": [choice]}
        parts = [*form.chunk_to_events(chunk), *form.end()]
        return http.Response(200, headers=_STREAM_HEADERS, content=b"".join(parts), request=request)

    def _whole_response(self, tokens: ExactTokens, content: bytes, request: Any, http: ModuleType) -> Any:
        try:
            chat = read_json(content)
            add_wire_answer(tokens, chat)
            require_tokens(tokens)
            return self._json_response(chat, request, http)
        except ServingError as error:
            self.failure = error
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            self.failure = tokens.malformed_error(f"{type(error).__name__}: {error}")
        # A status that no client tries again; the caller gets `failure` instead of the client's error.
        return http.Response(400, headers=_HEADERS, json=self._wire.error_to_body(str(self.failure)), request=request)

    def _json_response(self, chat: Body, request: Any, http: ModuleType) -> Any:
        answer = self._wire.chat_to_answer(chat, self._call.body)
        return http.Response(200, headers=_HEADERS, json=answer, request=request)

    # -- streams ----------------------------------------------------------------------------------------------

    def _stream_parts(self, tokens: ExactTokens, response: httpx.Response) -> Iterator[bytes]:
        stream = _ServedStream(self, tokens)
        for piece in response.iter_bytes():
            yield from stream.piece_to_parts(piece)
        yield from stream.end()

    async def _astream_parts(self, tokens: ExactTokens, response: httpx.Response) -> AsyncIterator[bytes]:
        stream = _ServedStream(self, tokens)
        async for piece in response.aiter_bytes():
            for part in stream.piece_to_parts(piece):
                yield part
        for part in stream.end():
            yield part


class _ServedStream:
    """The pieces of the served model's stream -> the parts of the provider's."""

    def __init__(self, served: ServedCall, tokens: ExactTokens) -> None:
        self._tokens = tokens
        self._form = served._wire.open_stream(served._call.body)
        self._reader = EventReader()
        self._has_failed = False

    def piece_to_parts(self, piece: bytes) -> Iterator[bytes]:
        for event in self._reader.feed(piece):
            yield from self._event_to_parts(event)

    def _event_to_parts(self, event: bytes) -> Iterator[bytes]:
        data = event_to_data(event)
        if data is None or data == b"[DONE]":
            return
        try:
            chunk = read_json(data)
        except ValueError as error:
            raise self._tokens.malformed_error(f"not JSON ({error})") from error
        if isinstance(chunk, dict) and chunk.get("error"):
            self._has_failed = True
            yield from self._form.error_to_events(str(chunk["error"].get("message")))
            return
        add_wire_answer(self._tokens, chunk)
        yield from self._form.chunk_to_events(chunk)

    def end(self) -> Iterator[bytes]:
        yield from self._event_to_parts(self._reader.rest)  # a server may end without a blank line
        if not self._has_failed:
            require_tokens(self._tokens)  # before the last event, after which nobody reads on
            yield from self._form.end()


def _no_usage() -> Body:
    return {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}


def _own_timeout(timeout: Any) -> httpx.Timeout:
    return httpx.Timeout(**timeout.as_dict()) if hasattr(timeout, "as_dict") else httpx.Timeout(timeout)


# -- in the client's HTTP library: httpx, or httpx2, which the openai package has moved to -----------------------


@functools.cache
def _body_classes(http: ModuleType) -> tuple[Any, Any]:
    """The bodies of streamed responses, synchronous and asynchronous: parts that are read once, and a close."""
    sync_base: Any = http.SyncByteStream
    async_base: Any = http.AsyncByteStream

    class Body(sync_base):  # type: ignore[misc]
        def __init__(self, parts: Iterator[bytes], close: Any) -> None:
            self._parts, self._close = parts, close

        def __iter__(self) -> Iterator[bytes]:
            return self._parts

        def close(self) -> None:
            self._close()

    class AsyncBody(async_base):  # type: ignore[misc]
        def __init__(self, parts: AsyncIterator[bytes], close: Any) -> None:
            self._parts, self._close = parts, close

        def __aiter__(self) -> AsyncIterator[bytes]:
            return self._parts

        async def aclose(self) -> None:
            await self._close()

    return Body, AsyncBody


@functools.cache
def _transport_classes(http: ModuleType) -> tuple[Any, Any]:
    sync_base: Any = http.BaseTransport
    async_base: Any = http.AsyncBaseTransport

    class Transport(sync_base):  # type: ignore[misc]
        def __init__(self, served: ServedCall) -> None:
            self._served = served

        def handle_request(self, request: Any) -> Any:
            return self._served.send(request, http)

    class AsyncTransport(async_base):  # type: ignore[misc]
        def __init__(self, served: ServedCall) -> None:
            self._served = served

        async def handle_async_request(self, request: Any) -> Any:
            return await self._served.asend(request, http)

    return Transport, AsyncTransport


def make_http_client(served: Any, http: ModuleType, *, is_async: bool) -> Any:
    """An HTTP client that sends nothing itself: `served`, a `ServedCall` or what has its methods, answers."""
    sync_class, async_class = _transport_classes(http)
    if is_async:
        return http.AsyncClient(transport=async_class(served), trust_env=False)
    return http.Client(transport=sync_class(served), trust_env=False)
