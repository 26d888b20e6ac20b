"""Estimators on tables worked by hand: lists of agents, turns and runs in the place of a round."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from trainers.advantages.estimator import estimators
from trainers.advantages.group_baselines import Baseline
from trainers.advantages.rae import Rae
from trainers.advantages.settings import EstimatorSettings


def table_round(
    tasks: Sequence[str], agents: Sequence[str], turns: Sequence[int], runs: Sequence[Hashable] | None = None
) -> Any:
    """What estimators read of a round: one entry per action; without `runs` each action is an episode of its own."""
    episode_of = range(len(tasks)) if runs is None else [list(dict.fromkeys(runs)).index(run) for run in runs]
    episodes = {e: SimpleNamespace(task_id=task) for e, task in zip(episode_of, tasks, strict=True)}
    items = [SimpleNamespace(agent=agent, turn=turn) for agent, turn in zip(agents, turns, strict=True)]
    numbers = tuple(episode_of)
    return SimpleNamespace(
        episodes=episodes,
        episode_A=numbers,
        tree_A=numbers,
        items=items,
        forest=None,
        is_replayed=lambda _row: False,
    )


def group_keys(estimator: str, tasks: Sequence[str], agents: Sequence[str], turns: Sequence[int]) -> Any:
    """The group of each action, as an estimator forms them."""
    return estimators()[estimator](EstimatorSettings()).groups(table_round(tasks, agents, turns))


class RunningBaselines:
    """RAE on a table."""

    def __init__(self, decay: float, state: Mapping[str, float] | None = None) -> None:
        self.rae = Rae(EstimatorSettings(rae_decay=decay))
        self.rae.commit(state or {})

    @property
    def state(self) -> dict[str, float]:
        return self.rae.state

    def commit(self, state: Mapping[str, float]) -> None:
        self.rae.commit(state)

    def baselines_of(self, returns: Any, agents: Sequence[str], runs: Sequence[Hashable]) -> tuple[Baseline, Any]:
        data = table_round(["t"] * len(agents), agents, [0] * len(agents), runs)
        return self.rae.baseline_and_state(np.asarray(returns, dtype=np.float64), data)
