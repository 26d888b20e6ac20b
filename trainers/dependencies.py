"""Edges of D to who directly depends on whom among the actions that are trained, as plain integers.

Actions that are not kept (a frozen node, say) are part of the environment: what depended on them depends on
whatever they depended on. Invariant: actions are numbered in a topological order, so every edge points forward.
It knows nothing of tokens, rewards or values.

Shapes: _A one entry per recorded action of an episode, in that order.
"""

# ruff: noqa: N803 (shape suffixes)
from __future__ import annotations

from collections.abc import Iterable, Sequence

Successors = tuple[tuple[int, ...], ...]


def edges_to_successors(
    count: int, edges: Iterable[tuple[int, int]], is_kept_A: Sequence[bool] | None = None
) -> Successors:
    """Edges of D to the direct dependents of each action: the transitive reduction among the kept ones.

    Args:
        count: number of actions, numbered in a topological order.
        edges: pairs (src, dst) with src < dst.
        is_kept_A: one flag per action; None keeps all.

    Returns:
        For each kept action, in order, the positions of its direct dependents among the kept actions.

    Raises:
        ValueError: an edge does not point forward in the order, or leaves it.
    """
    keep = [True] * count if is_kept_A is None else list(is_kept_A)
    direct: list[set[int]] = [set() for _ in range(count)]
    for src, dst in edges:
        if not 0 <= src < dst < count:
            raise ValueError(f"edge {src} -> {dst} does not point forward among {count} actions")
        direct[src].add(dst)
    for i in reversed(range(count)):
        direct[i] = set().union(*({j} if keep[j] else direct[j] for j in direct[i]))
    position = _positions(keep)
    pairs = [(position[i], position[j]) for i in position for j in direct[i]]
    return transitive_reduction(len(position), pairs)


def links_to(target: int, edges: Iterable[tuple[int, int]], is_kept_A: Sequence[bool]) -> dict[int, int]:
    """How many links of D lie between each kept action and one action of the recorded graph that it led to.

    A link is counted for every kept action that is left on the shortest way back from `target`: the target itself is 0
    links from itself, and so is the last kept action before a target that is not kept.

    Args:
        target: position among all actions, kept or not.
        edges: pairs (src, dst) with src < dst, over all actions.
        is_kept_A: one flag per action.

    Returns:
        Position among the kept actions -> links, for the target and everything that it depends on.
    """
    predecessors: dict[int, list[int]] = {}
    for src, dst in edges:
        predecessors.setdefault(dst, []).append(src)
    links = {target: 0}
    for i in range(target, -1, -1):  # all ways from `target` to i pass actions between them in the order
        if i in links:
            for j in predecessors.get(i, ()):
                links[j] = min(links.get(j, len(is_kept_A)), links[i] + is_kept_A[i])
    position = _positions(is_kept_A)
    return {position[i]: count for i, count in links.items() if is_kept_A[i]}


def transitive_reduction(count: int, edges: Iterable[tuple[int, int]]) -> Successors:
    """Edges to the fewest edges with the same reachability: i -> k goes when i -> j -> k exists.

    Nodes must be numbered in a topological order (src < dst). Reachability is kept as one integer bit set per
    node, so the cost is one `or` of `count` bits per edge.
    """
    following: list[set[int]] = [set() for _ in range(count)]
    for src, dst in edges:
        following[src].add(dst)
    reached = [0] * count
    reduced: list[tuple[int, ...]] = [()] * count
    for i in reversed(range(count)):
        direct = []
        for j in sorted(following[i]):  # nearest first: a later one may be reachable through an earlier one
            if not reached[i] >> j & 1:
                direct.append(j)
                reached[i] |= reached[j] | 1 << j
        reduced[i] = tuple(direct)
    return tuple(reduced)


def _positions(is_kept_A: Sequence[bool]) -> dict[int, int]:
    """Position among all actions -> position among the kept ones."""
    return {old: new for new, old in enumerate(i for i in range(len(is_kept_A)) if is_kept_A[i])}
