"""Two paired arrays with their tasks -> an interval of the ratio of their means, for claims such as "below 1.2 times".

The unit is the task, as everywhere in `statistics`. Invariant: both means' uncertainty counts; where the base's mean is
not surely apart from 0 there is no interval, rather than an endless one.

Source: Fieller (1954), "Some problems in interval estimation", JRSS B 16: the ratios r for which the mean of b - r a is
not shown to differ from 0.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import stdtrit

from marft_bridge.statistics.clusters import Labels, paired_values, totals_by_label


def ratio_interval(
    a: ArrayLike, b: ArrayLike, *, clusters: Labels | None = None, level: float = 0.95
) -> tuple[float, float] | None:
    """Parallel arrays [n] of the base and of the variant into the interval of mean(b) / mean(a).

    Variances are those of ratios of task totals (Cochran 1977, 6.3), with one degree of freedom less than tasks.
    None with a single task, or where the mean of `a` could be 0 or below it. Raises ValueError as
    `statistics.paired_difference` does.
    """
    left, right = paired_values("ratio", a, b)
    labels = list(range(left.size)) if clusters is None else clusters
    base, sizes = totals_by_label("ratio", left, labels)
    sums = totals_by_label("ratio", right, labels).sums
    k, n = sizes.size, sizes.sum()
    if k < 2:
        return None
    mean_a, mean_b = float(base.sum() / n), float(sums.sum() / n)
    apart_a, apart_b = base - mean_a * sizes, sums - mean_b * sizes  # [K]
    scale = k / (k - 1) / n**2
    var_a, var_b, cov = (
        float(scale * np.dot(x, y)) for x, y in ((apart_a, apart_a), (apart_b, apart_b), (apart_a, apart_b))
    )
    t2 = float(stdtrit(k - 1, (1 + level) / 2)) ** 2
    # (mean_b - r mean_a)^2 <= t2 (var_b - 2 r cov + r^2 var_a), a quadratic in r.
    square = mean_a**2 - t2 * var_a
    if mean_a <= 0 or square <= 0:
        return None
    half = mean_a * mean_b - t2 * cov
    root = math.sqrt(max(0.0, half**2 - square * (mean_b**2 - t2 * var_b)))
    return (half - root) / square, (half + root) / square
