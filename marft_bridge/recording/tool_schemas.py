"""The episodes of a run -> its tool surface: the tools that each node offered to its model. Refuses runs that differ.

A policy learns to call the tools that it was shown; with other tools the game is another one, and neither learning nor
a comparison across the two is valid. Invariants: the union over a run's episodes is compared, so that a loop which
ended early makes no difference; a node that did not act in one of two runs is not compared between them; tools that
were not recorded are never taken for "no tools".
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from marft_bridge.common.errors import ConfigError
from trace_store.records import ONE_TOOL_OF, TOOLS_OF, Trajectory
from trace_store.store import TraceStore

_ACTING_NODES = """
SELECT DISTINCT e.lineage::VARCHAR, a.node FROM episodes e JOIN actions a USING (episode_id)
WHERE e.run_id = $1 AND ($2 IS NULL OR e.variant = $2) AND a.node <> '' AND e.lineage IS NOT NULL
"""


@dataclass(slots=True)
class NodeTools:
    """The tools that one node offered in a run. Both fields empty: it acted without tools."""

    set_hashes: set[str] = field(default_factory=set)  # hashes of all tools of an episode together
    tools: dict[str, set[str]] = field(default_factory=dict)  # name -> hashes of its schemas

    @property
    def is_named(self) -> bool:
        """Whether the tools are known one by one; older runs have recorded the hashes of whole sets only."""
        return bool(self.tools) or not self.set_hashes


Surface = dict[str, NodeTools]
"""Node that acted -> its tools."""


def trajectories_to_surface(trajectories: Iterable[Trajectory]) -> Surface:
    """The tool surface of the nodes that acted in these episodes; episodes without a lineage are left out."""
    surface: Surface = {}
    for trajectory in trajectories:
        for node in {action.node for action in trajectory.actions}:
            _add_tools(surface, node, trajectory.episode.lineage)
    return surface


def runs_to_surfaces(trajectories: Iterable[Trajectory]) -> dict[str, Surface]:
    """`run <id>` -> tool surface, for each run of these episodes, in the order of its first episode."""
    runs: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        runs.setdefault(f"run {trajectory.episode.run_id}", []).append(trajectory)
    return {run: trajectories_to_surface(run_trajectories) for run, run_trajectories in runs.items()}


def store_to_surface(store: TraceStore, run_id: str, variant: str | None = None) -> Surface:
    """The tool surface of a stored run, or of one variant of it."""
    surface: Surface = {}
    for lineage, node in store.sql(_ACTING_NODES, (run_id, variant)):
        _add_tools(surface, node, json.loads(lineage))
    return surface


def surface_to_hashes(surface: Surface) -> dict[str, str]:
    """Node -> one SHA-256 of its tools' names and schemas; a node without tools is absent."""
    return {
        node: hashlib.sha256(json.dumps(sorted(_tools_to_entries(tools))).encode()).hexdigest()
        for node, tools in sorted(surface.items())
        if tools.set_hashes
    }


def refuse_changed(
    surfaces: Mapping[str, Surface],
    allowed: bool,
    option: str,
    graphs: Mapping[str, str] | None = None,
) -> bool:
    """Whether any of these surfaces differs from the first; refuses one that does, unless `allowed`.

    The surfaces of one graph are compared node by node, for the nodes that acted in both. Another graph distributes
    its tools over other nodes: there the union over all nodes is compared, the tools of the team as a whole.

    Args:
        surfaces: by the name of the run, round or variant, for the message.
        option: the key that allows a difference, for the message.
        graphs: name -> graph that it ran; None: all ran the same.

    Raises:
        ConfigError: one differs; the message names node and tools.
    """
    names = list(surfaces)
    for name in names[1:]:
        first = names[0]
        same_graph = graphs is None or graphs.get(first) == graphs.get(name)
        differences = surface_differences(surfaces[first], surfaces[name], same_graph)
        if differences and not allowed:
            raise ConfigError(
                f"tool surface of {'; of '.join(differences)} (between {first} and {name}); "
                f"set {option} = true to go on all the same"
            )
        if differences:
            return True
    return False


def surface_differences(first: Surface, second: Surface, same_graph: bool = True) -> list[str]:
    """The differences from `first` to `second`, as `node 'x' changed: added ..., removed ..., changed ...`."""
    if not same_graph:
        difference = _describe_difference(_unite_tools(first), _unite_tools(second))
        return [f"the whole team changed: {difference}"] if difference is not None else []
    common_nodes = sorted(first.keys() & second.keys())
    node_differences = ((node, _describe_difference(first[node], second[node])) for node in common_nodes)
    return [f"node {node!r} changed: {difference}" for node, difference in node_differences if difference is not None]


def _describe_difference(first: NodeTools, second: NodeTools) -> str | None:
    if not (first.is_named and second.is_named):
        # Episodes that ended early offered fewer tools: the runs surely differ only if no two of their sets are equal.
        is_same = first.set_hashes & second.set_hashes or not (first.set_hashes or second.set_hashes)
        return None if is_same else "its tools are others, and their names were not recorded"
    added, removed = second.tools.keys() - first.tools.keys(), first.tools.keys() - second.tools.keys()
    changed = {name for name in first.tools.keys() & second.tools.keys() if not first.tools[name] & second.tools[name]}
    parts = [
        f"{change} {', '.join(sorted(names))}"
        for change, names in (("added", added), ("removed", removed), ("changed", changed))
        if names
    ]
    return ", ".join(parts) or None


def _add_tools(surface: Surface, node: str, lineage: Mapping[str, str]) -> None:
    if not lineage:
        return
    tools = surface.setdefault(node, NodeTools())
    if (set_hash := lineage.get(f"{TOOLS_OF}{node}")) is not None:
        tools.set_hashes.add(set_hash)
    prefix = f"{ONE_TOOL_OF}{node}/"
    for name, digest in lineage.items():
        if name.startswith(prefix) and "/" not in name.removeprefix(prefix):  # else it is a node of a subgraph
            tools.tools.setdefault(name.removeprefix(prefix), set()).add(digest)


def _unite_tools(surface: Surface) -> NodeTools:
    team_tools = NodeTools()
    for tools in surface.values():
        team_tools.set_hashes |= tools.set_hashes
        for name, digests in tools.tools.items():
            team_tools.tools.setdefault(name, set()).update(digests)
    if any(not tools.is_named for tools in surface.values()):
        team_tools.tools = {}  # names are known for some nodes only: compare by the hashes of whole sets
    return team_tools


def _tools_to_entries(tools: NodeTools) -> list[str]:
    if not tools.tools:
        return sorted(tools.set_hashes)
    return [f"{name} {' '.join(sorted(digests))}" for name, digests in tools.tools.items()]
