"""Paired outcomes inside known bounds -> a confidence sequence: intervals that hold after every task at once.

Each candidate mean gets a bettor who wagers that it is wrong, at odds that are fair if it is right; a candidate whose
bettor has multiplied his capital by 1 / alpha is rejected for good. Invariant: with probability at least 1 - alpha the
intervals after *all* numbers of tasks hold the true mean, for any number of tasks and any stopping rule. That is a
theorem about bounded values (Ville's inequality), not an approximation; it needs tasks that arrive in an order that
has nothing to do with their outcomes, like independent draws from the population of tasks.

Source: Waudby-Smith and Ramdas (2024), "Estimating means of bounded random variables by betting", JRSS B 86: the
hedged capital process with predictable plug-in bets, half of the capital on each side, and at most half of a bettor's
capital at stake in one bet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from marft_bridge.statistics.clusters import Floats, Labels, paired_values, totals_in_order

_MAX_BET_FRACTION = 0.5  # of a bettor's capital


@dataclass(frozen=True, slots=True)
class ConfidenceSequence:
    """After each of T tasks: an interval of the mean of b - a over tasks, and a p-value of no difference, all [T].

    The interval is open: `low` and `high` themselves are rejected, unless they are the bounds that were handed in.
    """

    metric: str
    diffs: Floats  # mean over the tasks so far
    low: Floats  # never falls
    high: Floats  # never rises
    p_values: Floats  # never rise; valid at any time

    @property
    def settled_after(self) -> int | None:
        """The number of tasks after which the interval first left out 0; None if it did not."""
        excludes_zero = np.flatnonzero((self.low >= 0) | (self.high <= 0))
        return int(excludes_zero[0]) + 1 if excludes_zero.size else None


def confidence_sequence(
    name: str,
    a: ArrayLike,
    b: ArrayLike,
    *,
    clusters: Labels | None = None,
    bounds: tuple[float, float] = (-1.0, 1.0),
    alpha: float = 0.05,
    grid: int = 1_000,
) -> ConfidenceSequence:
    """Pairs in order of arrival into an interval after every task.

    Every task weighs the same, however many samples it has. The interval may become empty (low above high): then an
    assumption does not hold, most likely that on the order of the tasks.

    Args:
        a: array [n], parallel to `b`: same task and same seed.
        b: array [n].
        clusters: the task of each pair, [n]; None means that every pair is a task of its own.
        bounds: that b - a cannot leave, known beforehand and not read off the data; (-1, 1) for rewards from 0 to 1.
        grid: number of candidate means between the bounds; intervals are rounded outwards to them.

    Raises:
        ValueError: as `paired_difference`; a difference outside the bounds.
    """
    values_a, values_b = paired_values(name, a, b)
    lowest, highest = bounds
    diffs = values_b - values_a
    if not lowest < 0 < highest:
        raise ValueError(f"{name}: bounds {bounds} must have 0 between them")
    if not 0 < alpha < 1 or grid < 1:
        raise ValueError(f"{name}: alpha {alpha} must lie between 0 and 1, grid {grid} must be at least 1")
    if diffs.min() < lowest or diffs.max() > highest:
        raise ValueError(f"{name}: differences reach from {diffs.min():g} to {diffs.max():g}, outside {bounds}")
    totals = totals_in_order(name, diffs, clusters)
    means = totals.sums / totals.sizes
    unit_values = np.clip((means - lowest) / (highest - lowest), 0.0, 1.0)  # [T], clipped: rounding
    bets = _predictable_bets(unit_values, alpha)
    null_mean = -lowest / (highest - lowest)  # no difference, on the unit scale
    candidates = np.union1d(np.arange(grid + 1) / grid, null_mean)
    log_capital_above = _log_capital(unit_values, bets, candidates)  # bets that the mean lies above the candidate
    log_capital_below = _log_capital(1 - unit_values, bets, 1 - candidates)
    rejection_threshold = -math.log(alpha)
    # The capital falls from candidate to candidate, so those that are rejected are the first few.
    rejected_below = np.maximum.accumulate((log_capital_above >= rejection_threshold).sum(axis=1))
    rejected_above = np.maximum.accumulate((log_capital_below >= rejection_threshold).sum(axis=1))
    unit_low = np.concatenate([[0.0], candidates])[rejected_below]
    unit_high = np.concatenate([[1.0], candidates[::-1]])[rejected_above]
    null_index = int(np.searchsorted(candidates, null_mean))
    null_log_capital = np.maximum.accumulate(
        np.maximum(log_capital_above[:, null_index], log_capital_below[:, null_index])
    )
    return ConfidenceSequence(
        metric=name,
        diffs=np.cumsum(means) / np.arange(1, means.size + 1),
        low=lowest + (highest - lowest) * unit_low,
        high=lowest + (highest - lowest) * unit_high,
        p_values=np.exp(-np.maximum(null_log_capital, 0.0)),
    )


def _predictable_bets(unit_values: Floats, alpha: float) -> Floats:
    """Values in 0 to 1 [T] into the bet on each [T], which depends on the values before it only (predictable).

    sqrt(2 log(2 / alpha) / (variance_{t-1} t log(1 + t))), before the cap at `_MAX_BET_FRACTION`.
    """
    t = np.arange(1, unit_values.size + 1)
    running_mean = (0.5 + np.cumsum(unit_values)) / (t + 1)
    running_variance = (0.25 + np.cumsum((unit_values - running_mean) ** 2)) / (t + 1)
    variance_before = np.concatenate([[0.25], running_variance[:-1]])
    return np.asarray(np.sqrt(2 * math.log(2 / alpha) / (variance_before * t * np.log1p(t))))


def _log_capital(unit_values: Floats, bets: Floats, candidates: Floats) -> Floats:
    """Log of half of the capital of those who bet that the mean lies above each candidate, [T, candidates]."""
    with np.errstate(divide="ignore"):  # at candidate 0 nothing can be lost, and no bet is too large
        max_bets = _MAX_BET_FRACTION / candidates
    capped_bets = np.minimum(bets[:, None], max_bets)
    return np.asarray(np.cumsum(np.log1p(capped_bets * (unit_values[:, None] - candidates)), axis=0) - math.log(2))
