"""Log-probs of the trainer and of the engine that sampled to importance weights, and to the actions that are kept.

The engine (mu) and the trainer (pi_old) compute one policy with other kernels and precision, or, for replayed
episodes, are different policies. rho = pi_old / mu corrects for it. Invariant: weights and masks are constants: no
gradient flows through them. A weight multiplies a surrogate of pi_new / pi_old, never one of pi_new / mu, in which
the engine's probability would be counted twice. It knows nothing of rewards, adapters or versions.

Shapes as in `losses`: _T sampled tokens laid end to end, _A actions, _U units (actions or tokens).
"""

# ruff: noqa: N803, N806 (shape suffixes)
from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from trainers.config import Granularity
from trainers.scoring.logratios import LogprobNorm, log_ratio, tokens_to_action


def mismatch_weight(
    old_T: Tensor,
    behaviour_T: Tensor,
    row_T: Tensor,
    actions: int,
    granularity: Granularity,
    norm: LogprobNorm,
    mode: Literal["truncate", "mask", "none"],
    cap: float,
    words_A: Tensor | None = None,
) -> Tensor:
    """How much more likely the trainer's policy finds each unit than the engine that sampled it, shape [U], detached.

    rho = pi_old / mu, of an action with its length normalisation. `truncate`: min(rho, cap) (truncated importance
    sampling, TIS). `mask`: rho inside [1 / cap, cap], 0 outside (IcePop). `none`: 1.

    Only whole actions with norm "sum" and a cap that never binds give an unbiased gradient; every other choice
    trades bias for variance. Per-token weights ignore how likely it was to get to the token, and the trade is
    then best for long actions, whose product of ratios explodes.

    Raises:
        ValueError: norm and words do not fit, see `losses.tokens_to_action`.
    """
    with torch.no_grad():
        rho_U = log_ratio(
            old_T, behaviour_T, row_T, actions=actions, granularity=granularity, norm=norm, words_A=words_A
        ).exp()
        if mode == "none":
            return torch.ones_like(rho_U)
        if mode == "truncate":
            return rho_U.clamp(max=cap)
        return torch.where((rho_U >= 1 / cap) & (rho_U <= cap), rho_U, 0.0)


def kept_actions(
    old_T: Tensor,
    behaviour_T: Tensor,
    row_T: Tensor,
    actions: int,
    new_T: Tensor,
    advantage_A: Tensor,
    geometric_mask: float | None,
    veto: float | None,
    off_policy_mask: float | None,
) -> Tensor:
    """Which actions no mask drops, bool [A]. A mask that is None drops nothing; a value at its bound is kept.

    Args:
        old_T, behaviour_T, new_T: log-probs by the trainer at the start of the round (pi_old), by the engine (mu)
            and by the policy as it is now (pi_new).
        advantage_A: its sign decides for `off_policy_mask`.
        geometric_mask: g > 1; drops exp(mean_t log(pi_old / mu)) outside [1 / g, g]. A mean, because a product
            of many ratios near 1 leaves any range, and long actions would be dropped for being long.
        veto: in (0, 1); drops an action with a token whose pi_old / mu is below it.
        off_policy_mask: delta > 0, in nats per token; drops A < 0 with mean_t(log mu - log pi_new) > delta
            (DeepSeek-V3.2, off-policy sequence masking).
    """
    with torch.no_grad():
        log_rho_T = old_T - behaviour_T
        keep_A = torch.ones(actions, dtype=torch.bool, device=log_rho_T.device)
        if geometric_mask is not None:
            keep_A &= tokens_to_action(log_rho_T, row_T, actions, norm="token").abs() <= math.log(geometric_mask)
        if veto is not None:
            vetoed_T = (log_rho_T < math.log(veto)).to(log_rho_T)
            keep_A &= tokens_to_action(vetoed_T, row_T, actions, norm="sum") == 0
        if off_policy_mask is not None:
            drift_A = tokens_to_action(behaviour_T - new_T, row_T, actions, norm="token")
            keep_A &= ~((drift_A > off_policy_mask) & (advantage_A < 0))
        return keep_A
