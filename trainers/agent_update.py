"""One agent's actions and their advantages to a changed adapter: the optimiser loops of MARFT-A.

Invariant: only the agent's own adapter changes; micro-batches bound memory and change no result, since every loss
is divided by the totals of its whole optimiser step. It knows nothing of episodes, critics or other agents.

Shapes: _A one entry per action of the agent, _T one per sampled token; lists of _T tensors are parallel to the items.
"""

# ruff: noqa: N806, N815 (shape suffixes)
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainers.batch import ActionItem, MicroBatch, items_to_microbatches
from trainers.config import TrainerOptions
from trainers.errors import TrainError
from trainers.losses import imitation_loss, k3, kl_to_reference, mismatch_weight, policy_loss
from trainers.model import PolicyModel, Tick


@dataclass(frozen=True, slots=True)
class AgentRound:
    """What one agent learns from in one round. Tensors are on the model's device."""

    items: Sequence[ActionItem]
    old_T: Sequence[Tensor]  # log-probs at the start of the round, by the trainer
    reference_T: Sequence[Tensor] | None  # by the base model; None without a KL penalty
    advantage_A: Tensor
    factor_A: Tensor  # compounded clipped ratio of the agents already updated


class AgentLearner:
    """An agent's adapter with its AdamW state, and two ways to learn: `improve` (clipped surrogate) and `imitate`."""

    def __init__(self, model: PolicyModel, agent: str, options: TrainerOptions) -> None:
        self.model = model
        self.agent = agent
        self.options = options
        self.parameters = list(model.parameters(agent).values())
        self.optimizer = self.fresh_optimizer()

    def fresh_optimizer(self) -> torch.optim.AdamW:
        """AdamW without any memory of earlier steps."""
        return torch.optim.AdamW(self.parameters, lr=self.options.lr, weight_decay=self.options.weight_decay)

    @torch.no_grad()
    def logprobs(self, items: Sequence[ActionItem], reference: bool = False, tick: Tick | None = None) -> list[Tensor]:
        """Log-probs of each action's tokens under the current policy, or under the base model; one tensor each."""
        result: list[Tensor] = [torch.empty(0)] * len(items)
        for batch in items_to_microbatches(items, self.options.tokens_per_microbatch):
            logp_T = self.model.logprobs(None if reference else self.agent, batch)
            parts = torch.split(logp_T, list(batch.lengths))
            for item, part_T in zip(batch.items, parts, strict=True):
                result[item] = part_T
            if tick is not None:
                tick(len(batch.items))
        return result

    def improve(self, data: AgentRound, generator: torch.Generator, tick: Tick) -> dict[str, Any]:
        """The agent's update of one round: epochs x minibatches of the clipped surrogate.

        A minibatch's approximate KL is a mean of terms that are never negative, so it is known to be over `kl_stop` as
        soon as the micro-batches so far are over it; the update then ends, before the backward pass of that
        micro-batch, and gradients gathered for this minibatch are dropped. The decision is that of
        the whole minibatch, however it is cut up.

        Returns:
            approx_kl, clipfrac, ratio_mean, ratio_max (new against old policy), grad_norm (mean before clipping),
            steps, stopped_early. What no minibatch measured is None.
        """
        options = self.options
        clipped = ratio_sum = ratio_max = kl_sum = norm_sum = 0.0
        seen = tokens = steps = 0
        stopped = False
        for chosen in _minibatches(len(data.items), options.epochs, options.minibatches, generator):
            total_tokens = sum(len(data.old_T[i]) for i in chosen)
            kl_of_step = 0.0
            self.optimizer.zero_grad()
            for batch in items_to_microbatches(data.items, options.tokens_per_microbatch, chosen):
                new_T, old_T, row_T = self._new_and_old(batch, data)
                kl_of_step += float(k3(new_T.detach() - old_T).sum())
                if options.kl_stop is not None and kl_of_step > options.kl_stop * total_tokens:
                    stopped = True
                    break
                rows = torch.tensor(batch.items, device=new_T.device)
                behaviour_T = torch.tensor(
                    [logp for i in batch.items for logp in data.items[i].behaviour], device=new_T.device
                )
                weight_A = mismatch_weight(
                    old_T,
                    behaviour_T,
                    row_T,
                    len(rows),
                    options.logprob_norm,
                    options.mismatch,
                    options.mismatch_cap,
                )
                loss, sums = policy_loss(
                    new_T,
                    old_T,
                    row_T,
                    data.advantage_A[rows],
                    weight_A,
                    data.factor_A[rows],
                    norm=options.logprob_norm,
                    clip_low=options.clip_low,
                    clip_high=options.clip_high,
                    dual_clip=options.dual_clip,
                    total=len(chosen),
                )
                if data.reference_T is not None:
                    reference_T = torch.cat([data.reference_T[i] for i in batch.items])
                    loss = loss + options.kl_coef * kl_to_reference(new_T, reference_T, total_tokens)
                loss.backward()  # type: ignore[no-untyped-call]
                clipped += sums["clipped"]
                ratio_sum += sums["ratio_sum"]
                ratio_max = max(ratio_max, sums["ratio_max"])
                seen += len(rows)
                tick(len(rows))
            kl_sum += kl_of_step
            tokens += total_tokens
            if stopped:
                self.optimizer.zero_grad()
                break
            norm_sum += self._step()
            steps += 1
        return {
            "approx_kl": kl_sum / tokens if tokens else None,
            "clipfrac": clipped / seen if seen else None,
            "ratio_mean": ratio_sum / seen if seen else None,
            "ratio_max": ratio_max if seen else None,
            "grad_norm": norm_sum / steps if steps else None,
            "steps": steps,
            "stopped_early": stopped,
        }

    def imitate(
        self, items: Sequence[ActionItem], weights: Sequence[float], generator: torch.Generator, tick: Tick
    ) -> dict[str, Any]:
        """Weighted imitation of recorded actions; loss and grad_norm are means over the optimiser steps."""
        options = self.options.offline
        weight_A = torch.tensor(weights, device=self.model.device)
        loss_sum = norm_sum = 0.0
        steps = 0
        for chosen in _minibatches(len(items), options.epochs, options.minibatches, generator):
            total_tokens = sum(len(items[i].sampled_ids) for i in chosen)
            self.optimizer.zero_grad()
            for batch in items_to_microbatches(items, self.options.tokens_per_microbatch, chosen):
                row_T = batch.row_T.to(self.model.device)
                loss = imitation_loss(
                    self.model.logprobs(self.agent, batch), row_T, weight_A[list(batch.items)], total_tokens
                )
                loss.backward()  # type: ignore[no-untyped-call]
                loss_sum += float(loss.detach())
                tick(len(batch.items))
            norm_sum += self._step()
            steps += 1
        return {
            "loss": loss_sum / steps if steps else None,
            "grad_norm": norm_sum / steps if steps else None,
            "steps": steps,
        }

    def _new_and_old(self, batch: MicroBatch, data: AgentRound) -> tuple[Tensor, Tensor, Tensor]:
        new_T = self.model.logprobs(self.agent, batch)
        return new_T, torch.cat([data.old_T[i] for i in batch.items]), batch.row_T.to(new_T.device)

    def _step(self) -> float:
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self.options.max_grad_norm))
        if norm != norm or norm == float("inf"):
            raise TrainError(f"agent {self.agent!r}: the gradient is not finite; lower trainer.lr or check the rewards")
        self.optimizer.step()
        return norm


def _minibatches(count: int, epochs: int, minibatches: int, generator: torch.Generator) -> Iterator[list[int]]:
    """A fresh random partition of `count` actions for every epoch; no part is empty."""
    for _ in range(epochs):
        order = torch.randperm(count, generator=generator)
        for part in order.tensor_split(min(minibatches, count)) if count else ():
            yield part.tolist()
