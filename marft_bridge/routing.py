"""The node that calls a model -> where this episode sends its call.

Invariant: a node is named the same way everywhere, by its LangGraph path (`outer/inner`); which node calls is read
from LangGraph's own context, so threads and asyncio cannot mix nodes or episodes up.
It knows nothing of HTTP, tokens or adapters' files.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

from langchain_core.language_models import BaseChatModel
from langgraph.config import get_config

from marft_bridge.errors import GraphError
from marft_bridge.node_names import namespace_to_node


@dataclass(frozen=True, slots=True)
class Route:
    """Where the calls of one node go, and how they sample."""

    model: str  # the name under which the server serves it
    adapter: str | None  # None for a model without an adapter
    version: int | None
    temperature: float
    max_tokens: int
    trainable: bool = True  # False: the node runs on the served model, but is declared frozen


@dataclass(slots=True)
class Routing:
    """The routes of one episode. Its seed and the order of a node's calls give each call its own seed."""

    routes: Mapping[str, Route]
    seed: int | None = None
    chat: BaseChatModel | None = None
    """The engine's model: `redirect` lets it answer for the models of the nodes that have a route."""
    sampled_tokens: int = 0  # by all calls so far
    answered: Counter[str] = field(default_factory=Counter)  # node -> recorded calls that its route answered
    elsewhere: Counter[str] = field(default_factory=Counter)  # node without a route -> calls of its own model
    _calls: dict[str, Iterator[int]] = field(default_factory=dict)

    def call_seed(self, node: str) -> int | None:
        """A seed for the next call of `node`: the same episode seed gives the same sequence."""
        if self.seed is None:
            return None
        number = next(self._calls.setdefault(node, itertools.count()))
        digest = hashlib.sha256(f"{self.seed}/{node}/{number}".encode()).digest()
        return int.from_bytes(digest[:4], "big") >> 1


current_routing: ContextVar[Routing | None] = ContextVar("marft_routing", default=None)


def calling_node() -> str:
    """Name of the LangGraph node that the caller runs in, subgraph path included; "" outside any node."""
    try:
        config = get_config()
    except RuntimeError:
        return ""
    return namespace_to_node(config.get("configurable", {}).get("checkpoint_ns", ""))


def calling_route() -> tuple[str, Route | None]:
    """The calling node and its route in this episode; None outside an episode.

    Raises:
        GraphError: in an episode, from a node that has no route.
    """
    routing, node = current_routing.get(), calling_node()
    if routing is None:
        return node, None
    route = routing.routes.get(node)
    if route is None:
        known = ", ".join(sorted(routing.routes))
        raise GraphError(
            f"node {node!r} calls the served model but has no route; nodes that have one: {known}; "
            "name it in graph.nodes to train it, or in graph.frozen to run it untrained"
        )
    return node, route


def route_for_call() -> tuple[str, Route | None, int | None]:
    """`calling_route` and the seed of this call, which is used up."""
    node, route = calling_route()
    routing = current_routing.get()
    return node, route, routing.call_seed(node) if routing is not None else None
