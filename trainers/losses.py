"""Log-probs to losses and diagnostics: pure functions of tensors.

Invariant: every loss is a sum divided by a total that the caller gives, so that the losses of the micro-batches of
one optimiser step add up to the loss of the whole step. Weights that correct for the engine are detached
and enter once. It knows nothing of models, agents or optimisers.

Shapes: _T one entry per sampled token (all actions of the batch laid end to end), _A one per action;
`action_T` says which action a token belongs to.
"""

# ruff: noqa: N803, N806 (shape suffixes)
from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

_LOG_RATIO_LIMIT = 20.0  # exp(20) is far outside any clip range, and still finite in float32


def tokens_to_action(values_T: Tensor, action_T: Tensor, actions: int, norm: Literal["sum", "token"]) -> Tensor:
    """Per-token values to one per action: their sum (equation 6), or that divided by the number of tokens.

    With `token` the gradient of an action is the mean of its tokens' gradients, whatever its length. Shape [A].
    """
    total_A = torch.zeros(actions, dtype=values_T.dtype, device=values_T.device).index_add(0, action_T, values_T)
    if norm == "sum":
        return total_A
    return total_A / torch.bincount(action_T, minlength=actions).to(values_T.dtype)


def action_ratio(new_T: Tensor, old_T: Tensor, action_T: Tensor, actions: int, norm: Literal["sum", "token"]) -> Tensor:
    """pi_new(a) / pi_old(a) with the chosen length normalisation, shape [A].

    The log-ratio is limited to +-20, where the clip has long cut the gradient, so that nothing overflows.
    """
    log_ratio_A = tokens_to_action(new_T - old_T, action_T, actions, norm)
    return log_ratio_A.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT).exp()


def mismatch_weight(
    old_T: Tensor,
    behaviour_T: Tensor,
    action_T: Tensor,
    actions: int,
    norm: Literal["sum", "token"],
    mode: Literal["truncate", "mask", "none"],
    cap: float,
) -> Tensor:
    """How much more likely the trainer's policy finds each action than the engine that sampled it, shape [A], detached.

    rho_A = pi_old(a) / mu(a). `truncate`: min(rho, cap) (truncated importance sampling). `mask`: rho inside
    [1 / cap, cap], 0 outside (IcePop). `none`: 1. It multiplies a surrogate of pi_new / pi_old, never of
    pi_new / mu, in which the engine's probability would be counted twice.
    """
    if mode == "none":
        return torch.ones(actions, dtype=old_T.dtype, device=old_T.device)
    rho_A = action_ratio(old_T.detach(), behaviour_T, action_T, actions, norm)
    if mode == "truncate":
        return rho_A.clamp(max=cap)
    return torch.where((rho_A >= 1 / cap) & (rho_A <= cap), rho_A, torch.zeros_like(rho_A))


def policy_loss(
    new_T: Tensor,
    old_T: Tensor,
    action_T: Tensor,
    advantage_A: Tensor,
    weight_A: Tensor,
    factor_A: Tensor,
    *,
    norm: Literal["sum", "token"],
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    total: float,
) -> tuple[Tensor, dict[str, float]]:
    """The MARFT-A surrogate (paper, equations 5 and 6), as a loss.

    With r the ratio of an action, M the compounded ratio of the agents updated before this one (HAPPO) and w the
    mismatch weight::

        loss = - sum_A w * M * min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A) / total

    Dual clip: where A < 0 the minimum is not let below dual_clip * A, so that a large r cannot explode it.

    Args:
        new_T, old_T: log-probs under the policy being updated and under the one at the start of the round.
        advantage_A, weight_A, factor_A: A, w and M.
        total: number of actions of the whole optimiser step.

    Returns:
        The loss (a scalar), and sums over this batch: clipped (actions whose gradient the clip cut), ratio_sum,
        ratio_max.
    """
    ratio_A = action_ratio(new_T, old_T, action_T, len(advantage_A), norm)
    free_A = ratio_A * advantage_A
    clipped_A = ratio_A.clamp(1 - clip_low, 1 + clip_high) * advantage_A
    surrogate_A = torch.minimum(free_A, clipped_A)
    cut_A = clipped_A < free_A
    if dual_clip is not None:
        floor_A = dual_clip * advantage_A
        cut_A = cut_A | ((advantage_A < 0) & (surrogate_A < floor_A))
        surrogate_A = torch.where(advantage_A < 0, torch.maximum(surrogate_A, floor_A), surrogate_A)
    loss = -(weight_A.detach() * factor_A.detach() * surrogate_A).sum() / total
    ratio_A = ratio_A.detach()
    return loss, {
        "clipped": float(cut_A.sum()),
        "ratio_sum": float(ratio_A.sum()),
        "ratio_max": float(ratio_A.max()),
    }


def k3(log_ratio_T: Tensor) -> Tensor:
    """exp(x) - x - 1 per token: with x = log p - log q and samples from q, an unbiased estimate of KL(q || p).

    Never negative (Schulman's k3). `k3(new - old)` is the approximate KL that stops an update; with x = reference
    minus new it is the penalty of `kl_to_reference`.
    """
    x_T = log_ratio_T.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
    return x_T.exp() - x_T - 1


def kl_to_reference(new_T: Tensor, reference_T: Tensor, total_tokens: float) -> Tensor:
    """Penalty for leaving the base model: the sum of k3 over tokens, divided by the step's token count."""
    return k3(reference_T.detach() - new_T).sum() / total_tokens


def imitation_loss(logp_T: Tensor, action_T: Tensor, weight_A: Tensor, total_tokens: float) -> Tensor:
    """Weighted negative log-likelihood of recorded actions, divided by the step's token count.

    Weights 1 are filtered imitation; weights exp(advantage / beta) are AWR.
    """
    return -(weight_A.detach()[action_T] * logp_T).sum() / total_tokens


def value_loss(values_A: Tensor, targets_A: Tensor, delta: float) -> Tensor:
    """Mean Huber loss: error^2 / 2 up to `delta`, then linear, on both sides of zero."""
    return torch.nn.functional.huber_loss(values_A, targets_A, delta=delta)


def explained_variance(values_A: Tensor, targets_A: Tensor) -> float | None:
    """1 - Var(target - value) / Var(target): 1 is perfect, 0 as good as a constant. None for constant targets."""
    if len(targets_A) < 2 or bool((targets_A == targets_A[0]).all()):
        return None
    target_A = targets_A.double()
    return float(1 - (target_A - values_A.double()).var(correction=0) / target_A.var(correction=0))
