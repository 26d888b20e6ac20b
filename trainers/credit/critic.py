"""Rollout observations to values: V(o) as a small MLP on frozen features of the base model.

Input is the base model's last hidden state where the decision is taken (paper, section 4.2.1): at the last prompt
token for an action, before each sampled token for tokens; and which of the agents that share the critic acts.
Features are standardised per dimension with the statistics of the first episodes seen, then kept: hidden states have
a large part in common to all prompts, which a LayerNorm would leave in, and the small rest is what tells tasks
apart. Targets are fitted in a unit of their own, the largest less the smallest of the first that differ (or of later
ones that lie twice as far apart), so that no rate hangs on the unit that rewards are counted in. Before any fit V = 0.
Invariant: float32 on the CPU, own generator, no gradient ever reaches the base model. It knows nothing of tokens,
adapters or dependencies.

Shapes, for N observations: features_NF [N, F]; agent_N, targets_N, episode_N and held_N [N].
"""

# ruff: noqa: N803, N806 (shape suffixes)
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainers.advantages.arrays import range_of_most
from trainers.config import CriticOptions, ExperimentalOptions
from trainers.credit.value_loss import explained_variance, value_loss

_BATCH = 64  # observations per optimiser step, at least
_STEPS = 64  # optimiser steps per pass, at most: neighbouring tokens say much the same, so more would only cost time
_CHUNK = 4096  # observations per forward pass without gradient; bounds memory
_LIMIT = 5.0  # standard deviations; keeps unusual observations (an episode cut short) within what was fitted
_PATIENCE = 5  # epochs without a better held-out score before warm-up stops
_HELD_OUT = 5  # one episode in this many
_WIDER = 2.0  # targets that lie so many times as far apart as the unit have another one


