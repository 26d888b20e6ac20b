"""Dr. MAS: returns standardised over the samples of a task, each agent for itself."""

from __future__ import annotations

from collections.abc import Hashable
from typing import ClassVar

from trainers.advantages.grpo import Standardised, task_of_each_action
from trainers.advantages.settings import GroupWeight
from trainers.batch import Round


class DrMas(Standardised):
    """The samples of a task and one agent; every action counts once."""

    name: ClassVar[str] = "dr_mas"
    compares_depths: ClassVar[bool] = True  # of an agent that acts several times
    default_weight: ClassVar[GroupWeight] = "step"
    reads: ClassVar[tuple[str, ...]] = (*Standardised.reads, "group_weight")

    def groups(self, data: Round) -> list[Hashable]:
        """Task and agent."""
        return list(zip(task_of_each_action(data), (item.agent for item in data.items), strict=True))
