"""Owns: Elo of players from their games: hand-worked, against a general optimiser, and never infinite.

Intervals are over tasks: games of one task are not independent.
"""

from __future__ import annotations

import math
import random
import time

import numpy as np
import pytest
from scipy.optimize import minimize

from marft_bridge.statistics.bradley_terry import PRIOR_GAMES, Game, Outcome, games_to_won, have_finite_strengths
from marft_bridge.statistics.elo import games_to_ratings

TEN = 400 / math.log(10)


def games(pair: str, *outcomes: Outcome) -> list[Game]:
    return [Game(pair[0], pair[1], outcome) for outcome in outcomes]


def by_optimiser(played: list[Game], reference: str) -> dict[str, float]:
    """The ratings that make the outcomes likeliest, in Elo's own formula: a wins with 1 / (1 + 10^((b - a) / 400))."""
    names = sorted({name for game in played for name in game[:2]})
    free = [name for name in names if name != reference]

    def loss(values: np.ndarray) -> float:
        elo = {reference: 0.0, **dict(zip(free, 100 * values, strict=True))}
        total = 0.0
        for first, second, outcome in played:
            share = {"first": 1.0, "second": 0.0, "tie": 0.5}[outcome]
            odds = (elo[second] - elo[first]) * math.log(10) / 400
            total += share * np.logaddexp(0, odds) + (1 - share) * np.logaddexp(0, -odds)
        return float(total)

    result = minimize(loss, np.zeros(len(free)), method="BFGS", options={"gtol": 1e-9})
    return {reference: 0.0, **dict(zip(free, 100 * result.x, strict=True))}


def test_three_wins_to_one_are_400_log10_of_3_and_draws_count_half() -> None:
    ratings = games_to_ratings(games("ab", "first", "first", "first", "second"), "wxyz", "b", seed=0)
    assert ratings.finite
    assert ratings.by_player["a"].elo == pytest.approx(400 * math.log10(3))
    assert ratings.by_player["b"] == (0.0, None, None)
    # Two wins and two draws are three points of four as well, whoever is named first.
    drawn = games_to_ratings([*games("ba", "second", "tie"), *games("ab", "first", "tie")], "wxyz", "b", seed=0)
    assert drawn.by_player["a"].elo == pytest.approx(400 * math.log10(3))


def test_strengths_multiply_along_a_chain() -> None:
    # b beats c 3:1 and a beats b 3:1, and a and c never met: a is 9 times c.
    played = [*games("ab", "first", "first", "first", "second"), *games("bc", "first", "first", "first", "second")]
    ratings = games_to_ratings(played, range(8), "c", seed=0)
    elo = [ratings.by_player[name].elo for name in "abc"]
    assert elo == pytest.approx([400 * math.log10(9), 400 * math.log10(3), 0])


