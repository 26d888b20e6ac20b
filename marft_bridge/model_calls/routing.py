"""The node that calls a model -> the route of its call in this episode: served model, sampling, seed, server.

Invariant: an agent is named the same way everywhere, as the recorder named the task that it runs in; which task calls
is read from LangGraph's own context, so threads and asyncio cannot mix nodes or episodes up.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from langchain_core.language_models import BaseChatModel
from langgraph.config import get_config

from marft_bridge.common.agent_names import Actors
from marft_bridge.common.errors import GraphError
from marft_bridge.common.run_limits import tokens_reason
from marft_bridge.common.running_routers import own_namespace
from marft_bridge.common.running_task import running_task

if TYPE_CHECKING:
    from marft_bridge.model_calls.given_answers import AnswerRecord, Prefix

PROVIDER = "vllm"
"""What records name as the provider of a call that a route answered."""


@dataclass(frozen=True, slots=True)
class Route:
    """Where the calls of one node go, and how they sample."""

    model: str  # served name
    adapter: str | None  # None for a model without an adapter
    version: int | None
    temperature: float
    max_tokens: int
    trainable: bool = True  # False: the node runs on the served model, but is declared frozen
    server: str | None = None  # address of the server that answers, where several do; None: that of the model itself
    answer: str | None = None  # a fixed text that answers every call without a model; see `fixed_answer`


@dataclass(slots=True)
class Routing:
    """The routes of one episode. Its seed and the order of a node's calls give each call its own seed."""

    routes: Mapping[str, Route]
    seed: int | None = None
    chat: BaseChatModel | None = None
    """The engine's model: `redirect` lets it answer for the models of the nodes that have a route."""
    max_tokens: int | None = None  # limit on the tokens that its calls sample together; None: no limit
    note_cut: Callable[[str], None] = lambda _: None  # the episode counts as cut short, for this reason
    stop: Callable[[], object] = lambda: None  # ends it, from any thread
    actors: Actors = field(default_factory=Actors)  # the episode's; see `EpisodeContext.actors`
    prompts: Mapping[str, str] = field(default_factory=dict)  # node -> what its calls begin with; see `node_prompts`
    refusal: GraphError | None = None  # why its prompts cannot be put; the app may have caught it
    prefix: Prefix | None = None  # answers before the routes do, where the episode's beginning is a recorded one
    record: AnswerRecord | None = None  # answers for nodes without a route, where they are answered from the record
    asks_teacher: bool = False  # own models of nodes with a route are asked beside it; see `teacher`
    sampled_tokens: int = 0  # by all calls so far, those of the prefix among them
    given_tokens: int = 0  # of those, what the prefix gave again
    prompted_calls: Counter[str] = field(default_factory=Counter)  # node -> calls that began with its prompt
    routed_calls: Counter[str] = field(default_factory=Counter)  # node -> recorded calls that its route answered
    unrouted_calls: Counter[str] = field(default_factory=Counter)  # node without a route -> calls of its own model
    _call_numbers: dict[str, Iterator[int]] = field(default_factory=dict)

    @property
    def knows_answers(self) -> bool:
        """Whether some calls get an answer that is known beforehand."""
        return self.prefix is not None or self.record is not None

    def next_call_seed(self, node: str) -> int | None:
        """The seed of the next call of `node`: the same episode seed gives the same sequence."""
        if self.seed is None:
            return None
        number = next(self._call_numbers.setdefault(node, itertools.count()))
        digest = hashlib.sha256(f"{self.seed}/{node}/{number}".encode()).digest()
        return int.from_bytes(digest[:4], "big") >> 1

    def narrow_route(self, route: Route) -> Route:
        """The route of a call that starts now, limited to the tokens that the episode has left.

        Raises:
            GraphError: no token is left; the episode is cut short.
        """
        if self.max_tokens is None:
            return route
        remaining_tokens = self.max_tokens - self.sampled_tokens
        if remaining_tokens <= 0:
            self.note_cut(reason := tokens_reason(self.max_tokens))
            self.stop()  # a graph may go on after the error
            raise GraphError(f"the episode ends here: {reason}")
        return replace(route, max_tokens=min(route.max_tokens, remaining_tokens))

    def count_sampled(self, node: str, route: Route | None, sampled_count: int, finish_reason: str | None) -> None:
        """Counts a call's tokens. Notes the episode as cut short if its limit, not the model, ended the call.

        The episode is not stopped here, because the call's end is not recorded yet: the next call stops it.
        """
        self.sampled_tokens += sampled_count
        if self.max_tokens is None or self.sampled_tokens < self.max_tokens:
            return
        is_narrowed = route is not None and node in self.routes and route.max_tokens < self.routes[node].max_tokens
        if self.sampled_tokens > self.max_tokens or (is_narrowed and finish_reason == "length"):
            self.note_cut(tokens_reason(self.max_tokens))


current_routing: ContextVar[Routing | None] = ContextVar("marft_routing", default=None)


def calling_node() -> str:
    """The agent that the caller acts for: its declared name, else its node's path, or a router; "" outside any node."""
    try:
        config = get_config()
    except RuntimeError:
        return ""
    checkpoint_ns = config.get("configurable", {}).get("checkpoint_ns", "")
    if not checkpoint_ns and (task := running_task.get()) is not None:
        checkpoint_ns = task.checkpoint_ns  # a chain was given a `configurable` of its own in place of LangGraph's
    routing = current_routing.get()
    actors = routing.actors if routing is not None else Actors()
    return actors.agent_at(own_namespace(checkpoint_ns))


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
        routed_nodes = ", ".join(sorted(routing.routes))
        raise GraphError(
            f"node {node!r} calls the served model but has no route; nodes that have one: {routed_nodes}; "
            "name it in graph.nodes to train it, or in graph.frozen to run it untrained"
        )
    return node, route


def route_for_call() -> tuple[str, Route | None, int | None]:
    """Node, route within the episode's token limit, and seed of a call that starts now; each call uses up a seed."""
    node, route = calling_route()
    routing = current_routing.get()
    if routing is None or route is None:
        return node, route, None
    return node, routing.narrow_route(route), routing.next_call_seed(node)
