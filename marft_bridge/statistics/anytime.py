"""Paired outcomes inside known bounds, into intervals that hold at every task at once: look and stop when you like.

Each candidate mean gets a bettor who wagers that it is wrong, at odds that are fair if it is right; a candidate whose
bettor has multiplied his money by 1 / alpha is refused for good. Invariant: with probability at least 1 - alpha the
intervals after *all* numbers of tasks hold the true mean, for any number of tasks and any rule of stopping. That is a
theorem about bounded values (Ville's inequality), not an approximation; it needs tasks that arrive in an order that
has nothing to do with their outcomes, like independent draws from the tasks that one means.

Source: Waudby-Smith and Ramdas (2024), "Estimating means of bounded random variables by betting", JRSS B 86: the
hedged capital process with predictable plug-in bets, half of the money on each side, and at most half of what a bettor
has at stake in one bet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from marft_bridge.statistics.clusters import Floats, Labels, paired_values, totals_in_order

_MOST_AT_STAKE = 0.5


@dataclass(frozen=True, slots=True)
class ConfidenceSequence:
    """After each of T tasks: an interval of the mean of b - a over tasks, and a p-value of no difference, all [T].

    The interval is open: `low` and `high` themselves are refused, unless they are the bounds that were handed in.
    """

    metric: str
    diffs: Floats  # mean over the tasks so far
    low: Floats  # never falls
    high: Floats  # never rises
    p_values: Floats  # never rise; valid at any time

    @property
    def settled_after(self) -> int | None:
        """The number of tasks after which the interval first left out 0; None if it did not."""
        out = np.flatnonzero((self.low >= 0) | (self.high <= 0))
        return int(out[0]) + 1 if out.size else None


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

    Every task weighs the same, however many samples it has. After a wrong turn the interval may become empty (low
    above high): then an assumption does not hold, most likely the order of the tasks.

    Args:
        a: array [n], parallel to `b`: same task and same seed.
        b: array [n].
        clusters: the task of each pair, [n]; None means that every pair is a task of its own.
        bounds: that b - a cannot leave, known beforehand and not read off the data; (-1, 1) for rewards from 0 to 1.
        grid: candidates tried between the bounds; intervals are rounded outwards to them.

    Raises:
        ValueError: as `paired_difference`; a difference outside the bounds.
    """
    left, right = paired_values(name, a, b)
    lowest, highest = bounds
    diffs = right - left
    if not lowest < 0 < highest:
        raise ValueError(f"{name}: bounds {bounds} must have 0 between them")
    if not 0 < alpha < 1 or grid < 1:
        raise ValueError(f"{name}: alpha {alpha} must lie between 0 and 1, grid {grid} must be at least 1")
    if diffs.min() < lowest or diffs.max() > highest:
        raise ValueError(f"{name}: differences reach from {diffs.min():g} to {diffs.max():g}, outside {bounds}")
    totals = totals_in_order(name, diffs, clusters)
    means = totals.sums / totals.sizes
    unit = np.clip((means - lowest) / (highest - lowest), 0.0, 1.0)  # [T], rounding kept inside
    stakes = _stakes(unit, alpha)
    nothing = -lowest / (highest - lowest)  # no difference, among the candidates
    candidates = np.union1d(np.arange(grid + 1) / grid, nothing)
    from_below = _log_capital(unit, stakes, candidates)  # bets that the mean lies above the candidate
    from_above = _log_capital(1 - unit, stakes, 1 - candidates)
    enough = -math.log(alpha)
    # The money of a bettor from below falls from candidate to candidate, so what he refuses is the first few of them.
    below = np.maximum.accumulate((from_below >= enough).sum(axis=1))
    above = np.maximum.accumulate((from_above >= enough).sum(axis=1))
    low = np.concatenate([[0.0], candidates])[below]
    high = np.concatenate([[1.0], candidates[::-1]])[above]
    at = int(np.searchsorted(candidates, nothing))
    against_nothing = np.maximum.accumulate(np.maximum(from_below[:, at], from_above[:, at]))
    return ConfidenceSequence(
        metric=name,
        diffs=np.cumsum(means) / np.arange(1, means.size + 1),
        low=lowest + (highest - lowest) * low,
        high=lowest + (highest - lowest) * high,
        p_values=np.exp(-np.maximum(against_nothing, 0.0)),
    )


def _stakes(unit: Floats, alpha: float) -> Floats:
    """Values in 0 to 1 [T] into the share that is bet on each [T]; it knows only those before it."""
    t = np.arange(1, unit.size + 1)
    centre = (0.5 + np.cumsum(unit)) / (t + 1)
    spread = (0.25 + np.cumsum((unit - centre) ** 2)) / (t + 1)
    before = np.concatenate([[0.25], spread[:-1]])
    return np.asarray(np.sqrt(2 * math.log(2 / alpha) / (before * t * np.log1p(t))))


def _log_capital(unit: Floats, stakes: Floats, candidates: Floats) -> Floats:
    """Log of half of the money of those who bet that the mean lies above each candidate, [T, candidates]."""
    with np.errstate(divide="ignore"):  # at candidate 0 nothing can be lost, and no bet is too large
        most = _MOST_AT_STAKE / candidates
    bets = np.minimum(stakes[:, None], most)
    return np.asarray(np.cumsum(np.log1p(bets * (unit[:, None] - candidates)), axis=0) - math.log(2))
