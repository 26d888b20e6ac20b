"""The packages openai and anthropic -> `ClientCall`s of what a node asks with them, sync, async and streamed.

Both are made by the same generator: every resource of theirs, also one that was made long ago, and every way to call it
(`create`, `parse`, `stream`, `with_raw_response`) ends in `request` of the client's base class, and every answer in
`_process_response`. These two are wrapped while somebody records or redirects. Invariants: a request that is no chat
call of a node goes through untouched; the methods are restored at the end, or, where another library has wrapped them
meanwhile, left in place, inactive.
"""

from __future__ import annotations

import copy
import functools
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from marft_bridge.common.errors import GraphError
from marft_bridge.model_calls.clients.answered_call import AnsweredCall, KnownAnswer, current_answerer
from marft_bridge.model_calls.clients.anthropic_messages import AnthropicMessages
from marft_bridge.model_calls.clients.client_call import ClientCall, open_call, running_call
from marft_bridge.model_calls.clients.openai_chat import OpenAIChat
from marft_bridge.model_calls.clients.openai_responses import OpenAIResponses
from marft_bridge.model_calls.clients.patches import PatchState
from marft_bridge.model_calls.clients.served_call import (
    ServedCall,
    current_route,
    make_http_client,
    served_failures,
)
from marft_bridge.model_calls.clients.wire import Body, Wire
from marft_bridge.model_calls.given_answers import answer_given_call

log = logging.getLogger("marft_bridge")

_WIRES: dict[str, dict[str, Wire]] = {
    "openai": {"/chat/completions": OpenAIChat(), "/responses": OpenAIResponses()},
    "anthropic": {"/v1/messages": AnthropicMessages()},
}
"""Package -> path of a request, as its resources give it -> form."""
_NOT_GIVEN = ("NotGiven", "Omit")  # the packages' own words for an argument that the caller left out
_CLIENTS = {"openai": ("OpenAI", "AsyncOpenAI"), "anthropic": ("Anthropic", "AsyncAnthropic")}


def patch_sdk(package: ModuleType, state: PatchState) -> Iterator[Callable[[], None]]:
    """See `patches.PatchPackage`."""
    wires = _WIRES[package.__name__]
    for name, wrappers in zip(_CLIENTS[package.__name__], (_SYNC_WRAPPERS, _ASYNC_WRAPPERS), strict=True):
        owners = {method: _owner_of(getattr(package, name, None), method) for method in wrappers}
        if None in owners.values():
            missing = next(method for method, owner in owners.items() if owner is None)
            log.warning(
                "calls with %s.%s are not recorded: this release has no method %r", package.__name__, name, missing
            )
            continue
        for method, owner in owners.items():
            yield _replace_method(owner, method, functools.partial(wrappers[method], wires=wires, state=state))


