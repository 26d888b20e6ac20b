"""Rollout observations to values: V(o) as a small MLP on frozen features of the base model.

Input is the base model's last hidden state at the last prompt token (paper, section 4.2.1) and which agent acts.
Features are standardised per dimension with the statistics of the first episodes seen, then kept: hidden states have
a large part in common to all prompts, which a LayerNorm would leave in, and the small rest is what tells tasks
apart. Before any fit V = 0. Invariant: float32 on the CPU, own generator, no gradient ever reaches the base model.
It knows nothing of tokens, adapters or dependencies.

Shapes: features_AF [A, F], agent_A, targets_A and episode_A [A].
"""

# ruff: noqa: N803, N806 (shape suffixes)
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainers.config import CriticOptions
from trainers.losses import explained_variance, value_loss

_BATCH = 64  # actions per optimiser step
_LIMIT = 5.0  # standard deviations; keeps unusual observations (an episode cut short) within what was fitted
_PATIENCE = 5  # epochs without a better held-out score before warm-up stops
_HELD_OUT = 5  # one episode in this many


class Critic:
    """One value function for all agents.

    Args:
        width: F, size of a feature vector.
        agents: number of agents, whose index is one-hot beside the features.
        seed: of the weights and of the order of minibatches.
    """

    def __init__(self, width: int, agents: int, options: CriticOptions, seed: int) -> None:
        self.agents = agents
        self.options = options
        self.generator = torch.Generator().manual_seed(seed)
        bound = (width + agents) ** -0.5
        drawn = torch.empty(options.hidden, width + agents).uniform_(-bound, bound, generator=self.generator)
        self.parameters = {  # the output starts at zero, so that V starts as its bias
            "hidden_weight": drawn.requires_grad_(),
            "hidden_bias": torch.zeros(options.hidden, requires_grad=True),
            "output_weight": torch.zeros(1, options.hidden, requires_grad=True),
            "output_bias": torch.zeros(1, requires_grad=True),
        }
        self.statistics: dict[str, Tensor] = {}  # "mean" and "scale", shape [F], from the first fit
        self.optimizer = self._fresh_optimizer()

    @torch.no_grad()
    def values(self, features_AF: Tensor, agent_A: Tensor) -> Tensor:
        """V of each observation, shape [A]; 0 before the first fit."""
        if not self.statistics:
            return torch.zeros(len(features_AF))
        return self._forward(self._standardise(features_AF, agent_A))

    def fit(self, features_AF: Tensor, agent_A: Tensor, targets_A: Tensor) -> float | None:
        """Some passes over one round's observations and their returns; the mean Huber loss of the last pass."""
        self._first_statistics(features_AF)
        inputs_AI = self._standardise(features_AF, agent_A)
        loss = None
        for _ in range(self.options.epochs):
            loss = self._epoch(inputs_AI, targets_A)
        return loss

    def warm_up(self, features_AF: Tensor, agent_A: Tensor, targets_A: Tensor, episode_A: Tensor) -> dict[str, Any]:
        """Pre-training on Monte-Carlo returns of stored episodes (VAPO's value pre-training).

        A fifth of the episodes is held out; the weights with the best explained variance on it win, and training
        stops when it has not risen for five passes. V starts as the mean return; without enough episodes to hold
        one out, or when those held out all have the same return, it stays that, since nothing could show that more
        is not over-fitting.

        Returns:
            epochs (run), explained_variance (held out; None when undefined), value_loss (held out, or None).
        """
        episodes = torch.unique(episode_A)
        shuffled = episodes[torch.randperm(len(episodes), generator=self.generator)]
        held_A = torch.isin(episode_A, shuffled[: len(episodes) // _HELD_OUT])
        self._first_statistics(features_AF[~held_A])
        inputs_AI = self._standardise(features_AF, agent_A)
        with torch.no_grad():
            self.parameters["output_weight"].zero_()
            self.parameters["output_bias"].fill_(float(targets_A[~held_A].mean()))
        best = self._score(inputs_AI[held_A], targets_A[held_A])
        best_weights = {name: p.detach().clone() for name, p in self.parameters.items()}
        best_epoch = epoch = 0
        while best is not None and epoch < self.options.warmup_epochs and epoch - best_epoch < _PATIENCE:
            epoch += 1
            self._epoch(inputs_AI[~held_A], targets_A[~held_A])
            score = self._score(inputs_AI[held_A], targets_A[held_A])
            if score is not None and score > best:
                best, best_epoch = score, epoch
                best_weights = {name: p.detach().clone() for name, p in self.parameters.items()}
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(best_weights[name])
            held_loss = value_loss(self._forward(inputs_AI[held_A]), targets_A[held_A], self.options.huber_delta)
        self.optimizer = self._fresh_optimizer()  # its moments belong to the weights that were given up
        return {
            "epochs": epoch,
            "explained_variance": best,
            "value_loss": float(held_loss) if held_A.any() else None,
        }

    def _epoch(self, inputs_AI: Tensor, targets_A: Tensor) -> float:
        total = 0.0
        for rows in torch.split(torch.randperm(len(targets_A), generator=self.generator), _BATCH):
            loss = value_loss(self._forward(inputs_AI[rows]), targets_A[rows], self.options.huber_delta)
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            total += float(loss.detach()) * len(rows)
        return total / len(targets_A)

    @torch.no_grad()
    def _score(self, inputs_AI: Tensor, targets_A: Tensor) -> float | None:
        return explained_variance(self._forward(inputs_AI), targets_A)

    def _forward(self, inputs_AI: Tensor) -> Tensor:
        linear = torch.nn.functional.linear
        hidden_AK = linear(inputs_AI, self.parameters["hidden_weight"], self.parameters["hidden_bias"]).tanh()
        return linear(hidden_AK, self.parameters["output_weight"], self.parameters["output_bias"]).squeeze(1)

    def _first_statistics(self, features_AF: Tensor) -> None:
        if not self.statistics:
            scale_F = features_AF.std(dim=0, correction=0)
            # a dimension that never varied says nothing; dividing by almost zero would make noise of it
            self.statistics = {"mean": features_AF.mean(dim=0), "scale": scale_F.where(scale_F > 1e-4, 1.0)}

    def _standardise(self, features_AF: Tensor, agent_A: Tensor) -> Tensor:
        scaled_AF = (features_AF - self.statistics["mean"]) / self.statistics["scale"]
        one_hot = torch.nn.functional.one_hot(agent_A, self.agents).float()
        return torch.cat([scaled_AF.clamp(-_LIMIT, _LIMIT), one_hot], dim=1)

    def _fresh_optimizer(self) -> torch.optim.Adam:
        return torch.optim.Adam(list(self.parameters.values()), lr=self.options.lr)
