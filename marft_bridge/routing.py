"""The node that calls a model -> where this episode sends its call.

Invariant: a node is named the same way everywhere, by its LangGraph path (`outer/inner`); which node calls is read
from LangGraph's own context, so threads and asyncio cannot mix nodes or episodes up.
It knows nothing of HTTP, tokens or adapters' files.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

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
    server: str | None = None  # address of the server that answers, where several do; None: that of the model itself
    answer: str | None = None  # a text that answers every call, and no model is asked; see `fixed_answer`


@dataclass(slots=True)
class Routing:
    """The routes of one episode. Its seed and the order of a node's calls give each call its own seed."""

    routes: Mapping[str, Route]
    seed: int | None = None
    chat: BaseChatModel | None = None
    """The engine's model: `redirect` lets it answer for the models of the nodes that have a route."""
    max_tokens: int | None = None  # that its calls may sample together; None: as many as they like
    note_cut: Callable[[str], None] = lambda _: None  # the episode counts as cut short, for this reason
    stop: Callable[[], object] = lambda: None  # ends it, from any thread
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

    def within_limit(self, route: Route) -> Route:
        """The route of a call that starts now, with no more tokens than the episode has left.

        Raises:
            GraphError: none is left; the episode is cut short.
        """
        if self.max_tokens is None:
            return route
        left = self.max_tokens - self.sampled_tokens
        if left <= 0:
            self.note_cut(reason := self._used_up)
            self.stop()  # a graph may go on after the error
            raise GraphError(f"the episode ends here: {reason}")
        return replace(route, max_tokens=min(route.max_tokens, left))

    def count_sampled(self, node: str, route: Route | None, sampled: int, finish_reason: str | None) -> None:
        """Counts a call's tokens. An episode whose limit, and not the model, ended the call counts as cut short.

        It is not stopped here, where the call's end is not recorded yet: the next call stops it.
        """
        self.sampled_tokens += sampled
        if self.max_tokens is None or self.sampled_tokens < self.max_tokens:
            return
        narrowed = route is not None and node in self.routes and route.max_tokens < self.routes[node].max_tokens
        if self.sampled_tokens > self.max_tokens or (narrowed and finish_reason == "length"):
            self.note_cut(self._used_up)

    @property
    def _used_up(self) -> str:
        return f"its limit of {self.max_tokens} sampled tokens is used up"


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
    """`calling_route`, within the episode's limit of tokens, and the seed of this call, which is used up."""
    node, route = calling_route()
    routing = current_routing.get()
    if routing is None or route is None:
        return node, route, None
    return node, routing.within_limit(route), routing.call_seed(node)
