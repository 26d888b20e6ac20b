"""Outcomes of pairs -> a strength for each competitor, and its expected score against the others.

In the model i beats j with probability s_i / (s_i + s_j); a tie counts as half a win for each. A competitor that won,
or lost, all of its pairs has no finite strength of its own, so each also has `PRIOR_GAMES` games, half of them won,
against one of strength 1. Invariants: the fit is that of the unique maximum, whatever the order of the pairs; a
competitor without a pair has no strength.

Sources:

- Bradley and Terry (1952), "Rank analysis of incomplete block designs", Biometrika 39.
- Hunter (2004), "MM algorithms for generalized Bradley-Terry models", Annals of Statistics 32, equation 3.
"""

# ruff: noqa: N803, N806 (shape suffixes: _N one entry a competitor)
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from marft_bridge.statistics.clusters import Floats

PRIOR_GAMES = 1.0
_TOLERANCE, _MOST_STEPS = 1e-12, 100_000

Outcome = Literal["first", "second", "tie"]


class Game(NamedTuple):
    """One pair, and who of it was better."""

    first: str
    second: str
    outcome: Outcome


class Strength(NamedTuple):
    """Of one competitor. `score`: its expected wins a game against each of the others with a pair, ties as halves."""

    log_strength: float
    score: float


def games_to_strengths(games: Sequence[Game]) -> dict[str, Strength]:
    """Games -> the strength of everyone that is in one, by name.

    Raises ValueError for a game of somebody against themselves.
    """
    if any(game.first == game.second for game in games):
        raise ValueError("bradley-terry: nobody plays against themselves")
    names = sorted({name for game in games for name in (game.first, game.second)})
    if not names:
        return {}
    index = {name: i for i, name in enumerate(names)}
    wins_N = np.full(len(names), PRIOR_GAMES / 2)
    games_NN = np.zeros((len(names), len(names)))
    shares: Mapping[Outcome, tuple[float, float]] = {"first": (1.0, 0.0), "second": (0.0, 1.0), "tie": (0.5, 0.5)}
    for game in games:
        first, second = index[game.first], index[game.second]
        first_share, second_share = shares[game.outcome]
        wins_N[first] += first_share
        wins_N[second] += second_share
        games_NN[first, second] += 1
        games_NN[second, first] += 1
    strength_N = _fit(wins_N, games_NN)
    chance_NN = strength_N[:, None] / (strength_N[:, None] + strength_N)
    np.fill_diagonal(chance_NN, 0.0)
    score_N = chance_NN.sum(1) / (len(names) - 1)
    return {name: Strength(float(np.log(strength_N[i])), float(score_N[i])) for name, i in index.items()}


def _fit(wins_N: Floats, games_NN: Floats) -> Floats:
    """Hunter's iteration: s_i <- wins_i / sum_j games_ij / (s_i + s_j), the prior's games among them."""
    strength_N = np.ones_like(wins_N)
    for _ in range(_MOST_STEPS):
        load_N = (games_NN / (strength_N[:, None] + strength_N)).sum(1) + PRIOR_GAMES / (strength_N + 1)
        new_N: Floats = wins_N / load_N
        if np.abs(np.log(new_N / strength_N)).max() < _TOLERANCE:
            return new_N
        strength_N = new_N
    raise RuntimeError("bradley-terry: the iteration did not end")  # it converges for every set of games
