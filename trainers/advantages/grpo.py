"""GRPO: returns standardised over the samples of a task (DeepSeekMath, arXiv 2402.03300, section 4.1.2)."""

# ruff: noqa: N803 (shape suffixes)
from __future__ import annotations

from collections.abc import Hashable
from typing import ClassVar

from trainers.advantages.arrays import Floats
from trainers.advantages.estimator import BaselineEstimator
from trainers.advantages.group_baselines import Baseline, standardise
from trainers.advantages.settings import GroupWeight
from trainers.batch import Round


class Standardised(BaselineEstimator):
    """Estimators that divide by a deviation of their group; which group, and how it counts, is a subclass's."""

    needs_groups: ClassVar[bool] = True
    default_weight: ClassVar[GroupWeight] = "trajectory"
    reads: ClassVar[tuple[str, ...]] = ("skip_flat_groups", "group_std")

    def baseline(self, returns_A: Floats, data: Round) -> Baseline:
        """Mean and deviation of each group, see `standardise`."""
        groups = self.groups(data)
        assert groups is not None
        weight = self.settings.group_weight or self.default_weight
        return standardise(returns_A, groups, data.tree_A, weight=weight, std=self.settings.group_std)


class Grpo(Standardised):
    """The samples of a task, whoever acted."""

    name: ClassVar[str] = "grpo"
    per_agent: ClassVar[bool] = False
    compares_depths: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = (*Standardised.reads, "group_weight")

    def groups(self, data: Round) -> list[Hashable]:
        """The task."""
        return task_of_each_action(data)


def task_of_each_action(data: Round) -> list[Hashable]:
    """The task of each action's episode, [A]."""
    return [data.episodes[e].task_id for e in data.episode_A]
