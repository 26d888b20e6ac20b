"""What engine and trainer say of the same tokens to ratios, factors and the figures that are reported about them.

Invariant: a figure that was not measured is None; an action whose log-probs are unknown takes part in no ratio.
It knows nothing of models or optimisers.

Shapes: lists of _T tensors are parallel to the items, one entry per decided token; _A one entry per action.
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
from trainers.scoring.mismatch import kept_actions, mismatch_weight


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tokens of an agent's actions were drawn, and how far engine and trainer agree on them.

    entropy is -mean log-prob of the decided tokens by the engine, an estimate from the sample; the ratios are trainer
    against engine per token, the gap is the mean absolute difference of log-probs in nats; effective_sample_size
    is that of the weights that the loss gives them, capped and masked (`items_to_weights`), 1 when all are equal; None
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
    weights = items_to_weights(ours_T, scored, options).tolist() if options.needs_behaviour else None
    return Sampling(
        entropy,
        float(gap_T.exp().mean()),
        float(gap_T.exp().max()),
        engine_logprob_gap=float(gap_T.abs().mean()),
        effective_sample_size=effective_sample_size(weights) if weights is not None else None,
    )


def items_to_weights(old_T: Sequence[Tensor], items: Sequence[ActionItem], options: TrainerOptions) -> Tensor:
    """What the loss weighs actions by for what the engine said of them, at the start of a round.

    The mismatch weight, 0 where a mask drops the action. Shape [U] on the CPU: one entry per action with granularity
    "action", one per decided token with "token". `off_policy_mask` drops nothing here: it asks how far the policy has
    moved within the round. With `logprob_norm` "word" a ratio is that per token, as in `items_to_ratios`.
    """
    row_T = _action_of_token(items)
    ours_T = torch.cat([part.cpu().float() for part in old_T])
    theirs_T = torch.tensor([logp for item in items for logp in _behaviour(item)], dtype=torch.float32)
    importance, experimental, count = options.importance, options.experimental, len(items)
    weight_U = mismatch_weight(
        ours_T,
        theirs_T,
        row_T,
        actions=count,
        granularity=options.granularity,
        norm=_norm(options),
        mode=importance.mismatch,
        cap=importance.mismatch_cap,
    )
    keep_A = kept_actions(
        ours_T,
        theirs_T,
        row_T,
        actions=count,
        new_T=ours_T,
        advantage_A=torch.zeros(count),
        geometric_mask=experimental.geometric_mask,
        veto=experimental.veto,
        off_policy_mask=None,
    )
    return weight_U * (keep_A if options.granularity == "action" else keep_A[row_T])


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
    new, against = (torch.cat([part.cpu() for part in parts]) for parts in (new_T, against_T))
    return log_ratio(
        new, against, _action_of_token(items), actions=len(items), granularity="action", norm=_norm(options)
    ).exp()


def add_log_ratios(log_factor_E: Tensor, ratios_A: Tensor, stands_A: Sequence[Sequence[tuple[int, float]]]) -> None:
    """Moves the log of each run's compounded ratio on, in place, by the ratios of an adapter that was just updated.

    Args:
        stands_A: the runs that each of its actions stands in, with their weights.
    """
    runs, positions = [], []
    for position, standing in enumerate(stands_A):
        for run, _ in standing:
            runs.append(run)
            positions.append(position)
    log_factor_E.index_add_(0, torch.tensor(runs), ratios_A.double().log()[positions])


def compounded_factor(
    log_factor_E: Tensor, stands_A: Sequence[Sequence[tuple[int, float]]], options: TrainerOptions
) -> Tensor:
    """What actions of an adapter still to come are weighted by for the ratios of those already updated, [A].

    HAPPO's compounded ratio: per run the product over all actions of the adapters already updated, clipped like
    a ratio (A2PO). An action that several runs share has the mean of their ratios, by their weights (`stands_A`).
    """
    factor_E = log_factor_E.exp().clamp(1 - options.objective.clip_low, 1 + options.objective.clip_high)
    factors = factor_E.tolist()
    means = [sum(factors[run] * w for run, w in runs) / sum(w for _, w in runs) for runs in stands_A]
    return torch.tensor(means, dtype=torch.float32, device=factor_E.device)


def _action_of_token(items: Sequence[ActionItem]) -> Tensor:
    """Which action each decided token belongs to, shape [T]."""
    return torch.repeat_interleave(torch.arange(len(items)), torch.tensor([len(item.decided) for item in items]))


def _norm(options: TrainerOptions) -> Literal["sum", "token"]:
    return "sum" if options.experimental.logprob_norm == "sum" else "token"


def _behaviour(item: ActionItem) -> tuple[float, ...]:
    if item.behaviour is None:
        raise TrainError(f"an action of {item.agent!r} has no log-probs by the engine, so no ratio can be formed")
    return item.behaviour
