"""What engine and trainer say of the same tokens to ratios, factors and the figures that are reported about them.

Invariant: a figure that was not measured is None; an action whose log-probs are unknown takes part in no ratio.
It knows nothing of models or optimisers.

Shapes: lists of _T tensors are parallel to the items; _A one entry per action.
"""

# ruff: noqa: N803, N806 (shape suffixes)
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from trainers.batch import ActionItem
from trainers.config import TrainerOptions
from trainers.errors import TrainError
from trainers.scoring.effective_sample_size import effective_sample_size
from trainers.scoring.logratios import log_ratio


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tokens of an agent's actions were drawn, and how far engine and trainer agree on them.

    entropy is -mean log-prob of the sampled tokens by the engine, an estimate from the sample; the ratios are trainer
    against engine per token, the gap is the mean absolute difference of log-probs in nats; effective_sample_size
    is that of the mismatch weights per action, capped or masked as they enter the loss, 1 when all are equal; None
    where the options weigh nothing.
    """

    entropy: float | None
    engine_ratio_mean: float | None
    engine_ratio_max: float | None
    engine_logprob_gap: float | None
    effective_sample_size: float | None

    def metrics(self) -> dict[str, Any]:
        """By name."""
        return asdict(self)


def items_to_sampling(
    items: Sequence[ActionItem], scored: Sequence[ActionItem], ours_T: Sequence[Tensor], options: TrainerOptions
) -> Sampling:
    """The engine's log-probs of an agent's actions, and the trainer's of those that it scored, to figures."""
    if not items:
        return Sampling(None, None, None, engine_logprob_gap=None, effective_sample_size=None)
    engine = [logp for item in items for logp in _behaviour(item)]
    entropy = -sum(engine) / len(engine)
    if not scored:
        return Sampling(entropy, None, None, engine_logprob_gap=None, effective_sample_size=None)
    theirs_T = torch.tensor([logp for item in scored for logp in _behaviour(item)], dtype=torch.float64)
    gap_T = torch.cat([part.double().cpu() for part in ours_T]) - theirs_T
    weights = None
    if options.importance.mismatch != "none":
        rho_A, cap = items_to_ratios(ours_T, scored, options), options.importance.mismatch_cap
        kept_A = (
            rho_A.clamp(max=cap)
            if options.importance.mismatch == "truncate"
            else rho_A * (rho_A >= 1 / cap) * (rho_A <= cap)
        )
        weights = kept_A.tolist()
    return Sampling(
        entropy,
        float(gap_T.exp().mean()),
        float(gap_T.exp().max()),
        engine_logprob_gap=float(gap_T.abs().mean()),
        effective_sample_size=effective_sample_size(weights) if weights is not None else None,
    )


def items_to_ratios(
    new_T: Sequence[Tensor],
    items: Sequence[ActionItem],
    options: TrainerOptions,
    old_T: Sequence[Tensor] | None = None,
) -> Tensor:
    """Ratios of probabilities per action, normalised like its log-probs, shape [A] on the CPU.

    Against `old_T`, or against what the engine said where that is None. With `logprob_norm` "word" a ratio that weighs
    another agent is that per token: words are a unit of the loss only.
    """
    against_T = [torch.tensor(_behaviour(item)) for item in items] if old_T is None else old_T
    lengths = torch.tensor([len(item.sampled_ids) for item in items])
    action_T = torch.repeat_interleave(torch.arange(len(items)), lengths)
    norm: Literal["sum", "token"] = "sum" if options.experimental.logprob_norm == "sum" else "token"
    new, against = (torch.cat([part.cpu() for part in parts]) for parts in (new_T, against_T))
    return log_ratio(new, against, action_T, actions=len(items), granularity="action", norm=norm).exp()


def compounded_factor(
    log_factor_E: Tensor, ratios_A: Tensor, rows: Sequence[int], episode_A: Sequence[int], options: TrainerOptions
) -> Tensor:
    """The ratios of an adapter that was just updated to what the actions of those still to come are weighted by.

    HAPPO's compounded ratio: per episode the product over all actions of the adapters already updated, clipped like
    a ratio (A2PO), shape [A] of the whole round. `log_factor_E` is moved on in place.
    """
    log_factor_E.index_add_(0, torch.tensor([episode_A[i] for i in rows]), ratios_A.double().log())
    factor_E = log_factor_E.exp().clamp(1 - options.objective.clip_low, 1 + options.objective.clip_high)
    return factor_E.float()[list(episode_A)]


def _behaviour(item: ActionItem) -> tuple[float, ...]:
    if item.behaviour is None:
        raise TrainError(f"an action of {item.agent!r} has no log-probs by the engine, so no ratio can be formed")
    return item.behaviour
