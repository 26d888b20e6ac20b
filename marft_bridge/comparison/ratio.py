"""Two paired arrays with their tasks -> an interval of the ratio of their means, for claims such as "below 1.2 times".

The unit is the task, as everywhere in `statistics`. Invariant: the uncertainty of both means counts; where the base's
mean is not significantly above 0 there is no interval, rather than an unbounded one.

Source: Fieller (1954), "Some problems in interval estimation", JRSS B 16: the ratios r for which the mean of b - r a is
not shown to differ from 0.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from marft_bridge.statistics.clusters import Labels, paired_values, totals_by_label
from marft_bridge.statistics.distributions import stdtrit


def ratio_interval(
    a: ArrayLike, b: ArrayLike, *, clusters: Labels | None = None, level: float = 0.95
) -> tuple[float, float] | None:
    """Parallel arrays [n] of the base and of the variant into the interval of mean(b) / mean(a).

    Variances are those of ratios of task totals (Cochran 1977, 6.3), with one degree of freedom less than tasks.
    None with a single task, or where the mean of `a` could be 0 or below it. Raises ValueError as
    `statistics.paired_difference` does.
    """
    values_a, values_b = paired_values("ratio", a, b)
    labels = list(range(values_a.size)) if clusters is None else clusters
    sums_a, sizes = totals_by_label("ratio", values_a, labels)
    sums_b = totals_by_label("ratio", values_b, labels).sums
    k, n = sizes.size, sizes.sum()
    if k < 2:
        return None
    mean_a, mean_b = float(sums_a.sum() / n), float(sums_b.sum() / n)
    residuals_a, residuals_b = sums_a - mean_a * sizes, sums_b - mean_b * sizes  # [K]
    scale = k / (k - 1) / n**2
    var_a, var_b, cov = (
        float(scale * np.dot(x, y))
        for x, y in ((residuals_a, residuals_a), (residuals_b, residuals_b), (residuals_a, residuals_b))
    )
    t2 = float(stdtrit(k - 1, (1 + level) / 2)) ** 2
    # (mean_b - r mean_a)^2 <= t2 (var_b - 2 r cov + r^2 var_a), a quadratic in r.
    quadratic = mean_a**2 - t2 * var_a
    if mean_a <= 0 or quadratic <= 0:
        return None
    half_linear = mean_a * mean_b - t2 * cov
    root = math.sqrt(max(0.0, half_linear**2 - quadratic * (mean_b**2 - t2 * var_b)))
    return (half_linear - root) / quadratic, (half_linear + root) / quadratic
