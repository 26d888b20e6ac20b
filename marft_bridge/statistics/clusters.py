"""Values with the task that each belongs to -> totals per task, the clusters of all other modules.

Samples of one task are not independent, so the cluster is the unit of every interval and test here. Invariant: with
one value per task, everything computed from the totals equals what is computed from the values.

Source: Cochran (1977), "Sampling techniques", section 6.3: variance of a ratio of cluster totals.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Labels = Sequence[Any] | NDArray[Any]

ROUNDING = 1e-9  # of the largest value: what differs by less does not differ


class Totals(NamedTuple):
    """Totals per task: the sum of its values and their number, both [K]."""

    sums: Floats
    sizes: Floats


def finite_values(name: str, x: ArrayLike) -> Floats:
    """An array-like [n] into floats [n]; ValueError where it has another shape, or NaN or infinite values."""
    values = np.asarray(x, dtype=np.float64)
    if values.ndim != 1:
        raise ValueError(f"{name}: expected one row of values, got shape {values.shape}")
    if not np.isfinite(values).all():
        raise ValueError(f"{name}: {int((~np.isfinite(values)).sum())} of {values.size} values are NaN or infinite")
    return values


def paired_values(name: str, a: ArrayLike, b: ArrayLike) -> tuple[Floats, Floats]:
    """Both sides of n pairs into floats [n] each; ValueError where their lengths differ or are 0."""
    values_a, values_b = finite_values(name, a), finite_values(name, b)
    if values_a.size != values_b.size or values_a.size == 0:
        raise ValueError(
            f"{name}: a has {values_a.size} values, b has {values_b.size}; pairs need as many of each, at least 1"
        )
    return values_a, values_b


def totals_by_label(name: str, values: Floats, clusters: Labels | None) -> Totals:
    """Values [n] and their task labels [n] into totals [K] sorted by label, or by value without labels.

    The result does not depend on the order of the values. ValueError where the lengths differ.
    """
    if clusters is None:
        return Totals(np.sort(values), np.ones(values.size))
    _, _, totals = _group_by_label(name, values, clusters)
    return totals


def totals_in_order(name: str, values: Floats, clusters: Labels | None) -> Totals:
    """Like `totals_by_label`, but in the order in which each task first occurs."""
    if clusters is None:
        return Totals(values, np.ones(values.size))
    _, first_positions, totals = _group_by_label(name, values, clusters)
    order = np.argsort(first_positions)
    return Totals(totals.sums[order], totals.sizes[order])


def labels_and_totals(name: str, values: Floats, clusters: Labels) -> tuple[NDArray[Any], Totals]:
    """Values [n] and their task labels [n] into the labels [K], sorted, and the totals [K] of each."""
    labels, _, totals = _group_by_label(name, values, clusters)
    return labels, totals


def standard_error(totals: Totals) -> float:
    """Linearised standard error of sum(sums) / sum(sizes) over K tasks (Cochran 1977, 6.3)."""
    k = totals.sums.size
    residuals = totals.sums - totals.sums.sum() / totals.sizes.sum() * totals.sizes  # [K]
    return float(np.sqrt(k / (k - 1) * (residuals**2).sum()) / totals.sizes.sum())


def are_equal(values: Floats) -> bool:
    """Whether values [K] are the same up to rounding: sums of equal terms in another order differ in the last bits."""
    return bool(np.ptp(values) <= ROUNDING * np.abs(values).max())


def _group_by_label(name: str, values: Floats, clusters: Labels) -> tuple[NDArray[Any], NDArray[np.intp], Totals]:
    if len(clusters) != values.size:
        raise ValueError(f"{name}: {values.size} values but {len(clusters)} cluster labels")
    labels, first_positions, label_indices = np.unique(np.asarray(clusters), return_index=True, return_inverse=True)
    sums = np.bincount(label_indices, weights=values, minlength=labels.size).astype(np.float64)
    return labels, first_positions, Totals(sums, np.bincount(label_indices, minlength=labels.size).astype(np.float64))
