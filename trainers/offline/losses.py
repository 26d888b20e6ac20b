"""Advantages of recorded actions, and how likely they are by now, to a weighted log-likelihood.

Every offline mode descends - sum_T share * c * log pi, with one coefficient c per action; what differs is c.
Invariant: coefficients are constants, through which no gradient flows, and none is infinite however large a ratio is.
A mode that divides by the behaviour policy cannot be computed without its log-probs. It knows nothing of critics,
baselines or of what may be replayed.

Shapes: _A one entry per action, _T one per sampled token; `row_T` says which action a token belongs to.
"""

# ruff: noqa: N803, N806 (shape suffixes)
from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from trainers.config import OfflineOptions

OfflineMode = Literal["filtered", "awr", "asymre", "topr", "importance", "vtrace"]

_OVER_RATIOS = ("topr", "importance", "vtrace")


def offline_coefficients(
    mode: OfflineMode, advantage_A: Tensor, log_ratio_A: Tensor | None, options: OfflineOptions
) -> Tensor:
    """The factor of each action's log-likelihood, shape [A], detached.

    With A the advantage and r = pi(a) / mu(a), the ratio of the whole action:

        filtered     1                                   (the caller has chosen the episodes)
        awr          min(exp(A / beta), max_weight)      advantage-weighted regression (arXiv 1910.00177, equation 5)
        asymre       A, given as return - (mean return + shift)      asymmetric REINFORCE (arXiv 2506.20520)
        topr         A where A >= 0, A * min(r, 1) where A < 0       tapered off-policy REINFORCE (arXiv 2503.14286)
        importance   A * min(r, ratio_cap)               truncated importance-weighted policy gradient
        vtrace       A * min(r, ratio_cap), with A = reward + gamma v' - V towards V-trace's targets v'
                                                         (arXiv 1802.01561, section 4.2)

    Args:
        advantage_A: of the kind that the mode names, in units of how far the returns of the stored runs lie apart.
        log_ratio_A: log pi_now(a) - log mu(a), the SUM over the action's tokens, since r is the ratio of the
            whole action; for `topr`, `importance` and `vtrace`, and None for the others.

    Raises:
        ValueError: a mode over ratios without them, another mode with them, or no such mode.
    """
    if (mode in _OVER_RATIOS) != (log_ratio_A is not None):
        raise ValueError(f"offline mode {mode!r} {'needs' if mode in _OVER_RATIOS else 'does not read'} log-ratios")
    advantage_A = advantage_A.detach()
    if mode == "filtered":
        return torch.ones_like(advantage_A)
    if mode == "awr":
        return (advantage_A / options.beta).exp().clamp(max=options.max_weight)
    if mode == "asymre":
        return advantage_A
    if log_ratio_A is None:
        raise ValueError(f"{mode!r} is not an offline mode that learns from actions")
    ratio_A = log_ratio_A.detach().exp()  # may be infinite; the caps below are not
    if mode == "topr":
        return torch.where(advantage_A < 0, advantage_A * ratio_A.clamp(max=1), advantage_A)
    return advantage_A * ratio_A.clamp(max=options.ratio_cap)


def imitation_loss(logp_T: Tensor, row_T: Tensor, coefficient_A: Tensor, share_T: Tensor) -> Tensor:
    """- sum_T share * coefficient * log pi, a scalar; to be summed over the micro-batches of a step.

    Args:
        logp_T: under the policy that is trained.
        coefficient_A: see `offline_coefficients`; 1 for the negative log-likelihood of good examples (VAPO).
        share_T: what each token counts, see `weighting.unit_shares` (granularity "token").
    """
    return -(share_T.detach() * coefficient_A.detach()[row_T] * logp_T).sum()
