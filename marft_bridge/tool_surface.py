"""The episodes of a run -> the tools that each node offered to its model; several of these -> the same, or refused.

A policy learns to call the tools that it was shown; with others it plays another game, and neither learning nor a
comparison across the two means what it seems to. Invariants: what is compared is the union over a run's episodes, so
that a loop which ended early makes no difference; a node that did not act in one of two runs is not compared between
them; what was not recorded is never taken for "no tools". It knows no spans, no training and no statistics.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from marft_bridge.errors import ConfigError
from trace_store.records import ONE_TOOL_OF, TOOLS_OF, Trajectory
from trace_store.store import TraceStore

_ACTED = """
SELECT DISTINCT e.lineage::VARCHAR, a.node FROM episodes e JOIN actions a USING (episode_id)
WHERE e.run_id = $1 AND ($2 IS NULL OR e.variant = $2) AND a.node <> '' AND e.lineage IS NOT NULL
"""


@dataclass(slots=True)
class NodeTools:
    """What one node offered in a run. Nothing at all: it acted without tools."""

    sets: set[str] = field(default_factory=set)  # hashes of all tools of an episode together
    tools: dict[str, set[str]] = field(default_factory=dict)  # name -> hashes of its schema

    @property
    def is_named(self) -> bool:
        """Whether the tools are known one by one; runs from before that was recorded have the sets only."""
        return bool(self.tools) or not self.sets


Surface = dict[str, NodeTools]
"""Node that acted -> its tools."""


def trajectories_to_surface(trajectories: Iterable[Trajectory]) -> Surface:
    """The tools of the nodes that acted in these episodes; episodes without a lineage say nothing."""
    surface: Surface = {}
    for trajectory in trajectories:
        for node in {action.node for action in trajectory.actions}:
            _see(surface, node, trajectory.episode.lineage)
    return surface


def runs_to_surfaces(trajectories: Iterable[Trajectory]) -> dict[str, Surface]:
    """The same for each run that the episodes are of, in the order in which these come."""
    runs: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        runs.setdefault(f"run {trajectory.episode.run_id}", []).append(trajectory)
    return {run: trajectories_to_surface(of_run) for run, of_run in runs.items()}


def store_to_surface(store: TraceStore, run_id: str, variant: str | None = None) -> Surface:
    """The same of a stored run, or of one variant of it."""
    surface: Surface = {}
    for lineage, node in store.sql(_ACTED, (run_id, variant)):
        _see(surface, node, json.loads(lineage))
    return surface


def surface_to_hashes(surface: Surface) -> dict[str, str]:
    """Node -> one SHA-256 of its tools' names and schemas; a node without tools is absent."""
    return {
        node: hashlib.sha256(json.dumps(sorted(_entries(tools))).encode()).hexdigest()
        for node, tools in sorted(surface.items())
        if tools.sets
    }


def refuse_changed(
    surfaces: Mapping[str, Surface],
    allowed: bool,
    switch: str,
    graphs: Mapping[str, str] | None = None,
) -> bool:
    """Whether any of these surfaces differs from the first; refuses one that does, unless that is allowed.

    The surfaces of one graph are compared node by node, for the nodes that acted in both. Another graph shares its
    tools out to other nodes: there the union over all nodes counts, which is what the team as a whole could do.

    Args:
        surfaces: by the name that people know the run, round or variant by.
        switch: the option that allows it, for the message.
        graphs: name -> graph that it ran; without them all ran the same.

    Raises:
        ConfigError: one differs; the message names node and tools.
    """
    names = list(surfaces)
    for name in names[1:]:
        first = names[0]
        same_graph = graphs is None or graphs.get(first) == graphs.get(name)
        said = surface_differences(surfaces[first], surfaces[name], same_graph)
        if said and not allowed:
            raise ConfigError(
                f"tool surface of {'; of '.join(said)} (between {first} and {name}); "
                f"set {switch} = true to go on all the same"
            )
        if said:
            return True
    return False


def surface_differences(one: Surface, other: Surface, same_graph: bool = True) -> list[str]:
    """What changed from one surface to the other, as `node 'x' changed: added ..., removed ..., changed ...`."""
    if not same_graph:
        why = _difference(_union(one), _union(other))
        return [f"the whole team changed: {why}"] if why is not None else []
    both = sorted(one.keys() & other.keys())
    found = ((node, _difference(one[node], other[node])) for node in both)
    return [f"node {node!r} changed: {why}" for node, why in found if why is not None]


def _difference(one: NodeTools, other: NodeTools) -> str | None:
    if not (one.is_named and other.is_named):
        # Episodes that ended early offered less: only where none is like any other are the runs surely not alike.
        same = one.sets & other.sets or not (one.sets or other.sets)
        return None if same else "its tools are others, and their names were not recorded"
    added, removed = other.tools.keys() - one.tools.keys(), one.tools.keys() - other.tools.keys()
    changed = {name for name in one.tools.keys() & other.tools.keys() if not one.tools[name] & other.tools[name]}
    parts = [
        f"{what} {', '.join(sorted(names))}"
        for what, names in (("added", added), ("removed", removed), ("changed", changed))
        if names
    ]
    return ", ".join(parts) or None


def _see(surface: Surface, node: str, lineage: Mapping[str, str]) -> None:
    if not lineage:
        return
    tools = surface.setdefault(node, NodeTools())
    if (together := lineage.get(f"{TOOLS_OF}{node}")) is not None:
        tools.sets.add(together)
    begin = f"{ONE_TOOL_OF}{node}/"
    for name, digest in lineage.items():
        if name.startswith(begin) and "/" not in name.removeprefix(begin):  # else it is a node of a subgraph
            tools.tools.setdefault(name.removeprefix(begin), set()).add(digest)


def _union(surface: Surface) -> NodeTools:
    union = NodeTools()
    for tools in surface.values():
        union.sets |= tools.sets
        for name, digests in tools.tools.items():
            union.tools.setdefault(name, set()).update(digests)
    if any(not tools.is_named for tools in surface.values()):
        union.tools = {}  # known for some nodes only is not known
    return union


def _entries(tools: NodeTools) -> list[str]:
    if not tools.tools:
        return sorted(tools.sets)
    return [f"{name} {' '.join(sorted(digests))}" for name, digests in tools.tools.items()]
