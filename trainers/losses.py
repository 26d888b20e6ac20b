"""Log-probs, advantages and values to elementwise losses: pure functions of tensors.

A loss is given per unit, not yet weighted: the caller multiplies by shares (`weighting`), by weights between
engine and trainer (`mismatch`) and by compounded ratios, and sums. One surrogate serves MARFT-A and MARFT-T: what
differs is how log-probs become the log-ratio of a unit. Invariant: dtype follows the inputs, gradients flow through
the policy being updated and through the values being fitted, through nothing else.
It knows nothing of models, agents, episodes or optimisers.

Shapes: _T one entry per sampled token (all actions of the batch laid end to end), _A one per action, _N any;
_U one per unit: actions (granularity "action", MARFT-A) or tokens (granularity "token", MARFT-T).
`row_T` says which action a token belongs to, 0..actions-1; every action has at least one token.
"""

# ruff: noqa: N803, N806 (shape suffixes)
from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from trainers.config import Granularity

LogprobNorm = Literal["sum", "token", "word"]

_LOG_RATIO_LIMIT = 20.0  # exp(20) is far outside any clip range, and still finite in float32


def tokens_to_action(
    values_T: Tensor, row_T: Tensor, actions: int, norm: LogprobNorm, words_A: Tensor | None = None
) -> Tensor:
    """Per-token values to one per action, shape [A].

    `sum`: their sum, as in log pi(a) = sum_t log pi(w_t) (MARFT, equation 6). `token` and `word`: that divided by the
    number of the action's tokens, or of its words but at least 1 (MARFT, "Action Normalization", after TWOSOME,
    arXiv 2401.14151), so that long actions are not unlikely merely for being long.

    Args:
        words_A: words of each action; for norm "word", and for no other.

    Raises:
        ValueError: norm "word" without words, or another norm with them.
    """
    if (norm == "word") != (words_A is not None):
        raise ValueError(f"norm {norm!r} {'needs' if norm == 'word' else 'does not read'} the words of each action")
    total_A = torch.zeros(actions, dtype=values_T.dtype, device=values_T.device).index_add(0, row_T, values_T)
    if words_A is not None:
        return total_A / words_A.to(total_A).clamp(min=1)
    if norm == "token":
        return total_A / torch.bincount(row_T, minlength=actions).to(total_A)
    return total_A


def log_ratio(
    new_T: Tensor,
    old_T: Tensor,
    row_T: Tensor,
    actions: int,
    granularity: Granularity,
    norm: LogprobNorm,
    words_A: Tensor | None = None,
) -> Tensor:
    """log pi_new - log pi_old of each unit, shape [U]; of an action with its length normalisation.

    Limited to +-20 (with no gradient beyond), where every clip has long since bound, so that exp() stays finite.
    With granularity "token" each token stands for itself: `row_T`, `actions`, `norm` and `words_A` are not read.

    Raises:
        ValueError: norm and words do not fit, see `tokens_to_action`.
    """
    difference_T = new_T - old_T
    if granularity == "action":
        difference_U = tokens_to_action(difference_T, row_T, actions, norm, words_A)
    else:
        difference_U = difference_T
    return difference_U.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)


def ppo_loss(
    log_ratio_U: Tensor, advantage_U: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[Tensor, Tensor]:
    """The clipped surrogate (PPO, equation 7; MARFT, equation 5) of each unit, as a loss.

    With r = exp(log_ratio)::

        loss = - min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)

    With `dual_clip` c > 1 and A < 0 the minimum is not let below c * A (Ye et al. 2020, arXiv 1912.09729), so
    that an action which became far more likely since it was sampled cannot explode the step. Written per sign of A,
    min() is r held at 1 + clip_high from above where A > 0, and within [1 - clip_low, c] where A < 0.

    Args:
        log_ratio_U: finite, see `log_ratio`.
        advantage_U: constants; no gradient flows to them.

    Returns:
        The loss [U], to be minimised; and bool [U], true where r is past a bound that binds, so that the
        unit has no gradient. At a bound exactly it still has its full gradient.
    """
    advantage_U = advantage_U.detach()
    ratio_U = log_ratio_U.exp()
    upper_U = torch.full_like(ratio_U, math.inf).masked_fill(advantage_U > 0, 1 + clip_high)
    lower_U = torch.zeros_like(ratio_U).masked_fill(advantage_U < 0, 1 - clip_low)
    if dual_clip is not None:
        upper_U = upper_U.masked_fill(advantage_U < 0, dual_clip)
    cut_U = (ratio_U > upper_U) | (ratio_U < lower_U)
    return -ratio_U.clamp(lower_U, upper_U) * advantage_U, cut_U.detach()


def k3(log_ratio_T: Tensor) -> Tensor:
    """exp(x) - x - 1 of each token: with x = log p - log q and samples from q, an unbiased estimate of KL(q || p).

    Never negative (Schulman, "Approximating KL divergence", estimator k3). `k3(new - old)` is the approximate KL
    that stops an update. x is limited to +-20.
    """
    x_T = log_ratio_T.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
    return torch.expm1(x_T) - x_T  # expm1: exp(x) - 1 loses all digits of a small x


def kl_to_reference(new_T: Tensor, reference_T: Tensor, old_T: Tensor | None = None) -> Tensor:
    """Penalty for leaving the base model (k3 of reference - new), shape [T].

    Its mean over samples of the new policy is KL(new || reference). Its gradient is not that KL's, because the samples
    move with the policy and a plain mean over them does not see it: what is descended is KL(reference || new), which
    has the same minimum (Shao et al. 2024, arXiv 2402.03300, equation 4, has this form).

    Args:
        old_T: log-probs under the policy that sampled the tokens. Given, each term is multiplied by new / old,
            and value and gradient are those of KL(new || reference), without bias (given what precedes the token).
    """
    penalty_T = k3(reference_T.detach() - new_T)
    if old_T is None:
        return penalty_T
    return (new_T - old_T.detach()).clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT).exp() * penalty_T


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
