"""RAFT++: a round to advantages of one for what came out best of its task, and none for the rest, as a contender.

Rejection sampling with the clipped ratio of PPO (Xiong et al. 2025, arXiv 2504.11343, section 3): only samples with the
highest reward of their task are learned from, where that is above 0, and no baseline is taken off.
"""

# ruff: noqa: N803, N806 (shape suffixes)
from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from typing import ClassVar

import numpy as np

from trainers.advantages.arrays import Floats
from trainers.advantages.estimator import BaselineEstimator
from trainers.advantages.group_baselines import Baseline
from trainers.advantages.grpo import task_of_each_action
from trainers.batch import Round


class Raft(BaselineEstimator):
    """One for the best of each task, 0 for the others."""

    name: ClassVar[str] = "raft"
    needs_groups: ClassVar[bool] = True
    per_agent: ClassVar[bool] = False

    def groups(self, data: Round) -> list[Hashable]:
        """The task."""
        return task_of_each_action(data)

    def baseline(self, returns_A: Floats, data: Round) -> Baseline:
        """Returns less one where they are the best of their task, and themselves elsewhere."""
        best: dict[Hashable, float] = defaultdict(float)
        tasks = task_of_each_action(data)
        for task, earned in zip(tasks, returns_A, strict=True):
            best[task] = max(best[task], float(earned))
        chosen_A = np.array([earned > 0 and earned == best[t] for t, earned in zip(tasks, returns_A, strict=True)])
        return Baseline(returns_A - chosen_A, np.ones_like(returns_A))
