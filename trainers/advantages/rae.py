"""RAE: each agent's returns less a running mean of that agent's returns, from 0 on (SPIRAL, arXiv 2506.24119).

    b <- decay * b + (1 - decay) * R    once per trajectory in which the agent acted, in order of the round
    A = R - b                           with the b from before that update

All actions of an agent in a trajectory share that b: one that had seen an earlier action's return would have seen this
one's too, which is the same team reward, and would be biased. Where an agent acted several times in a trajectory, R of
the update is the mean of those returns. A run with its forks is one trajectory: R is then the mean over its runs, by
their weights. Older episodes changed b when they were fresh, and are held against the b that the fresh ones leave.
"""

# ruff: noqa: N803, N806 (shape suffixes)
from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from trainers.advantages.arrays import Floats, Rows, rows_by_key
from trainers.advantages.estimator import BaselineEstimator, Estimated, EstimatorInput, sum_of
from trainers.advantages.group_baselines import Baseline
from trainers.advantages.settings import Normalization
from trainers.batch import Round


class Rae(BaselineEstimator):
    """A running mean of each agent's returns; `state` is agent -> b."""

    name: ClassVar[str] = "rae"
    compares_depths: ClassVar[bool] = True  # of an agent that acts several times
    keeps_state: ClassVar[bool] = True
    normalization: ClassVar[Normalization] = "agent"
    reads: ClassVar[tuple[str, ...]] = ("rae_decay",)

    @classmethod
    def teaches_alone(
        cls, by_call: Sequence[float], by_run: Sequence[float], normalization: str, *, penalties_teach: bool
    ) -> bool:
        """Where it earned anything, since the running means begin at 0; but a round's mean takes that away."""
        earned = (*by_call, *by_run)
        return normalization == "none" and any(value > 0 or (value < 0 and penalties_teach) for value in earned)

    def estimate(self, round_input: EstimatorInput) -> Estimated:
        """As the class says. The running mean is no reward's, so `BASELINE` has all of it."""
        sources = round_input.returns_by_source(self.settings.gamma)
        return_A = sum_of(sources, len(round_input.data.items))
        baseline, state = self.baseline_and_state(return_A, round_input.data)
        zero_shares = dict.fromkeys(sources, np.zeros_like(return_A))
        return Estimated(self.split(round_input, sources, baseline, shares=zero_shares), state=state)

    def baseline(self, returns_A: Floats, data: Round) -> Baseline:
        """The running means as they stood before each trajectory."""
        return self.baseline_and_state(returns_A, data)[0]

    def baseline_and_state(self, returns_A: Floats, data: Round) -> tuple[Baseline, dict[str, float]]:
        """The baseline of a round, and the running means after it."""
        decay, state = self.settings.rae_decay, dict(self.state)
        baseline_A = np.zeros_like(returns_A)
        agents = [item.agent for item in data.items]
        stands_A = [[(e, 1.0)] for e in data.episode_A] if data.forest is None else data.forest.stands_A
        for (agent, _), rows in rows_by_key(list(zip(agents, data.tree_A, strict=True))).items():
            running = state.get(agent, 0.0)
            baseline_A[rows] = running
            if not data.is_replayed(int(rows[0])):
                state[agent] = decay * running + (1 - decay) * _tree_return(returns_A, rows, stands_A)
        return Baseline(baseline_A, np.ones_like(returns_A)), state


def _tree_return(returns_A: Floats, rows: Rows, stands_A: Sequence[Sequence[tuple[int, float]]]) -> float:
    """The mean of some actions' returns in each run that they stand in, and the mean of these by the runs' weights."""
    rows_of_run: dict[int, list[int]] = {}
    weight_by_run: dict[int, float] = {}
    for row in rows.tolist():
        for run, weight in stands_A[row]:
            rows_of_run.setdefault(run, []).append(row)
            weight_by_run[run] = weight
    weighted = sum(weight_by_run[run] * float(returns_A[run_rows].mean()) for run, run_rows in rows_of_run.items())
    return weighted / sum(weight_by_run.values())
