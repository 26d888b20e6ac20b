"""HRPO: a run against the other samples of its task, and what each call earned by itself (MasHost, arXiv 2506.08507).

    A = (R - mean R of the task's samples) / deviation + r

R is what the run earned (the team's reward, and an agent's own of the whole run), r what arrived with this very call
(shaping of level `step`). The second part is compared with nothing: a call that deserves a penalty has one though
every sample of its task deserves the same, and no call before or beside it shares that.

Theirs, by the abstract: group-relative advantages between whole teams, joined with rewards of single actions, for the
host that builds a team. The paper's formula was not at hand, so the plain sum is ours; so is that the agents which the
host called learn as well, each compared with its own calls in the other samples, every run counted once. A weight in
`shaping` is in deviations of R, since r is not divided by one.

An advantage below 0 has a part in the loss as far as `objective.negative_weight` says. At its default, 0, a penalty
takes from what the run was better by, and where it was not better teaches nothing.

Invariant: a reward of a step changes the advantage of the call that it arrived with, and of no other.
"""

# ruff: noqa: N803, N806 (shape suffixes)
from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from trainers.advantages.arrays import Floats, rows_by_key
from trainers.advantages.estimate import Estimate
from trainers.advantages.estimator import BaselineEstimator, Estimated, EstimatorInput, sum_of
from trainers.advantages.group_baselines import Baseline, flat_groups, standardise
from trainers.advantages.grpo import task_of_each_action
from trainers.advantages.returns import action_rewards
from trainers.batch import Round


class Hrpo(BaselineEstimator):
    """The samples of a task and one agent, every run once; rewards of single calls are added as they are."""

    name: ClassVar[str] = "hrpo"
    needs_groups: ClassVar[bool] = True
    compares_depths: ClassVar[bool] = True  # of an agent that acts several times
    adds_step_rewards: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = ("group_std",)

    @classmethod
    def teaches_alone(
        cls,
        by_call: Sequence[float],
        by_run: Sequence[float],  # noqa: ARG003
        normalization: str,  # noqa: ARG003
        *,
        penalties_teach: bool,
    ) -> bool:
        """Where a call earned anything by itself, or a penalty that counts."""
        return any(value > 0 or (value < 0 and penalties_teach) for value in by_call)

    def groups(self, data: Round) -> list[Hashable]:
        """Task and agent."""
        return list(zip(task_of_each_action(data), (item.agent for item in data.items), strict=True))

    def baseline(self, returns_A: Floats, data: Round) -> Baseline:
        """Mean and deviation of each group over its runs, see `standardise`."""
        return standardise(returns_A, self.groups(data), data.tree_A, weight="trajectory", std=self.settings.group_std)

    def estimate(self, round_input: EstimatorInput) -> Estimated:
        """As the module says."""
        data, count = round_input.data, len(round_input.data.items)
        by_call = action_rewards(data)
        of_runs = self.compared_by_source(round_input)
        return_A, own_A = sum_of(of_runs, count), sum_of(by_call, count)
        shares = {name: self.baseline(part_A, data).baseline_A for name, part_A in of_runs.items()}
        between_runs = self.split(round_input, of_runs, self.compare(return_A, round_input), shares=shares)
        own_by_source = {
            name: round_input.over_units(part_A, self.settings.gamma_token) for name, part_A in by_call.items()
        }
        estimate = Estimate(
            between_runs.advantage_U + round_input.over_units(own_A, self.settings.gamma_token),
            {**between_runs.by_source, **own_by_source},
        )
        teaches_A = own_A != 0 if self.settings.penalties_teach else own_A > 0
        silent_share = _silent_groups(return_A, teaches_A, self.groups(data), tree_A=data.tree_A)
        return Estimated(estimate, flat_groups=silent_share)


def _silent_groups(
    return_A: Floats, teaches_A: npt.NDArray[np.bool_], group_A: Sequence[Hashable], tree_A: Sequence[int]
) -> float | None:
    """Share of the groups whose runs earned the same and in which no call teaches by what it earned by itself."""
    flat_A, groups = flat_groups(return_A, group_A, tree_A)[1], rows_by_key(group_A).values()
    silent = sum(bool(flat_A[rows].all() and not teaches_A[rows].any()) for rows in groups)
    return silent / len(groups) if groups else None
