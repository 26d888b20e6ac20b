"""Values, rewards and dependencies to advantages, in plain numpy.

Two estimators. GAE along the dependencies D of an episode (MARFT, section 4.1.1: the sequential re-modelling of a
graph run), and group baselines over the samples of one task (GRPO, RLOO). Invariant: arithmetic in float64, no
state, no randomness. It knows nothing of tokens, models or episodes' outcomes: the caller says what was truncated.

Suffixes: _A one entry per action of an episode (or of a batch), in a topological order of D.
"""

# ruff: noqa: N803 (shape suffixes)
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Successors = tuple[tuple[int, ...], ...]

_EPSILON = 1e-6


def edges_to_successors(count: int, edges: Iterable[tuple[int, int]], kept: Sequence[bool] | None = None) -> Successors:
    """Edges of D to the direct dependents of each action.

    Actions that are not `kept` (a frozen node, say) are part of the environment: what depended on them depends on
    whatever they depended on. The result is the transitive reduction among the kept ones.

    Args:
        count: number of actions, numbered in a topological order.
        edges: pairs (src, dst) with src < dst.
        kept: one flag per action; None keeps all.

    Returns:
        For each kept action, in order, the positions of its direct dependents among the kept actions.

    Raises:
        ValueError: an edge does not point forward in the order, or leaves it.
    """
    keep = [True] * count if kept is None else list(kept)
    direct: list[set[int]] = [set() for _ in range(count)]
    for src, dst in edges:
        if not 0 <= src < dst < count:
            raise ValueError(f"edge {src} -> {dst} does not point forward among {count} actions")
        direct[src].add(dst)
    for i in reversed(range(count)):
        direct[i] = set().union(*({j} if keep[j] else direct[j] for j in direct[i]))
    position = {old: new for new, old in enumerate(i for i in range(count) if keep[i])}
    pairs = [(position[i], position[j]) for i in position for j in direct[i]]
    return transitive_reduction(len(position), pairs)


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


def gae_along_dependencies(
    values_A: Sequence[float] | Floats,
    rewards_A: Sequence[float] | Floats,
    successors: Successors,
    bootstrap_A: Sequence[float] | Floats,
    gamma: float,
    lam: float,
) -> Floats:
    """Values and rewards of one episode to the advantage of every action.

    With succ(i) the actions that directly depend on i::

        delta_i = r_i + gamma * mean_{j in succ(i)} V_j - V_i
        A_i     = delta_i + gamma * lam * mean_{j in succ(i)} A_j

    An action on which nothing depends has delta_i = r_i + gamma * bootstrap_i - V_i and A_i = delta_i.

    Why the mean and not the sum: V_j estimates the team reward that follows j, and every branch leads to the same
    team reward. A sum would count that reward once per branch, so an action would look better for being
    followed by more of them. With the mean, gamma = lam = 1 and the team reward R on the last actions,
    A_i = R - V_i for every action of any graph.

    On a chain this is MARFT's recurrence over agents and then steps (paper, section 4.1.1 and equation 5). Links
    inside an episode are never masked: the reference implementation masks the first step after an episode's
    end with the previous episode's flag, and so loses that step's credit.

    Args:
        values_A: V of the rollout observation of each action.
        rewards_A: reward that arrives with each action; the team reward belongs on the last actions.
        successors: direct dependents, see `edges_to_successors`.
        bootstrap_A: V after a last action of a truncated episode; 0 where the episode terminated. Read only for
            actions without dependents.
        gamma: discount per link of D.
        lam: lambda of GAE.

    Returns:
        Advantages, shape [A]. The critic's targets are A + V.
    """
    values = np.asarray(values_A, dtype=np.float64)
    advantages: Floats = np.zeros(len(successors), dtype=np.float64)
    for i in reversed(range(len(successors))):
        after = list(successors[i])
        if after:
            delta = rewards_A[i] + gamma * values[after].mean() - values[i]
            advantages[i] = delta + gamma * lam * advantages[after].mean()
        else:
            advantages[i] = rewards_A[i] + gamma * bootstrap_A[i] - values[i]
    return advantages


def group_advantages(
    rewards: Sequence[float] | Floats, group_ids: Sequence[object], kind: Literal["grpo", "rloo"]
) -> Floats:
    """Rewards of episodes to advantages against the other samples of their group (one task).

    grpo: (R - mean) / (std + 1e-6), std with ddof = 1 (DeepSeekMath). rloo: R - mean of the others' R. A group
    of one, and a group of equal rewards, says nothing about what was better: 0. Shape [episodes].
    """
    values = np.asarray(rewards, dtype=np.float64)
    members: dict[object, list[int]] = {}
    for i, group in enumerate(group_ids):
        members.setdefault(group, []).append(i)
    advantages: Floats = np.zeros(len(values), dtype=np.float64)
    for rows in members.values():
        group_values = values[rows]
        count = len(rows)
        if count < 2 or np.ptp(group_values) == 0:
            continue
        centred = group_values - group_values.mean()
        if kind == "grpo":
            advantages[rows] = centred / (group_values.std(ddof=1) + _EPSILON)
        else:
            advantages[rows] = centred * count / (count - 1)
    return advantages


def normalize(advantages_A: Floats, agent_ids: Sequence[object], mode: Literal["none", "batch", "agent"]) -> Floats:
    """Advantages to zero mean and unit (population) deviation, over the batch or over each agent's actions.

    Per agent is Dr. MAS's choice: agents whose rewards have another mean or spread would otherwise
    inflate each other's gradients. A single action, or equal advantages, become 0. Shape [A] in and out.
    """
    if mode == "none":
        return advantages_A
    ids = np.asarray([0 if mode == "batch" else list(dict.fromkeys(agent_ids)).index(a) for a in agent_ids])
    result: Floats = np.zeros_like(advantages_A)
    for group in np.unique(ids):
        rows = ids == group
        centred = advantages_A[rows] - advantages_A[rows].mean()
        result[rows] = centred / (centred.std() + _EPSILON)
    return result
