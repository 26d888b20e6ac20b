"""Differences per task -> the exact p-value of Wilcoxon's signed-rank test; two rows -> their rank correlation.

Invariant: the p-value is that of all 2^K signs of the observed ranks, ties and zeros included; up to `_EXACT_UP_TO`
tasks no table and no normal approximation stands in for it. The null hypothesis is that differences lie symmetrically
around 0, not that their mean is 0.

Sources:

- Wilcoxon (1945), "Individual comparisons by ranking methods", Biometrics Bulletin 1.
- Pratt (1959), "Remarks on zeros and ties in the Wilcoxon signed rank procedures", JASA 54: zeros take part in the
  ranking and are left out of the sum.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from marft_bridge.statistics.clusters import Floats, paired_values
from marft_bridge.statistics.distributions import ndtr

_EXACT_UP_TO = 400  # tasks: a tenth of a second; beyond, the normal approximation is right to the third digit


def signed_rank_p_value(diffs: Floats) -> float:
    """Differences [K], one per task, into the two-sided p-value of Wilcoxon's test with Pratt's zeros."""
    magnitudes = np.abs(diffs)
    if not magnitudes.any():
        return 1.0
    # Means of the same samples in another order differ in the last bits; such magnitudes are ties.
    rounded = np.round(magnitudes / magnitudes.max(), 12)
    _, tie_indices, counts = np.unique(rounded, return_inverse=True, return_counts=True)
    last_ranks = counts.cumsum()
    doubled_ranks = (2 * last_ranks - counts + 1)[tie_indices]  # twice the mean rank of each tie: whole numbers
    nonzero = magnitudes > 0
    doubled_ranks, positive = doubled_ranks[nonzero], diffs[nonzero] > 0
    total, positive_sum = int(doubled_ranks.sum()), int(doubled_ranks[positive].sum())
    smaller_sum = min(positive_sum, total - positive_sum)
    if doubled_ranks.size > _EXACT_UP_TO:
        deviation = 0.5 * float(np.sqrt((doubled_ranks.astype(np.float64) ** 2).sum()))
        # + 1 is the continuity correction of half a rank, doubled as the ranks are
        return float(min(1.0, 2.0 * ndtr((smaller_sum + 1 - total / 2) / deviation)))
    probabilities = np.zeros(total + 1)  # null distribution of the sum of positive doubled ranks; one rank at a time
    probabilities[0] = 1.0
    for rank in doubled_ranks:
        with_rank = np.zeros_like(probabilities)
        with_rank[rank:] = probabilities[: total + 1 - rank]
        probabilities = (probabilities + with_rank) / 2
    return float(min(1.0, 2.0 * probabilities[: smaller_sum + 1].sum()))


def rank_correlation(x: ArrayLike, y: ArrayLike) -> float | None:
    """Two rows of values [n] into Spearman's correlation: that of their ranks, ties at their mean rank.

    None where a row has fewer than two different values.

    Raises ValueError where the lengths differ or are 0, and for NaN or infinite values.
    """
    ranks = [_mean_ranks(values) for values in paired_values("rank correlation", x, y)]
    centred = [rank - rank.mean() for rank in ranks]
    norms = [float(np.sqrt((part**2).sum())) for part in centred]
    return float((centred[0] * centred[1]).sum() / (norms[0] * norms[1])) if all(norms) else None


def _mean_ranks(values: Floats) -> Floats:
    _, tie_indices, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: Floats = (counts.cumsum() - (counts - 1) / 2)[tie_indices]
    return ranks
