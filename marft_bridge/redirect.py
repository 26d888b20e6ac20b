"""A node's own chat model, whichever it is -> the served model under that node's adapter, while an engine runs.

It stands at BaseChatModel's own methods, below every provider's class: when the calling node has a route in this
episode, a `NodeChat` that carries the model's callbacks, tags and options answers in its place. Invariants: a call
from a node without a route, or outside an episode, is not touched; the methods are restored when the last engine
has stopped. It knows nothing of spans, servers or training.

What it cannot see: a client that is no LangChain chat model (the openai package called directly), a thread without
LangGraph's context. `Routing.answered` tells that a trainable node made no call through its route.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_openai.chat_models.base import BaseChatOpenAI
from pydantic import SecretStr

from marft_bridge.policy import NodeChat
from marft_bridge.routing import calling_node, current_routing
from marft_bridge.wire_rules import tools_to_openai

# Where every call of a chat model passes. The pair below catches classes that override the ones above it;
# v3 is `stream_events(version="v3")`.
_V3 = ("_chat_model_stream_v3", "_achat_model_stream_v3")
_BELOW = ("_generate_with_cache", "_agenerate_with_cache")
_ENTRIES = ("generate", "agenerate", "stream", "astream", *_V3, *_BELOW)
# Of BaseChatModel: what the app sees of a call, whoever answers it. Its cache and rate limiter belong to the provider.
_KEPT = ("callbacks", "tags", "metadata", "verbose", "disable_streaming", "output_version")
# Of BaseChatOpenAI: what would be sent with each request; `wire_rules` then carries, replaces or refuses it.
_SENT = (
    *("stop", "n", "logprobs", "top_logprobs", "max_tokens", "model_kwargs", "extra_body", "stream_usage", "streaming"),
    *("temperature", "top_p", "seed", "presence_penalty", "frequency_penalty", "logit_bias", "reasoning_effort"),
    *("reasoning", "verbosity", "service_tier", "store", "include", "truncation", "context_management"),
)
# Names that other providers give to what `stop` and `max_tokens` are here.
_STOP_NAMES = ("stop", "stop_sequences")
_LENGTH_NAMES = ("max_tokens", "max_output_tokens", "num_predict")
_CONNECTION = frozenset(
    {
        *("model", "model_name", "model_id", "base_url", "endpoint", "max_retries", "timeout"),
        *("default_request_timeout", "default_headers", "http_client", "http_async_client", "client"),
        *("async_client", "name", "cache", "rate_limiter", "custom_get_token_ids", "profile"),
    }
)


def stand_in_for(model: BaseChatModel, chat: NodeChat, node: str) -> NodeChat:
    """A copy of `chat` that answers as `model` was set up to; what it cannot take over is said once for the node."""
    update: dict[str, Any] = {name: getattr(model, name) for name in _KEPT}
    update["name"] = model.name or type(model).__name__  # what the app's own callbacks call it
    given = model.model_fields_set
    if isinstance(model, BaseChatOpenAI):
        update |= {name: getattr(model, name) for name in _SENT if name != "streaming" or name in given}
        if model.output_version == "responses/v1" or model._use_responses_api({}):
            update["output_version"] = "v1"  # the nearest: content in blocks
    else:
        update |= {"stop": _first(model, _STOP_NAMES), "max_tokens": _first(model, _LENGTH_NAMES)}
        carried = {*_KEPT, *_STOP_NAMES, *_LENGTH_NAMES, *_CONNECTION}
        chat.say_left_out(node, sorted(name for name in given - carried if _is_setting(getattr(model, name, None))))
    stand_in = chat.model_copy(update=update)
    # Callbacks are told the serialised model; made anew for each copy, it takes longer than all the rest.
    stand_in.__dict__["_serialized"] = {**chat._serialized, "name": update["name"]}
    return stand_in


def _first(model: BaseChatModel, names: tuple[str, ...]) -> Any:
    return next((value for name in names if (value := getattr(model, name, None)) is not None), None)


def _is_setting(value: Any) -> bool:
    """A plain value; a client, a key or nothing is no setting of the model."""
    return value is not None and not isinstance(value, SecretStr) and isinstance(value, str | int | float | dict | list)


def _answering(model: BaseChatModel, options: dict[str, Any], entry: str) -> tuple[BaseChatModel, dict[str, Any]]:
    """The model that answers this call, and the call's options in its dialect."""
    routing = current_routing.get()
    if routing is None or not isinstance(routing.chat, NodeChat) or routing.chat.is_copy_of(model):
        return model, options
    node = calling_node()
    if node not in routing.routes:
        routing.elsewhere[node] += entry not in _BELOW  # one call passes both
        return model, options
    return stand_in_for(model, routing.chat, node), tools_to_openai(options, node)


def _redirected(original: Callable[..., Any], entry: str) -> Callable[..., Any]:
    if entry in _V3:  # their decorator warns of a beta whenever the caller is not LangChain's own code, as we are not
        original = getattr(original, "__wrapped__", original)

    # Calling is enough for all four kinds of method: a coroutine or a generator belongs to the model it was made of.
    @functools.wraps(original)
    def method(self: BaseChatModel, *args: Any, **kwargs: Any) -> Any:
        model, options = _answering(self, kwargs, entry)
        return original(model, *args, **options)

    return method


_lock = threading.Lock()
_engines = 0
_originals: dict[str, Callable[..., Any]] = {}


@contextmanager
def redirected_models() -> Iterator[None]:
    """While the block runs, episodes whose routing names a `chat` have their models redirected."""
    global _engines
    with _lock:
        if _engines == 0:
            for name in _ENTRIES:
                _originals[name] = vars(BaseChatModel)[name]
                setattr(BaseChatModel, name, _redirected(_originals[name], name))
        _engines += 1
    try:
        yield
    finally:
        with _lock:
            _engines -= 1
            if _engines == 0:
                for name, original in _originals.items():
                    setattr(BaseChatModel, name, original)
                _originals.clear()
