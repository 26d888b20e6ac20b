"""A node's own chat model, of any provider -> the served model under that node's adapter, while a session runs.

It stands in at the methods that every chat model's call passes (`model_entries`): when the calling node has a route in
this episode, a `NodeChat` that carries the model's callbacks, tags and options answers in its place. Invariant: a call
from a node without a route, or outside an episode, is not touched, but for the recorded answers that it may get and for
a prompt that the episode gives its node.

Clients that are no LangChain chat model are in `clients/`. A thread without LangGraph's context cannot be seen;
`Routing.routed_calls` shows that a trainable node made no call through its route.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_openai.chat_models.base import BaseChatOpenAI
from pydantic.fields import FieldInfo

from marft_bridge.common.errors import GraphError
from marft_bridge.common.library_internals import CHAT_INNER, TESTED_VERSIONS, require_internals
from marft_bridge.model_calls.model_entries import Arguments, stand_in_for_models
from marft_bridge.model_calls.node_chat_model import NodeChat
from marft_bridge.model_calls.node_prompts import put_prompt
from marft_bridge.model_calls.own_methods import warn_of_own_methods
from marft_bridge.model_calls.own_model import own_model_with_answers
from marft_bridge.model_calls.provider_options import options_to_openai, response_format_to_openai
from marft_bridge.model_calls.request_rules import is_length_limit
from marft_bridge.model_calls.routing import Routing, calling_node, current_routing
from marft_bridge.model_calls.teacher import Teacher

# Fields of BaseChatModel that decide what the app sees of a call, whichever model answers. Cache and rate limiter are
# not among them: they belong to the provider.
_APP_FIELDS = ("callbacks", "tags", "metadata", "verbose", "disable_streaming", "output_version")
# Fields of BaseChatOpenAI that would be sent with each request; `request_rules` then carries, replaces or refuses them.
_REQUEST_FIELDS = (
    "stop",
    "n",
    "logprobs",
    "top_logprobs",
    "max_tokens",
    "model_kwargs",
    "extra_body",
    "stream_usage",
    "streaming",
    "temperature",
    "top_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "reasoning_effort",
    "reasoning",
    "verbosity",
    "service_tier",
    "store",
    "include",
    "truncation",
    "context_management",
)
# Names of other providers for `stop` and `max_tokens`.
_STOP_NAMES = ("stop", "stop_sequences")
_LENGTH_NAMES = ("max_tokens", "max_output_tokens", "num_predict")
# Fields about the connection to the app's own server: left out without a warning.
_CONNECTION_FIELDS = frozenset(
    [
        "model",
        "model_name",
        "model_id",
        "base_url",
        "endpoint",
        "max_retries",
        "timeout",
        "default_request_timeout",
        "default_headers",
        "http_client",
        "http_async_client",
        "client",
        "async_client",
        "name",
        "cache",
        "rate_limiter",
        "custom_get_token_ids",
        "profile",
    ]
)


def make_stand_in(model: BaseChatModel, chat: NodeChat, node: str) -> NodeChat:
    """A copy of `chat` that answers with the settings of `model`. Warns once per node of settings it cannot carry."""
    update: dict[str, Any] = {name: getattr(model, name) for name in _APP_FIELDS}
    update["name"] = model.name or type(model).__name__  # the name that the app's own callbacks receive
    given_fields = model.model_fields_set
    if isinstance(model, BaseChatOpenAI):
        update |= {
            name: getattr(model, name) for name in _REQUEST_FIELDS if name != "streaming" or name in given_fields
        }
        if model.output_version == "responses/v1" or model._use_responses_api({}):
            update["output_version"] = "v1"  # the nearest: content in blocks
    else:
        limit = _first_value(model, _LENGTH_NAMES)
        update |= {"stop": _first_value(model, _STOP_NAMES), "max_tokens": limit if is_length_limit(limit) else None}
        if "streaming" in given_fields:
            update["streaming"] = bool(getattr(model, "streaming"))  # noqa: B009 - no field of every model
        settings = response_format_to_openai(_given_settings(model))
        if "response_format" in settings:
            update["model_kwargs"] = {"response_format": settings.pop("response_format")}
        chat.warn_left_out(node, sorted(settings))
    warn_of_own_methods(model, chat, node)
    stand_in = chat.model_copy(update=update)
    # Callbacks receive the serialised model; made anew for each copy, it takes longer than all the rest.
    stand_in.__dict__["_serialized"] = {**chat._serialized, "name": update["name"]}
    return stand_in


def _first_value(model: BaseChatModel, names: tuple[str, ...]) -> Any:
    return next((value for name in names if (value := getattr(model, name, None)) is not None), None)


def _given_settings(model: BaseChatModel) -> dict[str, Any]:
    """The fields of another provider's model that the app set and that are not carried as they are.

    A plain value; a client, a key or nothing is no setting. Nor is what the class itself fills in: its validators set
    fields, too.
    """
    carried_fields = {"streaming", *_APP_FIELDS, *_STOP_NAMES, *_LENGTH_NAMES, *_CONNECTION_FIELDS}
    fields = type(model).model_fields
    settings = {
        name: value
        for name in model.model_fields_set - carried_fields
        if isinstance(value := getattr(model, name, None), str | int | float | dict | list)
        and not (name in fields and (fields[name].alias in carried_fields or _is_default(value, fields[name])))
    }
    more_settings = settings.pop("model_kwargs", {})  # what the class has no field for
    return {**more_settings, **settings} if isinstance(more_settings, dict) else settings


def _is_default(value: Any, field: FieldInfo) -> bool:
    """Whether a field has what its class gives it."""
    try:
        return bool(value == field.get_default(call_default_factory=True))
    except Exception:  # noqa: BLE001 - a factory of the provider's own, which may look for a key
        return False


def _redirect_call(model: BaseChatModel, arguments: Arguments, entry: str) -> tuple[BaseChatModel, Arguments]:
    """The model that answers this call, and the call's arguments in that model's form, with the prompt of its node."""
    routing = current_routing.get()
    if routing is None:
        return model, arguments
    if routing.prompts and entry not in CHAT_INNER:
        arguments = put_prompt(model, arguments, entry)
    chat = routing.chat if isinstance(routing.chat, NodeChat) else None
    if routing.asks_teacher and chat is not None and chat.is_copy_of(model) and getattr(model, "teacher", None) is None:
        _refuse_without_teacher(routing)
    if (chat is None and not routing.knows_answers) or (chat is not None and chat.is_copy_of(model)):
        return model, arguments
    node, (positional, options) = calling_node(), arguments
    if node not in routing.routes:
        routing.unrouted_calls[node] += entry not in CHAT_INNER  # one call passes both
        return own_model_with_answers(model) if routing.knows_answers else model, arguments
    if chat is None:
        return model, arguments
    stand_in = make_stand_in(model, chat, node)
    if routing.asks_teacher and routing.routes[node].trainable:
        stand_in.teacher = Teacher(model, options)
    return stand_in, (positional, options_to_openai(options, node))


def _refuse_without_teacher(routing: Routing) -> None:
    """Raises GraphError where a trained node calls the served model itself, so that nobody could teach it."""
    node = calling_node()
    route = routing.routes.get(node)
    if route is not None and route.trainable:
        raise GraphError(
            f"node {node!r} is given the served model, and has none of its own to learn from: let it make its own "
            "model, or leave train.teacher_rounds out"
        )


def _look_at_completion(model: Any, arguments: Arguments, entry: str) -> tuple[Any, Arguments]:  # noqa: ARG001
    """A completion model, which answers itself where it may be asked."""
    routing = current_routing.get()
    if routing is not None and routing.record is not None:
        routing.record.refuse_unanswerable("a completion model (BaseLLM)")
    return model, arguments


@contextmanager
def redirected_models() -> Iterator[None]:
    """While the block runs, episodes whose routing names a `chat` have their models redirected, and forks answered.

    Raises:
        BridgeError: a release of LangChain whose internals have moved.
    """
    require_internals(*TESTED_VERSIONS)
    with stand_in_for_models(_redirect_call, _look_at_completion):
        yield
