"""Paired outcomes of two variants of a graph, into a difference, an interval and a p-value.

A pair is one task and one seed run on both sides. Samples of one task are not independent, so the unit that is
resampled and flipped is the task (the cluster), never the single run. Invariant: the same numbers and the same seed
give the same result up to rounding, whatever the order of the pairs. This module knows arrays, not episodes, stores or
pages.

Sources:

- Efron (1987), "Better bootstrap confidence intervals", JASA 82: the BCa interval.
- Hesterberg (2015), "What teachers should know about the bootstrap", The American Statistician 69: bootstrap levels
  expanded to the t distribution, because the bootstrap of n values is too narrow by about sqrt((n - 1) / n).
- McNemar (1947), Psychometrika 12: discordant pairs; exact form: binomial(b + c, 1/2).
- Phipson and Smyth (2010), "Permutation p-values should never be zero", SAGMB 9: (k + 1) / (m + 1).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import bdtr, ndtr, ndtri, stdtrit

from marft_bridge.statistics.clusters import Floats, Labels, Totals, paired_values, totals_by_label
from marft_bridge.statistics.ranks import signed_rank_p

MCNEMAR = "exact McNemar test"
SIGN_FLIP = "sign-flip permutation test over tasks"
SIGNED_RANK = "Wilcoxon signed-rank test over tasks"
INTERVAL = "BCa bootstrap over tasks, levels expanded to the t distribution"

_CHUNK = 1 << 20  # random numbers drawn at a time: bounds memory at some 20 MB whatever the number of pairs


@dataclass(frozen=True, slots=True)
class PairedResult:
    """One metric on two sides. `diff` is b - a; `ci95` is its interval at the level asked for (95% unless told)."""

    metric: str
    n: int  # pairs
    clusters: int  # tasks
    mean_a: float
    mean_b: float
    diff: float
    ci95: tuple[float, float]
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
    values (seconds, tokens): they hide a common small difference from every test of a mean. It is a choice to make
    before one sees the numbers. The interval stays that of the mean.

    Raises ValueError for empty or non-finite arrays, for lengths that differ, and for a single task that shows a
    difference: one task says nothing about others.
    """
    left, right = paired_values(name, a, b)
    if not 0 < level < 1 or resamples < 1:
        raise ValueError(f"{name}: level {level} must lie between 0 and 1, resamples {resamples} must be at least 1")
    diffs = right - left
    totals = totals_by_label(name, diffs, clusters)
    k = totals.sums.size
    one_each = k == diffs.size
    binary = one_each and _binary(left) and _binary(right)
    test = MCNEMAR if binary else SIGNED_RANK if ranks else SIGN_FLIP
    mean = float(diffs.mean())
    if not diffs.any():
        mean, interval, p = 0.0, (0.0, 0.0), 1.0
    elif k < 2:
        raise ValueError(f"{name}: all {diffs.size} pairs are of one task; an interval needs at least 2 tasks")
    else:
        resampling, flipping = (np.random.default_rng(s) for s in np.random.SeedSequence(seed).spawn(2))
        interval = _bca_interval(totals, resampling, level, resamples)
        if test == MCNEMAR:
            p = mcnemar_exact(int((diffs < 0).sum()), int((diffs > 0).sum()))
        elif test == SIGNED_RANK:
            p = signed_rank_p(totals.sums / totals.sizes)
        else:
            p = _sign_flip_p(totals.sums, flipping, resamples)
    return PairedResult(name, diffs.size, k, float(left.mean()), float(right.mean()), mean, interval, p, test)


def mcnemar_exact(losses: int, wins: int) -> float:
    """Discordant pairs (a only, b only) into the two-sided p-value of binomial(losses + wins, 1/2), McNemar (1947)."""
    return min(1.0, 2.0 * float(bdtr(min(losses, wins), losses + wins, 0.5)))


def _binary(x: Floats) -> bool:
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
        drawn = rng.integers(0, k, size=(stop - start, k), dtype=np.int32)  # [rows, K]
        weight = k * sizes[0] if equal_sizes else sizes[drawn].sum(axis=1)
        means[start:stop] = sums[drawn].sum(axis=1) / weight
    means.sort()
    mean = sums.sum() / sizes.sum()
    # Sums of the same values in another order differ in the last bits; such means are ties.
    slack = 1e-12 * np.abs(sums).sum() / sizes.sum()
    below = np.searchsorted(means, mean - slack, side="left") + np.searchsorted(means, mean + slack, side="right")
    z0 = float(ndtri(np.clip(below / (2 * resamples), 0.5 / resamples, 1 - 0.5 / resamples)))
    left_out = (sums.sum() - sums) / (sizes.sum() - sizes)  # [K] means without one cluster
    bends = left_out.mean() - left_out
    squares = float((bends**2).sum())
    accel = float((bends**3).sum()) / (6 * squares**1.5) if squares > 0 else 0.0
    z_wide = np.sqrt(k / (k - 1)) * stdtrit(k - 1, (1 + level) / 2)  # Hesterberg (2015): wider than the normal z
    shifted = z0 + np.array([-z_wide, z_wide])
    room = 1 - accel * shifted  # none left: the bound lies past every bootstrap mean
    bent = np.where(room > 0, shifted / np.where(room > 0, room, 1.0), np.sign(shifted) * np.inf)
    low, high = np.quantile(means, ndtr(z0 + bent))
    return float(low), float(high)


def _sign_flip_p(sums: Floats, rng: np.random.Generator, resamples: int) -> float:
    """Cluster sums [K] into the two-sided p-value of random signs, (k + 1) / (m + 1) (Phipson and Smyth 2010)."""
    moved = sums[sums != 0]  # flipping a zero changes nothing
    if moved.size == 0:
        return 1.0
    observed = abs(moved.sum()) - 1e-12 * np.abs(moved).sum()  # equal sums in another order differ in the last bits
    extreme = 0
    for start, stop in _chunks(resamples, moved.size):
        kept = rng.integers(0, 2, size=(stop - start, moved.size), dtype=np.uint8)  # [rows, moved]
        flipped = 2.0 * (kept @ moved) - moved.sum()
        extreme += int((np.abs(flipped) >= observed).sum())
    return (extreme + 1) / (resamples + 1)
