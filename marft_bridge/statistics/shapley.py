"""Scores of teams in which some agents act themselves and the others are replaced -> what each agent contributes.

A team is the set of agents that act themselves (or, between two versions, at the newer one). Every share (difference
reward, Shapley value, interaction) is a weighted sum of the teams' scores, taken task by task, so that noise that all
teams have in common cancels; its interval is the bootstrap over tasks of `statistics.paired`. Invariants: only tasks
that every team has a score on count, so that Shapley values sum to the full team's score less the empty team's, up to
rounding; a bound that the tasks cannot give is None.

Sources:
- Wolpert and Tumer (2002), "Optimal payoff functions for members of collectives": the difference reward
  D_i = G(team) - G(team with i replaced).
- Shapley (1953), "A value for n-person games".
- Grabisch and Roubens (1999), International Journal of Game Theory 28: interaction of two players, here at the full
  team: what both are worth together beyond what each is worth alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from marft_bridge.statistics import paired_difference
from marft_bridge.statistics.clusters import ROUNDING

Team = frozenset[str]
Key = TypeVar("Key", bound=Hashable)
Weights = Mapping[Team, float]
"""A share as a linear combination: team -> the weight of its score. The weights of differences sum to 0."""


@dataclass(frozen=True, slots=True)
class Share:
    """The mean over tasks of one weighted sum of scores, and its interval."""

    mean: float
    ci95: tuple[float, float] | None  # at the requested level, 95% by default; None with fewer than two tasks


def all_teams(agents: Sequence[str]) -> tuple[Team, ...]:
    """Every on/off combination, by size and then in the agents' order; 2^n of them, the empty team first."""
    return tuple(
        frozenset(members) for size in range(len(agents) + 1) for members in itertools.combinations(agents, size)
    )


def solo_and_leave_one_out_teams(agents: Sequence[str]) -> tuple[Team, ...]:
    """The empty team, each agent alone, the full team without each, the full team; each once."""
    full = frozenset(agents)
    teams = [frozenset[str](), *(frozenset({a}) for a in agents), *(full - {a} for a in agents), full]
    return tuple(dict.fromkeys(teams))


# -- shares ---------------------------------------------------------------------------------------------------


def solo_weights(agent: str) -> Weights:
    """What the agent adds to the empty team, in which everyone else is replaced."""
    return {frozenset({agent}): 1.0, frozenset(): -1.0}


def removal_weights(agent: str, agents: Sequence[str]) -> Weights:
    """What the full team's score changes by when the agent is replaced: minus its difference reward."""
    return {team: -weight for team, weight in difference_weights([agent], agents).items()}


def difference_weights(replaced: Sequence[str], agents: Sequence[str]) -> Weights:
    """The full team's score less that of the team without `replaced`; for one agent, its difference reward."""
    full = frozenset(agents)
    return {full: 1.0, full - frozenset(replaced): -1.0}


def interaction_weights(pair: tuple[str, str], agents: Sequence[str]) -> Weights:
    """The sum of both agents' difference rewards less the difference of the pair: their interaction.

    D_i + D_j - D_ij = G(N) - G(N - i) - G(N - j) + G(N - ij). Above 0 each is needed for what the other adds, below 0
    one covers for the other.
    """
    full, (first, second) = frozenset(agents), pair
    return {full: 1.0, full - {first}: -1.0, full - {second}: -1.0, full - {first, second}: 1.0}


def shapley_weights(agent: str, agents: Sequence[str]) -> Weights:
    """The Shapley value: what the agent adds to the team, averaged over all orders in which the team can come together.

    With n agents, a team of s others that it joins weighs s! (n - 1 - s)! / n!. Needs all 2^n teams.
    """
    n = len(agents)
    teammates = [teammate for teammate in agents if teammate != agent]
    weights: dict[Team, float] = {}
    for team in all_teams(teammates):
        weight = 1 / (n * math.comb(n - 1, len(team)))
        weights[team | {agent}] = weight
        weights[team] = -weight
    return weights


# -- scores ---------------------------------------------------------------------------------------------------


def shared_keys(scores: Mapping[Team, Mapping[Key, float]]) -> list[Key]:
    """The keys (tasks, or tasks and samples) that every team has a score on, in the order of the first team."""
    first, *rest = scores.values()
    return [key for key in first if all(key in by_key for by_key in rest)]


def weighted_sums(scores: Mapping[Team, Mapping[Key, float]], share: Weights, keys: Sequence[Key]) -> list[float]:
    """The share for each of `keys`, which every team with a weight must have a score on.

    One that is nothing but the rounding of the scores is 0: teams that add up would have one sign of it in every task.
    """
    return [_sum_or_zero([weight * scores[team][key] for team, weight in share.items()]) for key in keys]


def _sum_or_zero(parts: Sequence[float]) -> float:
    total = sum(parts)
    return total if abs(total) > ROUNDING * sum(map(abs, parts)) else 0.0


def values_to_share(name: str, values: Sequence[float], tasks: Sequence[str], seed: int, level: float = 0.95) -> Share:
    """A share's values [n] and the task of each [n] into their mean, with the bootstrap interval over tasks at `level`.

    Needs at least one value. Raises ValueError for NaN and infinite values.
    """
    if len(set(tasks)) < 2:
        return Share(sum(values) / len(values), None)
    result = paired_difference(name, [0.0] * len(values), values, clusters=tasks, seed=seed, level=level)
    return Share(result.diff, result.ci95)
