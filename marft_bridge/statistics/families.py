"""Several variants and metrics against one base -> a family of contrasts whose claims hold together.

Of twenty comparisons one is significant at the 5% level by chance. Invariant: the family-wise error rate is at most
1 - level: with probability `level` or more, no member is called higher or lower that is not, however the members
depend on each other. Which direction of a metric is good is not decided here.

P-values are Holm's. Intervals are Bonferroni's, and not those of a studentised bootstrap maximum (Romano and Wolf
2005), although the latter are narrower where variants share a base: rewards are often 0 or 1, and a resample without
variance has no studentised value; and metrics may lack different pairs, so that no joint resample of tasks exists.

Sources:

- Holm (1979), Scandinavian Journal of Statistics 6: step-down correction.
- Dunn (1961), "Multiple comparisons among means", JASA 56: simultaneous intervals, each at level 1 - alpha / m.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from marft_bridge.statistics.clusters import Labels, finite_values
from marft_bridge.statistics.paired import PairedResult, paired_difference

_MIN_TAIL_RESAMPLES = 25  # bootstrap means beyond a bound of the interval: with fewer, the bound depends on the seed


@dataclass(frozen=True, slots=True)
class Contrast:
    """One metric of one variant against the base: parallel arrays [n] of the pairs that have it on both sides."""

    variant: str
    metric: str
    base: ArrayLike
    values: ArrayLike
    clusters: Labels | None = None
    ranks: bool = False  # see `paired_difference`


@dataclass(frozen=True, slots=True)
class FamilyMember:
    """One contrast with the p-value, the interval and the verdict that hold together with the rest of its family."""

    variant: str
    result: PairedResult  # uncorrected: of this contrast alone
    p_adjusted: float  # Holm
    simultaneous: tuple[float, float]  # Bonferroni: the intervals of all members hold together at the family's level
    verdict: Literal["higher", "lower", "not settled"]  # than the base


def compare_family(
    contrasts: Sequence[Contrast], *, seed: int, level: float = 0.95, resamples: int = 10_000
) -> tuple[FamilyMember, ...]:
    """Contrasts of one family into its members, in the same order.

    A verdict needs both: an adjusted p-value of at most 1 - level, and a simultaneous interval on one side of 0.
    The family is what one chooses from: all variants, and all metrics that may decide. A metric that only describes
    stays out of it and is shown with its own interval.

    Args:
        resamples: of the bootstrap, at least; more are drawn where the simultaneous level needs them in its tails.

    Raises:
        ValueError: see `paired_difference`.
    """
    m = len(contrasts)
    if not m:
        return ()
    alpha = 1 - level
    resamples_needed = max(resamples, math.ceil(2 * _MIN_TAIL_RESAMPLES * m / alpha))

    def compare_at(contrast: Contrast, interval_level: float) -> PairedResult:
        name = f"{contrast.variant}: {contrast.metric}"
        return paired_difference(
            name,
            contrast.base,
            contrast.values,
            clusters=contrast.clusters,
            seed=seed,
            level=interval_level,
            resamples=resamples_needed,
            ranks=contrast.ranks,
        )

    marginal = [compare_at(contrast, level) for contrast in contrasts]
    intervals = [
        (result if m == 1 else compare_at(contrast, 1 - alpha / m)).ci95
        for contrast, result in zip(contrasts, marginal, strict=True)
    ]
    p_adjusted = holm([result.p_value for result in marginal])
    return tuple(
        FamilyMember(contrast.variant, result, p, simultaneous=interval, verdict=_verdict(p, interval, alpha))
        for contrast, result, interval, p in zip(contrasts, marginal, intervals, p_adjusted, strict=True)
    )


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values of one family into Holm's adjusted p-values, in the same order (Holm 1979).

    Sorted upwards, the i-th of m (from 0) is multiplied by m - i; a running maximum keeps the order; capped at 1.
    ValueError for NaN.
    """
    p = finite_values("p_values", p_values)
    order = np.argsort(p, kind="stable")
    stepped_down = np.minimum(1.0, p[order] * (p.size - np.arange(p.size)))
    p_adjusted = np.empty_like(p)
    p_adjusted[order] = np.maximum.accumulate(stepped_down)
    return [float(x) for x in p_adjusted]


def _verdict(
    p_adjusted: float, interval: tuple[float, float], alpha: float
) -> Literal["higher", "lower", "not settled"]:
    if p_adjusted <= alpha and interval[0] > 0:
        return "higher"
    if p_adjusted <= alpha and interval[1] < 0:
        return "lower"
    return "not settled"
