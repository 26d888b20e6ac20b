"""RLOO: returns less the mean of the other samples of the task (Ahmadian et al. 2024, arXiv 2402.14740)."""

# ruff: noqa: N803 (shape suffixes)
from __future__ import annotations

from collections.abc import Hashable
from typing import ClassVar

from trainers.advantages.arrays import Floats
from trainers.advantages.estimator import BaselineEstimator
from trainers.advantages.group_baselines import Baseline, leave_one_out
from trainers.advantages.grpo import task_of_each_action
from trainers.batch import Round


class Rloo(BaselineEstimator):
    """Leave-one-out over the samples of a task, whoever acted."""

    name: ClassVar[str] = "rloo"
    needs_groups: ClassVar[bool] = True
    per_agent: ClassVar[bool] = False
    compares_depths: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = ("skip_flat_groups",)

    def groups(self, data: Round) -> list[Hashable]:
        """The task."""
        return task_of_each_action(data)

    def baseline(self, returns_A: Floats, data: Round) -> Baseline:
        """The mean of the others, see `leave_one_out`."""
        return leave_one_out(returns_A, task_of_each_action(data), data.tree_A)
