"""Log-probs and advantages to elementwise losses: pure functions of tensors.

A loss is given per unit, not yet weighted: the caller multiplies by shares (`weighting`), by weights between
engine and trainer (`mismatch`) and by compounded ratios, and sums. One surrogate serves MARFT-A and MARFT-T: what
differs is how log-probs become the log-ratio of a unit. Invariant: dtype follows the inputs, gradients flow through
the policy being updated, through nothing else.
It knows nothing of models, agents, episodes or optimisers.

Shapes: _T one entry per sampled token (all actions of the batch laid end to end), _A one per action, _N any;
_U one per unit: actions (granularity "action", MARFT-A) or tokens (granularity "token", MARFT-T).
`row_T` says which action a token belongs to, 0..actions-1; every action has at least one token.
"""

# ruff: noqa: N803, N806 (shape suffixes)
from __future__ import annotations

import math

import torch
from torch import Tensor

from trainers.config import Granularity
from trainers.scoring.logratios import LOG_RATIO_LIMIT, k3, tokens_to_action


def ppo_loss(
    log_ratio_U: Tensor,
    advantage_U: Tensor,
    clip_low: float | Tensor,
    clip_high: float | Tensor,
    dual_clip: float | None,
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
        clip_low, clip_high: of all units, or of each [U].

    Returns:
        The loss [U], to be minimised; and bool [U], true where r is past a bound that binds, so that the
        unit has no gradient. At a bound exactly it still has its full gradient.
    """
    advantage_U = advantage_U.detach()
    ratio_U = log_ratio_U.exp()
    one_U = torch.ones_like(ratio_U)
    upper_U = torch.where(advantage_U > 0, one_U + clip_high, math.inf)
    lower_U = torch.where(advantage_U < 0, one_U - clip_low, 0.0)
    if dual_clip is not None:
        upper_U = upper_U.masked_fill(advantage_U < 0, dual_clip)
    cut_U = (ratio_U > upper_U) | (ratio_U < lower_U)
    return -ratio_U.clamp(lower_U, upper_U) * advantage_U, cut_U.detach()


def shaped_loss(
    new_T: Tensor, advantage_U: Tensor, row_T: Tensor, actions: int, *, granularity: Granularity, shaping: float
) -> Tensor:
    """LUFFY's loss of what another policy sampled (Yan et al. 2025, arXiv 2504.14945, equation 8), of each unit.

    With p the probability of a token today, whoever sampled it, and no clip::

        loss = - p / (p + shaping) * A                      an action's is the mean over its tokens

    Its gradient is largest where p is near `shaping`: rare tokens of a success are learned sooner than by a ratio to
    the policy that sampled them, and those that are certain already are left alone.

    Args:
        new_T: log-probs, which the gradient flows to.
        shaping: gamma of the paper, which takes 0.1.
    """
    probability_T = new_T.exp()
    shaped_T = probability_T / (probability_T + shaping)
    if granularity == "token":
        return -shaped_T * advantage_U.detach()
    return -tokens_to_action(shaped_T, row_T, actions, "token") * advantage_U.detach()


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
    return (new_T - old_T.detach()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp() * penalty_T
