"""Paired outcomes of two variants of a graph -> a difference, an interval and a p-value.

A pair is one task and one seed run on both sides. Samples of one task are not independent, so the unit that is
resampled and flipped is the task (the cluster), never the single episode. Invariant: the same numbers and the same
seed give the same result up to rounding, whatever the order of the pairs.

Sources:

- Efron (1987), "Better bootstrap confidence intervals", JASA 82: the BCa interval.
- Hesterberg (2015), "What teachers should know about the bootstrap", The American Statistician 69: bootstrap levels
  expanded to the t distribution, because the bootstrap of n values is too narrow by about sqrt((n - 1) / n).
- McNemar (1947), Psychometrika 12: discordant pairs; exact form: binomial(b + c, 1/2).
- Phipson and Smyth (2010), "Permutation p-values should never be zero", SAGMB 9: (k + 1) / (m + 1).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from marft_bridge.statistics.clusters import ROUNDING, Floats, Labels, Totals, paired_values, totals_by_label
from marft_bridge.statistics.distributions import bdtr, ndtr, ndtri, stdtrit
from marft_bridge.statistics.ranks import signed_rank_p_value

MCNEMAR = "exact McNemar test"
SIGN_FLIP = "sign-flip permutation test over tasks"
SIGNED_RANK = "Wilcoxon signed-rank test over tasks"
INTERVAL = "BCa bootstrap over tasks, levels expanded to the t distribution"

_CHUNK = 1 << 20  # random numbers drawn at a time: bounds memory at some 20 MB whatever the number of pairs


@dataclass(frozen=True, slots=True)
class PairedResult:
    """One metric on two sides, with the difference of the means, its interval and a test of no difference."""

    metric: str
    n: int  # pairs
    clusters: int  # tasks
    mean_a: float
    mean_b: float
    diff: float  # mean_b - mean_a
    ci95: tuple[float, float]  # of `diff`, at the requested level; its name is that of the default, 95%
    p_value: float  # two-sided
    test: str


def paired_difference(
    name: str,
    a: ArrayLike,
    b: ArrayLike,
    *,
    clusters: Labels | None = None,
    seed: int,
    level: float = 0.95,
    resamples: int = 10_000,
    ranks: bool = False,
) -> PairedResult:
    """Two parallel arrays [n] (same task, same seed) into the mean of b - a, with an interval and a p-value.

    `clusters` [n] names the task of each pair; None means that every pair is a task of its own. The interval is the BCa
    bootstrap over tasks: differences of rewards are skewed and often mostly zero, and BCa corrects for that skew where
    the percentile interval does not. The p-value is the exact McNemar test when both sides hold only 0 and 1 and
    every task has one pair; otherwise a sign-flip permutation test in which all pairs of a task flip together,
    because under no difference it is the labels a and b of a whole task that could have been swapped.

    `ranks` replaces the sign flips by Wilcoxon's signed ranks of the tasks' mean differences, for scores with rare huge
    values (seconds, tokens), which hide a common small difference from every test of a mean. Choose it before the
    outcomes are seen. The interval stays that of the mean.

    `resamples` is the number of bootstrap resamples and, separately, of sign patterns.

    Values that differ by rounding only do not differ. Raises ValueError for empty or non-finite arrays, for lengths
    that differ, and for a single task that shows a difference: one task says nothing about others.
    """
    values_a, values_b = paired_values(name, a, b)
    if not 0 < level < 1 or resamples < 1:
        raise ValueError(f"{name}: level {level} must lie between 0 and 1, resamples {resamples} must be at least 1")
    diffs = values_b - values_a
    diffs[np.abs(diffs) <= ROUNDING * np.maximum(np.abs(values_a), np.abs(values_b))] = 0.0
    totals = totals_by_label(name, diffs, clusters)
    k = totals.sums.size
    one_pair_per_task = k == diffs.size
    binary = one_pair_per_task and _is_binary(values_a) and _is_binary(values_b)
    test = MCNEMAR if binary else SIGNED_RANK if ranks else SIGN_FLIP
    mean = float(diffs.mean())
    if not diffs.any():
        mean, interval, p = 0.0, (0.0, 0.0), 1.0
    elif k < 2:
        raise ValueError(f"{name}: all {diffs.size} pairs are of one task; an interval needs at least 2 tasks")
    else:
        bootstrap_rng, permutation_rng = (np.random.default_rng(s) for s in np.random.SeedSequence(seed).spawn(2))
        interval = _bca_interval(totals, bootstrap_rng, level, resamples=resamples)
        if test == MCNEMAR:
            p = mcnemar_exact(int((diffs < 0).sum()), int((diffs > 0).sum()))
        elif test == SIGNED_RANK:
            p = signed_rank_p_value(totals.sums / totals.sizes)
        else:
            p = _sign_flip_p_value(totals.sums, permutation_rng, resamples)
    return PairedResult(
        name,
        diffs.size,
        k,
        mean_a=float(values_a.mean()),
        mean_b=float(values_b.mean()),
        diff=mean,
        ci95=interval,
        p_value=p,
        test=test,
    )


def mcnemar_exact(losses: int, wins: int) -> float:
    """Discordant pairs (a only, b only) into the two-sided p-value of binomial(losses + wins, 1/2), McNemar (1947)."""
    return min(1.0, 2.0 * float(bdtr(min(losses, wins), losses + wins, 0.5)))


def _is_binary(x: Floats) -> bool:
    return bool(((x == 0) | (x == 1)).all())


def _chunks(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """Row ranges (start, stop) that cover `rows`, each of at most _CHUNK numbers."""
    step = max(1, _CHUNK // columns)
    for start in range(0, rows, step):
        yield start, min(rows, start + step)


def _bca_interval(totals: Totals, rng: np.random.Generator, level: float, resamples: int) -> tuple[float, float]:
    """BCa bootstrap interval of the mean over all pairs, clusters [K] drawn with replacement.

    Efron (1987), equations 3.9 and 6.6: quantiles of the bootstrap means at Phi(z0 + (z0 + z) / (1 - accel (z0 + z))).
    z0 counts ties as half, as means of binary rewards tie often; accel comes from the jackknife over clusters.
    """
    sums, sizes = totals
    k = sums.size
    equal_sizes = bool((sizes == sizes[0]).all())
    means = np.empty(resamples)
    for start, stop in _chunks(resamples, k):
        indices = rng.integers(0, k, size=(stop - start, k), dtype=np.int32)  # [rows, K]
        pair_counts = k * sizes[0] if equal_sizes else sizes[indices].sum(axis=1)
        means[start:stop] = sums[indices].sum(axis=1) / pair_counts
    means.sort()
    mean = sums.sum() / sizes.sum()
    # Sums of the same values in another order differ in the last bits; such means are ties.
    tolerance = 1e-12 * np.abs(sums).sum() / sizes.sum()
    first_tie = np.searchsorted(means, mean - tolerance, side="left")
    past_ties = np.searchsorted(means, mean + tolerance, side="right")
    share_below = (first_tie + past_ties) / (2 * resamples)
    z0 = float(ndtri(np.clip(share_below, 0.5 / resamples, 1 - 0.5 / resamples)))
    jackknife_means = (sums.sum() - sums) / (sizes.sum() - sizes)  # [K] means without one cluster
    deviations = jackknife_means.mean() - jackknife_means
    sum_of_squares = float((deviations**2).sum())
    accel = float((deviations**3).sum()) / (6 * sum_of_squares**1.5) if sum_of_squares > 0 else 0.0
    z_wide = t_expanded_z(k, level)
    shifted_z = z0 + np.array([-z_wide, z_wide])
    denominator = 1 - accel * shifted_z  # not above 0: the bound lies past every bootstrap mean
    in_range = denominator > 0
    adjusted_z = np.where(in_range, shifted_z / np.where(in_range, denominator, 1.0), np.sign(shifted_z) * np.inf)
    low, high = np.quantile(means, ndtr(z0 + adjusted_z))
    return float(low), float(high)


def t_expanded_z(tasks: int, level: float) -> float:
    """The normal quantile at which the bootstrap of some tasks is read, at least 2, for an interval of this level.

    Hesterberg (2015): wider than the normal z, as the t distribution is, and by sqrt(K / (K - 1)) besides.
    """
    return math.sqrt(tasks / (tasks - 1)) * float(stdtrit(tasks - 1, (1 + level) / 2))


def _sign_flip_p_value(sums: Floats, rng: np.random.Generator, resamples: int) -> float:
    """Cluster sums [K] into the two-sided p-value of random sign flips.

    (k + 1) / (m + 1) for k of m sign patterns with a sum at least as extreme as the observed one (Phipson and Smyth
    2010).
    """
    nonzero_sums = sums[sums != 0]  # flipping a zero changes nothing
    if nonzero_sums.size == 0:
        return 1.0
    # Equal sums in another order differ in the last bits; they count as extreme.
    observed = abs(nonzero_sums.sum()) - 1e-12 * np.abs(nonzero_sums).sum()
    extreme_count = 0
    for start, stop in _chunks(resamples, nonzero_sums.size):
        positive_signs = rng.integers(0, 2, size=(stop - start, nonzero_sums.size), dtype=np.uint8)  # [rows, nonzero]
        flipped_sums = 2.0 * (positive_signs @ nonzero_sums) - nonzero_sums.sum()
        extreme_count += int((np.abs(flipped_sums) >= observed).sum())
    return (extreme_count + 1) / (resamples + 1)
