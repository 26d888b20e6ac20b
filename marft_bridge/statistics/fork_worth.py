"""Rewards of one episode and of its forks at one call -> what the recorded answer was worth against those sampled anew.

Invariants: mean and interval are of the resampled branches only. The recorded run is one more branch where it was
sampled alike, but it is no part of the mean: who forks an episode has often seen how it ended. No interval has width 0:
a few equal rewards do not say that all are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from marft_bridge.statistics.means import mean_interval, pass_at_k


@dataclass(frozen=True, slots=True)
class ForkWorth:
    """One reward after one call. None: no branch has it; bounds also where one alone has it, or all have the same.

    `interval`: how the bounds were found. "t" is Student's t; "exact" is that of Clopper and Pearson for a share, where
    all resampled rewards are 0 or all are 1, and the recorded one is 0 or 1 too: right for a reward that is always 0
    or 1, or between. None: no bounds.
    """

    recorded: float | None  # after the recorded answer: one run, with all the chance that came after
    branches: int  # with a reward; the recorded run among them where it is comparable
    resampled: int  # branches with a reward that were sampled anew
    mean: float | None  # of the resampled
    low: float | None  # 95 % interval of the mean
    high: float | None
    interval: Literal["t", "exact"] | None
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
        return ForkWorth(
            recorded, branches, resampled=0, mean=None, low=None, high=None, interval=None, recorded_over_mean=None
        )
    mean, low, high = mean_interval(rewards)
    kind: Literal["t", "exact"] | None = None if low is None else "t"
    different = {*rewards} if recorded is None else {*rewards, recorded}
    if low is None and len(rewards) > 1 and different <= {0.0, 1.0}:
        _, low, high = pass_at_k(rewards, range(len(rewards)), 1)  # each fork is a draw of its own
        kind = "exact"
    over = None if recorded is None else recorded - mean
    return ForkWorth(
        recorded, branches, len(rewards), mean=mean, low=low, high=high, interval=kind, recorded_over_mean=over
    )


def interval_to_text(worth: ForkWorth) -> str:
    """`95% interval 0.0771 to 1.07`, or why there is none; of a worth with a mean."""
    if worth.low is None or worth.high is None:
        return "no interval: " + ("one fork" if worth.resampled == 1 else "all forks have the same")
    bounds = f"{worth.low:.3g} to {worth.high:.3g}"
    if worth.interval == "exact":
        return f"exact 95% interval {bounds} if it is always 0 or 1: all forks have the same"
    return f"95% interval {bounds}"
