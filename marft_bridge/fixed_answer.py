"""A fixed text in the place of a node's model: what a call gets when its route says so, and no server is asked.

For teams in which an agent is replaced by one that always says the same. Invariant: such a call has no token ids, no
log-probs and no adapter, so it is never taken for an action of a policy. It knows nothing of servers or plans.
"""

from __future__ import annotations

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from marft_bridge.exact_tokens import ExactTokens
from marft_bridge.routing import Route

_MODEL = "fixed text"


def text_to_route(text: str) -> Route:
    """The route of a node that always answers `text`. Temperature and length mean nothing there."""
    return Route(_MODEL, None, None, temperature=0.0, max_tokens=0, trainable=False, answer=text)


def fixed_answer(tokens: ExactTokens, node: str, route: Route) -> ChatResult:
    """The answer of a route that has one; `tokens` is told who answered, which is no model."""
    tokens.node, tokens.route, tokens.finish_reason, tokens.model = node, route, "stop", route.model
    message = AIMessage(route.answer or "", response_metadata={"model_name": route.model})
    return ChatResult(generations=[ChatGeneration(message=message, generation_info={"finish_reason": "stop"})])


def result_to_chunk(result: ChatResult) -> ChatGenerationChunk:
    """A whole answer as the one chunk of a stream."""
    (generation,) = result.generations
    said = generation.message
    chunk = AIMessageChunk(content=said.content, response_metadata=said.response_metadata)
    return ChatGenerationChunk(message=chunk, generation_info=generation.generation_info)
