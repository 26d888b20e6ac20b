"""The actions of one adapter and their advantages to a changed adapter: the optimiser loops.

Invariant: only this adapter changes. Cutting a round into micro-batches, or over processes, changes no
result: shares are parts of the whole round, and sums over processes are taken before every decision and every step.
It knows nothing of episodes, critics or other adapters.

Shapes: lists are parallel to the items, one tensor per action: _T tensors have one entry per sampled token, _U ones one
entry per unit (one with granularity "action", one per sampled token with "token").
"""

# ruff: noqa: N803, N806 (shape suffixes)
from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainers.adapter_round import AdapterRound, PreparedRound, behaviour_T_of, shares_A_of
from trainers.batch import ActionItem
from trainers.config import TrainerOptions
from trainers.errors import TrainError
from trainers.losses import k3
from trainers.microbatch import MicroBatch, items_to_microbatches
from trainers.model import PolicyModel, Tick
from trainers.objective import Scored, scored_to_linear_loss, scored_to_loss
from trainers.offline_losses import imitation_loss, offline_coefficients
from trainers.trust_region import backtrack
from trainers.workers import Workers

_SUMS = ("units", "clipped", "ratio_sum", "actions", "masked")


@dataclass(frozen=True, slots=True)
class AdapterRates:
    """What the optimiser of one adapter is given."""

    lr: float
    weight_decay: float


