"""Several variants and metrics against one base, into one family of claims that are all true together.

Looking at twenty comparisons finds one at the 5% level by chance. Invariant: with probability `level` or more, no
member of a family is called higher or lower that is not, whatever the members have to do with each other. It does not
know which direction of a metric is good.

P-values are Holm's. Intervals are Bonferroni's, and not those of a studentised bootstrap maximum (Romano and Wolf
2005), although the latter are narrower where variants share a base: rewards are often 0 or 1, and a resample without
spread has no studentised value; and metrics may lack different pairs, so that no joint resample of tasks exists.

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

_DRAWS_IN_A_TAIL = 25  # bootstrap means beyond a bound: fewer make it a matter of the seed


@dataclass(frozen=True, slots=True)
class Contrast:
    """One metric of one variant beside the base: parallel arrays [n] of the pairs that have it on both sides."""

    variant: str
    metric: str
    base: ArrayLike
    values: ArrayLike
    clusters: Labels | None = None
    ranks: bool = False  # see `paired_difference`


@dataclass(frozen=True, slots=True)
class FamilyMember:
    """One contrast and what may be said of it beside all others of its family."""

    variant: str
    result: PairedResult  # on its own
    p_adjusted: float
    simultaneous: tuple[float, float]  # the intervals of all members hold together at the family's level
    verdict: Literal["higher", "lower", "not settled"]  # than the base


def compare_family(
    contrasts: Sequence[Contrast], *, seed: int, level: float = 0.95, resamples: int = 10_000
) -> tuple[FamilyMember, ...]:
    """Contrasts of one family into its members, in the same order.

    A verdict needs both: an adjusted p-value of at most 1 - level, and a simultaneous interval on one side of 0.
    The family is what one chooses from: all variants, and all metrics that may decide. A metric that only describes
    stays out of it and is shown with its own interval.

    Args:
        resamples: at least so many; more are drawn where the simultaneous level asks for them.

    Raises:
        ValueError: see `paired_difference`.
    """
    m = len(contrasts)
    if not m:
        return ()
    alpha = 1 - level
    needed = max(resamples, math.ceil(2 * _DRAWS_IN_A_TAIL * m / alpha))

    def paired(contrast: Contrast, at: float) -> PairedResult:
        name = f"{contrast.variant}: {contrast.metric}"
        return paired_difference(
            name,
            contrast.base,
            contrast.values,
            clusters=contrast.clusters,
            seed=seed,
            level=at,
            resamples=needed,
            ranks=contrast.ranks,
        )

    alone = [paired(contrast, level) for contrast in contrasts]
    together = alone if m == 1 else [paired(contrast, 1 - alpha / m) for contrast in contrasts]
    adjusted = holm([result.p_value for result in alone])
    return tuple(
        FamilyMember(contrast.variant, result, p, wide.ci95, _verdict(p, wide.ci95, alpha))
        for contrast, result, wide, p in zip(contrasts, alone, together, adjusted, strict=True)
    )


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values of one family into Holm's adjusted p-values, in the same order (Holm 1979).

    Sorted upwards, the i-th of m (from 0) is multiplied by m - i; a running maximum keeps the order; at most 1.
    """
    p = finite_values("p_values", p_values)
    order = np.argsort(p, kind="stable")
    stepped = np.minimum(1.0, p[order] * (p.size - np.arange(p.size)))
    adjusted = np.empty_like(p)
    adjusted[order] = np.maximum.accumulate(stepped)
    return [float(x) for x in adjusted]


def _verdict(p: float, interval: tuple[float, float], alpha: float) -> Literal["higher", "lower", "not settled"]:
    if p <= alpha and interval[0] > 0:
        return "higher"
    if p <= alpha and interval[1] < 0:
        return "lower"
    return "not settled"
