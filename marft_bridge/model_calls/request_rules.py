"""A chat request of the app -> the request that the served model gets under a route.

Invariant: every field of the app's request is carried, decided by the route, left out with a warning (once per node),
or refused by name; none disappears silently. Carried: messages, tools, response format, stop sequences, n. Decided by
the route: model, temperature, seed, and sampling from the whole distribution, because the trainer's ratios need it.
The length is the smaller of both; one below 1 is none, as Ollama's -1 says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from marft_bridge.common.errors import GraphError
from marft_bridge.model_calls.provider_options import CACHE_HINT
from marft_bridge.model_calls.routing import Route

_CARRIED_FIELDS = frozenset(
    [
        "messages",
        "model",
        "stream",
        "stream_options",
        "stop",
        "n",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "response_format",
        "logprobs",
        "top_logprobs",
        "timeout",
    ]
)
_LENGTH_FIELDS = frozenset({"max_tokens", "max_completion_tokens"})
# Sampling settings: they change the distribution, and with it what a log-prob means.
_ROUTE_FIELDS = frozenset({"temperature", "top_p", "seed", "presence_penalty", "frequency_penalty", "logit_bias"})
_ROUTE_EXTRAS = frozenset({"top_k", "min_p", "repetition_penalty", "temperature", "top_p", "seed"})
# Fields of a hosted service: billing, storage, caching, effort. They mean nothing to a local model.
_HOSTED_FIELDS = frozenset(
    [
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "reasoning_effort",
        "reasoning",
        "verbosity",
        "include",
        "truncation",
        "context_management",
        "extra_headers",
        "extra_query",
    ]
)
_CARRIED_EXTRAS = frozenset({"chat_template_kwargs", "structured_outputs", "documents", "return_token_ids"})
_NO_PARSER = (
    "binds tools, and the model server was not told how its model writes a tool call; "
    "set serve.tool_call_parser (hermes for Qwen and SmolLM, llama3_json for Llama 3)"
)


def payload_to_routed(
    payload: Mapping[str, Any], node: str, route: Route, seed: int | None, *, auto_tools: bool
) -> tuple[dict[str, Any], list[str]]:
    """The request to send, and the names of the app's fields that it leaves out.

    Args:
        payload: the app's request, in OpenAI's form.
        auto_tools: whether the server parses tool calls out of the model's text.

    Raises:
        GraphError: a field that the served model cannot honour and that cannot be left out.
    """
    extra_body = dict(payload.get("extra_body") or {})
    requested_fields = {name for name, value in payload.items() if value is not None and name != "extra_body"}
    unknown_fields = requested_fields - _CARRIED_FIELDS - _LENGTH_FIELDS - _ROUTE_FIELDS - _HOSTED_FIELDS
    unknown_fields |= {f"extra_body.{name}" for name in extra_body.keys() - _CARRIED_EXTRAS - _ROUTE_EXTRAS}
    if unknown_fields:
        raise GraphError(
            f"node {node!r} asks its model for {min(unknown_fields)!r}, which the served model cannot do; "
            "take it out of the call, or leave the node out of graph.nodes"
        )
    _check_tools(payload, node, auto_tools)
    length_limits = [payload[name] for name in _LENGTH_FIELDS if is_length_limit(payload.get(name))]
    routed_payload = {name: value for name, value in payload.items() if name in _CARRIED_FIELDS}
    if "messages" in payload:
        routed_payload["messages"] = [_without_cache_hints(message) for message in payload["messages"]]
    routed_payload |= {"model": route.model, "temperature": route.temperature, "top_p": 1.0}
    routed_payload["max_tokens"] = min([route.max_tokens, *length_limits])
    if seed is not None:
        routed_payload["seed"] = seed
    routed_payload["extra_body"] = {name: value for name, value in extra_body.items() if name in _CARRIED_EXTRAS}
    return routed_payload, sorted(
        (requested_fields & (_ROUTE_FIELDS | _HOSTED_FIELDS)) | (extra_body.keys() & _ROUTE_EXTRAS)
    )


def _without_cache_hints(message: Any) -> Any:
    """A message whose blocks carry no hint to a provider's cache; the same object where none does."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list) or not any(isinstance(part, dict) and CACHE_HINT in part for part in content):
        return message
    parts = [
        {name: value for name, value in part.items() if name != CACHE_HINT} if isinstance(part, dict) else part
        for part in content
    ]
    is_text = len(parts) == 1 and parts[0].get("type") == "text"
    return {**message, "content": parts[0]["text"] if is_text else parts}


def is_length_limit(value: Any) -> bool:
    """Whether a length that an app asks for limits anything."""
    return value is not None and value >= 1


def _check_tools(payload: Mapping[str, Any], node: str, auto_tools: bool) -> None:
    tools = payload.get("tools") or ()
    for tool in tools:
        if tool.get("type") != "function":
            raise GraphError(f"node {node!r} binds {tool.get('type')!r}, a tool that only a hosted service runs")
    if tools and not auto_tools and payload.get("tool_choice") != "none":
        raise GraphError(f"node {node!r} {_NO_PARSER}")


def move_extras(body: Mapping[str, Any]) -> dict[str, Any]:
    """A request of the openai package, which puts `extra_body` among the other fields, with those that a model server
    knows beside OpenAI's own in `extra_body` again."""
    extra_names = (_CARRIED_EXTRAS | _ROUTE_EXTRAS) - _CARRIED_FIELDS - _ROUTE_FIELDS
    extra_body = {name: value for name, value in body.items() if name in extra_names}
    other_fields = {name: value for name, value in body.items() if name not in extra_names}
    if extra_body:
        other_fields["extra_body"] = {**(body.get("extra_body") or {}), **extra_body}
    return other_fields
