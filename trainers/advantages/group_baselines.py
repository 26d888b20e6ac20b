"""Returns of groups of actions to a baseline and a gain for every action: what estimators without a critic share.

The advantage is gain * (return - baseline), linear in the rewards, so that it can be told how much of it came from each
reward. Invariant: a group that cannot say what was better has gain 0, never the raw return. Arithmetic is float64,
without state. It knows nothing of tokens, graphs or models; who is compared with whom is the estimator's to say.

Shapes: _A one entry per action of the round; a trajectory is one episode, one sample of its task.
"""

# ruff: noqa: N803, N806, N815 (shape suffixes)
from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from trainers.advantages.arrays import NO_SPREAD, Floats, Rows, rows_by_key
from trainers.advantages.estimate import EPSILON


@dataclass(frozen=True, slots=True)
class Baseline:
    """What returns are compared with, and by how much the difference counts; both of shape [A]."""

    baseline_A: Floats
    gain_A: Floats

    def advantages(self, returns_A: Floats) -> Floats:
        """gain * (return - baseline), shape [A]."""
        return self.gain_A * (returns_A - self.baseline_A)

    def with_least_deviation(self, least: float) -> Baseline:
        """Of a baseline whose gain is one over a deviation: as if no deviation were smaller."""
        return replace(self, gain_A=np.minimum(self.gain_A, 1.0 / (least + EPSILON))) if least else self


def standardise(
    returns_A: Sequence[float] | Floats,
    group_A: Sequence[Hashable],
    trajectory_A: Sequence[Hashable],
    weight: Literal["trajectory", "step"],
    std: bool,
) -> Baseline:
    """Mean and sample deviation of each group: (R - mean) / (deviation + 1e-6).

    GRPO (DeepSeekMath, section 4.1.2), Dr. MAS (grouped by task and agent), AT-GRPO (by task, turn and agent): the
    estimator's groups decide. With w the weight of an action in its group and n the group's trajectories::

        step         w = 1:          deviation^2 = sum (R - mean)^2 / (actions - 1)
        trajectory   w = 1 / (actions of its trajectory in the group):
                                     mean = sum w R / n,  deviation^2 = sum w (R - mean)^2 / (n - 1)

    so that under `trajectory` a run that called an agent ten times says no more than one that called it once.

    The gain is 0 in a group of fewer than two trajectories, and where all trajectories earned the same on average: what
    spread is left is then between places inside a trajectory, and a deviation of that alone would blow it up.

    Args:
        group_A: equal keys are compared with each other.
        trajectory_A: which episode each action belongs to.
        std: False leaves the deviation out (Dr. GRPO): the gain is 1.
    """
    returns = np.asarray(returns_A, dtype=np.float64)
    baseline_A, gain_A = np.zeros_like(returns), np.zeros_like(returns)
    for rows in rows_by_key(group_A).values():
        values, by_trajectory = returns[rows], rows_by_key([trajectory_A[i] for i in rows])
        if weight == "step":
            w, freedom = np.ones(len(rows)), len(rows) - 1
        else:
            w, freedom = np.zeros(len(rows)), len(by_trajectory) - 1
            for positions in by_trajectory.values():
                w[positions] = 1.0 / len(positions)
        mean = (w * values).sum() / w.sum()
        baseline_A[rows] = mean
        if tells_apart(values, by_trajectory):
            deviation = np.sqrt((w * (values - mean) ** 2).sum() / freedom)
            gain_A[rows] = 1.0 / (deviation + EPSILON) if std else 1.0
    return Baseline(baseline_A, gain_A)


def leave_one_out(
    returns_A: Sequence[float] | Floats, group_A: Sequence[Hashable], trajectory_A: Sequence[Hashable]
) -> Baseline:
    """RLOO (Ahmadian et al., 2024): the baseline is the mean over the other trajectories' mean return in the group.

    It does not depend on the trajectory that it is subtracted from, so the policy gradient stays unbiased. The gain is
    1, and 0 in a group of one trajectory, which has no baseline, or of equal returns.
    """
    returns = np.asarray(returns_A, dtype=np.float64)
    baseline_A, gain_A = np.zeros_like(returns), np.zeros_like(returns)
    for rows in rows_by_key(group_A).values():
        values, by_trajectory = returns[rows], rows_by_key([trajectory_A[i] for i in rows])
        means = {key: float(values[positions].mean()) for key, positions in by_trajectory.items()}
        total, other_count = sum(means.values()), len(means) - 1
        for key, positions in by_trajectory.items():
            baseline_A[rows[positions]] = (total - means[key]) / other_count if other_count else means[key]
        if other_count and np.ptp(values) > NO_SPREAD * np.abs(values).max():
            gain_A[rows] = 1.0
    return Baseline(baseline_A, gain_A)


def flat_groups(
    returns_A: Sequence[float] | Floats, group_A: Sequence[Hashable], trajectory_A: Sequence[Hashable] | None = None
) -> tuple[float | None, npt.NDArray[np.bool_]]:
    """Share of the groups whose trajectories all earned the same, and which entries belong to one.

    DAPO's dynamic sampling leaves them out: they would only dilute the loss. A group of one trajectory is flat too.

    Args:
        trajectory_A: which episode an entry belongs to; None where each entry is an episode of its own.

    Returns:
        The share of groups (None without any), and a mask of shape [A].
    """
    returns = np.asarray(returns_A, dtype=np.float64)
    trajectories = range(len(returns)) if trajectory_A is None else trajectory_A
    mask_A = np.zeros(len(returns), dtype=np.bool_)
    groups = rows_by_key(group_A)
    flat = 0
    for rows in groups.values():
        if not tells_apart(returns[rows], rows_by_key([trajectories[i] for i in rows])):
            mask_A[rows] = True
            flat += 1
    return (flat / len(groups) if groups else None), mask_A


def tells_apart(values: Floats, by_trajectory: Mapping[Hashable, Rows]) -> bool:
    """Whether two trajectories of a group earned different returns on average."""
    means = np.array([values[positions].mean() for positions in by_trajectory.values()])
    return bool(np.ptp(means) > NO_SPREAD * np.abs(values).max())
