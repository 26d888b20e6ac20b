"""A directed acyclic graph with node widths -> coordinates in layers, top to bottom, parallel nodes side by side.

A layered (Sugiyama) layout. A node lies one layer below the lowest of its predecessors (longest path). A link over
several layers has a waypoint between the nodes of each, so that no line crosses a node. Inside a layer nodes are
ordered by the barycentres of their neighbours, in a few sweeps. Invariants: the same graph gives the same layout, and
no two nodes overlap.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

_SWEEPS = 6
_LANE_WIDTH = 22.0  # px that a link needs where it passes a layer

_Waypoint = tuple[int, int, int]  # (source, target, layer): where a link passes a layer
_Member = int | _Waypoint  # of a layer; an int is a node


@dataclass(frozen=True, slots=True)
class GraphLayout:
    """Coordinates of nodes and links, in px. A link has a waypoint in each layer between those of its ends."""

    width: float
    height: float
    centres: tuple[tuple[float, float], ...]  # of each node
    waypoints_x: Mapping[tuple[int, int], tuple[float, ...]]  # link -> x in each layer that it passes, downwards
    layers: tuple[int, ...]  # of each node
    row_height: float  # from one layer to the next


def graph_to_layout(
    widths: Sequence[float], links: Iterable[tuple[int, int]], *, row_height: float, gap: float, half_height: float
) -> GraphLayout:
    """The layout of the nodes 0, 1, ... of these widths, in px.

    Args:
        links: pairs (source, target) with source < target: nodes are numbered in a topological order.
        row_height: px from one layer to the next.
        gap: px between neighbours.
        half_height: half the height of a node, in px.
    """
    pairs = sorted(set(links))
    layers = [0] * len(widths)
    for source, target in pairs:  # by source, so that a source's own layer is settled
        layers[target] = max(layers[target], layers[source] + 1)
    members_by_layer: list[list[_Member]] = [[] for _ in range(max(layers, default=-1) + 1)]
    for node, layer_index in enumerate(layers):
        members_by_layer[layer_index].append(node)
    uppers_of: dict[_Member, list[_Member]] = {}
    for source, target in pairs:
        chain: list[_Member] = [source]
        for passed_layer in range(layers[source] + 1, layers[target]):
            waypoint = (source, target, passed_layer)
            members_by_layer[passed_layer].append(waypoint)
            chain.append(waypoint)
        chain.append(target)
        for upper, lower in pairwise(chain):
            uppers_of.setdefault(lower, []).append(upper)
    _order_layers(members_by_layer, uppers_of)

    def width_of(member: _Member) -> float:
        return widths[member] if isinstance(member, int) else _LANE_WIDTH

    totals = [sum(map(width_of, members)) + gap * (len(members) - 1) for members in members_by_layer]
    widest = max(totals, default=0.0)
    x: dict[_Member, float] = {}
    for members, total in zip(members_by_layer, totals, strict=True):
        left = (widest - total) / 2
        for member in members:
            x[member] = left + width_of(member) / 2
            left += width_of(member) + gap
    return GraphLayout(
        width=widest,
        height=row_height * (len(members_by_layer) - 1) + 2 * half_height if members_by_layer else 0.0,
        centres=tuple((x[node], half_height + row_height * layers[node]) for node in range(len(widths))),
        waypoints_x={(a, b): tuple(x[a, b, i] for i in range(layers[a] + 1, layers[b])) for a, b in pairs},
        layers=tuple(layers),
        row_height=row_height,
    )


def _order_layers(members_by_layer: list[list[_Member]], uppers_of: Mapping[_Member, Sequence[_Member]]) -> None:
    """Sorts each layer by the mean position of its neighbours, downwards and upwards in turn; ties keep their order.

    A position is relative, (i + 0.5) / members of the layer, so that layers of different sizes compare.
    """
    lowers_of: dict[_Member, list[_Member]] = {}
    for lower, uppers in uppers_of.items():
        for upper in uppers:
            lowers_of.setdefault(upper, []).append(lower)
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        neighbours = uppers_of if down else lowers_of
        positions: dict[_Member, float] = {}
        for members in members_by_layer if down else reversed(members_by_layer):
            own_positions = {member: (i + 0.5) / len(members) for i, member in enumerate(members)}
            means = {m: _mean([positions[n] for n in neighbours.get(m, ())], own_positions[m]) for m in members}
            members.sort(key=means.__getitem__)
            positions |= {member: (i + 0.5) / len(members) for i, member in enumerate(members)}


def _mean(values: Sequence[float], default: float) -> float:
    return sum(values) / len(values) if values else default
