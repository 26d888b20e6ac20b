"""Values with the task that each belongs to, into totals per task.

Samples of one task are not independent, so every other module here works on these totals. Invariant: with one value
per task, everything computed from the totals equals what is computed from the values.

Source: Cochran (1977), "Sampling techniques", section 6.3: variance of a ratio of cluster totals.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Labels = Sequence[Any] | NDArray[Any]


class Totals(NamedTuple):
    """Totals per task: the sum of its values and their number, both [K]."""

    sums: Floats
    sizes: Floats


def finite_values(name: str, x: ArrayLike) -> Floats:
    """Anything that holds one row of finite numbers, into floats [n]; otherwise a ValueError that says what it held."""
    values = np.asarray(x, dtype=np.float64)
    if values.ndim != 1:
        raise ValueError(f"{name}: expected one row of values, got shape {values.shape}")
    if not np.isfinite(values).all():
        raise ValueError(f"{name}: {int((~np.isfinite(values)).sum())} of {values.size} values are NaN or infinite")
    return values


def paired_values(name: str, a: ArrayLike, b: ArrayLike) -> tuple[Floats, Floats]:
    """Two sides [n] of the same pairs, checked; ValueError where their lengths differ or are 0."""
    left, right = finite_values(name, a), finite_values(name, b)
    if left.size != right.size or left.size == 0:
        raise ValueError(
            f"{name}: a has {left.size} values, b has {right.size}; pairs need as many of each, at least 1"
        )
    return left, right


def totals_by_label(name: str, values: Floats, clusters: Labels | None) -> Totals:
    """Values [n] and their task labels [n] into totals [K] by label; the order of the values is forgotten."""
    if clusters is None:
        return Totals(np.sort(values), np.ones(values.size))
    _, _, totals = _grouped(name, values, clusters)
    return totals


def totals_in_order(name: str, values: Floats, clusters: Labels | None) -> Totals:
    """Like `totals_by_label`, but the tasks stand in the order in which each was first seen."""
    if clusters is None:
        return Totals(values, np.ones(values.size))
    _, first, totals = _grouped(name, values, clusters)
    order = np.argsort(first)
    return Totals(totals.sums[order], totals.sizes[order])


def labels_and_totals(name: str, values: Floats, clusters: Labels) -> tuple[NDArray[Any], Totals]:
    """The labels [K], sorted, and the totals [K] of each."""
    labels, _, totals = _grouped(name, values, clusters)
    return labels, totals


def standard_error(totals: Totals) -> float:
    """Linearised standard error of sum(sums) / sum(sizes) over K tasks (Cochran 1977, 6.3)."""
    k = totals.sums.size
    residuals = totals.sums - totals.sums.sum() / totals.sizes.sum() * totals.sizes  # [K]
    return float(np.sqrt(k / (k - 1) * (residuals**2).sum()) / totals.sizes.sum())


def _grouped(name: str, values: Floats, clusters: Labels) -> tuple[NDArray[Any], NDArray[np.intp], Totals]:
    if len(clusters) != values.size:
        raise ValueError(f"{name}: {values.size} values but {len(clusters)} cluster labels")
    labels, first, index = np.unique(np.asarray(clusters), return_index=True, return_inverse=True)
    sums = np.bincount(index, weights=values, minlength=labels.size).astype(np.float64)
    return labels, first, Totals(sums, np.bincount(index, minlength=labels.size).astype(np.float64))
