"""AT-GRPO: returns standardised over siblings, calls of one agent and turn that answer one prompt (arXiv 2510.11062).

The paper samples a tree: several answers to the prompt of each agent and turn, going on from the best of them; so here
groups are the calls at a fork point, and the first calls of the samples of a task. Ours: a call's return is what its
run earned to the end, the mean over the runs beneath it, where theirs pays a call by its own turn alone. A call without
a sibling has the advantage 0.

A round without a fork has no tree: there the samples of a task, one agent and one turn are compared, whose prompts are
alike at the first turn only. Where the policy decides when to stop, those that are still running at a turn are no fair
sample of all, so that baseline is biased.
"""

# ruff: noqa: N803 (shape suffixes)
from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import ClassVar

from trainers.advantages.arrays import Floats
from trainers.advantages.group_baselines import Baseline, standardise
from trainers.advantages.grpo import Standardised, task_of_each_action
from trainers.advantages.siblings import siblings_A
from trainers.batch import Round


class AtGrpo(Standardised):
    """Siblings at a turn."""

    name: ClassVar[str] = "at_grpo"
    compares_siblings: ClassVar[bool] = True

    def groups(self, data: Round) -> list[Hashable]:
        """Siblings; in a round without forks task, turn and agent."""
        if data.forest is not None:
            return siblings_A(data)
        turns, agents = (item.turn for item in data.items), (item.agent for item in data.items)
        return list(zip(task_of_each_action(data), turns, agents, strict=True))

    def samples(self, data: Round) -> Sequence[Hashable]:
        """Each call, since siblings lie in one tree; in a round without forks each run."""
        return super().samples(data) if data.forest is None else range(len(data.items))

    def baseline(self, returns_A: Floats, data: Round) -> Baseline:
        """Mean and deviation of each group, in which every call counts once."""
        if data.forest is None:
            return super().baseline(returns_A, data)
        return standardise(returns_A, self.groups(data), self.samples(data), weight="step", std=self.settings.group_std)
