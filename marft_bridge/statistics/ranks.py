"""Differences per task, into the exact p-value of Wilcoxon's signed ranks.

Invariant: the p-value is that of all 2^K signs of the ranks that were seen, ties and zeros included; no table and no
normal curve stands in for it below `_EXACT_UP_TO` tasks. It asks whether differences lie symmetrically around 0, not
what their mean is, and knows neither pairs nor samples.

Sources:

- Wilcoxon (1945), "Individual comparisons by ranking methods", Biometrics Bulletin 1.
- Pratt (1959), "Remarks on zeros and ties in the Wilcoxon signed rank procedures", JASA 54: zeros take part in the
  ranking and are left out of the sum.
"""

from __future__ import annotations

import numpy as np
from scipy.special import ndtr

from marft_bridge.statistics.clusters import Floats

_EXACT_UP_TO = 400  # tasks: a tenth of a second; beyond, the normal curve is right to the third digit


def signed_rank_p(diffs: Floats) -> float:
    """Differences [K], one per task, into the two-sided p-value of Wilcoxon's test with Pratt's zeros."""
    sizes = np.abs(diffs)
    if not sizes.any():
        return 1.0
    # Means of the same samples in another order differ in the last bits; such sizes are ties.
    _, index, counts = np.unique(np.round(sizes / sizes.max(), 12), return_inverse=True, return_counts=True)
    last = counts.cumsum()
    doubled = (2 * last - counts + 1)[index]  # twice the mean rank of each tie: whole numbers
    moved = sizes > 0
    doubled, positive = doubled[moved], diffs[moved] > 0
    total, seen = int(doubled.sum()), int(doubled[positive].sum())
    low = min(seen, total - seen)
    if doubled.size > _EXACT_UP_TO:
        deviation = 0.5 * float(np.sqrt((doubled.astype(np.float64) ** 2).sum()))
        return float(min(1.0, 2.0 * ndtr((low + 1 - total / 2) / deviation)))  # half a rank of continuity, doubled
    chance = np.zeros(total + 1)  # of each sum of positive doubled ranks; one rank more at a time
    chance[0] = 1.0
    for rank in doubled:
        with_rank = np.zeros_like(chance)
        with_rank[rank:] = chance[: total + 1 - rank]
        chance = (chance + with_rank) / 2
    return float(min(1.0, 2.0 * chance[: low + 1].sum()))