@pytest.mark.parametrize("seed", range(2))
def test_ratings_are_those_of_a_general_optimiser(seed: int) -> None:
    draw = random.Random(seed)
    outcomes: tuple[Outcome, ...] = ("first", "first", "second", "tie")
    played = [Game(*draw.sample("abcd", 2), draw.choice(outcomes)) for _ in range(40)]
    ratings = games_to_ratings(played, [n // 2 for n in range(40)], "a", seed=0)
    assert ratings.finite
    assert {name: row.elo for name, row in ratings.by_player.items()} == pytest.approx(
        by_optimiser(played, "a"), abs=1e-2
    )


def test_who_lost_every_game_has_a_finite_rating_by_the_priors_games_and_no_interval() -> None:
    played = [*games("ab", "first", "tie", "second", "first"), *games("ac", *["first"] * 4), *games("bc", "first")]
    ratings = games_to_ratings(played, range(9), "c", seed=0)
    assert not ratings.finite
    assert all(math.isfinite(row.elo) for row in ratings.by_player.values())
    assert {(row.low, row.high) for row in ratings.by_player.values()} == {(None, None)}
    assert ratings.by_player["a"].elo > ratings.by_player["b"].elo > 0
    # Two players, n games won: s and 1/s with n / (s^2 + 1) = 1/2 - 1 / (s + 1), for the prior's one game.
    assert PRIOR_GAMES == 1
    sure = games_to_ratings(games("ab", *["first"] * 20), range(20), "b", seed=0)
    s = 10 ** (sure.by_player["a"].elo / 800)
    assert 20 / (s**2 + 1) == pytest.approx(1 / 2 - 1 / (s + 1))
    more = games_to_ratings(games("ab", *["first"] * 40), range(40), "b", seed=0)
    assert more.by_player["a"].elo > sure.by_player["a"].elo


def test_games_have_a_finite_maximum_where_each_can_be_reached_from_each() -> None:
    index = {name: i for i, name in enumerate("abc")}
    ring = [*games("ab", "first"), *games("bc", "first"), *games("ca", "first")]
    assert have_finite_strengths(games_to_won(ring, index))
    assert not have_finite_strengths(games_to_won(ring[:2], index))
    assert have_finite_strengths(games_to_won([*games("ab", "tie"), *games("bc", "tie")], index))
    many = games_to_won(ring, index)
    assert have_finite_strengths(np.array([many, 0 * many])).tolist() == [True, False]


def test_an_interval_is_over_tasks_and_holds_the_truth_as_often_as_it_says() -> None:
    """a beats b with probability 0.7 on average; tasks differ, and their two games are alike."""
    truth, held, widths = TEN * math.log(7 / 3), 0, []
    chance = np.random.default_rng(0)
    for seed in range(40):
        played: list[Game] = []
        for _ in range(60):
            of_task = chance.choice([0.45, 0.95])
            wins = chance.random() < of_task
            played += games("ab", *["first" if wins else "second"] * 2)
        rating = games_to_ratings(played, [n // 2 for n in range(120)], "b", seed=seed).by_player["a"]
        assert rating.low is not None
        assert rating.high is not None
        held += rating.low <= truth <= rating.high
        widths.append(rating.high - rating.low)
    assert 34 <= held <= 40
    # Twice as many games, and no more tasks: an interval over games would be narrower by the root of 2.
    assert np.mean(widths) == pytest.approx(2 * 1.96 * TEN / math.sqrt(60 * 0.21), rel=0.1)


def test_the_same_seed_gives_the_same_interval_and_equal_tasks_give_none() -> None:
    played = games("ab", "first", "second", "first", "first", "tie", "first")
    assert games_to_ratings(played, "uvwxyz", "a", seed=3) == games_to_ratings(played, "uvwxyz", "a", seed=3)
    alike = games_to_ratings(games("ab", *["first", "second"] * 3), [n // 2 for n in range(6)], "a", seed=0)
    assert (alike.by_player["b"].low, alike.by_player["b"].high) == (None, None)
    one = games_to_ratings(games("ab", "first", "second"), ["t", "t"], "a", seed=0)
    assert one.by_player["b"][1:] == (None, None)


def test_what_is_no_tournament_is_refused() -> None:
    with pytest.raises(ValueError, match="'c' is in no game"):
        games_to_ratings(games("ab", "tie"), ["t"], "c", seed=0)
    with pytest.raises(ValueError, match="1 games but 2 tasks"):
        games_to_ratings(games("ab", "tie"), ["t", "u"], "a", seed=0)


def test_a_lopsided_field_is_rated_in_seconds() -> None:
    """Five players of which each beats the next almost always."""
    draw = random.Random(0)
    played, tasks = [], []
    for task in range(60):
        for i, first in enumerate("abcde"):
            for second in "abcde"[i + 1 :]:
                outcome: Outcome = "first" if draw.random() < 0.97 else "second"
                played.append(Game(first, second, outcome))
                tasks.append(task)
    began = time.process_time()
    games_to_ratings(played, tasks, "e", seed=0)
    assert time.process_time() - began < 5
