"""What one adapter learns from in one round, and its micro-batches as the objective wants them.

Invariant: shares are parts of the whole round of the adapter, so a token counts the same in whatever minibatch it
lands; an action without log-probs by the engine is refused where a ratio is asked for. It knows nothing of optimisers.

Shapes: lists are parallel to the items, one tensor per action: _T tensors have one entry per decided token, _U ones one
entry per unit (one with granularity "action", one per decided token with "token"); _A tensors one entry per action.
"""

# ruff: noqa: N802, N803, N806, N815 (shape suffixes)
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from trainers.batch import ActionItem
from trainers.config import Granularity, TrainerOptions
from trainers.errors import TrainError
from trainers.objective.distillation import to_teacher
from trainers.objective.minibatch_loss import Scored
from trainers.objective.weighting import unit_shares
from trainers.scoring.logratios import k3
from trainers.scoring.microbatch import MicroBatch
from trainers.scoring.model import PolicyModel


@dataclass(frozen=True, slots=True)
class AdapterRound:
    """What one adapter learns from in one round. Tensors are on the model's device."""

    items: Sequence[ActionItem]
    episode_A: Sequence[int]
    old_T: Sequence[Tensor]  # log-probs at the start of the round
    reference_T: Sequence[Tensor] | None  # by the base model; None without a KL penalty
    advantage_U: Sequence[Tensor]
    factor_A: Tensor  # compounded clipped ratio of the agents already updated
    positive_A: Tensor  # 1.0 where the team reward reached nll_threshold
    source_U: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)  # parts of the advantage, by reward
    stands_A: Sequence[Sequence[tuple[int, float]]] | None = (
        None  # runs of each action and their weights; None: no forks
    )
    success_A: Tensor | None = (
        None  # bool: successes of before, whose `old_T` is no policy of this round; None: none may
    )
    teacher_T: Sequence[Tensor] | None = None  # log-probs by a teacher; `advantage_U` is then that of the start only


class PreparedRound:
    """A round with what stays the same over its epochs: shares, words, what the engine said."""

    def __init__(self, data: AdapterRound, options: TrainerOptions, model: PolicyModel) -> None:
        self.data, self.options, self.device = data, options, model.device
        self.rows = self._learnable()
        self.parts = max(1, round(len(self.rows) / options.optimizer.minibatch_actions))  # each stands for the whole
        self.share_A, self.token_share_A = (
            shares_A_of(
                data.items,
                data.episode_A,
                options,
                granularity=granularity,
                device=self.device,
                stands_A=data.stands_A,
            )
            for granularity in self._granularities()
        )
        self.words_A: Tensor | None = None
        if options.experimental.logprob_norm == "word":
            words = [sum(model.word_counts(item.decided_stretches)) for item in data.items]
            self.words_A = torch.tensor(words, dtype=torch.float32, device=self.device)
        self._shapes_successes = options.experimental.success_shaping is not None
        self.needs_behaviour = options.importance.mismatch != "none" or options.experimental.masks_actions

    def _granularities(self) -> tuple[Granularity, Granularity]:
        return self.options.granularity, "token"

    def _learnable(self) -> list[int]:
        """Positions of the actions that have a part in the loss: without a gradient there is nothing to compute."""
        experimental = self.options.experimental
        if experimental.entropy_coef or experimental.kl_coef or experimental.nll_coef:
            return list(range(len(self.data.items)))
        lowest = 0.0 if self.options.objective.negative_weight == 0 else -math.inf
        return [i for i, part_U in enumerate(self.data.advantage_U) if bool(((part_U != 0) & (part_U > lowest)).any())]

    def scored(self, batch: MicroBatch, new_T: Tensor, entropy_T: Tensor | None) -> Scored:
        """The micro-batch with its rows of everything."""
        data, rows = self.data, list(batch.items)
        if data.teacher_T is None:
            advantage_U = torch.cat([data.advantage_U[i] for i in rows])
        else:
            advantage_U = to_teacher(new_T, torch.cat([data.teacher_T[i] for i in rows]))
        negative_weight = self.options.objective.negative_weight
        return Scored(
            row_T=batch.row_T.to(self.device),
            new_T=new_T,
            old_T=torch.cat([data.old_T[i] for i in rows]),
            behaviour_T=behaviour_T_of(data.items, rows, self.device) if self.needs_behaviour else None,
            reference_T=None if data.reference_T is None else torch.cat([data.reference_T[i] for i in rows]),
            entropy_T=entropy_T,
            advantage_U=advantage_U,
            sign_weight_U=torch.ones_like(advantage_U).masked_fill(advantage_U < 0, negative_weight),
            share_A=self.parts * self.share_A[rows],
            token_share_A=self.parts * self.token_share_A[rows],
            factor_A=data.factor_A[rows],
            positive_A=data.positive_A[rows],
            words_A=None if self.words_A is None else self.words_A[rows],
            success_A=None if data.success_A is None else data.success_A[rows],
            shaped_A=data.success_A[rows] if data.success_A is not None and self._shapes_successes else None,
        )

    def moved_tokens(self, rows: Sequence[int]) -> int:
        """How many tokens of these actions tell how far the policy has moved from that at the start of the round."""
        success_A = self.data.success_A
        return sum(len(self.data.items[i].decided) for i in rows if success_A is None or not success_A[i])

    def kl_sum(self, scored: Scored, batch: MicroBatch) -> float:
        """The micro-batch's KL to the policy at the start of the round: k3, the sum over `moved_tokens`."""
        kl_T = k3(scored.new_T.detach() - scored.old_T)
        if self.data.success_A is not None:
            kl_T = kl_T[~self.data.success_A[list(batch.items)][scored.row_T]]
        return float(kl_T.sum())

    def with_source(self, scored: Scored, batch: MicroBatch, source: str) -> Scored:
        """The same with one part of the advantage in place of the whole, weighted as the whole is."""
        part_U = torch.cat([self.data.source_U[source][i] for i in batch.items])
        return replace(scored, advantage_U=part_U)


def behaviour_T_of(items: Sequence[ActionItem], rows: Sequence[int], device: torch.device) -> Tensor:
    """The engine's log-probs of some actions, end to end.

    Raises:
        TrainError: an action without them. Such actions are left out of rounds that need them; to go on
            here would count them as if engine and trainer agreed.
    """
    logprobs: list[float] = []
    for i in rows:
        behaviour = items[i].behaviour
        if behaviour is None:
            raise TrainError(f"an action of {items[i].agent!r} has no log-probs, so it cannot be importance-weighted")
        logprobs += behaviour
    return torch.tensor(logprobs, dtype=torch.float32, device=device)


def shares_A_of(
    items: Sequence[ActionItem],
    episode_A: Sequence[int],
    options: TrainerOptions,
    granularity: Granularity,
    device: torch.device,
    stands_A: Sequence[Sequence[tuple[int, float]]] | None = None,
) -> Tensor:
    """What each action, or each token of it, counts in the loss; see `unit_shares`. Shape [A]."""
    lengths = [len(item.decided) for item in items]
    shares = unit_shares(lengths, list(episode_A), options.loss_weighting, granularity=granularity, stands_A=stands_A)
    return torch.tensor(shares, dtype=torch.float32, device=device)
