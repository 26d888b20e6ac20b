"""Recorded actions and what the offline mode weighs them by to a changed adapter, for as long as it generalises.

Epochs over minibatches of a given number of actions. After each epoch two things are looked at: how likely the better
actions of tasks that are held out are by now, and how far the policy has moved on calls of its own. Once two
epochs in a row have not made them more likely none follows. An epoch that moves beyond the budget is shortened along
its own line until it is within, and none follows. What is kept are the weights of the epoch that made them likeliest,
or those of the start where none made them more likely.

Invariants: only that adapter changes; however often is imitated, no call of a held-out task was learned from before,
as the learner remembers those tasks; shares are parts of the whole of its actions, so no cut into minibatches changes
what an action counts. Decisions are taken on sums over all processes. It knows nothing of where advantages come from.

Shapes: lists are parallel to the items; _A tensors have one entry per action.
"""

# ruff: noqa: N803, N806, N815 (shape suffixes)
from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainers.batch import ActionItem
from trainers.common.spread import spread_rows
from trainers.objective.adapter_round import behaviour_T_of, shares_A_of
from trainers.objective.trust_region import backtrack
from trainers.offline.held_out import HeldOutFit, measure_held_out
from trainers.offline.losses import imitation_loss, offline_coefficients
from trainers.policies.adapter_learner import AdapterLearner
from trainers.scoring.logratios import k3
from trainers.scoring.microbatch import MicroBatch, random_minibatches
from trainers.scoring.model import Tick
from trainers.scoring.passes import scoring_passes

_HELD_SHARE = 8  # one task in so many is held out
_PATIENCE = 2  # epochs without better held-out actions before the phase ends
_LEAST_HELD = 4  # fewer held-out actions than this say nothing about when to stop
_PROBES = 32  # actions of the policy's own that the KL is measured on, at most

HELD_OUT, KL = "held-out likelihood", "kl"
DIGEST_LENGTH = 16
"""Of the digests of tasks in `AdapterLearner.imitated_tasks`, in characters."""


@dataclass(frozen=True, slots=True)
class Demonstrations:
    """What one adapter learns from offline. `own_items`: calls that its policy at the start sampled, good or bad."""

    items: Sequence[ActionItem]
    episode_A: Sequence[int]
    task_A: Sequence[str]  # equal for calls of one task
    advantages: Sequence[float]  # what the mode weighs by, one per action; see `offline_coefficients`
    own_items: Sequence[ActionItem] = ()
    kl_budget: float = math.inf  # nats a call that the adapter may move


@dataclass(frozen=True, slots=True)
class Imitated:
    """What came of an adapter's offline phase, and how its held-out actions fit it, by agent.

    figures: loss and grad_norm (means over minibatches), coefficient_mean, steps and epochs (that count), stopped_by
        ("held-out likelihood", "kl", or None, where every epoch was made and counts), held_out_loss and kl_after (nats
        a call; None where nothing measures them).
    """

    figures: dict[str, Any]
    held_out_before: Mapping[str, HeldOutFit]  # empty where none are held out
    held_out: Mapping[str, HeldOutFit]  # with the weights that are kept

    def held_out_figures(self, agent: str) -> dict[str, Any]:
        """held_out_actions, and held_out_nats and held_out_exact with theirs `_before`; None where there is none."""
        before, after = self.held_out_before.get(agent), self.held_out.get(agent)
        return {
            "held_out_actions": 0 if after is None else after.actions,
            "held_out_nats_before": None if before is None else before.nats,
            "held_out_nats": None if after is None else after.nats,
            "held_out_exact_before": None if before is None else before.exact,
            "held_out_exact": None if after is None else after.exact,
        }


