"""One micro-batch of one adapter to its loss and to what is reported about it.

    loss = sum_U share * weight * factor * keep * sign * ppo_loss(log_ratio, advantage)     units: actions or tokens
         + sum_T token_share * (kl_coef * KL - entropy_coef * entropy - nll_coef * positive * log pi)

Invariant: shares are parts of the whole round of the adapter, so the losses of the micro-batches of a step add up, and
no cut into micro-batches, minibatches or processes changes what an action counts. Everything that weighs is detached.
It knows nothing of models, optimisers or episodes.

Shapes: _T one per sampled token of the micro-batch, _A one per action, _U one per unit: an action with granularity
"action", a token with "token".
"""

# ruff: noqa: N803, N806, N815 (shape suffixes)
from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from trainers.config import TrainerOptions
from trainers.objective.losses import kl_to_reference, ppo_loss, shaped_loss
from trainers.scoring.logratios import lengths_to_clip_factor, log_ratio
from trainers.scoring.mismatch import kept_actions, mismatch_weight


@dataclass(frozen=True, slots=True)
class Scored:
    """A micro-batch with what the policy and the round say about it. None: the options do not ask for it."""

    row_T: Tensor
    new_T: Tensor  # the only tensor, with entropy_T, that a gradient flows through
    old_T: Tensor  # at the start of the round
    behaviour_T: Tensor | None  # by the engine
    reference_T: Tensor | None  # by the base model
    entropy_T: Tensor | None
    advantage_U: Tensor
    sign_weight_U: Tensor  # 1 where the whole advantage is not negative, `negative_weight` where it is
    share_A: Tensor  # of each action, or of each of its tokens, as the granularity says
    token_share_A: Tensor  # of each of its tokens
    factor_A: Tensor  # compounded ratio of the agents already updated
    positive_A: Tensor  # 1.0 where the team reward reached nll_threshold
    words_A: Tensor | None
    success_A: Tensor | None = None  # bool: successes of before, of which no figure is told; None: there can be none
    shaped_A: Tensor | None = None  # bool: likewise, with `success_shaping`


def scored_to_loss(scored: Scored, options: TrainerOptions) -> tuple[Tensor, dict[str, float]]:
    """The loss of a micro-batch, and sums over it.

    Returns:
        The loss (a scalar), and of all but successes of before: units, clipped (units whose gradient the clip cut),
        ratio_sum, ratio_max; and of all: actions, masked (actions that a mask dropped).
    """
    row_T, experimental = scored.row_T, options.experimental
    log_ratio_U = _log_ratio(scored, options)
    clip_low_U, clip_high_U = _clip_range(scored, options)
    loss_U, clipped_U = ppo_loss(
        log_ratio_U,
        scored.advantage_U,
        clip_low=clip_low_U,
        clip_high=clip_high_U,
        dual_clip=experimental.dual_clip,
    )
    if scored.shaped_A is not None:
        shaped_U = _to_units(scored.shaped_A, scored.row_T, options)
        loss_U = torch.where(shaped_U, _shaped_loss(scored, options), loss_U)
    weight_U, masked = _weights(scored, options)
    loss = (weight_U * loss_U).sum()
    token_share_T = scored.token_share_A[row_T]
    if scored.reference_T is not None:
        kl_T = kl_to_reference(scored.new_T, scored.reference_T, scored.old_T)
        loss = loss + experimental.kl_coef * (token_share_T * kl_T).sum()
    if scored.entropy_T is not None:
        loss = loss - experimental.entropy_coef * (token_share_T * scored.entropy_T).sum()
    if experimental.nll_coef > 0:
        loss = loss - experimental.nll_coef * (token_share_T * scored.positive_A[row_T] * scored.new_T).sum()
    ratio_U = log_ratio_U.detach().exp()
    if scored.success_A is not None:
        sampled_U = _to_units(~scored.success_A, row_T, options)
        ratio_U, clipped_U = ratio_U[sampled_U], clipped_U[sampled_U]
    return loss, {
        "units": float(len(ratio_U)),
        "clipped": float(clipped_U.sum()),
        "ratio_sum": float(ratio_U.sum()),
        "ratio_max": float(ratio_U.max()) if len(ratio_U) else -math.inf,
        "actions": float(len(scored.share_A)),
        "masked": masked,
    }


