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

from marft_bridge.statistics.clusters import Floats, Labels, paired_values, totals_by_label
from marft_bridge.statistics.distributions import ndtr, ndtri
from marft_bridge.statistics.planning import tasks_to_settle

NON_INFERIORITY = "score test over tasks (Tango), one-sided"

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
    if not 0 < margin < value_range:
        raise ValueError(f"{name}: margin {margin} must lie between 0 and the metric's range, {value_range}")
    if np.abs(diffs).max() > value_range * (1 + 1e-9):
        raise ValueError(f"{name}: a difference of {np.abs(diffs).max():g} is larger than the range {value_range}")
    sums, sizes = totals_by_label(name, diffs, clusters)
    # Mean 0 if the true difference is -margin. Dividing by the mean size makes a task of mean size its mean difference.
    shifted = (sums + margin * sizes) / sizes.mean()
    if shifted.mean() >= 0:
        return float(ndtr(-_score(shifted, lowest=margin - value_range)))
    return float(ndtr(_score(-shifted, lowest=-margin - value_range)))


def _score(values: Floats, lowest: float) -> float:
    """Values [K] with a mean of at least 0 into that mean in standard errors, if the true mean is 0.

    The variance is that of the most likely distribution with mean 0 on the values seen and on `lowest`, which is below
    0 and need not be among them: weights 1 / (K (1 + tilt x value)), and the rest on `lowest`.
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
    variance = float((weights * values**2).sum()) + rest * lowest**2
    return math.sqrt(values.size / variance) * float(values.mean()) if variance > 0 else 0.0


def tasks_for_non_inferiority(
    diffs: ArrayLike,
    *,
    margin: float,
    value_range: float,
    alpha: float = 0.05,
    power: float = 0.8,
    clusters: Labels | None = None,
) -> int | None:
    """Paired differences [n] into the tasks that show non-inferiority with this power, if nothing truly differs.

    The tasks are in total, at the variance that was seen, and at least as many as it takes without a single changed
    task: z^2 (range - margin) / margin, from `non_inferiority_p_value`. `alpha` is two-sided, as that of the interval.
    None where ten million tasks would not do.
    """
    z = float(ndtri(1 - alpha / 2))
    fewest = math.floor(z**2 * (value_range - margin) / margin) + 1
    values = np.asarray(diffs, dtype=np.float64)
    if np.ptp(values) == 0:
        return fewest
    required = tasks_to_settle(values, margin, alpha, power, clusters=clusters)
    return None if required is None else max(fewest, required.tasks)
