"""Observed paired differences -> the minimum detectable effect, and the number of tasks that would settle an effect.

Both are the closed form of a t test over tasks, which the sign-flip test and McNemar's test follow closely
(docs/statistics.md has the measured power). Invariant: what the data cannot tell is None, never 0.

Source: Bloom (1995), "Minimum detectable effects", Evaluation Review 19: (t_{1-alpha/2} + t_{power}) x standard error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from marft_bridge.statistics.clusters import ROUNDING, Floats, Labels, finite_values, standard_error, totals_by_label
from marft_bridge.statistics.distributions import stdtrit

MAX_TASKS = 10_000_000  # nobody will run more, and rounding alone can ask for them


@dataclass(frozen=True, slots=True)
class TasksToSettle:
    """How many tasks find an effect of this size with the requested power."""

    effect: float  # absolute, in units of the metric
    tasks: int  # in total, at least 2
    additional_tasks: int  # beyond those already run; 0 when those suffice


def minimum_detectable_effect(
    diffs: ArrayLike, alpha: float = 0.05, power: float = 0.8, *, clusters: Labels | None = None
) -> float | None:
    """Paired differences [n] into the smallest true difference (in the metric's units) that is found with this power.

    (t_{1-alpha/2} + t_{power}) x standard error, with K - 1 degrees of freedom (Bloom 1995). None with fewer than two
    tasks or when all tasks have the same difference: the variance is then unknown, and 0 would claim perfect
    resolution.
    """
    spread = _spread(finite_values("diffs", diffs), clusters)
    if spread is None:
        return None
    k, deviation = spread
    return float(_detectable_multiple(k, alpha, power) * deviation / math.sqrt(k))


def tasks_to_settle(
    diffs: ArrayLike,
    effect: float | None = None,
    alpha: float = 0.05,
    power: float = 0.8,
    *,
    clusters: Labels | None = None,
) -> TasksToSettle | None:
    """Paired differences [n] into the number of tasks that would find `effect` with this power, at this variance.

    New tasks are taken to be like the observed ones, with as many samples each. Without `effect` it is the observed
    difference, which is itself uncertain and, where it is followed up because it is large, too large: then the answer
    is too small. Better is the smallest effect that would change a decision.

    None with fewer than two tasks, when all tasks have the same difference, and when the effect is 0 or so small that
    ten million tasks would not settle it.

    Raises ValueError for alpha or power outside 0 to 1.
    """
    values = finite_values("diffs", diffs)
    spread = _spread(values, clusters)
    if not (0 < alpha < 1 and 0 < power < 1):
        raise ValueError(f"alpha {alpha} and power {power} must lie between 0 and 1")
    if spread is None:
        return None
    target = abs(float(values.mean()) if effect is None else effect)
    k, deviation = spread

    def suffices(tasks: int) -> bool:
        return _detectable_multiple(tasks, alpha, power) * deviation <= target * math.sqrt(tasks)

    low, high = 1, 2  # bisection: `low` never suffices, `high` doubles until it does
    while not suffices(high):
        if high > MAX_TASKS:
            return None
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return TasksToSettle(target, high, max(0, high - k))


def _spread(values: Floats, clusters: Labels | None) -> tuple[int, float] | None:
    """The number of tasks K, and sqrt(K) times the standard error of the mean: the deviation of one task.

    None with fewer than two tasks or without variance between tasks, up to rounding: samples that differ in the same
    way in every task say nothing about the next one.
    """
    totals = totals_by_label("diffs", values, clusters)
    k = totals.sums.size
    if k < 2:
        return None
    deviation = standard_error(totals) * math.sqrt(k)
    return (k, deviation) if deviation > ROUNDING * float(np.abs(values).max()) else None


def _detectable_multiple(tasks: int, alpha: float, power: float) -> float:
    return float(stdtrit(tasks - 1, 1 - alpha / 2) + stdtrit(tasks - 1, power))
