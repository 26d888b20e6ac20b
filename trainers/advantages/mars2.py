"""MARS2: each call of a tree search against all calls of its task's trees, paid by itself (arXiv 2604.14564).

Agents grow a tree of programs, each call adding one; a program's path leads from the root to it. Theirs: a call earns
what its own path's end earned, shaped by the tree (over its parent, over its siblings), and the group that it is
standardised in are all calls of the tree, whoever made them::

    A = (r - mean of the group) / (deviation + 1e-6)

So a step reward reaches the call that it arrived with, and not those before it: D of a search that looks at all scores
is one chain, along which the end of one branch would pay the calls of every other. The shaping itself is the graph's
(`graphs/tree_search.py`), since only the search knows which program a call refined; their code, too, does it where
rewards are made. Ours: several trees of a task are one group, and the team reward counts alike for all calls of its
tree: nothing within a tree, and between trees by which of them ended better.
"""

# ruff: noqa: N803 (shape suffixes)
from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import ClassVar

from trainers.advantages.arrays import Floats
from trainers.advantages.estimator import BaselineEstimator
from trainers.advantages.group_baselines import Baseline, standardise
from trainers.advantages.grpo import task_of_each_action
from trainers.batch import Round


class Mars2(BaselineEstimator):
    """All calls of a task's trees; every call counts once, and earns what arrived with it."""

    name: ClassVar[str] = "mars2"
    per_agent: ClassVar[bool] = False
    compares_depths: ClassVar[bool] = True
    pays_calls_alone: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = ("skip_flat_groups", "group_std")

    @classmethod
    def teaches_alone(
        cls,
        by_call: Sequence[float],
        by_run: Sequence[float],  # noqa: ARG003
        normalization: str,  # noqa: ARG003
        *,
        penalties_teach: bool,  # noqa: ARG003
    ) -> bool:
        """Where two of its calls earned differently."""
        return len(set(by_call)) > 1

    def groups(self, data: Round) -> list[Hashable]:
        """The task."""
        return task_of_each_action(data)

    def samples(self, data: Round) -> Sequence[Hashable]:
        """Each call is a sample of its own."""
        return range(len(data.items))

    def baseline(self, returns_A: Floats, data: Round) -> Baseline:
        """Mean and deviation of each group."""
        return standardise(returns_A, self.groups(data), self.samples(data), weight="step", std=self.settings.group_std)
