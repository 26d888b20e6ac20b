"""The package litellm -> calls of a node: `completion` and `acompletion`, also through its Router, streamed or not.

An app may hold the functions since before we came (`from litellm import completion`), so the functions stay and their
code is replaced. A call of a node with a route is sent on as one to an OpenAI server: litellm makes it with the openai
package, where it is recorded and redirected (`sdk_hooks`). Any other call is recorded here, and what litellm uses
beneath is not. Invariant: what litellm gives its caller is its own.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType, FunctionType, ModuleType
from typing import Any

from marft_bridge.common.errors import GraphError
from marft_bridge.model_calls.clients.answered_call import NO_ADDRESS, current_answerer
from marft_bridge.model_calls.clients.client_call import ClientCall, open_call, running_call
from marft_bridge.model_calls.clients.openai_chat import OpenAIChat
from marft_bridge.model_calls.clients.patches import PatchState
from marft_bridge.model_calls.clients.served_call import current_route, route_to_address, served_failures
from marft_bridge.model_calls.clients.wire import Body
from marft_bridge.model_calls.given_answers import answer_given_call
from marft_bridge.model_calls.routing import Route, current_routing

log = logging.getLogger("marft_bridge")

# Where a call goes, and who pays for it; the served model's take their place.
_CONNECTION_FIELDS = frozenset(
    ["api_base", "base_url", "api_key", "api_version", "custom_llm_provider", "client", "model_list", "fallbacks"]
)
# A remembered answer is no sample.
_NO_CACHE = {"caching": False, "cache": {"no-cache": True, "no-store": True}}
# What a record has of a call. litellm's own settings of how it calls are not among them.
_CHAT_FIELDS = (
    "model",
    "messages",
    "temperature",
    "top_p",
    "n",
    "stop",
    "max_tokens",
    "max_completion_tokens",
    "seed",
    "tools",
    "tool_choice",
    "response_format",
    "stream",
)
_streams: weakref.WeakKeyDictionary[Any, tuple[ClientCall, list[Body]]] = weakref.WeakKeyDictionary()
"""Stream that litellm gave its caller -> the call that it answers, and its chunks so far."""


class _LiteLLMChat(OpenAIChat):
    """litellm's requests and answers have the form of chat completions, whichever provider answers."""

    def __init__(self, provider: str) -> None:
        self.provider = provider


def patch_litellm(package: ModuleType, state: PatchState) -> Iterator[Callable[[], None]]:
    """See `patches.PatchPackage`."""
    for name, wrap in (("completion", _wrap_completion), ("acompletion", _wrap_acompletion)):
        function = getattr(package, name, None)
        if not isinstance(function, FunctionType) or function.__closure__ or function.__defaults__:
            log.warning("calls with litellm.%s are not recorded: in this release it is made in another way", name)
            continue
        yield _replace_code(function, functools.partial(wrap, package=package, state=state))
    for name, watch in (("__next__", _watch_next), ("__anext__", _watch_anext)):
        yield _replace_method(package.CustomStreamWrapper, name, watch)


def _replace_code(function: FunctionType, wrap: Callable[[Any], Any]) -> Callable[[], None]:
    """Has every holder of `function` call what `wrap` makes of it; returns what restores it."""
    code = function.__code__
    original = FunctionType(code, function.__globals__, function.__name__)
    original.__kwdefaults__ = function.__kwdefaults__
    entry = f"_marft_{function.__name__}"
    function.__globals__[entry] = wrap(original)
    function.__code__ = replacement = _calling_code(function.__name__, entry, is_async=bool(code.co_flags & 0x80))

    def restore() -> None:
        if function.__code__ is replacement:
            function.__code__ = code
            del function.__globals__[entry]

    return restore


def _calling_code(name: str, entry: str, *, is_async: bool) -> CodeType:
    """The code of a function that passes its arguments on to the global `entry`."""
    source = f"async def {name}(*args, **kwargs):\n    return await {entry}(*args, **kwargs)"
    if not is_async:
        source = source.replace("async ", "").replace("await ", "")
    module = compile(source, f"<{entry}>", "exec")
    return next(constant for constant in module.co_consts if isinstance(constant, CodeType))


def _replace_method(owner: Any, name: str, watch: Callable[[Any], Any]) -> Callable[[], None]:
    original = getattr(owner, name)
    replacement = functools.wraps(original)(watch(original))
    setattr(owner, name, replacement)

    def restore() -> None:
        if vars(owner).get(name) is replacement:
            setattr(owner, name, original)

    return restore


# -- calls ---------------------------------------------------------------------------------------------------------


