"""Tree-GRPO: a call against its siblings at a fork point, mixed with the other trees of its task (arXiv 2509.21240).

Theirs adds two standardised advantages: of a run within its tree, and among all runs of the task. Ours is their mean
with leave-one-out in place of both standardisations, so that a call's own branch is in neither baseline::

    A = R - (mean of the branches beside it + mean of the other trees of the task) / 2

The branches beside a call are those of the fork point at or next above it. Both means are over calls of the same agent
at the same turn, since calls at other places have other rewards before them; a branch, or a tree, counts once. Where
one of the two is not there the other stands alone; without both the advantage is 0. A call above all fork points has
the other trees only: the branches beneath it follow from what it did. The return is the mean over the runs beneath.
"""

# ruff: noqa: N803, N806 (shape suffixes)
from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import ClassVar

import numpy as np

from trainers.advantages.arrays import NO_SPREAD, Floats, rows_by_key
from trainers.advantages.estimator import BaselineEstimator
from trainers.advantages.group_baselines import Baseline
from trainers.batch import Round

_NOT_KNOWN = np.nan


class TreeGrpo(BaselineEstimator):
    """Leave-one-out within the tree, and among the trees of the task."""

    name: ClassVar[str] = "tree_grpo"
    needs_groups: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = ("skip_flat_groups",)

    def groups(self, data: Round) -> list[Hashable]:
        """Task, agent and turn, in whatever tree."""
        turn_A = _agent_turns(data)
        return [(data.episodes[e].task_id, *turn) for e, turn in zip(data.episode_A, turn_A, strict=True)]

    def samples(self, data: Round) -> Sequence[Hashable]:
        """Each call: branches of one tree are compared as well."""
        return range(len(data.items))

    def baseline(self, returns_A: Floats, data: Round) -> Baseline:
        """Half of each mean, see the module."""
        weight_A = np.ones(len(returns_A)) if data.forest is None else data.forest.weight_A
        beside_A = _beside(returns_A, weight_A, data)
        others_A = np.full(len(returns_A), _NOT_KNOWN)
        for rows in rows_by_key(self.groups(data)).values():
            others_A[rows] = _means_of_others(returns_A[rows], weight_A[rows], [data.tree_A[i] for i in rows])
        known = ~np.isnan(np.stack([beside_A, others_A]))
        total_A = np.nan_to_num(beside_A) + np.nan_to_num(others_A)
        count_A = known.sum(axis=0)
        baseline_A = np.divide(total_A, count_A, out=returns_A.astype(np.float64).copy(), where=count_A > 0)
        # what float64 leaves of a difference between equal returns teaches nothing
        differs_A = np.abs(returns_A - baseline_A) > NO_SPREAD * np.maximum(np.abs(returns_A), np.abs(baseline_A))
        return Baseline(baseline_A, differs_A.astype(np.float64))


def _agent_turns(data: Round) -> list[tuple[str, int]]:
    """What calls are compared by: agent and turn; [A].

    Without the links of D that `returns.run_positions` counts besides: by these a call would stand alone whose agent
    had its turn a link later in the other runs.
    """
    return [(item.agent, item.turn) for item in data.items]


def _beside(returns_A: Floats, weight_A: Floats, data: Round) -> Floats:
    """The mean of the branches beside each call at its nearest fork point; NaN where it has none."""
    beside_A = np.full(len(returns_A), _NOT_KNOWN)
    if data.forest is None:
        return beside_A
    # every call that lies in a branch of a fork point, with that branch, by fork point, agent and turn
    lying: dict[Hashable, list[tuple[int, int]]] = defaultdict(list)
    for row, (path, turn) in enumerate(zip(data.forest.path_A, _agent_turns(data), strict=True)):
        for point, branch in path:
            lying[point, turn].append((row, branch))
    for (point, _), members in lying.items():  # type: ignore[misc]
        rows = np.array([row for row, _ in members], dtype=np.intp)
        means = _means_of_others(returns_A[rows], weight_A[rows], [branch for _, branch in members])
        for row, mean in zip(rows.tolist(), means.tolist(), strict=True):
            if data.forest.path_A[row][-1][0] == point:
                beside_A[row] = mean
    return beside_A


def _means_of_others(values: Floats, weights: Floats, keys: Sequence[int]) -> Floats:
    """For each value, the mean over the other keys' weighted means; NaN where there is no other key."""
    positions = rows_by_key(keys)
    means = {key: float(np.average(values[rows], weights=weights[rows])) for key, rows in positions.items()}
    total, other_count = sum(means.values()), len(means) - 1
    result = np.full(len(values), _NOT_KNOWN)
    for key, rows in positions.items():
        if other_count:
            result[rows] = (total - means[key]) / other_count
    return result
