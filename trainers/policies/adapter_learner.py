"""An adapter on its base model, with its optimiser: the log-probs that it gives, and the steps that change it.

Invariant: only this adapter changes. Cutting actions into micro-batches, or over processes, changes no result: sums
over processes are taken before every step. It knows nothing of losses, advantages or other adapters.

Shapes: lists are parallel to the items; _T tensors have one entry per decided token.
"""

# ruff: noqa: N806, N815 (shape suffixes)
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainers.batch import ActionItem
from trainers.checks.reality import Fingerprint, tensors_to_fingerprint
from trainers.common.workers import Workers
from trainers.config import TrainerOptions
from trainers.errors import TrainError
from trainers.scoring.microbatch import MicroBatch, items_to_microbatches
from trainers.scoring.model import PolicyModel, Tick
from trainers.scoring.passes import scoring_passes

_Calls = tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], float], ...]
"""Of each: prompt, sampled ids, forced ones among them, temperature."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """What was asked last of one process alone, and the log-probs that it was told."""

    calls: _Calls
    weights: Fingerprint | None  # of the adapter; None for the base model
    logp_T: tuple[Tensor, ...]


class AdapterLearner:
    """An adapter with its AdamW state: what `objective.improve` and `offline.imitate` change."""

    def __init__(
        self, model: PolicyModel, adapter: str, lr: float, *, options: TrainerOptions, workers: Workers
    ) -> None:
        self.model = model
        self.adapter = adapter
        self.lr = lr
        self.options = options
        self.workers = workers
        self.parameters = list(model.parameters(adapter).values())
        self.optimizer = self.fresh_optimizer()
        self.imitated_tasks: set[str] = set()  # digests of those that imitation, or another training, learned from
        self._latest: _Answer | None = None
        self.kl_rate = 1.0  # what `objective.kl_target` has made of `lr`, as a factor

    def fresh_optimizer(self) -> torch.optim.AdamW:
        """AdamW without any memory of earlier steps."""
        return torch.optim.AdamW(self.parameters, lr=self.lr, weight_decay=self.options.experimental.weight_decay)

    def set_rate(self, factor: float) -> None:
        """Sets the learning rate to `factor` times the adapter's own."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * factor

    def scale_rate(self, factor: float) -> float:
        """Multiplies the learning rate that is set; returns it."""
        for group in self.optimizer.param_groups:
            group["lr"] *= factor
        return float(self.optimizer.param_groups[0]["lr"])

    def snapshot(self) -> list[Tensor]:
        """The adapter's weights as they are now, for `movement`."""
        return [p.detach().clone() for p in self.parameters]

    def movement(self, start_weights: Sequence[Tensor]) -> dict[str, float]:
        """adapter_norm (Frobenius norm of its weight update) and adapter_moved (distance of its matrices since)."""
        squares = [
            float((p.detach() - old).square().sum()) for p, old in zip(self.parameters, start_weights, strict=True)
        ]
        return {"adapter_norm": self.model.adapter_norm(self.adapter), "adapter_moved": math.sqrt(sum(squares))}

    @torch.no_grad()
    def logprobs(
        self,
        items: Sequence[ActionItem],
        reference: bool = False,
        tick: Tick | None = None,
        *,
        is_shared: bool = True,
    ) -> list[Tensor]:
        """Log-probs of each action's decided tokens under the current policy, or the base model's; one tensor each.

        The same calls by the same weights as the time before are not scored again: whether the server answers with the
        newest adapter and whether engine and trainer agree is mostly told of the same few calls.

        Args:
            is_shared: all processes score them together; else this one does it alone, and meets nobody, unless it is
                for the layers of a sharded base: then the others must make as many passes (`PolicyModel.idle_pass`).
        """
        if self.workers.count > 1:  # they all must meet, and one may have scored by itself what the others did not
            workers = self.workers if is_shared else Workers.alone()
            return self._score(items, reference, tick, workers=workers)
        calls = tuple((item.prompt_ids, item.sampled_ids, item.forced, item.temperature) for item in items)
        weights = None if reference else tensors_to_fingerprint(self.model.parameters(self.adapter))
        latest = self._latest
        if latest is None or latest.weights != weights or latest.calls != calls:
            logp_T = self._score(items, reference, tick, workers=self.workers)
            latest = self._latest = _Answer(calls, weights, tuple(logp_T))
        elif tick is not None:
            tick(len(items))
        return list(latest.logp_T)

    def _score(
        self, items: Sequence[ActionItem], reference: bool, tick: Tick | None, *, workers: Workers
    ) -> list[Tensor]:
        scored: list[tuple[int, Tensor]] = []
        batches = self.microbatches(items, shares=workers.count)
        for batch in scoring_passes(self.model, workers, batches):
            logp_T = self.model.logprobs(None if reference else self.adapter, batch)
            scored += zip(batch.items, torch.split(logp_T, list(batch.lengths)), strict=True)
            if tick is not None:
                tick(len(batch.items))
        return workers.gather(scored, [len(item.decided) for item in items], self.model.device)

    def microbatches(
        self, items: Sequence[ActionItem], chosen: Sequence[int] | None = None, *, shares: int | None = None
    ) -> list[MicroBatch]:
        """The actions, or some of them by position, cut for one forward and backward pass each.

        Args:
            shares: processes that they are dealt out to; None: all.
        """
        return items_to_microbatches(
            items,
            self.options.system.tokens_per_microbatch,
            chosen,
            rows_to_groups=self.model.rows_to_groups,
            shares=self.workers.count if shares is None else shares,
        )

    def step(self) -> float:
        """One step of AdamW along the gradients of all processes; returns their norm before clipping.

        No step where that is 0: AdamW would go on along the moments of earlier steps, which nothing here asked for.

        Raises:
            TrainError: the gradient is not finite.
        """
        self.workers.add_gradients(self.parameters)
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self.options.optimizer.max_grad_norm))
        if not math.isfinite(norm):
            raise TrainError(
                f"adapter {self.adapter!r}: the gradient is not finite; lower train.trainer.optimizer.lr or check the "
                "rewards"
            )
        if norm > 0:
            self.optimizer.step()
        return norm
