"""A route with a fixed text -> the chat result that answers every call of the node, without asking a server.

For teams in which an agent is replaced by one that always gives the same answer. Invariant: such a call has no token
ids, no log-probs and no adapter, so it is never taken for an action of a policy.
"""

from __future__ import annotations

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from marft_bridge.model_calls.routing import Route
from marft_bridge.model_calls.token_capture import ExactTokens

_MODEL_NAME = "fixed text"


def text_to_route(text: str) -> Route:
    """The route of a node that always answers `text`. Its temperature and length have no effect."""
    return Route(_MODEL_NAME, None, None, temperature=0.0, max_tokens=0, trainable=False, answer=text)


def fixed_tokens(node: str, route: Route) -> ExactTokens:
    """What is known of a call that a fixed text answers: no tokens."""
    return ExactTokens(route, node=node, finish_reason="stop", model=route.model)


def fixed_answer(tokens: ExactTokens, node: str, route: Route) -> ChatResult:
    """The result of a route that has a fixed answer. Writes node, route and finish reason into `tokens`."""
    tokens.node, tokens.route, tokens.finish_reason, tokens.model = node, route, "stop", route.model
    message = AIMessage(route.answer or "", response_metadata={"model_name": route.model})
    return ChatResult(generations=[ChatGeneration(message=message, generation_info={"finish_reason": "stop"})])


def result_to_chunk(result: ChatResult) -> ChatGenerationChunk:
    """A whole answer as the one chunk of a stream."""
    (generation,) = result.generations
    message = generation.message
    chunk = AIMessageChunk(content=message.content, response_metadata=message.response_metadata)
    return ChatGenerationChunk(message=chunk, generation_info=generation.generation_info)