def _wrap_completion(original: Callable[..., Any], package: ModuleType, state: PatchState) -> Callable[..., Any]:
    def completion(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("acompletion"):  # litellm hands it on to the asynchronous function
            return original(*args, **kwargs)
        arguments = _name_arguments(args, kwargs)
        call, route = _begin(arguments, package, state)
        if route is not None:
            with served_failures.raised():
                return original(**_to_served(arguments, route))
        if call is None:
            return original(*args, **kwargs)
        args, kwargs = _put_messages(args, kwargs, arguments.get("messages"))
        with _running(call):
            answer = original(*args, **kwargs)
        _note_answer(call, answer, package)
        return answer

    return completion


def _wrap_acompletion(original: Callable[..., Any], package: ModuleType, state: PatchState) -> Callable[..., Any]:
    async def acompletion(*args: Any, **kwargs: Any) -> Any:
        arguments = _name_arguments(args, kwargs)
        call, route = _begin(arguments, package, state)
        if route is not None:
            with served_failures.raised():
                return await original(**_to_served(arguments, route))
        if call is None:
            return await original(*args, **kwargs)
        args, kwargs = _put_messages(args, kwargs, arguments.get("messages"))
        with _running(call):
            answer = await original(*args, **kwargs)
        _note_answer(call, answer, package)
        return answer

    return acompletion


def _name_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Body:
    """The arguments by name: only the model and the messages are ever given by position."""
    return dict(zip(("model", "messages"), args, strict=False)) | dict(kwargs)


def _put_messages(args: tuple[Any, ...], kwargs: Body, messages: Any) -> tuple[tuple[Any, ...], Body]:
    """The arguments as they were given, with these messages."""
    if len(args) > 1:
        return (args[0], messages, *args[2:]), kwargs
    return args, kwargs if messages is None else {**kwargs, "messages": messages}


def _begin(arguments: Body, package: ModuleType, state: PatchState) -> tuple[ClientCall | None, Route | None]:
    """The call where it is one of a node; a route instead where the served model answers it.

    Puts the prompt of its node into the arguments.
    """
    if not state.is_active:
        return None, None
    provider = _provider_of(arguments, package)
    fields = {name: arguments[name] for name in _CHAT_FIELDS if arguments.get(name) is not None}
    call = open_call(_LiteLLMChat(provider), lambda: fields)
    if call is None:
        return None, None
    arguments.update(call.put_prompt())
    call.reads_http = False
    if current_answerer() is not None:
        return None, Route(str(arguments.get("model")), None, None, temperature=1.0, max_tokens=0)
    route = current_route() if state.redirects else None
    if route is not None:
        return None, route
    call.start({})
    if state.redirects:
        _refuse_given(call)
    return call, None


def _refuse_given(call: ClientCall) -> None:
    """Ends a call of a node's own model whose answer is known, or has to be. Raises GraphError, DivergedError."""
    routing = current_routing.get()
    try:
        if routing is not None and routing.record is not None:
            routing.record.refuse_unanswerable("litellm")
        given = None if routing is None or routing.prefix is None else answer_given_call(call.run_id)
    except BaseException as error:
        call.fail(error)
        raise
    if given is not None:
        refusal = GraphError(
            "fork: a call of litellm from a node that is not in graph.nodes or graph.frozen cannot be given its"
            " recorded answer; name the node in graph.frozen, or fork at this call or before it"
        )
        call.fail(refusal)
        raise refusal


def _provider_of(arguments: Body, package: ModuleType) -> str:
    """As litellm reads it from the model's name; litellm's own name where it cannot."""
    try:
        _, provider, *_ = package.get_llm_provider(
            model=arguments.get("model"),
            custom_llm_provider=arguments.get("custom_llm_provider"),
            api_base=arguments.get("api_base") or arguments.get("base_url"),
        )
    except Exception:  # noqa: BLE001 - litellm will say so itself
        return "litellm"
    return str(provider)


def _to_served(arguments: Body, route: Route) -> Body:
    """The arguments of the same call to the served model."""
    address, key = route_to_address() if current_answerer() is None else (NO_ADDRESS, "none")
    kept_arguments = {name: value for name, value in arguments.items() if name not in _CONNECTION_FIELDS}
    return kept_arguments | _NO_CACHE | {"model": f"openai/{route.model}", "api_base": address, "api_key": key}


@contextmanager
def _running(call: ClientCall) -> Iterator[None]:
    reset_token = running_call.set(call)
    try:
        yield
    except BaseException as error:
        call.fail(error)
        raise
    finally:
        running_call.reset(reset_token)


def _note_answer(call: ClientCall, answer: Any, package: ModuleType) -> None:
    if isinstance(answer, package.CustomStreamWrapper):
        _streams[answer] = (call, [])
    else:
        call.end_with(lambda: answer.model_dump(mode="json", warnings=False))


# -- streams -------------------------------------------------------------------------------------------------------


def _watch_next(original: Callable[..., Any]) -> Callable[..., Any]:
    def watched_next(stream: Any) -> Any:
        with _watching(stream):
            return _note_chunk(stream, original(stream))

    return watched_next


def _watch_anext(original: Callable[..., Any]) -> Callable[..., Any]:
    async def watched_next(stream: Any) -> Any:
        with _watching(stream):
            return _note_chunk(stream, await original(stream))

    return watched_next


@contextmanager
def _watching(stream: Any) -> Iterator[None]:
    """Ends the call with its stream."""
    try:
        yield
    except (StopIteration, StopAsyncIteration):
        _end_stream(stream)
        raise
    except BaseException as error:
        if stream in _streams:
            _streams.pop(stream)[0].fail(error)
        raise


def _note_chunk(stream: Any, chunk: Any) -> Any:
    if stream in _streams:
        _streams[stream][1].append(chunk.model_dump(mode="json", warnings=False))
    return chunk


def _end_stream(stream: Any) -> None:
    if stream in _streams:
        call, chunks = _streams.pop(stream)
        call.end_with(lambda: call.wire.events_to_answer(chunks))
