"""Scores of teams in which some agents play themselves and the others are replaced -> what each agent contributes.

A team is the set of agents that play themselves (or, between two versions, that play the newer one). Every share is a
weighted sum of the teams' scores, taken task by task, so that chance that all teams share cancels; its interval is the
bootstrap over tasks of `statistics.paired`. Invariants: only tasks that every team has a score on count, so that
Shapley values sum to the full team's score less the empty team's, to the last bit but rounding; a bound that the tasks
cannot give is None. It knows nothing of episodes, nodes' models or pages.

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

Team = frozenset[str]
Key = TypeVar("Key", bound=Hashable)
Weights = Mapping[Team, float]
"""A share: team -> what its score counts for. The weights of a share of nothing but differences sum to 0."""


@dataclass(frozen=True, slots=True)
class Share:
    """The mean of one weighted sum over tasks, and its 95% interval; None with fewer than two tasks."""

    mean: float
    ci95: tuple[float, float] | None


def all_teams(agents: Sequence[str]) -> tuple[Team, ...]:
    """Every on/off combination, by size and then in the agents' order; 2^n of them, the empty team first."""
    return tuple(frozenset(on) for size in range(len(agents) + 1) for on in itertools.combinations(agents, size))


def one_in_and_one_out(agents: Sequence[str]) -> tuple[Team, ...]:
    """The empty team, each agent alone, the full team without each, the full team; each once."""
    full = frozenset(agents)
    teams = [frozenset[str](), *(frozenset({a}) for a in agents), *(full - {a} for a in agents), full]
    return tuple(dict.fromkeys(teams))


# -- shares ---------------------------------------------------------------------------------------------------


def alone(agent: str) -> Weights:
    """What the agent adds to the team in which nobody plays."""
    return {frozenset({agent}): 1.0, frozenset(): -1.0}


def put_back(agent: str, agents: Sequence[str]) -> Weights:
    """What happens to the full team when the agent is replaced: minus its difference reward."""
    return {team: -weight for team, weight in difference([agent], agents).items()}


def difference(replaced: Sequence[str], agents: Sequence[str]) -> Weights:
    """What the full team scores more than the one in which `replaced` are; of one agent, its difference reward."""
    full = frozenset(agents)
    return {full: 1.0, full - frozenset(replaced): -1.0}


def interaction(pair: tuple[str, str], agents: Sequence[str]) -> Weights:
    """What the pair's difference is less than the sum of both differences: above 0, each is needed for the other's.

    D_i + D_j - D_ij = G(N) - G(N - i) - G(N - j) + G(N - ij). Below 0 one covers for the other.
    """
    full, (first, second) = frozenset(agents), pair
    return {full: 1.0, full - {first}: -1.0, full - {second}: -1.0, full - {first, second}: 1.0}


def shapley(agent: str, agents: Sequence[str]) -> Weights:
    """The Shapley value: what the agent adds to the team, averaged over all orders in which the team can come together.

    With n agents, a team of s others that it joins weighs s! (n - 1 - s)! / n!. Needs all 2^n teams.
    """
    n = len(agents)
    others = [other for other in agents if other != agent]
    weights: dict[Team, float] = {}
    for team in all_teams(others):
        weight = 1 / (n * math.comb(n - 1, len(team)))
        weights[team | {agent}] = weight
        weights[team] = -weight
    return weights


# -- scores ---------------------------------------------------------------------------------------------------


def complete(scores: Mapping[Team, Mapping[Key, float]]) -> list[Key]:
    """What every team has a score on, in the order of the first team."""
    first, *others = scores.values()
    return [key for key in first if all(key in other for other in others)]


def weighted(scores: Mapping[Team, Mapping[Key, float]], share: Weights, keys: Sequence[Key]) -> list[float]:
    """The share for each of `keys`, which all teams that it weighs have."""
    return [sum(weight * scores[team][key] for team, weight in share.items()) for key in keys]


def values_to_share(name: str, values: Sequence[float], tasks: Sequence[str], seed: int, level: float = 0.95) -> Share:
    """A share's values [n] and the task of each into their mean, with the interval over tasks at `level`.

    Raises ValueError where there are none.
    """
    if len(set(tasks)) < 2:
        return Share(sum(values) / len(values), None)
    found = paired_difference(name, [0.0] * len(values), values, clusters=tasks, seed=seed, level=level)
    return Share(found.diff, found.ci95)