def scored_to_linear_loss(scored: Scored, options: TrainerOptions) -> Tensor:
    """The surrogate without clip, and without the terms beside it: linear in the advantage.

    At the start of a round its gradient is that of the whole surrogate, so the gradients of the parts of an
    advantage add up to the gradient of the advantage.
    """
    log_ratio_U = _log_ratio(scored, options)
    weight_U, _ = _weights(scored, options)
    loss_U = -log_ratio_U.exp() * scored.advantage_U
    if scored.shaped_A is not None:
        loss_U = torch.where(_to_units(scored.shaped_A, scored.row_T, options), _shaped_loss(scored, options), loss_U)
    return (weight_U * loss_U).sum()


def _shaped_loss(scored: Scored, options: TrainerOptions) -> Tensor:
    shaping = options.experimental.success_shaping
    assert shaping is not None
    return shaped_loss(
        scored.new_T,
        scored.advantage_U,
        row_T=scored.row_T,
        actions=len(scored.share_A),
        granularity=options.granularity,
        shaping=shaping,
    )


def _to_units(value_A: Tensor, row_T: Tensor, options: TrainerOptions) -> Tensor:
    """What holds of each action, for each of its units."""
    return value_A if options.granularity == "action" else value_A[row_T]


def _log_ratio(scored: Scored, options: TrainerOptions) -> Tensor:
    norm, actions = options.experimental.logprob_norm, len(scored.share_A)
    return log_ratio(
        scored.new_T,
        scored.old_T,
        scored.row_T,
        actions=actions,
        granularity=options.granularity,
        norm=norm,
        words_A=scored.words_A,
    )


def _clip_range(scored: Scored, options: TrainerOptions) -> tuple[float | Tensor, float | Tensor]:
    """How far below and above 1 the ratio of each unit may go; see `clip_by_length`."""
    low, high = options.objective.clip_low, options.objective.clip_high
    if not options.clips_by_length:
        return low, high
    factor_A = lengths_to_clip_factor(scored.row_T, len(scored.share_A), words_A=scored.words_A)
    return low * factor_A, high * factor_A


@torch.no_grad()
def _weights(scored: Scored, options: TrainerOptions) -> tuple[Tensor, float]:
    """What each unit counts: its share, the engine's mismatch, the other agents' factor, the masks, and less where its
    advantage is negative (`negative_weight`); how many were masked."""
    row_T, actions = scored.row_T, len(scored.share_A)
    weight_A = scored.share_A * scored.factor_A
    masked = 0.0
    if options.experimental.masks_actions:
        assert scored.behaviour_T is not None
        advantage_A = _to_actions(scored.advantage_U, row_T, actions, options=options)
        keep_A = kept_actions(
            scored.old_T,
            scored.behaviour_T,
            row_T,
            actions=actions,
            new_T=scored.new_T.detach(),
            advantage_A=advantage_A,
            geometric_mask=options.experimental.geometric_mask,
            veto=options.experimental.veto,
            off_policy_mask=options.experimental.off_policy_mask,
        )
        masked = float((~keep_A).sum())
        weight_A = weight_A * keep_A
    weight_U = _to_units(weight_A, row_T, options)
    weight_U = weight_U * scored.sign_weight_U
    if options.importance.mismatch == "none":
        return weight_U, masked
    assert scored.behaviour_T is not None
    return weight_U * mismatch_weight(
        scored.old_T,
        scored.behaviour_T,
        row_T,
        actions=actions,
        granularity=options.granularity,
        norm=options.experimental.logprob_norm,
        mode=options.importance.mismatch,
        cap=options.importance.mismatch_cap,
        words_A=scored.words_A,
    ), masked


def _to_actions(advantage_U: Tensor, row_T: Tensor, actions: int, options: TrainerOptions) -> Tensor:
    """One advantage per action: its own, or the sum over its tokens, whose sign is what a mask asks for."""
    if options.granularity == "action":
        return advantage_U
    return torch.zeros(actions, dtype=advantage_U.dtype, device=advantage_U.device).index_add(0, row_T, advantage_U)