def imitate(learner: AdapterLearner, data: Demonstrations, generator: torch.Generator, tick: Tick) -> Imitated:
    """Learns from recorded actions as `offline.mode` says, each weighted by its coefficient."""
    offline = learner.options.offline
    if offline.mode == "off" or not data.items:
        unknown = ("loss", "grad_norm", "coefficient_mean", "stopped_by", "held_out_loss", "kl_after")
        return Imitated({**dict.fromkeys(unknown), "steps": 0, "epochs": 0}, {}, {})
    phase = _Phase(learner, data)
    held_out_before = phase.held_fits()
    stopped_by: str | None = None
    best = _Best(epochs=0, held_loss=phase.held_loss(), weights=learner.snapshot(), kl_after=None)
    epoch = 0
    for epoch in range(1, offline.epochs + 1):
        start_weights = learner.snapshot()
        phase.run_epoch(generator, tick)
        kl_after, is_shortened = phase.shorten(start_weights)
        held_loss = phase.held_loss()
        if held_loss is None or best.held_loss is None or held_loss < best.held_loss:
            best = _Best(epochs=epoch, held_loss=held_loss, weights=learner.snapshot(), kl_after=kl_after)
        elif epoch - best.epochs >= _PATIENCE:
            stopped_by = HELD_OUT
            break
        if is_shortened:
            stopped_by = KL
            break
    if best.epochs < epoch and stopped_by is None:  # the epochs were all made, and the last of them is taken back
        stopped_by = HELD_OUT
    phase.go_back_to(best)
    fields: dict[str, Any] = {"epochs": best.epochs, "stopped_by": stopped_by}
    fields |= {"held_out_loss": best.held_loss, "kl_after": best.kl_after}
    return Imitated(phase.figures() | fields, held_out_before, phase.held_fits())


@dataclass(frozen=True, slots=True)
class _Best:
    """The adapter after the epoch that made held-out actions likeliest, or after the newest where none are held out."""

    epochs: int
    held_loss: float | None
    weights: Sequence[Tensor]
    kl_after: float | None


