"""A text for a node in this episode -> the node's calls, which begin with it in place of their system message.

It is put before anybody is told of the call, so that the recorder, the app's callbacks and the model see the same
messages. Invariants: the app's own messages are not changed; a call that begins with no system message is refused, by
name, and the episode's routing keeps the refusal, since an app may catch it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from langchain_core.messages import BaseMessage, SystemMessage

from marft_bridge.common.errors import GraphError
from marft_bridge.model_calls.model_entries import Arguments
from marft_bridge.model_calls.routing import Routing, calling_node, current_routing


def put_prompt(model: Any, arguments: Arguments, entry: str) -> Arguments:
    """The arguments of a LangChain chat model's method with the prompt of the calling node, where it has one.

    Raises:
        GraphError: the call begins with no system message.
    """
    routing, node, text = _calling_prompt()
    if routing is None or text is None:
        return arguments
    positional, options = arguments
    name = "messages" if entry in ("generate", "agenerate") else "input"
    given = positional[0] if positional else options[name]
    if name == "messages":
        replaced: Any = [_replace_first(messages, text, routing, node=node) for messages in given]
    else:
        replaced = _replace_first(model._convert_input(given).to_messages(), text, routing, node=node)
    routing.prompted_calls[node] += 1
    return ((replaced, *positional[1:]), options) if positional else (positional, {**options, name: replaced})


def fields_with_prompt(
    fields: Mapping[str, Any], replace_system: Callable[[Mapping[str, Any], str], dict[str, Any] | None]
) -> dict[str, Any]:
    """The fields of another client's request that the prompt of the calling node changes; none where it has none.

    Args:
        replace_system: fields and text -> the changed fields; None where they hold no system message.

    Raises:
        GraphError: the call begins with no system message.
    """
    routing, node, text = _calling_prompt()
    if routing is None or text is None:
        return {}
    changed_fields = replace_system(fields, text)
    if changed_fields is None:
        _refuse(routing, node)
    routing.prompted_calls[node] += 1
    return changed_fields


def _calling_prompt() -> tuple[Routing | None, str, str | None]:
    routing = current_routing.get()
    if routing is None or not routing.prompts:
        return None, "", None
    node = calling_node()
    return routing, node, routing.prompts.get(node)


def _replace_first(messages: Sequence[BaseMessage], text: str, routing: Routing, *, node: str) -> list[BaseMessage]:
    if not messages or not isinstance(messages[0], SystemMessage):
        _refuse(routing, node)
    return [messages[0].model_copy(update={"content": text}), *messages[1:]]


def _refuse(routing: Routing, node: str) -> NoReturn:
    refusal = GraphError(
        f"prompts: a call of node {node!r} begins with no system message, so there is nothing to replace; have the app "
        "put its instructions into one, or leave the node out"
    )
    routing.refusal = routing.refusal or refusal
    raise refusal