def _replace_method(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Callable[[], None]:
    original = vars(owner)[name]
    replacement = functools.wraps(original)(wrap(original))
    setattr(owner, name, replacement)

    def restore() -> None:
        if vars(owner).get(name) is replacement:
            setattr(owner, name, original)

    return restore


def _owner_of(client_class: Any, method: str) -> Any:
    """The class that defines a method of a client."""
    return next((each for each in getattr(client_class, "__mro__", ()) if method in vars(each)), None)


def _begin(
    client: Any, options: Any, stream: bool, wires: Mapping[str, Wire], state: PatchState
) -> tuple[Any, ClientCall | None, Any]:
    """The client that makes the request, the call where it is one of a node, and how the served model, the record of a
    replay, or the prefix of an episode answers it.

    Raises:
        GraphError: the node has a route, and the served model cannot answer this call.
    """
    wire = wires.get(str(options.url).partition("?")[0]) if options.method.lower() == "post" else None
    if wire is None or not state.is_active:
        return client, None, None
    call = open_call(wire, lambda: _options_to_body(options, stream))
    if call is None:
        return client, None, None
    if changed_fields := _put_prompt(call):
        options.extra_json = {**(options.extra_json or {}), **changed_fields}  # which goes before its other fields
    if (answerer := current_answerer()) is not None:
        call.start({})
        answered = AnsweredCall(call, answerer)
        return _client_on_served(client, answered), call, answered
    route = current_route() if state.redirects else None
    parameters = {} if route is None else {"model": route.model, "temperature": route.temperature}
    call.start(parameters)
    try:
        if state.redirects and (given := answer_given_call(call.run_id)) is not None:
            call.tokens = given.tokens
            known = AnsweredCall(call, KnownAnswer(given.message))
            return _client_on_served(client, known), call, known
        if route is None:
            return client, call, None
        served = ServedCall(call, _own_timeout(options))
    except BaseException as error:
        call.fail(error)
        served_failures.note(error)
        raise
    return _client_on_served(client, served), call, served


def _put_prompt(call: ClientCall) -> Body:
    """See `ClientCall.put_prompt`. The packages in between would wrap its refusal in an error of theirs."""
    try:
        return call.put_prompt()
    except GraphError as refusal:
        served_failures.note(refusal)
        raise


def _options_to_body(options: Any, stream: bool) -> Body:
    fields = {**(options.json_data or {}), **(options.extra_json or {})}
    body = {name: value for name, value in fields.items() if type(value).__name__ not in _NOT_GIVEN}
    return body | ({"stream": True} if stream else {})


def _own_timeout(options: Any) -> Any:
    """The time limit of this one call; None where it has none of its own."""
    return None if type(options.timeout).__name__ in _NOT_GIVEN else options.timeout


def _client_on_served(client: Any, served: ServedCall | AnsweredCall) -> Any:
    """A copy of the client whose requests the served model answers, without credentials of the hosted service."""
    http = _http_library(client._client)
    is_async = isinstance(client._client, http.AsyncClient)
    stand_in = copy.copy(client)
    stand_in._client = make_http_client(served, http, is_async=is_async)
    stand_in._prepare_options = _same_async if is_async else _same
    stand_in._prepare_request = _nothing_async if is_async else _nothing
    stand_in._validate_headers = _nothing
    if getattr(client, "_middleware", None):  # a chain is bound to the client that built it
        stand_in._middleware_chain = stand_in._build_middleware_chain()
    return stand_in


def _http_library(http_client: Any) -> ModuleType:
    """httpx or httpx2, whichever the client's HTTP client is of."""
    names = (each.__module__.partition(".")[0] for each in type(http_client).__mro__)
    return next(sys.modules[name] for name in names if name in ("httpx", "httpx2"))


def _same(options: Any) -> Any:
    return options


async def _same_async(options: Any) -> Any:
    return options


def _nothing(*args: Any, **kwargs: Any) -> None:
    """In place of what only the hosted service needs."""


async def _nothing_async(*args: Any, **kwargs: Any) -> None:
    """As above."""


def _wrap_request(original: Callable[..., Any], wires: Mapping[str, Wire], state: PatchState) -> Callable[..., Any]:
    def request(client: Any, cast_to: Any, options: Any, *args: Any, **kwargs: Any) -> Any:
        client, call, served = _begin(client, options, bool(kwargs.get("stream")), wires=wires, state=state)
        if call is None:
            return original(client, cast_to, options, *args, **kwargs)
        with _running(call, served):
            return original(client, cast_to, options, *args, **kwargs)

    return request


def _wrap_async_request(
    original: Callable[..., Any], wires: Mapping[str, Wire], state: PatchState
) -> Callable[..., Any]:
    async def request(client: Any, cast_to: Any, options: Any, *args: Any, **kwargs: Any) -> Any:
        client, call, served = _begin(client, options, bool(kwargs.get("stream")), wires=wires, state=state)
        if call is None:
            return await original(client, cast_to, options, *args, **kwargs)
        with _running(call, served):
            return await original(client, cast_to, options, *args, **kwargs)

    return request


@contextmanager
def _running(call: ClientCall, served: ServedCall | AnsweredCall | None) -> Iterator[None]:
    reset_token = running_call.set(call)
    try:
        yield
    except BaseException as error:
        call.fail(error)
        if served is not None and served.failure is not None and isinstance(error, Exception):
            served_failures.note(served.failure)
            raise served.failure from error
        raise
    finally:
        running_call.reset(reset_token)


def _wrap_process(original: Callable[..., Any], wires: Mapping[str, Wire], state: PatchState) -> Callable[..., Any]:  # noqa: ARG001
    """Works for both kinds: the asynchronous method's coroutine is returned as it is."""

    def process_response(client: Any, *args: Any, **kwargs: Any) -> Any:
        call = running_call.get()
        if call is not None and call.reads_http and "response" in kwargs:
            call.watch_response(kwargs["response"])
        return original(client, *args, **kwargs)

    return process_response


_SYNC_WRAPPERS = {"request": _wrap_request, "_process_response": _wrap_process}
_ASYNC_WRAPPERS = {"request": _wrap_async_request, "_process_response": _wrap_process}
