"""Names of agents in a configuration -> accepted, or refused with one line.

Invariant: what a recorder can write of the graph's runs is accepted; what cannot come from it is refused. A name that
only a run can show (of a graph that a node makes when it runs) is accepted where a node could run such a graph; if it
then makes no call, that is reported after the episodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from marft_bridge.common.errors import GraphError
from marft_bridge.rollouts.app_models import START, InspectedNode, inspect_places


def check_nodes(graph: Any, names: Sequence[str], app_name: str, key: str = "graph.nodes") -> None:
    """Refuses a name under which nobody of the graph can act.

    Raises:
        GraphError: for the first such name, with those that there are.
    """
    if not names:
        return
    places = inspect_places(graph, app_name)
    agents = {node.name: node for node in places if not node.holds_graph or node.may_hide_model}
    for name in names:
        if name not in agents and not _may_act(name, places):
            by_path = next((node for node in agents.values() if node.path == name), None)
            if by_path is not None:
                raise GraphError(f"{key}: the agent at {name!r} declares a name; call it {by_path.name!r}")
            raise GraphError(f"{key}: {app_name!r} has no node {name!r}; its nodes: {', '.join(agents)}")


def _may_act(name: str, places: Sequence[InspectedNode]) -> bool:
    """Whether a run may show this name, though the inspection did not."""
    places_by_name: dict[str, InspectedNode] = {}
    for node in places:
        places_by_name.setdefault(node.name, node)
        places_by_name.setdefault(node.path, node)
    router_of, colon, _ = name.rpartition(":")
    if colon and (router_of in places_by_name or _is_start(router_of, places_by_name)):
        return True  # a routing function, whose code may lie anywhere
    if _is_start(name, places_by_name):
        return True
    parts = name.split("/")
    for length in range(len(parts) - 1, 0, -1):
        place = places_by_name.get("/".join(parts[:length]))
        if place is not None:  # the longest prefix that there is
            inner_is_known = any(node.path.startswith(f"{place.path}/") for node in places)
            return place.may_hide_agent or not inner_is_known
    return any(node.may_hide_agent for node in places)


def _is_start(name: str, places_by_name: Mapping[str, InspectedNode]) -> bool:
    """Whether it is the entry of the graph, or of one inside it, where a routing function may run."""
    outer, _, node = name.rpartition("/")
    return node == START and (not outer or outer in places_by_name)
