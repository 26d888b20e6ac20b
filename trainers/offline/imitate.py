"""Recorded actions and what the offline mode weighs them by to a changed adapter.

Invariant: only that adapter changes; shares are parts of the whole of its actions, so no cut into minibatches changes
what an action counts. It knows nothing of where advantages come from.

Shapes: lists are parallel to the items; _A tensors have one entry per action.
"""

# ruff: noqa: N803, N806 (shape suffixes)
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from trainers.batch import ActionItem
from trainers.objective.adapter_round import behaviour_T_of, shares_A_of
from trainers.offline.losses import imitation_loss, offline_coefficients
from trainers.policies.adapter_learner import AdapterLearner
from trainers.scoring.microbatch import random_minibatches
from trainers.scoring.model import Tick


def imitate(
    learner: AdapterLearner,
    items: Sequence[ActionItem],
    episode_A: Sequence[int],
    advantages: Sequence[float],
    generator: torch.Generator,
    tick: Tick,
) -> dict[str, Any]:
    """Learns from recorded actions as `offline.mode` says, each weighted by its coefficient.

    Args:
        advantages: what the mode weighs by, one per action; see `offline_coefficients`.

    Returns:
        loss and grad_norm (means over minibatches), coefficient_mean, steps.
    """
    options, offline = learner.options, learner.options.offline
    if offline.mode == "off" or not items:
        return {"loss": None, "grad_norm": None, "coefficient_mean": None, "steps": 0}
    device = learner.model.device
    share_A = shares_A_of(items, episode_A, options, granularity="token", device=device)
    advantage_A = torch.tensor(advantages, dtype=torch.float32, device=device)
    loss_sum = coefficient_sum = 0.0
    action_count, norms = 0, []
    for chosen in random_minibatches(len(items), offline.epochs, offline.minibatches, generator=generator):
        parts = min(offline.minibatches, len(items))
        learner.optimizer.zero_grad()
        for batch in learner.workers.mine(learner.microbatches(items, chosen)):
            row_T, rows = batch.row_T.to(device), list(batch.items)
            new_T = learner.model.logprobs(learner.adapter, batch)
            log_ratio_A = None
            if offline.needs_behaviour:
                gap_T = new_T.detach() - behaviour_T_of(items, rows, device)
                log_ratio_A = torch.zeros(len(rows), device=device).index_add(0, row_T, gap_T)
            coefficient_A = offline_coefficients(offline.mode, advantage_A[rows], log_ratio_A, options=offline)
            loss = imitation_loss(new_T, row_T, coefficient_A, share_T=parts * share_A[rows][row_T])
            loss.backward()  # type: ignore[no-untyped-call]
            loss_sum += float(loss.detach())
            coefficient_sum += float(coefficient_A.sum())
            tick(len(rows))
        norms.append(learner.step())
        action_count += len(chosen)
    loss_sum, coefficient_sum = learner.workers.add([loss_sum, coefficient_sum])
    return {
        "loss": loss_sum / len(norms) if norms else None,  # offline.epochs may be 0
        "grad_norm": math.fsum(norms) / len(norms) if norms else None,
        "coefficient_mean": coefficient_sum / action_count if action_count else None,
        "steps": sum(norm > 0 for norm in norms),
    }
