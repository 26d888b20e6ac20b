"""Importance weights to the share of the samples that they leave, and to whether that is enough to learn from."""

# ruff: noqa: N806 (shape suffixes)
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

TOO_FEW = "effective sample size below replay.min_ess"
NO_WEIGHT = "not one of its importance weights is above 0"


def effective_sample_size(weights: Sequence[float] | Tensor) -> float | None:
    """(sum w)^2 / (N sum w^2): the share of N weighted samples that count (Kish). 1 for equal weights, 1/N for one.

    None where there is nothing to divide by: no weights, or all of them 0.

    Raises:
        ValueError: a weight is negative or not finite.
    """
    weight_N = torch.as_tensor(weights, dtype=torch.float64).detach()
    if not bool(((weight_N >= 0) & weight_N.isfinite()).all()):
        raise ValueError("importance weights must be finite and not negative")
    if not bool(weight_N.any()):
        return None
    weight_N = weight_N / weight_N.max()  # the share has no scale; squares of huge weights would overflow
    return float(weight_N.sum() ** 2 / (len(weight_N) * weight_N.square().sum()))


def gate_actions(weights: Sequence[float], min_ess: float) -> str | None:
    """Why the replayed actions of one adapter say too little about its policy of today; None where they may be used.

    Args:
        weights: their importance weights, capped as the loss caps them. None at all are no reason.
        min_ess: the least effective sample size, (sum w)^2 / (N sum w^2) (Kish), as a share of the actions.

    Raises:
        ValueError: a weight is negative or not finite.
    """
    if not weights:
        return None
    size = effective_sample_size(weights)
    if size is None:
        return NO_WEIGHT
    return TOO_FEW if size < min_ess else None