class Critic:
    """One value function, for one agent or several.

    Args:
        width: F, size of a feature vector.
        agents: number of agents that share it, whose index is one-hot beside the features.
        experimental: the loss of a value, which is fixed for most.
        seed: of the weights and of the order of minibatches.
    """

    def __init__(
        self, width: int, agents: int, options: CriticOptions, *, experimental: ExperimentalOptions, seed: int
    ) -> None:
        self.agents = agents
        self.options, self._experimental = options, experimental
        self.generator = torch.Generator().manual_seed(seed)
        bound = (width + agents) ** -0.5
        drawn = torch.empty(options.hidden, width + agents).uniform_(-bound, bound, generator=self.generator)
        self.parameters = {  # the output starts at zero, so that V starts as its bias
            "hidden_weight": drawn.requires_grad_(),
            "hidden_bias": torch.zeros(options.hidden, requires_grad=True),
            "output_weight": torch.zeros(1, options.hidden, requires_grad=True),
            "output_bias": torch.zeros(1, requires_grad=True),
        }
        self.statistics: dict[str, Tensor] = {}  # "mean" and "scale", shape [F], from the first fit; "unit", of targets
        self.optimizer = self._fresh_optimizer()

    @torch.no_grad()
    def values(self, features_NF: Tensor, agent_N: Tensor) -> Tensor:
        """V of each observation, shape [N]; 0 before the first fit."""
        if not self.statistics:
            return torch.zeros(len(features_NF))
        return self._unit * self._scaled_values(features_NF, agent_N)

    @torch.no_grad()
    def _scaled_values(self, features_NF: Tensor, agent_N: Tensor) -> Tensor:
        """V in the critic's unit."""
        chunks = zip(torch.split(features_NF, _CHUNK), torch.split(agent_N, _CHUNK), strict=True)
        return torch.cat([self._forward(features_CF, agent_C) for features_CF, agent_C in chunks])

    def fit(self, features_NF: Tensor, agent_N: Tensor, targets_N: Tensor) -> float | None:
        """Some passes over one round's observations and their targets; the mean value loss of the last pass.

        With `critic_clip`, an observation whose value has moved further than that towards its target in this call no
        longer pulls (PPO's clipped value loss); what the others pull on the shared weights may still move it.
        """
        self._first_statistics(features_NF)
        self._find_unit(targets_N)
        old_N = self._scaled_values(features_NF, agent_N)
        scaled_N, chosen_M = targets_N / self._unit, torch.arange(len(targets_N))
        loss = None
        for _ in range(self.options.epochs):
            loss = self._epoch(features_NF, agent_N, scaled_N, chosen_M=chosen_M, old_N=old_N)
        return None if loss is None else loss * self._unit**2

    def held_out(self, episode_N: Tensor) -> Tensor:
        """Which observations `warm_up` is to be judged on: those of a random fifth of the episodes. Bool [N]."""
        episodes = torch.unique(episode_N)
        shuffled = episodes[torch.randperm(len(episodes), generator=self.generator)]
        return torch.isin(episode_N, shuffled[: len(episodes) // _HELD_OUT])

    def warm_up(self, features_NF: Tensor, agent_N: Tensor, targets_N: Tensor, held_N: Tensor) -> dict[str, Any]:
        """Pre-training on Monte-Carlo returns of stored episodes (VAPO's value pre-training).

        The weights with the best explained variance on what is held out win, and training stops when it has not
        risen for five passes. V starts as the mean return; where nothing is held out, or all of it has the same
        return, it stays that, since nothing could show that more is not over-fitting.

        Args:
            held_N: the observations to judge by, whole episodes, see `held_out`. The others are fitted.

        Returns:
            epochs (run), explained_variance (held out; None when undefined), value_loss (held out, or None).
        """
        fitted_M, held_M = torch.nonzero(~held_N).squeeze(1), torch.nonzero(held_N).squeeze(1)
        self._first_statistics(features_NF[fitted_M])
        self._find_unit(targets_N[fitted_M])
        scaled_N = targets_N / self._unit
        held = features_NF[held_M], agent_N[held_M], scaled_N[held_M]
        with torch.no_grad():
            self.parameters["output_weight"].zero_()
            self.parameters["output_bias"].fill_(float(scaled_N[fitted_M].mean()))
        best = self._score(*held)
        best_weights = {name: p.detach().clone() for name, p in self.parameters.items()}
        best_epoch = epoch = 0
        while best is not None and epoch < self.options.warmup_epochs and epoch - best_epoch < _PATIENCE:
            epoch += 1
            self._epoch(features_NF, agent_N, scaled_N, chosen_M=fitted_M, old_N=None)
            score = self._score(*held)
            if score is not None and score > best:
                best, best_epoch = score, epoch
                best_weights = {name: p.detach().clone() for name, p in self.parameters.items()}
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(best_weights[name])
        self.optimizer = self._fresh_optimizer()  # its moments belong to the weights that were given up
        held_loss = float(self._loss(self._scaled_values(*held[:2]), held[2])) * self._unit**2 if len(held_M) else None
        return {"epochs": epoch, "explained_variance": best, "value_loss": held_loss}

    def _epoch(
        self, features_NF: Tensor, agent_N: Tensor, targets_N: Tensor, chosen_M: Tensor, old_N: Tensor | None
    ) -> float:
        """One pass over the chosen observations, targets in the critic's unit; the mean loss on the way."""
        total = 0.0
        shuffled_M = chosen_M[torch.randperm(len(chosen_M), generator=self.generator)]
        for rows in torch.split(shuffled_M, max(_BATCH, -(-len(chosen_M) // _STEPS))):
            values_B = self._forward(features_NF[rows], agent_N[rows])
            loss = self._loss(values_B, targets_N[rows], None if old_N is None else old_N[rows])
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            total += float(loss.detach()) * len(rows)
        return total / len(chosen_M)

    def _loss(self, values_B: Tensor, targets_B: Tensor, old_B: Tensor | None = None) -> Tensor:
        kind, delta = self._experimental.critic_loss, self._experimental.critic_huber_delta
        clip = None if old_B is None else self._experimental.critic_clip
        return value_loss(values_B, targets_B, kind, delta=delta, old_N=None if clip is None else old_B, clip=clip)

    def _score(self, features_NF: Tensor, agent_N: Tensor, targets_N: Tensor) -> float | None:
        return explained_variance(self._scaled_values(features_NF, agent_N), targets_N)

    def _forward(self, features_NF: Tensor, agent_N: Tensor) -> Tensor:
        linear = torch.nn.functional.linear
        feature_weight_KF, agent_weight_KG = self.parameters["hidden_weight"].tensor_split(
            [features_NF.shape[1]], dim=1
        )
        hidden_NK = linear(self._standardise(features_NF), feature_weight_KF, self.parameters["hidden_bias"])
        hidden_NK = (hidden_NK + agent_weight_KG.T[agent_N]).tanh()  # as if a one-hot stood beside the features
        return linear(hidden_NK, self.parameters["output_weight"], self.parameters["output_bias"]).squeeze(1)

    def _first_statistics(self, features_NF: Tensor) -> None:
        if not self.statistics:
            scale_F = features_NF.std(dim=0, correction=0)
            # a dimension that never varied says nothing; dividing by almost zero would make noise of it
            self.statistics = {"mean": features_NF.mean(dim=0), "scale": scale_F.where(scale_F > 1e-4, 1.0)}

    @property
    def _unit(self) -> float:
        return float(self.statistics["unit"]) if "unit" in self.statistics else 1.0

    def _find_unit(self, targets_N: Tensor) -> None:
        """The unit of these targets, unless the one so far fits; values stay what they were."""
        spread, unit = targets_N.new_tensor(range_of_most(targets_N.double().cpu().numpy())), self._unit
        if spread > (_WIDER * unit if "unit" in self.statistics else 0):
            self.statistics["unit"] = spread
            with torch.no_grad():
                for name in ("output_weight", "output_bias"):
                    self.parameters[name].mul_(unit / spread)

    def _standardise(self, features_NF: Tensor) -> Tensor:
        # in place after the first operation: large intermediates cost more than the matrix product
        return (features_NF - self.statistics["mean"]).div_(self.statistics["scale"]).clamp_(-_LIMIT, _LIMIT)

    def _fresh_optimizer(self) -> torch.optim.Adam:
        return torch.optim.Adam(list(self.parameters.values()), lr=self.options.lr)