class AdapterLearner:
    """An adapter with its AdamW state, and two ways to learn: `improve` (clipped surrogate) and `imitate`."""

    def __init__(
        self, model: PolicyModel, adapter: str, rates: AdapterRates, options: TrainerOptions, workers: Workers
    ) -> None:
        self.model = model
        self.adapter = adapter
        self.rates = rates
        self.options = options
        self.workers = workers
        self.parameters = list(model.parameters(adapter).values())
        self.optimizer = self.fresh_optimizer()

    def fresh_optimizer(self) -> torch.optim.AdamW:
        """AdamW without any memory of earlier steps."""
        return torch.optim.AdamW(self.parameters, lr=self.rates.lr, weight_decay=self.rates.weight_decay)

    def set_rate(self, factor: float) -> float:
        """Sets the learning rate to `factor` times the adapter's own; returns it."""
        rate = self.rates.lr * factor
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def snapshot(self) -> list[Tensor]:
        """The adapter's weights as they are now, for `movement`."""
        return [p.detach().clone() for p in self.parameters]

    def movement(self, before: Sequence[Tensor]) -> dict[str, float]:
        """adapter_norm (Frobenius norm of its weight update) and adapter_moved (distance of its matrices since)."""
        squares = [float((p.detach() - old).square().sum()) for p, old in zip(self.parameters, before, strict=True)]
        return {"adapter_norm": self.model.adapter_norm(self.adapter), "adapter_moved": math.sqrt(sum(squares))}

    @torch.no_grad()
    def logprobs(self, items: Sequence[ActionItem], reference: bool = False, tick: Tick | None = None) -> list[Tensor]:
        """Log-probs of each action's tokens under the current policy, or under the base model; one tensor each."""
        scored: list[tuple[int, Tensor]] = []
        batches = self._batches(items)
        for batch in self.workers.mine(batches):
            logp_T = self.model.logprobs(None if reference else self.adapter, batch)
            scored += zip(batch.items, torch.split(logp_T, list(batch.lengths)), strict=True)
            if tick is not None:
                tick(len(batch.items))
        return self.workers.gather(scored, [len(item.sampled_ids) for item in items], self.model.device)

    def measure(
        self, data: AdapterRound, before: Sequence[Tensor], limit: float | None, phase: Callable[[], Tick]
    ) -> tuple[list[Tensor], dict[str, float]]:
        """Looks at the policy that the steps of a round have led to, and shortens them where it is beyond `limit`.

        Args:
            data: what the round was; one action at least.
            before: the adapter's `snapshot` at its start.
            limit: its part of `kl_limit`; None only looks.
            phase: what is told of the actions as they are scored, which is once for each try.

        Returns:
            Their log-probs under the policy that it is now, one tensor each; and kl_after (k3, mean per token, against
            the policy at the start), step_share (what is left of the step; 1 where nothing was shortened).
        """
        new_T: list[Tensor] = []

        def kl() -> float:
            new_T[:] = self.logprobs(data.items, tick=phase())
            return float(k3(torch.cat(new_T) - torch.cat(list(data.old_T))).mean())

        if limit is None:
            return new_T, {"kl_after": kl(), "step_share": 1.0}
        share, kl_after = backtrack(self.parameters, before, kl, limit)
        return new_T if share else list(data.old_T), {"kl_after": kl_after, "step_share": share}

    def improve(self, data: AdapterRound, generator: torch.Generator, tick: Tick) -> dict[str, Any]:
        """The adapter's update of one round: epochs x minibatches of the clipped surrogate.

        A minibatch's approximate KL is a mean of terms that are never negative, so it is known to be over `kl_stop` as
        soon as the micro-batches so far are over it. No backward pass follows, and gradients gathered for this
        minibatch are dropped; the rest of it is scored for its KL only, so that decision and figure are those of the
        whole minibatch, however it is cut up.

        Returns:
            approx_kl, clipfrac, ratio_mean, ratio_max (new against old policy), masked (share of the actions),
            grad_norm (mean before clipping), gradient_share (part of each reward in the gradient of the first
            minibatch, when there are several), steps, stopped_early. What no minibatch measured is None.
        """
        options = self.options
        sums = dict.fromkeys(_SUMS, 0.0)
        ratio_max, kl_sum, norm_sum, tokens, steps = -math.inf, 0.0, 0.0, 0, 0
        gradient_share: dict[str, float] | None = None
        stopped = False
        prepared = PreparedRound(data, options, self.model)
        for chosen in _minibatches(len(data.items), options.epochs, options.minibatches, generator):
            step_tokens = sum(len(data.items[i].sampled_ids) for i in chosen)
            if gradient_share is None and len(data.source_U) > 1:
                gradient_share = self._gradient_share(prepared, chosen)
            kl_of_step = 0.0
            self.optimizer.zero_grad()
            for batch in self._turns(self._batches(data.items, chosen)):
                with torch.set_grad_enabled(not stopped):  # after a stop only the minibatch's KL is still to be told
                    scored = None if batch is None else self._score(prepared, batch)
                kl = 0.0 if scored is None else float(k3(scored.new_T.detach() - scored.old_T).sum())
                kl_of_step += self.workers.add([kl])[0]
                if options.kl_stop is not None and kl_of_step > options.kl_stop * step_tokens:
                    stopped = True
                if scored is not None and not stopped:
                    loss, found = scored_to_loss(scored, options)
                    loss.backward()  # type: ignore[no-untyped-call]
                    ratio_max = max(ratio_max, found["ratio_max"])
                    for name in _SUMS:
                        sums[name] += found[name]
                    tick(int(found["actions"]))
            kl_sum += kl_of_step
            tokens += step_tokens
            if stopped:
                self.optimizer.zero_grad()
                break
            norm_sum += self._step()
            steps += 1
        units, clipped, ratio_sum, actions, masked = self.workers.add([sums[name] for name in _SUMS])
        return {
            "approx_kl": kl_sum / tokens if tokens else None,
            "clipfrac": clipped / units if units else None,
            "ratio_mean": ratio_sum / units if units else None,
            "ratio_max": self.workers.max(ratio_max) if units else None,
            "masked": masked / actions if actions else None,
            "grad_norm": norm_sum / steps if steps else None,
            "gradient_share": gradient_share,
            "steps": steps,
            "stopped_early": stopped,
        }

    def imitate(
        self,
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
            loss and grad_norm (means over the optimiser steps), coefficient_mean, steps.
        """
        options, offline = self.options, self.options.offline
        if offline.mode == "off" or not items:
            return {"loss": None, "grad_norm": None, "coefficient_mean": None, "steps": 0}
        device = self.model.device
        share_A = shares_A_of(items, episode_A, options, "token", device)
        advantage_A = torch.tensor(advantages, dtype=torch.float32, device=device)
        loss_sum = coefficient_sum = norm_sum = 0.0
        seen = steps = 0
        for chosen in _minibatches(len(items), offline.epochs, offline.minibatches, generator):
            parts = min(offline.minibatches, len(items))
            self.optimizer.zero_grad()
            for batch in self.workers.mine(self._batches(items, chosen)):
                row_T, rows = batch.row_T.to(device), list(batch.items)
                new_T = self.model.logprobs(self.adapter, batch)
                log_ratio_A = None
                if offline.needs_behaviour:
                    gap_T = new_T.detach() - behaviour_T_of(items, rows, device)
                    log_ratio_A = torch.zeros(len(rows), device=device).index_add(0, row_T, gap_T)
                coefficient_A = offline_coefficients(offline.mode, advantage_A[rows], log_ratio_A, offline)
                loss = imitation_loss(new_T, row_T, coefficient_A, parts * share_A[rows][row_T])
                loss.backward()  # type: ignore[no-untyped-call]
                loss_sum += float(loss.detach())
                coefficient_sum += float(coefficient_A.sum())
                tick(len(rows))
            norm_sum += self._step()
            seen += len(chosen)
            steps += 1
        loss_sum, coefficient_sum = self.workers.add([loss_sum, coefficient_sum])
        return {
            "loss": loss_sum / steps if steps else None,  # offline.epochs may be 0
            "grad_norm": norm_sum / steps if steps else None,
            "coefficient_mean": coefficient_sum / seen if seen else None,
            "steps": steps,
        }

    def _batches(self, items: Sequence[ActionItem], chosen: Sequence[int] | None = None) -> list[MicroBatch]:
        return items_to_microbatches(items, self.options.tokens_per_microbatch, chosen, self.model.rows_to_groups)

    def _turns(self, batches: Sequence[MicroBatch]) -> Iterator[MicroBatch | None]:
        """This process's micro-batches, in step with the others; None when it has none left and others do."""
        for first in range(0, len(batches), self.workers.count):
            mine = first + self.workers.rank
            yield batches[mine] if mine < len(batches) else None

    def _score(self, prepared: PreparedRound, batch: MicroBatch) -> Scored:
        """A micro-batch under the current policy."""
        entropy_T = None
        if self.options.entropy_coef > 0:
            new_T, entropy_T = self.model.logprobs_and_entropy(self.adapter, batch)
        else:
            new_T = self.model.logprobs(self.adapter, batch)
        return prepared.scored(batch, new_T, entropy_T)

    def _gradient_share(self, prepared: PreparedRound, chosen: Sequence[int]) -> dict[str, float] | None:
        """Norm of each reward's part of the gradient of a minibatch, as shares; None when there is no gradient."""
        totals = {name: [torch.zeros_like(p) for p in self.parameters] for name in prepared.data.source_U}
        batches = self._batches(prepared.data.items, chosen)
        for batch in self.workers.mine(batches):
            scored = self._score(prepared, batch)
            for name, total in totals.items():
                loss = scored_to_linear_loss(prepared.with_source(scored, batch, name), self.options)
                gradients = torch.autograd.grad(loss, self.parameters, retain_graph=True, allow_unused=True)
                for sum_so_far, gradient in zip(total, gradients, strict=True):
                    if gradient is not None:
                        sum_so_far += gradient
        norms = {}
        for name, total in totals.items():
            flat = self.workers.add_tensor(torch.cat([part.flatten() for part in total]))
            norms[name] = float(flat.norm())
        whole = sum(norms.values())
        return {name: norm / whole for name, norm in norms.items()} if whole > 0 else None

    def _step(self) -> float:
        self.workers.add_gradients(self.parameters)
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self.options.max_grad_norm))
        if not math.isfinite(norm):
            raise TrainError(
                f"adapter {self.adapter!r}: the gradient is not finite; lower trainer.lr or check the rewards"
            )
        self.optimizer.step()
        return norm


def _minibatches(count: int, epochs: int, minibatches: int, generator: torch.Generator) -> Iterator[list[int]]:
    """A fresh random partition of `count` actions for every epoch; no part is empty."""
    for _ in range(epochs):
        order = torch.randperm(count, generator=generator)
        for part in order.tensor_split(min(minibatches, count)) if count else ():
            yield part.tolist()
