"""A directed acyclic graph with sizes -> places: one layer below another, what is parallel side by side.

A node lies in the layer after the last of those that it comes from (longest path). A link over several layers is led
through each of them between the nodes, so that no line crosses a node. Inside a layer nodes are ordered by where
their neighbours are (barycentres, a few sweeps). Invariants: the same graph gives the same places, and no two nodes
overlap. It knows nothing of episodes, letters or colours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

_SWEEPS = 6
_LANE = 22.0  # px that a link needs where it passes a layer

_Passing = tuple[int, int, int]  # (source, target, layer): where a link passes a layer
_Member = int | _Passing


@dataclass(frozen=True, slots=True)
class Placed:
    """Where nodes and links lie, in px. Points of a link lie between its ends, one per layer that it passes."""

    width: float
    height: float
    centre: tuple[tuple[float, float], ...]  # of each node
    through: Mapping[tuple[int, int], tuple[float, ...]]  # link -> x in each layer that it passes, downwards
    layer: tuple[int, ...]
    row: float  # from one layer to the next


def place_layers(
    widths: Sequence[float], links: Iterable[tuple[int, int]], *, row: float, gap: float, half: float
) -> Placed:
    """Places for nodes of some widths.

    Args:
        links: pairs (source, target) with source < target: nodes are numbered in a topological order.
        row: px from one layer to the next.
        gap: px between neighbours.
        half: half the height of a node, in px.
    """
    pairs = sorted(set(links))
    layer = [0] * len(widths)
    for source, target in pairs:  # by source, so that a source's own layer is settled
        layer[target] = max(layer[target], layer[source] + 1)
    rows: list[list[_Member]] = [[] for _ in range(max(layer, default=-1) + 1)]
    for node, at in enumerate(layer):
        rows[at].append(node)
    above: dict[_Member, list[_Member]] = {}
    for source, target in pairs:
        chain: list[_Member] = [source]
        for at in range(layer[source] + 1, layer[target]):
            passing = (source, target, at)
            rows[at].append(passing)
            chain.append(passing)
        chain.append(target)
        for upper, lower in pairwise(chain):
            above.setdefault(lower, []).append(upper)
    _order(rows, above)

    def width_of(member: _Member) -> float:
        return widths[member] if isinstance(member, int) else _LANE

    totals = [sum(map(width_of, members)) + gap * (len(members) - 1) for members in rows]
    widest = max(totals, default=0.0)
    x: dict[_Member, float] = {}
    for members, total in zip(rows, totals, strict=True):
        left = (widest - total) / 2
        for member in members:
            x[member] = left + width_of(member) / 2
            left += width_of(member) + gap
    return Placed(
        width=widest,
        height=row * (len(rows) - 1) + 2 * half if rows else 0.0,
        centre=tuple((x[node], half + row * layer[node]) for node in range(len(widths))),
        through={(a, b): tuple(x[a, b, at] for at in range(layer[a] + 1, layer[b])) for a, b in pairs},
        layer=tuple(layer),
        row=row,
    )


def _order(rows: list[list[_Member]], above: Mapping[_Member, Sequence[_Member]]) -> None:
    """Sorts each layer by the mean place of its neighbours, down and up again; ties keep their order."""
    below: dict[_Member, list[_Member]] = {}
    for lower, uppers in above.items():
        for upper in uppers:
            below.setdefault(upper, []).append(lower)
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        neighbours = above if down else below
        place: dict[_Member, float] = {}
        for members in rows if down else reversed(rows):
            own = {member: (i + 0.5) / len(members) for i, member in enumerate(members)}
            means = {m: _mean([place[n] for n in neighbours.get(m, ())], own[m]) for m in members}
            members.sort(key=means.__getitem__)
            place |= {member: (i + 0.5) / len(members) for i, member in enumerate(members)}


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise
