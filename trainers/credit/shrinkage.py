"""Values of a round -> values that are worth having as a baseline: drawn towards the mean return by what they explain.

A critic that has seen little explains nothing of the returns, or less than a constant does; its noise then decides
which actions count as better than expected. So each agent's values become

    mean return + weight * (value - mean value),        weight = cov(value, return) / var(value), within [0, 1]

With a discount the returns of early calls are smaller than those of late ones, whatever a run earned, and one mean of
both would make the early calls of the best run look worse than the late ones of the worst. So a mean is that of what
runs earned in the end, times what the discount is expected to leave of it at each observation (`discounts`), and
deviations are those from that. Without a discount all of these factors are 1.

The weight is 1 for a critic that is right and 0 for one that knows nothing. Invariant: mean, and weight, of an
observation come from episodes of other tasks (or from other episodes where there are too few tasks), so the baseline of
an action does not depend on what that action earned, and leaves the policy gradient without bias.

Shapes: _N one entry per observation of some actions; `means`, `values`, `returns` and `discounts` have one array per
action, an entry per observation; _A one entry per action.
"""

# ruff: noqa: N803, N806 (shape suffixes)
from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from trainers.advantages.arrays import Floats

_FOLDS = 5
_LEAST_TASKS = 2 * _FOLDS


@dataclass(frozen=True, slots=True)
class Shrunk:
    """`values[i]`: of the observations of action i; `ends[i]`: what follows it where its run was cut, else 0;
    `weights`: by agent, mean over its actions, None where nothing told it; `means[i]`: what those values were drawn
    towards, the mean return of other tasks; NaN where nothing told it."""

    values: list[Floats]
    ends: Floats
    weights: dict[str, float | None]
    means: list[Floats]


def shrink_values(
    values: Sequence[Floats],
    returns: Sequence[Floats],
    agents: Sequence[str],
    tasks: Sequence[Hashable],
    episode_A: Sequence[int],
    ends_A: Floats,
    is_cut_A: Sequence[bool],
    discounts: Sequence[Floats] | None = None,
) -> Shrunk:
    """Values of each agent to cross-fitted ones; an agent whose actions are all of one fold keeps its values.

    Args:
        values, returns: one array per action, an entry per observation.
        agents, tasks, episode_A: of each action.
        ends_A: the critic's value of what follows an action whose run was cut there, as `is_cut_A` says; 0 elsewhere.
        discounts: what a reward at a run's end is expected to be worth at each observation; None: 1.
    """
    fold_A = _folds(tasks, episode_A)
    discounts = [np.ones_like(v) for v in values] if discounts is None else discounts
    shrunk, ends, means = [v.copy() for v in values], ends_A.copy(), [np.full_like(v, np.nan) for v in values]
    weights: dict[str, float | None] = {}
    for agent in dict.fromkeys(agents):
        rows = [i for i, actor in enumerate(agents) if actor == agent]
        used: list[float] = []
        for fold in range(_FOLDS):
            inside, outside = [i for i in rows if fold_A[i] == fold], [i for i in rows if fold_A[i] != fold]
            if not inside or not outside:
                continue
            value_N, return_N, discount_N = (
                np.concatenate([part[i] for i in outside]) for part in (values, returns, discounts)
            )
            value_mean, return_mean = value_N.mean() / discount_N.mean(), return_N.mean() / discount_N.mean()
            weight = _weight(value_N - value_mean * discount_N, return_N - return_mean * discount_N)
            for i in inside:
                means[i] = return_mean * discounts[i]
                shrunk[i] = means[i] + weight * (values[i] - value_mean * discounts[i])
                if is_cut_A[i]:  # how far the end still was nobody knows: a discount as elsewhere
                    ends[i] = return_N.mean() + weight * (ends_A[i] - value_N.mean())
                used.append(weight)
        weights[agent] = sum(used) / len(used) if used else None
    return Shrunk(shrunk, ends, weights, means=means)


def explained_out_of_sample(shrunk: Shrunk, returns: Sequence[Floats], rows: Sequence[int]) -> float | None:
    """How much less the returns of some actions differ from the shrunk values than from the mean return alone: a share
    of their squared distance from that, below 0 where the values are worse; None where nothing tells it."""
    known = [i for i in rows if not np.isnan(shrunk.means[i]).any()]
    around_mean = sum(float(np.square(returns[i] - shrunk.means[i]).sum()) for i in known)
    around_value = sum(float(np.square(returns[i] - shrunk.values[i]).sum()) for i in known)
    rounding = 1e-24 * sum(float(np.square(returns[i]).sum()) for i in known)
    return 1 - around_value / around_mean if around_mean > rounding else None


def _weight(value_N: Floats, return_N: Floats) -> float:
    """The slope of returns over values, both less their means, within [0, 1]; 0 where the values are all the same."""
    variance = float(np.square(value_N).mean())
    if variance <= 1e-12 * float(np.square(return_N).mean()):
        return 0.0
    covariance = float((value_N * return_N).mean())
    return min(1.0, max(0.0, covariance / variance))


def _folds(tasks: Sequence[Hashable], episode_A: Sequence[int]) -> list[int]:
    """Which of five parts each action belongs to; a task stays whole where there are tasks enough."""
    keys: Sequence[Hashable] = tasks if len(set(tasks)) >= _LEAST_TASKS else episode_A
    number_of = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return [number_of[key] % _FOLDS for key in keys]
