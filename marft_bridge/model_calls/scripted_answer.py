"""A route with a fixed text -> the message that answers every call of the node, without asking a server.

For teams in which an agent is replaced by one that always gives the same answer. Invariant: such a call has no token
ids, no log-probs and no adapter, so it is never taken for an action of a policy.
"""

from __future__ import annotations

from langchain_core.messages import AIMessage

from marft_bridge.model_calls.routing import Route
from marft_bridge.model_calls.token_capture import ExactTokens

FIXED_TEXT = "fixed text"
"""What records name as the model of a call that a text answered."""


def text_to_route(text: str) -> Route:
    """The route of a node that always answers `text`. Its temperature and length have no effect."""
    return Route(FIXED_TEXT, None, None, temperature=0.0, max_tokens=0, trainable=False, answer=text)


def fixed_tokens(node: str, route: Route) -> ExactTokens:
    """What is known of a call that a fixed text answers: no tokens."""
    return ExactTokens(route, node=node, finish_reason="stop", model=route.model)


def fixed_answer(tokens: ExactTokens, node: str, route: Route) -> AIMessage:
    """The answer of a route that has a fixed one. Writes what is known of it into `tokens`."""
    tokens.take(fixed_tokens(node, route))
    metadata = {"model_name": route.model, "finish_reason": "stop"}
    return AIMessage(route.answer or "", response_metadata=metadata)
