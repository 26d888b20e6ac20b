"""What a teacher says of a policy's own tokens to advantages, and to how far the two are apart.

The objective is KL(policy || teacher) of each decided token, given what precedes it (on-policy distillation: GKD, arXiv
2306.13649, with the reverse KL; MiniLLM, arXiv 2306.08543, without its long-range part). The advantage of a token is
log p_teacher - log p_policy, by the policy as it is at that step, so the gradient of the surrogate is that of the KL at
every step of a round and is nothing where the two agree. Invariant: no gradient flows through an advantage, and none
credits a token for what came after it.

Shapes: _T one entry per decided token.
"""

# ruff: noqa: N803 (shape suffixes)
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainers.config import TrainerOptions
from trainers.scoring.logratios import LOG_RATIO_LIMIT


def to_teacher(policy_T: Tensor, teacher_T: Tensor) -> Tensor:
    """The advantage of each token: log p_teacher - log p_policy in nats, a constant."""
    return (teacher_T - policy_T).detach()


def mean_reverse_kl(old_T: Sequence[Tensor], new_T: Sequence[Tensor], teacher_T: Sequence[Tensor]) -> float | None:
    """KL(new || teacher) in nats, the mean per token; None without a token.

    Estimated on tokens that `old` sampled, as log p_new - log p_teacher weighted by new / old; the weights are made to
    add up to 1. With new = old it is the plain mean. Unlike k3 it is not ruled by a few tokens that the teacher finds
    far likelier, as there are while the two are far apart; near 0 it may fall below. The lists are parallel, one tensor
    per action.
    """
    if not old_T:
        return None
    old, new, teacher = (torch.cat(list(part_T)).double().cpu() for part_T in (old_T, new_T, teacher_T))
    weight = (new - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return float((weight * (new - teacher)).sum() / weight.sum())


def options_to_distil(options: TrainerOptions) -> TrainerOptions:
    """The options of a round whose advantages are those to a teacher.

    Tokens are the units, both signs count in full, every adapter is held against the policies that sampled, and steps
    are as long as `optimizer.lr` makes them: `kl_target` reads what rewards say. Terms beside the surrogate are off.
    The clip, `kl_stop`, the weights between engine and trainer, and the optimiser are those of every round.
    """
    objective = {"negative_weight": 1.0, "kl_target": None, "update": "simultaneous"}
    terms = {"entropy_coef": 0.0, "kl_coef": 0.0, "nll_coef": 0.0, "off_policy_mask": None, "success_shaping": None}
    return options.model_copy(
        update={
            "granularity": "token",
            "objective": options.objective.model_copy(update=objective),
            "experimental": options.experimental.model_copy(update={**terms, "logprob_norm": "token"}),
            "replay": options.replay.model_copy(update={"share": 0.0, "successes": 0.0}),
        }
    )
