"""AT-GRPO: returns standardised over the samples of a task, each agent and each of its turns for itself (PettingLLMs).

Not quite the paper's: its groups are branches of one prompt, from a sampled tree that goes on from the best; here
they are independent episodes, whose prompts are alike at the first turn only. Where the policy decides when to stop,
those that are still running at a turn are no fair sample of all, so a baseline by turn is biased.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import ClassVar

from trainers.advantages.grpo import Standardised, task_of_each_action
from trainers.batch import Round


class AtGrpo(Standardised):
    """The samples of a task, one agent and one turn."""

    name: ClassVar[str] = "at_grpo"

    def groups(self, data: Round) -> list[Hashable]:
        """Task, turn and agent."""
        turns, agents = (item.turn for item in data.items), (item.agent for item in data.items)
        return list(zip(task_of_each_action(data), turns, agents, strict=True))
