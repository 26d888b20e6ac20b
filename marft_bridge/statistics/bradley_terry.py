"""Outcomes of pairs -> a strength for each competitor, and its expected score against the others.

In the model i beats j with probability s_i / (s_i + s_j); a tie counts as half a win for each. A competitor that won,
or lost, all of its pairs has no finite strength of its own, so each also has `PRIOR_GAMES` games, half of them won,
against one of strength 1. Invariants: the fit is that of the unique maximum, whatever the order of the pairs; a
competitor without a pair has no strength.

Sources:

- Bradley and Terry (1952), "Rank analysis of incomplete block designs", Biometrika 39.
- Ford (1957), "Solution of a ranking problem from binary comparisons", American Mathematical Monthly 64: when there is
  a finite maximum.
- Hunter (2004), "MM algorithms for generalized Bradley-Terry models", Annals of Statistics 32: the likelihood is
  concave in the logarithms of the strengths.
"""

# ruff: noqa: N803, N806 (shape suffixes: _N one entry a competitor, _X any axes before)
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from marft_bridge.statistics.clusters import Floats

PRIOR_GAMES = 1.0
_TOLERANCE, _LONGEST_STEP, _MOST_STEPS = 1e-10, 1.0, 1000  # of the logarithms

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
    strength_N = won_to_strengths(games_to_won(games, index), PRIOR_GAMES)
    chance_NN = strength_N[:, None] / (strength_N[:, None] + strength_N)
    np.fill_diagonal(chance_NN, 0.0)
    score_N = chance_NN.sum(1) / (len(names) - 1)
    return {name: Strength(float(np.log(strength_N[i])), float(score_N[i])) for name, i in index.items()}


def games_to_won(games: Iterable[Game], index: Mapping[str, int]) -> Floats:
    """Games and the row of each competitor -> what each won from each other one [N, N], a tie as half."""
    won_NN = np.zeros((len(index), len(index)))
    shares: Mapping[Outcome, tuple[float, float]] = {"first": (1.0, 0.0), "second": (0.0, 1.0), "tie": (0.5, 0.5)}
    for game in games:
        first, second = index[game.first], index[game.second]
        first_share, second_share = shares[game.outcome]
        won_NN[first, second] += first_share
        won_NN[second, first] += second_share
    return won_NN


def have_finite_strengths(won_XNN: Floats) -> NDArray[np.bool_]:
    """Whether games [..., N, N] have a finite maximum without a prior's games.

    They do where everyone can be reached from everyone else along "won something from" (Ford 1957).
    """
    reach_XNN = (won_XNN > 0) | np.eye(won_XNN.shape[-1], dtype=bool)
    for _ in range(won_XNN.shape[-1].bit_length()):
        reach_XNN = reach_XNN @ reach_XNN  # of boolean matrices: paths of up to twice the length
    return np.asarray(reach_XNN.all((-2, -1)))


def won_to_strengths(won_XNN: Floats, prior_games: float) -> Floats:
    """What each won from each other one [..., N, N] -> strengths [..., N], by Newton's method on their logarithms.

    Args:
        prior_games: of each against one of strength 1, half of them won. 0: none, and the strengths have the geometric
            mean 1; only where `have_finite_strengths`.
    """
    n = won_XNN.shape[-1]
    wins_XN = won_XNN.sum(-1) + prior_games / 2
    games_XNN = won_XNN + np.swapaxes(won_XNN, -1, -2)
    log_XN = np.zeros_like(wins_XN)
    for _ in range(_MOST_STEPS):
        chance_XNN = 1 / (1 + np.exp(log_XN[..., None, :] - log_XN[..., :, None]))
        prior_XN = 1 / (1 + np.exp(-log_XN))
        slope_XN = wins_XN - (games_XNN * chance_XNN).sum(-1) - prior_games * prior_XN
        between_XNN = games_XNN * chance_XNN * (1 - chance_XNN)
        own_XN = between_XNN.sum(-1) + prior_games * prior_XN * (1 - prior_XN)
        bend_XNN = own_XN[..., None] * np.eye(n) - between_XNN
        if prior_games == 0:  # games alone tell ratios only: this keeps the mean of the logarithms at 0
            bend_XNN = bend_XNN + 1 / n
        step_XN = np.linalg.solve(bend_XNN, slope_XN[..., None])[..., 0]
        log_XN = log_XN + np.clip(step_XN, -_LONGEST_STEP, _LONGEST_STEP)  # far from the maximum it would overshoot
        if np.abs(step_XN).max(initial=0.0) < _TOLERANCE:
            return np.asarray(np.exp(log_XN))
    raise RuntimeError("bradley-terry: the iteration did not end")  # it converges for every set of games
