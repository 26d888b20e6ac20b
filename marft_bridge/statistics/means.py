"""Values of one variant, with their tasks -> a mean with an interval: plain scores, avg@k and pass@k.

Describes one variant and tests nothing; two variants are compared in `paired`. Invariant: a bound that the data cannot
give is None, and equal tasks never make an interval of width zero: that nothing differed in a few says not that nothing
does.

Sources:

- Chen et al. (2021), "Evaluating large language models trained on code", section 2.1: the unbiased pass@k.
- Clopper and Pearson (1934), Biometrika 26: the exact interval of a proportion, here where all tasks are equal.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from marft_bridge.statistics.clusters import (
    ROUNDING,
    Floats,
    Labels,
    are_equal,
    finite_values,
    labels_and_totals,
    standard_error,
    totals_by_label,
)
from marft_bridge.statistics.distributions import stdtrit


class MeanInterval(NamedTuple):
    """A mean and its interval; the bounds are None when the spread is unknown."""

    mean: float
    low: float | None
    high: float | None


def mean_interval(x: ArrayLike, level: float = 0.95, *, clusters: Labels | None = None) -> MeanInterval:
    """Values [n] into their mean and its t interval, for one point of a learning curve.

    t and not bootstrap: a curve has many points, each describes rather than decides, and the closed form needs neither
    seed nor resamples. With `clusters` the standard error is that of a ratio of cluster totals (Cochran 1977, 6.3)
    with K - 1 degrees of freedom; with one value per cluster this is the usual s / sqrt(n). The bounds are None where
    there is one cluster, and where the means of all clusters are equal: their spread is then unknown, not 0.

    Raises ValueError for no values, and for NaN or infinite ones.
    """
    values = finite_values("mean", x)
    if values.size == 0:
        raise ValueError("mean: no values")
    mean = float(values.mean())
    totals = totals_by_label("mean", values, clusters)
    if totals.sums.size < 2 or are_equal(totals.sums / totals.sizes):
        return MeanInterval(mean, None, None)
    half_width = float(stdtrit(totals.sums.size - 1, (1 + level) / 2)) * standard_error(totals)
    return MeanInterval(mean, mean - half_width, mean + half_width)


def difference_interval(
    x: ArrayLike, in_first: ArrayLike, level: float = 0.95, *, clusters: Labels | None = None
) -> MeanInterval:
    """Values [n] and whether each is of the first group [n] into mean(first) - mean(rest), with its t interval.

    The linearised standard error of a difference of two ratios of cluster totals (Cochran 1977, 6.3): a cluster adds
    sum_first (x - mean_first) / n_first - sum_rest (x - mean_rest) / n_rest. With one value per cluster the variance is
    K / (K - 1) times Welch's with divisors n; K - 1 degrees of freedom. The bounds are None for one cluster, and where
    the values show no spread.

    Raises ValueError where a group is empty, and for NaN or infinite values.
    """
    values, first = finite_values("difference", x), np.asarray(in_first, dtype=bool)
    if first.shape != values.shape or not first.any() or first.all():
        raise ValueError("difference: each of the two groups needs a value")
    mean_first, mean_rest = float(values[first].mean()), float(values[~first].mean())
    parts = np.where(first, (values - mean_first) / first.sum(), -(values - mean_rest) / (~first).sum())
    sums = totals_by_label("difference", parts, clusters).sums
    k = sums.size
    smaller = min(int(first.sum()), int((~first).sum()))
    if k < 2 or np.abs(sums).max() <= ROUNDING * np.abs(values).max() / smaller:
        return MeanInterval(mean_first - mean_rest, None, None)
    half_width = float(stdtrit(k - 1, (1 + level) / 2)) * float(np.sqrt(k / (k - 1) * (sums**2).sum()))
    return MeanInterval(
        mean_first - mean_rest, mean_first - mean_rest - half_width, mean_first - mean_rest + half_width
    )


def pass_at_k_by_task(correct: ArrayLike, clusters: Labels, k: int) -> tuple[NDArray[Any], Floats]:
    """Outcomes 0 or 1 [n] and their tasks [n] into the tasks [K], sorted, and the unbiased pass@k of each [K].

    1 - C(n - c, k) / C(n, k) for c right out of n samples (Chen et al. 2021). For a paired comparison of pass@k, hand
    the two rows of estimates to `paired_difference`, one value per task.

    Raises ValueError for outcomes other than 0 and 1, and for a task with fewer than k samples: its pass@k is unknown.
    """
    values = finite_values("pass@k", correct)
    if not ((values == 0) | (values == 1)).all():
        raise ValueError("pass@k: outcomes must be 0 or 1")
    labels, totals = labels_and_totals("pass@k", values, clusters)
    _require_samples(f"pass@{k}", labels, totals.sizes, k=k)
    # C(n - c, k) / C(n, k) is the product of (n - c - i) / (n - i) for i below k; a factor of 0 stays 0.
    steps = np.arange(k)[:, None]
    failure_ratios = np.maximum(totals.sizes - totals.sums - steps, 0.0) / (totals.sizes - steps)  # [k, K]
    return labels, 1.0 - failure_ratios.prod(axis=0)


def pass_at_k(correct: ArrayLike, clusters: Labels, k: int, level: float = 0.95) -> MeanInterval:
    """Outcomes 0 or 1 [n] and their tasks [n] into the mean pass@k over tasks, with its interval inside 0 to 1.

    The t interval over tasks. Where all K tasks have the same value v their variance is 0 and of no use: a share q of
    tasks that differ goes unseen with probability (1 - q)^K, which bounds q, and v moves by at most that share.

    Raises ValueError as `pass_at_k_by_task`.
    """
    _, estimates = pass_at_k_by_task(correct, clusters, k)
    mean = float(estimates.mean())
    if are_equal(estimates):
        unseen_share = 1 - ((1 - level) / 2) ** (1 / estimates.size)
        return MeanInterval(mean, mean * (1 - unseen_share), mean + (1 - mean) * unseen_share)
    _, low, high = mean_interval(estimates, level)
    assert low is not None  # values that differ come from at least two tasks
    assert high is not None
    return MeanInterval(mean, max(0.0, low), min(1.0, high))


def avg_at_k(scores: ArrayLike, clusters: Labels, k: int, level: float = 0.95) -> MeanInterval:
    """Scores [n] and their tasks [n] into the mean over tasks of each task's mean score, with its t interval.

    What k samples of a task score on average; a task with more samples uses all of them for its mean, since the
    expectation is the same. Every task weighs the same. The bounds are None when all tasks have the same mean.

    Raises ValueError for a task with fewer than k samples.
    """
    name = f"avg@{k}"
    labels, totals = labels_and_totals(name, finite_values(name, scores), clusters)
    _require_samples(name, labels, totals.sizes, k=k)
    return mean_interval(totals.sums / totals.sizes, level)


def _require_samples(name: str, labels: NDArray[Any], sizes: Floats, k: int) -> None:
    if k < 1:
        raise ValueError(f"{name}: k must be at least 1")
    if labels.size == 0:
        raise ValueError(f"{name}: no values")
    short_tasks = np.flatnonzero(sizes < k)
    if short_tasks.size:
        raise ValueError(
            f"{name}: task {labels[short_tasks[0]]} has {int(sizes[short_tasks[0]])} samples; it needs at least {k}"
        )