class _Phase:
    """One adapter's offline phase: its held-out actions, its probes, and sums over its minibatches."""

    def __init__(self, learner: AdapterLearner, data: Demonstrations) -> None:
        self.learner, self.data = learner, data
        self.device = learner.model.device
        self.advantage_A = torch.tensor(data.advantages, dtype=torch.float32, device=self.device)
        self.share_A = shares_A_of(data.items, data.episode_A, learner.options, granularity="token", device=self.device)
        held = _hold_out(data.task_A, learner.imitated_tasks)
        self.held = held if any(self._good_coefficients(held) > 0) else []
        self.fitted = sorted(set(range(len(data.items))) - set(self.held))
        learner.imitated_tasks |= {_task_digest(data.task_A[i]) for i in self.fitted}
        self.minibatches = max(1, round(len(self.fitted) / learner.options.offline.minibatch_actions))
        kinds = [(item.agent, item.turn) for item in data.own_items]
        self.probes = [data.own_items[k] for k in spread_rows(kinds, _PROBES)]
        self.start_T = learner.logprobs(self.probes) if self.probes else []
        self.loss_sum = self.coefficient_sum = 0.0
        self.action_count = self.step_count = 0  # of all epochs, the one that was undone included
        self.norms: list[float] = []  # of the epochs that count

    def run_epoch(self, generator: torch.Generator, tick: Tick) -> None:
        """One pass over the fitted actions."""
        for chosen in random_minibatches(len(self.fitted), 1, self.minibatches, generator=generator):
            self.learner.optimizer.zero_grad()
            rows = [self.fitted[i] for i in chosen]
            for batch in self.learner.workers.turns(self.learner.microbatches(self.data.items, rows)):
                if batch is None:
                    self.learner.model.idle_pass(self.learner.adapter, backwards=1)
                    continue
                loss, coefficient_A = self._loss(batch, min(self.minibatches, len(self.fitted)))
                loss.backward()  # type: ignore[no-untyped-call]
                self.loss_sum += float(loss.detach())
                self.coefficient_sum += float(coefficient_A.sum())
                tick(len(batch.items))
            self.norms.append(self.learner.step())
            self.action_count += len(rows)
            self.step_count += 1

    @torch.no_grad()
    def held_loss(self) -> float | None:
        """How unlikely the better of the held-out actions are by now; None where none are held out.

        The loss of the mode over actions of an advantage above 0. What it pushes down grows without bound as it is
        pushed; and what it imitates a little although it went badly (awr), of which there may be far more, is not what
        the phase is for. With the importance weights of the start, so that two epochs are compared on the same terms.
        """
        if not self.held:
            return None
        total = 0.0
        batches = self.learner.microbatches(self.data.items, self.held)
        for batch in scoring_passes(self.learner.model, self.learner.workers, batches):
            row_T, rows = batch.row_T.to(self.device), list(batch.items)
            new_T = self.learner.model.logprobs(self.learner.adapter, batch)
            good_A = self._good_coefficients(rows)
            total += float(imitation_loss(new_T, row_T, good_A, share_T=self.share_A[rows][row_T]))
        return self.learner.workers.add([total])[0]

    def held_fits(self) -> dict[str, HeldOutFit]:
        """How the held-out actions fit the adapter as it is, all alike, whether or not the mode would imitate them.

        Unlike `held_loss` it is in the same units whatever the mode and the traces, so that it can be predicted.
        """
        return measure_held_out(self.learner, [self.data.items[i] for i in self.held])

    def shorten(self, start_weights: Sequence[Tensor]) -> tuple[float | None, bool]:
        """Takes back as much of the epoch that began at these weights as is beyond the budget.

        Returns:
            How far the adapter has moved in all, None without calls of its own; and whether any of it was taken back.
        """
        if not self.probes:
            return None, False
        result = backtrack(self.learner.parameters, start_weights, self.kl_of_a_call, limit=self.data.kl_budget)
        return result.kl if result.share else self.kl_of_a_call(), result.share < 1

    def kl_of_a_call(self) -> float:
        """k3 of the policy at the start to the one it is, summed over a call. There must be probes."""
        new_T, start_T = torch.cat(self.learner.logprobs(self.probes)), torch.cat(self.start_T)
        return float(k3(new_T - start_T).sum()) / len(self.probes)

    def figures(self) -> dict[str, Any]:
        """Means over what was run."""
        loss_sum, coefficient_sum = self.learner.workers.add([self.loss_sum, self.coefficient_sum])
        norms = self.norms
        return {
            "loss": loss_sum / self.step_count if self.step_count else None,  # offline.epochs may be 0
            "grad_norm": math.fsum(norms) / len(norms) if norms else None,
            "coefficient_mean": coefficient_sum / self.action_count if self.action_count else None,
            "steps": sum(norm > 0 for norm in norms),
        }

    def go_back_to(self, best: _Best) -> None:
        """Puts the weights of an earlier epoch back; the steps after it do not count."""
        with torch.no_grad():
            for parameter, old in zip(self.learner.parameters, best.weights, strict=True):
                parameter.copy_(old)
        del self.norms[best.epochs * min(self.minibatches, len(self.fitted)) :]

    def _loss(self, batch: MicroBatch, parts: int) -> tuple[Tensor, Tensor]:
        row_T, rows = batch.row_T.to(self.device), list(batch.items)
        new_T = self.learner.model.logprobs(self.learner.adapter, batch)
        log_ratio: Tensor | float = 0.0
        if self.learner.options.offline.needs_behaviour:
            gap_T = new_T.detach() - behaviour_T_of(self.data.items, rows, self.device)
            log_ratio = torch.zeros(len(rows), device=self.device).index_add(0, row_T, gap_T)
        coefficient_A = self._coefficients(rows, log_ratio)
        return imitation_loss(new_T, row_T, coefficient_A, share_T=parts * self.share_A[rows][row_T]), coefficient_A

    def _good_coefficients(self, rows: Sequence[int]) -> Tensor:
        """Those of the start, and 0 for actions that were no better than expected; shape [A of them]."""
        coefficient_A = self._coefficients(rows, log_ratio=0.0)
        if self.learner.options.offline.mode == "filtered":  # all of them were chosen
            return coefficient_A
        return coefficient_A.where(self.advantage_A[list(rows)] > 0, 0.0)

    def _coefficients(self, rows: Sequence[int], log_ratio: Tensor | float) -> Tensor:
        """What the mode weighs some actions by, at these log-ratios; shape [A of them]."""
        offline = self.learner.options.offline
        assert offline.mode != "off"
        advantage_A = self.advantage_A[list(rows)]
        log_ratio_A = log_ratio + torch.zeros_like(advantage_A) if offline.needs_behaviour else None
        return offline_coefficients(offline.mode, advantage_A, log_ratio_A, options=offline)


def _hold_out(task_A: Sequence[str], imitated_tasks: Set[str]) -> list[int]:
    """Positions of the actions of one task in eight, of those that were never learned from the lowest by digest.

    So most are the same each time. None where they would be too few to say anything.

    Args:
        task_A: what each task says; its id where it says nothing.
    """
    digests = {task: _task_digest(task) for task in set(task_A)}
    fresh_tasks = sorted(
        (task for task, digest in digests.items() if not {digest, _task_digest(f"id {task}")} & imitated_tasks),
        key=digests.__getitem__,
    )
    held_tasks = set(fresh_tasks[: len(digests) // _HELD_SHARE])
    held = [i for i, task in enumerate(task_A) if task in held_tasks]
    return held if len(held) >= _LEAST_HELD else []


def _task_digest(task: str) -> str:
    return hashlib.sha256(task.encode("utf-8", "surrogatepass")).hexdigest()[:DIGEST_LENGTH]
