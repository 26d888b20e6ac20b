"""Returns of the samples of a task to a baseline and a gain for every action: advantages without a critic.

An estimator fixes a `Baseline`; the advantage is then gain * (return - baseline), linear in the rewards, so that it can
be told how much of it came from each reward. `group_keys` says who is compared with whom:

    grpo, rloo   the samples of a task
    dr_mas       the samples of a task, each agent for itself
    at_grpo      the samples of a task, each agent and each of its turns for itself
    rae          no groups: a running mean of each agent's returns

Invariant: a group that cannot say what was better has gain 0, never the raw return. Arithmetic is float64; the only
state is `RunningBaselines.state`, which changes in `commit` alone. It knows nothing of tokens, graphs or models.

Shapes: _A one entry per action of the round; a trajectory is one episode, one sample of its task.
"""

# ruff: noqa: N803, N806, N815 (shape suffixes)
from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt

from trainers.gae import Floats

_Rows = npt.NDArray[np.intp]
_Key = TypeVar("_Key", bound=Hashable)

_EPSILON = 1e-6  # DeepSeekMath's and Dr. MAS's, beside the deviation
_NO_SPREAD = 1e-12  # relative: what float64 leaves of equal returns that were discounted along different branches


@dataclass(frozen=True, slots=True)
class Baseline:
    """What returns are compared with, and by how much the difference counts; both of shape [A]."""

    baseline_A: Floats
    gain_A: Floats

    def advantages(self, returns_A: Floats) -> Floats:
        """gain * (return - baseline), shape [A]."""
        return self.gain_A * (returns_A - self.baseline_A)


def rows_by_key(keys: Sequence[_Key]) -> dict[_Key, _Rows]:
    """Each key, in order of first appearance, to the positions where it stands, ascending."""
    rows: dict[_Key, list[int]] = {}
    for i, key in enumerate(keys):
        rows.setdefault(key, []).append(i)
    return {key: np.array(each, dtype=np.intp) for key, each in rows.items()}


def group_keys(
    estimator: Literal["grpo", "rloo", "dr_mas", "at_grpo"],
    task_ids_A: Sequence[str],
    agent_A: Sequence[str],
    turn_A: Sequence[int],
) -> list[Hashable]:
    """The group of each action: equal keys are compared with each other. See the module's docstring. Shape [A]."""
    if estimator == "dr_mas":
        return list(zip(task_ids_A, agent_A, strict=True))
    if estimator == "at_grpo":
        return list(zip(task_ids_A, turn_A, agent_A, strict=True))
    return list(task_ids_A)


def standardise(
    returns_A: Sequence[float] | Floats,
    group_A: Sequence[Hashable],
    trajectory_A: Sequence[Hashable],
    weight: Literal["trajectory", "step"],
    std: bool,
) -> Baseline:
    """Mean and sample deviation of each group: (R - mean) / (deviation + 1e-6).

    GRPO (DeepSeekMath, section 4.1.2), Dr. MAS (grouped by task and agent), AT-GRPO (by task, turn and agent): the
    caller's keys decide. With w the weight of an action in its group and n the group's trajectories::

        step         w = 1:          deviation^2 = sum (R - mean)^2 / (actions - 1)
        trajectory   w = 1 / (actions of its trajectory in the group):
                                     mean = sum w R / n,  deviation^2 = sum w (R - mean)^2 / (n - 1)

    so that under `trajectory` a run that called an agent ten times says no more than one that called it once.

    The gain is 0 in a group of fewer than two trajectories, and where all trajectories earned the same on average: what
    spread is left is then between places inside a trajectory, and a deviation of that alone would blow it up.

    Args:
        group_A: see `group_keys`.
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
            for own in by_trajectory.values():
                w[own] = 1.0 / len(own)
        mean = (w * values).sum() / w.sum()
        baseline_A[rows] = mean
        if _tells_apart(values, by_trajectory):
            deviation = np.sqrt((w * (values - mean) ** 2).sum() / freedom)
            gain_A[rows] = 1.0 / (deviation + _EPSILON) if std else 1.0
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
        means = {key: float(values[own].mean()) for key, own in by_trajectory.items()}
        total, others = sum(means.values()), len(means) - 1
        for key, own in by_trajectory.items():
            baseline_A[rows[own]] = (total - means[key]) / others if others else means[key]
        if others and np.ptp(values) > _NO_SPREAD * np.abs(values).max():
            gain_A[rows] = 1.0
    return Baseline(baseline_A, gain_A)


def leave_one_out_mean(values_A: Sequence[float] | Floats, agent_A: Sequence[str], episode_A: Sequence[int]) -> Floats:
    """Values less the mean over the same agent's actions in other episodes of the round; 0 where there are none.

    For rewards that no critic predicts (step and private ones). Every action of the other episodes counts once.
    Linear in the values. Shape [A].
    """
    values = np.asarray(values_A, dtype=np.float64)
    centred: Floats = np.zeros_like(values)
    for rows in rows_by_key(agent_A).values():
        total = values[rows].sum()
        for own in rows_by_key([episode_A[i] for i in rows]).values():
            others = len(rows) - len(own)
            if others:
                mine = rows[own]
                centred[mine] = values[mine] - (total - values[mine].sum()) / others
    return centred


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
        if not _tells_apart(returns[rows], rows_by_key([trajectories[i] for i in rows])):
            mask_A[rows] = True
            flat += 1
    return (flat / len(groups) if groups else None), mask_A


@dataclass
class RunningBaselines:
    """RAE (SPIRAL, 2025): each agent's returns against a running mean of that agent's returns, from 0 on.

    b <- decay * b + (1 - decay) * R once per trajectory in which the agent acted, in order of the round, and
    A = R - b with the b from before that update. All its actions in a trajectory share that b: one that had seen an
    earlier action's return would have seen this one's too, which is the same team reward, and would be biased.

    Args:
        decay: of the running mean, 0 <= decay < 1.
        state: agent -> b; for the checkpoint.
    """

    decay: float
    state: dict[str, float] = field(default_factory=dict)

    def baselines_of(
        self, returns_A: Sequence[float] | Floats, agent_A: Sequence[str], trajectory_A: Sequence[Hashable]
    ) -> tuple[Baseline, dict[str, float]]:
        """The baseline of a round, and the state after it. Nothing changes until `commit`: a round may be refused.

        Where an agent acted several times in a trajectory, R of the update is the mean of those returns.
        """
        returns = np.asarray(returns_A, dtype=np.float64)
        state = dict(self.state)
        baseline_A = np.zeros_like(returns)
        for (agent, _), rows in rows_by_key(list(zip(agent_A, trajectory_A, strict=True))).items():
            before = state.get(agent, 0.0)
            baseline_A[rows] = before
            state[agent] = self.decay * before + (1 - self.decay) * float(returns[rows].mean())
        return Baseline(baseline_A, np.ones_like(returns)), state

    def commit(self, state: Mapping[str, float]) -> None:
        """Takes over the state that `baselines_of` returned."""
        self.state = dict(state)


def _tells_apart(values: Floats, by_trajectory: Mapping[Hashable, _Rows]) -> bool:
    """Whether two trajectories of a group earned different returns on average."""
    means = np.array([values[own].mean() for own in by_trajectory.values()])
    return bool(np.ptp(means) > _NO_SPREAD * np.abs(values).max())
