"""The actions of one adapter and their advantages to a changed adapter: epochs x minibatches of the clipped surrogate.

Invariant: cutting a round into micro-batches, or over processes, changes no result: shares are parts of the whole
round, and sums over processes are taken before every decision and every step. It knows nothing of episodes, critics or
other adapters.

Shapes: lists are parallel to the items, one tensor per action: _T tensors have one entry per decided token.
"""

# ruff: noqa: N806 (shape suffixes)
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from trainers.config import TrainerOptions
from trainers.objective.adapter_round import AdapterRound, PreparedRound
from trainers.objective.minibatch_loss import Scored, scored_to_linear_loss, scored_to_loss
from trainers.objective.trust_region import Backtracked, backtrack
from trainers.policies.adapter_learner import AdapterLearner
from trainers.scoring.logratios import k3
from trainers.scoring.microbatch import MicroBatch, random_minibatches
from trainers.scoring.model import Tick

_SUMS = ("units", "clipped", "ratio_sum", "actions", "masked")


def improve(
    learner: AdapterLearner,
    data: AdapterRound,
    generator: torch.Generator,
    tick: Tick,
    options: TrainerOptions | None = None,
    step_share: float = 1.0,
) -> dict[str, Any]:
    """The adapter's update of one round: epochs x minibatches of the clipped surrogate.

    A minibatch's approximate KL is a mean of terms that are never negative, so it is known to be over `kl_stop` as
    soon as the micro-batches so far are over it. No backward pass follows, and gradients gathered for this
    minibatch are dropped; the rest of it is scored for its KL only, so that decision and figure are those of the
    whole minibatch, however it is cut up.

    Args:
        options: of this round; None: the learner's.
        step_share: the part of the steps that are taken, from the first on: rounded up, and so much shorter each.

    Returns:
        approx_kl, clipfrac, ratio_mean, ratio_max (new against old policy), masked (share of the actions),
        grad_norm (mean over minibatches, before clipping), gradient_share (part of each reward in the gradient of the
        first minibatch, when there are several), lr, steps, stopped_early. What no minibatch measured is
        None.
    """
    options = options or learner.options
    optimizer = options.optimizer
    sums = dict.fromkeys(_SUMS, 0.0)
    ratio_max, kl_sum, tokens, norms = -math.inf, 0.0, 0, []
    gradient_share: dict[str, float] | None = None
    stopped = False
    prepared = PreparedRound(data, options, learner.model)
    minibatches = random_minibatches(len(prepared.rows), optimizer.epochs, prepared.parts, generator=generator)
    step_count = step_share * optimizer.epochs * min(prepared.parts, len(prepared.rows))
    whole_steps = math.ceil(step_count - 1e-9)  # a third of three passes is one, whatever the rounding
    lr = learner.scale_rate(step_count / whole_steps if whole_steps else 1.0)
    for drawn in islice(minibatches, whole_steps):
        chosen = [prepared.rows[i] for i in drawn]
        step_tokens = prepared.moved_tokens(chosen)
        if gradient_share is None and len(data.source_U) > 1:
            gradient_share = gradient_share_of(learner, prepared, chosen)
        kl_of_step = 0.0
        learner.optimizer.zero_grad()
        for batch in learner.workers.turns(learner.microbatches(data.items, chosen)):
            with torch.set_grad_enabled(not stopped):  # after a stop only the minibatch's KL is still to be told
                scored = None if batch is None else _score(learner, prepared, batch)
                idle = learner.model.idle_pass(learner.adapter) if batch is None else None
            kl = 0.0 if batch is None or scored is None else prepared.kl_sum(scored, batch)
            kl_of_step += learner.workers.add([kl])[0]
            if options.objective.kl_stop is not None and kl_of_step > options.objective.kl_stop * step_tokens:
                stopped = True
            if scored is not None and not stopped:
                loss, loss_metrics = scored_to_loss(scored, options)
                loss.backward()  # type: ignore[no-untyped-call]
                ratio_max = max(ratio_max, loss_metrics["ratio_max"])
                for name in _SUMS:
                    sums[name] += loss_metrics[name]
                tick(int(loss_metrics["actions"]))
            if idle is not None and not stopped:
                learner.model.idle_backward(idle, learner.adapter)
        kl_sum += kl_of_step
        tokens += step_tokens
        if stopped:
            learner.optimizer.zero_grad()
            break
        norms.append(learner.step())
    units, clipped, ratio_sum, actions, masked = learner.workers.add([sums[name] for name in _SUMS])
    return {
        "approx_kl": kl_sum / tokens if tokens else None,
        "clipfrac": clipped / units if units else None,
        "ratio_mean": ratio_sum / units if units else None,
        "ratio_max": learner.workers.max(ratio_max) if units else None,
        "masked": masked / actions if actions else None,
        "grad_norm": _mean_norm(norms, prepared),
        "gradient_share": gradient_share,
        "lr": lr,
        "steps": sum(norm > 0 for norm in norms),
        "stopped_early": stopped,
    }


