"""Rewards of one episode and of its forks at one call -> what the recorded answer was worth against those sampled anew.

Invariant: mean and interval are of the resampled branches only. The recorded run is one more branch where it was
sampled alike, but it is no part of the mean: who forks an episode has often seen how it ended.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from marft_bridge.statistics.means import mean_interval


@dataclass(frozen=True, slots=True)
class ForkWorth:
    """One reward after one call. None: no branch has it, or one alone, which has no interval."""

    recorded: float | None  # after the recorded answer: one run, with all the chance that came after
    branches: int  # with a reward; the recorded run among them where it is comparable
    resampled: int  # branches with a reward that were sampled anew
    mean: float | None  # of the resampled
    low: float | None  # 95 % interval of the mean, Student's t
    high: float | None
    recorded_over_mean: float | None  # recorded - mean: above 0, the recorded answer went better than others do


def rewards_to_worth(recorded: float | None, resampled: Sequence[float | None], *, comparable: bool) -> ForkWorth:
    """The worth of a call by one reward; None and what is not finite count as no reward.

    Args:
        comparable: whether the recorded run was sampled as the forks were, so that it is a branch like them.
    """
    recorded = None if recorded is None or not math.isfinite(recorded) else recorded
    rewards = [reward for reward in resampled if reward is not None and math.isfinite(reward)]
    branches = len(rewards) + (comparable and recorded is not None)
    if not rewards:
        return ForkWorth(recorded, branches, resampled=0, mean=None, low=None, high=None, recorded_over_mean=None)
    mean, low, high = mean_interval(rewards)
    over = None if recorded is None else recorded - mean
    return ForkWorth(recorded, branches, len(rewards), mean=mean, low=low, high=high, recorded_over_mean=over)
