"""A round of episodes to values, returns and advantages, one per action: who earned the team reward.

Invariant: the base model runs once per distinct token sequence between two calls of `forget`; arithmetic on rewards is
float64. It knows nothing of log-probs, adapters or optimisers.

Shapes: _A one entry per action of the round, episode after episode, each in topological order.
"""

# ruff: noqa: N803, N806 (shape suffixes)
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainers.advantages import Floats, gae_along_dependencies, group_advantages
from trainers.batch import Round
from trainers.config import TrainerOptions
from trainers.critic import Critic
from trainers.losses import explained_variance
from trainers.model import PolicyModel, Tick


class Credit:
    """The critic with the features that it reads and the estimators that turn its values into advantages.

    Args:
        tick: (phase, total) to a function that is told how many sequences each pass took.
    """

    def __init__(
        self, options: TrainerOptions, model: PolicyModel, critic: Critic, tick: Callable[[str, int], Tick]
    ) -> None:
        self.options = options
        self.model = model
        self.critic = critic
        self._tick = tick
        self._features: dict[tuple[int, ...], Tensor] = {}

    def forget(self) -> None:
        """Frees the cached features; the next round has other observations."""
        self._features.clear()

    def warm_up(self, data: Round) -> dict[str, Any]:
        """Critic pre-training on the returns of terminated episodes, see `Critic.warm_up`."""
        if not data.items:
            return {"epochs": 0, "explained_variance": None, "value_loss": None}
        returns_A = self._returns(data, np.zeros(len(data.items)))
        return self.critic.warm_up(
            self._observations(data), self._agents(data), _floats(returns_A), torch.tensor(data.episode_A)
        )

    def replay_advantages(self, data: Round) -> Floats:
        """Return minus value of each stored action, shape [A]."""
        return self._returns(data, self._bootstrap(data)) - self._values(data)

    def advantages(self, data: Round) -> tuple[Floats, Callable[[], dict[str, Any]]]:
        """Advantages before normalisation, shape [A], and what fits the critic to the round once agents are updated.

        The critic's targets are A + V. Its explained variance is measured before the fit and against returns, which
        are not made of V as the targets are; a group estimator has no use for a critic and leaves it alone.
        """
        if self.options.estimator != "gae":
            per_episode = group_advantages(
                [e.reward for e in data.episodes], [e.task_id for e in data.episodes], self.options.estimator
            )
            return per_episode[list(data.episode_A)], lambda: {"value_loss": None, "explained_variance": None}
        values_A, bootstrap_A = self._values(data), self._bootstrap(data)
        advantages_A = self._gae(data, values_A, bootstrap_A, self.options.gae_lambda)

        def fit() -> dict[str, Any]:
            explained = explained_variance(_floats(values_A), _floats(self._returns(data, bootstrap_A)))
            loss = self.critic.fit(self._observations(data), self._agents(data), _floats(advantages_A + values_A))
            return {"value_loss": loss, "explained_variance": explained}

        return advantages_A, fit

    def _gae(self, data: Round, values_A: Floats, bootstrap_A: Floats, lam: float) -> Floats:
        ends = np.cumsum([len(e.actions) for e in data.episodes])[:-1]
        parts = [
            gae_along_dependencies(
                values,
                [0.0 if after else episode.reward for after in episode.successors],
                episode.successors,
                bootstrap,
                self.options.gamma,
                lam,
            )
            for episode, values, bootstrap in zip(
                data.episodes, np.split(values_A, ends), np.split(bootstrap_A, ends), strict=True
            )
        ]
        return np.concatenate(parts)

    def _returns(self, data: Round, bootstrap_A: Floats) -> Floats:
        """Discounted team reward after each action: GAE with lambda = 1 and no baseline."""
        return self._gae(data, np.zeros(len(data.items)), bootstrap_A, 1.0)

    def _values(self, data: Round) -> Floats:
        return np.asarray(self.critic.values(self._observations(data), self._agents(data)), dtype=np.float64)

    def _bootstrap(self, data: Round) -> Floats:
        """V after the last actions of truncated episodes (at prompt and completion), 0 elsewhere."""
        result: Floats = np.zeros(len(data.items))
        last = [not after for episode in data.episodes for after in episode.successors]
        cut = [i for i in range(len(last)) if last[i] and data.episodes[data.episode_A[i]].truncated]
        if cut:
            features_AF = self._features_of([data.items[i].prompt_ids + data.items[i].sampled_ids for i in cut])
            result[cut] = self.critic.values(features_AF, self._agents(data)[cut]).numpy()
        return result

    def _observations(self, data: Round) -> Tensor:
        return self._features_of([item.prompt_ids for item in data.items])

    def _features_of(self, sequences: Sequence[tuple[int, ...]]) -> Tensor:
        """Features, each distinct sequence once: the samples of one task share their first prompts."""
        missing = [s for s in dict.fromkeys(sequences) if s not in self._features]
        if missing:
            rows = self.model.features(
                missing, self.options.tokens_per_microbatch, self._tick("features", len(missing))
            )
            self._features.update(zip(missing, rows, strict=True))
        return torch.stack([self._features[s] for s in sequences])

    def _agents(self, data: Round) -> Tensor:
        index = {agent: i for i, agent in enumerate(self.model.agents)}
        return torch.tensor([index[item.agent] for item in data.items])


def _floats(values: Floats) -> Tensor:
    return torch.from_numpy(values).float()
