"""Games of several players on the same tasks -> Elo ratings with intervals.

Elo is 400 * log10 of a Bradley-Terry strength (`bradley_terry`), a tie as half a win: 400 points more are ten wins to
one. Invariants: one player, the reference, has 0; no rating is infinite; games of one task are not independent, so
tasks are what the bootstrap draws, and an interval that they cannot give is None; few tasks give a wide one, as the t
distribution has it (Hesterberg 2015, see `paired`).

Where somebody won, or lost, everything against the others, no rating is finite by the games alone. Then every player
gets `PRIOR_GAMES` games more, as in `games_to_strengths`, and there is no interval: how far apart they are is not told.
A draw of the bootstrap in which that happens gets those games too.
"""

# ruff: noqa: N803, N806 (shape suffixes: _K one entry a task, _N a player, _B a draw of the bootstrap)
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from marft_bridge.statistics.bradley_terry import (
    PRIOR_GAMES,
    Game,
    games_to_won,
    have_finite_strengths,
    won_to_strengths,
)
from marft_bridge.statistics.clusters import Floats, Labels
from marft_bridge.statistics.distributions import ndtr
from marft_bridge.statistics.paired import t_expanded_z

_DRAWS = 2000
_POINTS = 400.0 / np.log(10)
_SAME = 1e-6  # points: draws that differ by less do not differ


class Rating(NamedTuple):
    """One player's Elo, and its 95 % interval; the bounds are None where the tasks cannot give them."""

    elo: float
    low: float | None
    high: float | None


class Ratings(NamedTuple):
    """Ratings by player. `finite`: whether the games alone give them; else the prior's games hold them finite."""

    by_player: dict[str, Rating]
    finite: bool


def games_to_ratings(games: Sequence[Game], tasks: Labels, reference: str, *, seed: int) -> Ratings:
    """Games [n] and the task of each [n] -> ratings in which `reference` has 0, by a bootstrap over tasks.

    Raises ValueError where there is no game, `reference` is in none, or the lengths differ.
    """
    names = sorted({name for game in games for name in (game.first, game.second)})
    if reference not in names:
        raise ValueError(f"elo: {reference!r} is in no game")
    if len(tasks) != len(games):
        raise ValueError(f"elo: {len(games)} games but {len(tasks)} tasks")
    index = {name: i for i, name in enumerate(names)}
    games_of: dict[object, list[Game]] = {}
    for game, task in zip(games, tasks, strict=True):
        games_of.setdefault(task, []).append(game)
    won_KNN = np.array([games_to_won(task_games, index) for task_games in games_of.values()])
    won_NN, n_tasks = won_KNN.sum(0), len(won_KNN)
    finite = bool(have_finite_strengths(won_NN))
    elo_N = _elo(won_NN[None], index[reference])[0]
    low_N = high_N = elo_N
    if finite and n_tasks > 1:
        counts_BK = np.random.default_rng(seed).multinomial(n_tasks, np.full(n_tasks, 1 / n_tasks), size=_DRAWS)
        elo_BN = _elo(np.tensordot(counts_BK.astype(np.float64), won_KNN, axes=1), index[reference])
        z = t_expanded_z(n_tasks, level=0.95)
        low_N, high_N = np.quantile(elo_BN, [ndtr(-z), ndtr(z)], axis=0)
    return Ratings(
        {
            name: Rating(float(elo_N[i]), float(low_N[i]), float(high_N[i]))
            if high_N[i] - low_N[i] > _SAME
            else Rating(float(elo_N[i]), None, None)
            for name, i in index.items()
        },
        finite,
    )


def _elo(won_BNN: Floats, reference: int) -> Floats:
    """Ratings of each draw [B, N]; with the prior's games where the draw has no finite maximum."""
    finite_B = have_finite_strengths(won_BNN)
    strength_BN = np.ones(won_BNN.shape[:2])
    for chosen_B, prior_games in ((finite_B, 0.0), (~finite_B, PRIOR_GAMES)):
        strength_BN[chosen_B] = won_to_strengths(won_BNN[chosen_B], prior_games)
    elo_BN = _POINTS * np.log(strength_BN)
    return np.asarray(elo_BN - elo_BN[:, reference, None])
