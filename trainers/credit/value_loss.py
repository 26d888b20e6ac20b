"""Values and their targets to a loss, and to how much of the targets the values explain: pure functions of tensors.

Shapes: _N any, the same for all.
"""

# ruff: noqa: N803, N806 (shape suffixes)
from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def value_loss(
    values_N: Tensor,
    targets_N: Tensor,
    kind: Literal["huber", "squared"],
    delta: float,
    old_N: Tensor | None = None,
    clip: float | None = None,
) -> Tensor:
    """Mean loss of values against their targets, a scalar.

    `squared`: error^2 / 2. `huber`: the same up to `delta`, then delta * (|error| - delta / 2), on both sides of zero.
    With `clip` the larger of loss(v) and loss(old + clamp(v - old, +-clip)) counts (PPO's clipped value loss;
    Engstrom et al. 2020, arXiv 2005.12729): a value that has moved by more than `clip` towards its target
    gets no gradient.

    Args:
        delta: in units of the values; read for `huber` only.
        old_N: values at the start of the round; with `clip`, and only with it.

    Raises:
        ValueError: one of `old_N` and `clip` without the other.
    """
    if (old_N is None) != (clip is None):
        raise ValueError("a clipped value loss needs both the old values and the clip")
    loss_N = _value_error_to_loss(values_N - targets_N.detach(), kind, delta)
    if old_N is not None and clip is not None:
        moved_N = old_N.detach() + (values_N - old_N.detach()).clamp(-clip, clip)
        loss_N = torch.maximum(loss_N, _value_error_to_loss(moved_N - targets_N.detach(), kind, delta))
    return loss_N.mean()


def _value_error_to_loss(error_N: Tensor, kind: Literal["huber", "squared"], delta: float) -> Tensor:
    if kind == "squared":
        return error_N.square() / 2
    return torch.nn.functional.huber_loss(error_N, torch.zeros_like(error_N), reduction="none", delta=delta)


def explained_variance(values_N: Tensor, targets_N: Tensor) -> float | None:
    """1 - Var(target - value) / Var(target): 1 is perfect, 0 as good as a constant. None for constant targets."""
    if len(targets_N) < 2 or bool((targets_N == targets_N[0]).all()):
        return None
    target_N = targets_N.double()
    return float(1 - (target_N - values_N.double()).var(correction=0) / target_N.var(correction=0))
