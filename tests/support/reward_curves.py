"""Invented training runs: how good each version truly is, and the rewards of the rounds that would be seen of it.

Independent of the product's model: rewards are right or wrong, tasks shift the log-odds, every round draws its tasks by
other weights, in groups of four samples, and the newest version is never played.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from marft_bridge.training.best_version import ScoredEpisode

RISING = ("levels off", "rises", "dips and rises")
FALLING = ("rises and falls", "breaks down")
FLAT = ("flat",)
TASKS, COLLECTED, SAMPLES = 60, 64, 4


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """`true_values[v]` is the mean reward of version v over all tasks; version 0 was collected, the last not played."""

    true_values: NDArray[np.float64]
    episodes: tuple[ScoredEpisode, ...]

    @property
    def newest(self) -> int:
        return len(self.true_values) - 1

    def regret(self, version: int) -> float:
        """How much better than this version the best of the trained ones is."""
        return float(self.true_values[1:].max() - self.true_values[version])

    def luckiest(self) -> int:
        """The version with the highest mean of its own round."""
        rewards: dict[int, list[float]] = {}
        for episode in self.episodes:
            assert episode.reward is not None
            rewards.setdefault(episode.version, []).append(episode.reward)
        return max(range(1, self.newest), key=lambda version: float(np.mean(rewards[version])))

    def until(self, rounds: int) -> tuple[ScoredEpisode, ...]:
        """What is seen after so many rounds."""
        return tuple(episode for episode in self.episodes if episode.version <= rounds)


def invent_run(shape: str, rounds: int, episodes_per_round: int, seed: int) -> TrainingRun:
    """One run; versions 0 and 1 are equally good."""
    rng = np.random.default_rng([seed, rounds])
    levels = _curve(shape, rounds, rng).clip(0.03, 0.97)
    log_odds = 1.25 * np.log(levels / (1 - levels))
    chances = 1 / (1 + np.exp(-(np.r_[log_odds[:1], log_odds][:, None] + rng.normal(0, 1.2, TASKS))))
    episodes = [_play(0, task, chances, rng) for task in rng.integers(0, TASKS, COLLECTED)]
    for version in range(1, rounds + 1):
        # undecided tasks more often, as a curriculum would, and by chance
        weights = np.sqrt(chances[version] * (1 - chances[version])) * rng.uniform(0.2, 1, TASKS)
        drawn = rng.choice(TASKS, episodes_per_round // SAMPLES, p=weights / weights.sum())
        episodes += [_play(version, task, chances, rng) for task in drawn for _ in range(SAMPLES)]
    return TrainingRun(chances.mean(axis=1), tuple(episodes))


def _play(version: int, task: int, chances: NDArray[np.float64], rng: np.random.Generator) -> ScoredEpisode:
    return ScoredEpisode(version, f"t{task}", float(rng.random() < chances[version, task]))


def _curve(shape: str, rounds: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """The level of versions 1 to `rounds` + 1."""
    time = np.linspace(0, 1, rounds + 1)
    low, gain, loss = rng.uniform(0.2, 0.5), rng.uniform(0.1, 0.4), rng.uniform(0.1, 0.4)
    rise: NDArray[np.float64] = low + gain * time
    if shape == "levels off":
        rise = low + gain * (1 - np.exp(-3 * time)) / (1 - np.exp(-3))
    elif shape == "dips and rises":
        dip = rng.integers(1, max(2, rounds - 2))
        rise[dip : dip + 2] -= 0.08
    elif shape == "rises and falls":
        peak = rng.uniform(0.3, 0.8)
        rise = np.where(time < peak, low + gain * time / peak, low + gain - loss * (time - peak) / (1 - peak))
    elif shape == "breaks down":
        rise[rng.integers(2, rounds) :] -= 0.05 + loss
    elif shape == "flat":
        rise = np.full(rounds + 1, low)
    return rise
