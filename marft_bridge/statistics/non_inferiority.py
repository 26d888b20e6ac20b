"""Paired outcomes and a margin -> a p-value of "b is worse than a by the margin or more", and the tasks that it takes.

Invariant: outcomes that never changed are no proof by themselves. The variance is that under the null hypothesis, where
tasks that fell to the bottom of the metric's range may exist although none was seen; so a margin of 0.03 takes 125
tasks without a single loss, and never ten.

Sources:

- Tango (1998), "Equivalence test and confidence interval for the difference in proportions for the paired-sample
  design", Statistics in Medicine 17: the score test. For outcomes of 0 and 1, one pair per task, it is this one.
- Owen (2001), "Empirical likelihood", section 3.14: weights of observed values under a given mean, here with one more
  value that may have weight. It carries Tango's test over to scores and to several samples per task.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from marft_bridge.statistics.clusters import Floats, Labels, Totals, finite_values, paired_values, totals_by_label
from marft_bridge.statistics.distributions import ndtr, ndtri
from marft_bridge.statistics.planning import MAX_TASKS

NON_INFERIORITY = "score test over tasks (Tango), one-sided"

_ROUNDING = 1e-12
_BISECTIONS = 100  # halvings of an interval of floats: enough for its last bit


def non_inferiority_p_value(
    name: str,
    a: ArrayLike,
    b: ArrayLike,
    *,
    margin: float,
    value_range: float,
    clusters: Labels | None = None,
) -> float:
    """Two parallel arrays [n] (same task, same seed) into the one-sided p-value of "mean of b - a is -margin or less".

    It is near 0 where b is surely not worse by the margin, and near 1 where b surely is.

    Args:
        margin: in the metric's units, above 0 and below `value_range`.
        value_range: the highest value of the metric minus its lowest: 1 for rewards from 0 to 1.
        clusters: the task of each pair, [n]; None means that every pair is a task of its own.

    Raises:
        ValueError: as `paired_difference`; a margin outside its bounds; differences beyond `value_range`.
    """
    values_a, values_b = paired_values(name, a, b)
    diffs = values_b - values_a
    _check_margin(name, diffs, margin=margin, value_range=value_range)
    totals = totals_by_label(name, diffs, clusters)
    return totals_to_non_inferiority_p_value(name, totals, margin=margin, value_range=value_range)


def totals_to_non_inferiority_p_value(name: str, totals: Totals, *, margin: float, value_range: float) -> float:
    """`non_inferiority_p_value` of b - a summed by task [K], for whoever has not the pairs themselves.

    Raises:
        ValueError: a margin outside its bounds; a task whose mean difference is beyond `value_range`; no task.
    """
    sums, sizes = totals
    if not sums.size:
        raise ValueError(f"{name}: no tasks")
    _check_margin(name, sums / sizes, margin=margin, value_range=value_range)
    # Mean 0 if the true difference is -margin. Dividing by the mean size makes a task of mean size its mean difference.
    shifted = (sums + margin * sizes) / sizes.mean()
    mean, root = float(shifted.mean()), math.sqrt(shifted.size)
    if abs(mean) <= _ROUNDING * value_range:  # the difference is -margin itself; every single one may be
        return 0.5
    if mean > 0:
        return float(ndtr(-root * mean / _null_deviation(shifted, lowest=margin - value_range)))
    return float(ndtr(-root * mean / _null_deviation(-shifted, lowest=-margin - value_range)))


def _check_margin(name: str, diffs: Floats, margin: float, value_range: float) -> None:
    if not 0 < margin < value_range:
        raise ValueError(f"{name}: margin {margin} must lie between 0 and the metric's range, {value_range}")
    if (largest := float(np.abs(diffs).max(initial=0.0))) > value_range * (1 + 1e-9):
        raise ValueError(f"{name}: a difference of {largest:g} is larger than the range {value_range}")


def _null_deviation(values: Floats, lowest: float) -> float:
    """Values [K] with a mean above 0 into their standard deviation if the true mean is 0; above 0.

    It is that of the most likely distribution with mean 0 on the values seen and on `lowest`, which is below 0 and need
    not be among them: weights 1 / (K (1 + tilt x value)), and the rest on `lowest`.
    """
    lowest = min(lowest, float(values.min()))  # a task with more samples than the mean may weigh more
    tilt_limit = -1 / lowest

    def tilted_mean(tilt: float) -> float:
        return float((values / (1 + tilt * values)).mean())  # falls as the tilt grows

    low, high = 0.0, tilt_limit
    at_limit = float(values.min()) > lowest and tilted_mean(tilt_limit) >= 0
    if at_limit:
        low = tilt_limit
    else:
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if tilted_mean(middle) > 0 else (low, middle)
    weights = 1 / (values.size * (1 + low * values))
    rest = max(0.0, 1 - float(weights.sum())) if at_limit else 0.0
    return math.sqrt(float((weights * values**2).sum()) + rest * lowest**2)


def tasks_for_non_inferiority(
    diffs: ArrayLike,
    *,
    margin: float,
    value_range: float,
    alpha: float = 0.05,
    power: float = 0.8,
    clusters: Labels | None = None,
) -> int | None:
    """Paired differences [n] into the tasks, in total, that show non-inferiority with this power if nothing differs.

    ((z_{1-alpha/2} x deviation of a task at a difference of -margin + z_power x its deviation as seen) / margin)^2: the
    spread is that of the tasks seen, around no difference. Where none changed it is the number that it takes without a
    change. `alpha` is two-sided, as that of the interval. None where ten million tasks would not do.

    Raises:
        ValueError: as `non_inferiority_p_value`; alpha or power outside 0 to 1.
    """
    values = finite_values("diffs", diffs)
    _check_margin("diffs", values, margin=margin, value_range=value_range)
    if not values.size:
        raise ValueError("diffs: none; the spread of at least one task is needed")
    if not (0 < alpha < 1 and 0 < power < 1):
        raise ValueError(f"alpha {alpha} and power {power} must lie between 0 and 1")
    sums, sizes = totals_by_label("diffs", values, clusters)
    centred = (sums - sums.sum() / sizes.sum() * sizes) / sizes.mean()
    null_deviation = _null_deviation(centred + margin * sizes / sizes.mean(), lowest=margin - value_range)
    distance = float(ndtri(1 - alpha / 2)) * null_deviation + float(ndtri(power)) * float(centred.std())
    tasks = math.floor((distance / margin) ** 2) + 1
    return tasks if tasks <= MAX_TASKS else None