def measure(
    learner: AdapterLearner,
    data: AdapterRound,
    start_weights: Sequence[Tensor],
    limit: float | None,
    phase: Callable[[], Tick],
) -> tuple[list[Tensor], Backtracked, float]:
    """Looks at the policy that the steps of a round have led to, and shortens them where it is beyond `limit`.

    The KL of a call is k2, half of its tokens' squared log-ratios, added up: unlike k3 it is not ruled by a few rare
    tokens that became likely, which is what learning from them makes of them (Schulman, "Approximating KL divergence").

    Args:
        data: what the round was; one action at least.
        start_weights: the adapter's `snapshot` at its start.
        limit: nats a call; None only looks.
        phase: what is told of the actions as they are scored, which is once for each try.

    Returns:
        Their log-probs under the policy that it is now, one tensor each; what became of the step, in nats a call; and
        the policy's KL to that at the start as k3, the mean per token.
    """
    new_T: list[Tensor] = []
    old_T = torch.cat(list(data.old_T))

    def kl() -> float:
        new_T[:] = learner.logprobs(data.items, tick=phase())
        return float((torch.cat(new_T) - old_T).square().sum()) / 2 / len(new_T)

    result = backtrack(learner.parameters, start_weights, kl, limit=math.inf if limit is None else limit)
    if not result.share:
        return list(data.old_T), result, 0.0
    return new_T, result, float(k3(torch.cat(new_T) - old_T).mean())


def _mean_norm(norms: Sequence[float], prepared: PreparedRound) -> float | None:
    """Of the gradients before clipping; 0 where no action has a part in the loss, None where no step was asked."""
    if not norms:
        return 0.0 if prepared.data.items and not prepared.rows else None
    return math.fsum(norms) / len(norms)


def _score(learner: AdapterLearner, prepared: PreparedRound, batch: MicroBatch) -> Scored:
    """A micro-batch under the current policy."""
    entropy_T = None
    if prepared.options.experimental.entropy_coef > 0:
        new_T, entropy_T = learner.model.logprobs_and_entropy(learner.adapter, batch)
    else:
        new_T = learner.model.logprobs(learner.adapter, batch)
    return prepared.scored(batch, new_T, entropy_T)


def gradient_share_of(
    learner: AdapterLearner, prepared: PreparedRound, chosen: Sequence[int]
) -> dict[str, float] | None:
    """Norm of each reward's part of the gradient of a minibatch, as shares; None when there is no gradient."""
    totals = {name: [torch.zeros_like(p) for p in learner.parameters] for name in prepared.data.source_U}
    batches = learner.microbatches(prepared.data.items, chosen)
    for batch in learner.workers.turns(batches):
        if batch is None:
            learner.model.idle_pass(learner.adapter, backwards=len(totals))
            continue
        scored = _score(learner, prepared, batch)
        for name, total in totals.items():
            loss = scored_to_linear_loss(prepared.with_source(scored, batch, name), prepared.options)
            gradients = torch.autograd.grad(loss, learner.parameters, retain_graph=True, allow_unused=True)
            for sum_so_far, gradient in zip(total, gradients, strict=True):
                if gradient is not None:
                    sum_so_far += gradient
    norms = {}
    for name, total in totals.items():
        flat = learner.workers.add_tensor(torch.cat([part.flatten() for part in total]))
        norms[name] = float(flat.norm())
    total_norm = sum(norms.values())
    return {name: norm / total_norm for name, norm in norms.items()} if total_norm > 0 else None
