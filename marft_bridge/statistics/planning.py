"""Paired differences that were seen, into what such a comparison can find and how many tasks a finding needs.

Both answers are the closed form of a t test over tasks, which the sign-flip test and McNemar's test follow closely
(docs/statistics.md has the measured power). Invariant: what the data cannot tell is None, never 0. This module plans
and judges nothing.

Source: Bloom (1995), "Minimum detectable effects", Evaluation Review 19: (t_{1-alpha/2} + t_{power}) x standard error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import stdtrit

from marft_bridge.statistics.clusters import Floats, Labels, finite_values, standard_error, totals_by_label

_TOO_MANY = 10_000_000  # tasks: nobody will run them, and rounding alone can ask for more


@dataclass(frozen=True, slots=True)
class TasksToSettle:
    """How many tasks find an effect of this size with the power asked for."""

    effect: float  # absolute, in units of the metric
    tasks: int  # in total, at least 2
    more: int  # beyond those already run; 0 when they are enough


def minimum_detectable_effect(
    diffs: ArrayLike, alpha: float = 0.05, power: float = 0.8, *, clusters: Labels | None = None
) -> float | None:
    """Paired differences [n] into the smallest true difference that such a comparison finds with this power.

    (t_{1-alpha/2} + t_{power}) x standard error, with K - 1 degrees of freedom (Bloom 1995). None with fewer than two
    tasks or when all differences are equal: the spread is then unknown, and 0 would claim perfect resolution.
    """
    found = _spread(finite_values("diffs", diffs), clusters)
    if found is None:
        return None
    k, deviation = found
    return float(_multiple(k, alpha, power) * deviation / math.sqrt(k))


def tasks_to_settle(
    diffs: ArrayLike,
    effect: float | None = None,
    alpha: float = 0.05,
    power: float = 0.8,
    *,
    clusters: Labels | None = None,
) -> TasksToSettle | None:
    """Paired differences [n] into the number of tasks that would find `effect` with this power, at this spread.

    New tasks are taken to be like those seen, with as many samples each. Without `effect` it is the difference that
    was seen, which is itself uncertain and, where one looks because it is large, too large: then the answer is too
    small. Better is the smallest effect that would change a decision.

    None with fewer than two tasks, when all differences are equal, and when the effect is 0 or so small that
    `_TOO_MANY` tasks would not settle it.

    Raises ValueError for alpha or power outside 0 to 1.
    """
    values = finite_values("diffs", diffs)
    found = _spread(values, clusters)
    if not (0 < alpha < 1 and 0 < power < 1):
        raise ValueError(f"alpha {alpha} and power {power} must lie between 0 and 1")
    if found is None:
        return None
    wanted = abs(float(values.mean()) if effect is None else effect)
    k, deviation = found

    def enough(tasks: int) -> bool:
        return _multiple(tasks, alpha, power) * deviation <= wanted * math.sqrt(tasks)

    low, high = 1, 2  # `low` is never enough, `high` grows until it is
    while not enough(high):
        if high > _TOO_MANY:
            return None
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return TasksToSettle(wanted, high, max(0, high - k))


def _spread(values: Floats, clusters: Labels | None) -> tuple[int, float] | None:
    """The number of tasks K, and the deviation whose K-th part of the variance is that of the mean; None if unknown."""
    totals = totals_by_label("diffs", values, clusters)
    k = totals.sums.size
    if k < 2 or np.ptp(values) == 0:
        return None
    return k, standard_error(totals) * math.sqrt(k)


def _multiple(tasks: int, alpha: float, power: float) -> float:
    return float(stdtrit(tasks - 1, 1 - alpha / 2) + stdtrit(tasks - 1, power))
