"""Values of a round -> values that are worth having as a baseline: drawn towards the mean return by what they explain.

A critic that has seen little explains nothing of the returns, or less than a constant does; its noise then decides
which actions count as better than expected. So each agent's values become

    mean return + weight * (value - mean value),        weight = cov(value, return) / var(value), within [0, 1]

The weight is 1 for a critic that is right and 0 for one that knows nothing. Invariant: mean, and weight, of an
observation come from episodes of other tasks (or from other episodes where there are too few tasks), so the baseline of
an action does not depend on what that action earned, and leaves the policy gradient without bias.
"""

# ruff: noqa: N803, N806, N815 (shape suffixes)
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
    `weights`: by agent, mean over its actions, None where nothing told it; `mean_A`: the mean return of other tasks
    that each action's values were drawn towards, NaN where nothing told it."""

    values: list[Floats]
    ends: Floats
    weights: dict[str, float | None]
    mean_A: Floats


def shrink_values(
    values: Sequence[Floats],
    returns: Sequence[Floats],
    agents: Sequence[str],
    tasks: Sequence[Hashable],
    episode_A: Sequence[int],
    ends_A: Floats,
    is_cut_A: Sequence[bool],
) -> Shrunk:
    """Values of each agent to cross-fitted ones; an agent whose actions are all of one fold keeps its values.

    Args:
        values, returns: one array per action, an entry per observation.
        agents, tasks, episode_A: of each action.
        ends_A: the critic's value of what follows an action whose run was cut there, as `is_cut_A` says; 0 elsewhere.
    """
    fold_A = _folds(tasks, episode_A)
    shrunk, ends, mean_A = [v.copy() for v in values], ends_A.copy(), np.full(len(values), np.nan)
    weights: dict[str, float | None] = {}
    for agent in dict.fromkeys(agents):
        rows = [i for i, actor in enumerate(agents) if actor == agent]
        used: list[float] = []
        for fold in range(_FOLDS):
            inside, outside = [i for i in rows if fold_A[i] == fold], [i for i in rows if fold_A[i] != fold]
            if not inside or not outside:
                continue
            value_N, return_N = (np.concatenate([part[i] for i in outside]) for part in (values, returns))
            weight = _weight(value_N, return_N)
            for i in inside:
                mean_A[i] = return_N.mean()
                shrunk[i] = mean_A[i] + weight * (values[i] - value_N.mean())
                if is_cut_A[i]:
                    ends[i] = mean_A[i] + weight * (ends_A[i] - value_N.mean())
                used.append(weight)
        weights[agent] = sum(used) / len(used) if used else None
    return Shrunk(shrunk, ends, weights, mean_A=mean_A)


def explained_out_of_sample(shrunk: Shrunk, returns: Sequence[Floats], rows: Sequence[int]) -> float | None:
    """How much less the returns of some actions differ from the shrunk values than from the mean return alone: a share
    of their squared distance from that, below 0 where the values are worse; None where nothing tells it."""
    known = [i for i in rows if not np.isnan(shrunk.mean_A[i])]
    around_mean = sum(float(np.square(returns[i] - shrunk.mean_A[i]).sum()) for i in known)
    around_value = sum(float(np.square(returns[i] - shrunk.values[i]).sum()) for i in known)
    return 1 - around_value / around_mean if around_mean > 0 else None


def _weight(value_N: Floats, return_N: Floats) -> float:
    """The slope of returns over values, within [0, 1]; 0 where the values are all the same."""
    variance = float(value_N.var())
    if variance < 1e-12:
        return 0.0
    covariance = float(((value_N - value_N.mean()) * (return_N - return_N.mean())).mean())
    return min(1.0, max(0.0, covariance / variance))


def _folds(tasks: Sequence[Hashable], episode_A: Sequence[int]) -> list[int]:
    """Which of five parts each action belongs to; a task stays whole where there are tasks enough."""
    keys: Sequence[Hashable] = tasks if len(set(tasks)) >= _LEAST_TASKS else episode_A
    number_of = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return [number_of[key] % _FOLDS for key in keys]
