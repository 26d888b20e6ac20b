"""Owns: strengths of competitors from the outcomes of pairs, against a general optimiser and a case worked by hand."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from scipy.optimize import minimize

from marft_bridge.statistics.bradley_terry import PRIOR_GAMES, Game, Outcome, games_to_strengths

OUTCOMES: tuple[Outcome, ...] = ("first", "second", "tie")


def random_games(seed: int, names: str, count: int) -> list[Game]:
    draw = random.Random(seed)
    pairs = [draw.sample(names, 2) for _ in range(count)]
    return [Game(first, second, draw.choice(OUTCOMES)) for first, second in pairs]


def by_optimiser(games: list[Game]) -> dict[str, float]:
    """The log-strengths that make the outcomes likeliest, the prior's games included."""
    names = sorted({name for game in games for name in game[:2]})

    def loss(log_strengths: np.ndarray) -> float:
        logs = dict(zip(names, log_strengths, strict=True))
        total = 0.0
        for first, second, outcome in games:
            share = {"first": 1.0, "second": 0.0, "tie": 0.5}[outcome]
            gap = logs[first] - logs[second]
            total += share * np.logaddexp(0, -gap) + (1 - share) * np.logaddexp(0, gap)
        for value in logs.values():
            total += PRIOR_GAMES / 2 * (np.logaddexp(0, -value) + np.logaddexp(0, value))
        return float(total)

    result = minimize(loss, np.zeros(len(names)), method="BFGS", options={"gtol": 1e-9})
    return dict(zip(names, result.x, strict=True))


@pytest.mark.parametrize("seed", range(5))
def test_the_fit_is_that_of_a_general_optimiser_in_any_order(seed: int) -> None:
    games = random_games(seed, "abcde", 12)
    strengths = games_to_strengths(games)
    assert {name: row.log_strength for name, row in strengths.items()} == pytest.approx(by_optimiser(games), abs=1e-5)
    swapped = [Game(b, a, {"first": "second", "second": "first", "tie": "tie"}[o]) for a, b, o in games[::-1]]  # type: ignore[arg-type]
    again = games_to_strengths(swapped)
    assert [row for name in strengths for row in again[name]] == pytest.approx(
        [value for row in strengths.values() for value in row], abs=1e-9
    )


def test_one_game_won_is_the_hand_worked_case() -> None:
    # The two are s and 1/s, and s^2 / (s^2 + 1) + s / (s + 1) = 3/2 wins, which is s^3 - s^2 - s - 3 = 0.
    strengths = games_to_strengths([Game("a", "b", "first")])
    s = math.exp(strengths["a"].log_strength)
    assert strengths["b"].log_strength == pytest.approx(-strengths["a"].log_strength)
    assert s == pytest.approx(2.1303954347672)
    assert s**3 - s**2 - s - 3 == pytest.approx(0, abs=1e-9)
    assert strengths["a"].score == pytest.approx(s / (s + 1 / s))
    assert strengths["a"].score + strengths["b"].score == pytest.approx(1)


def test_ties_are_equal_strengths_and_who_wins_all_stays_finite() -> None:
    tied = games_to_strengths([Game("a", "b", "tie"), Game("b", "c", "tie")])
    assert {row.score for row in tied.values()} == {0.5}
    sure = games_to_strengths([Game("a", other, "first") for other in "bcd" for _ in range(50)])
    assert 0.98 < sure["a"].score < 1
    assert math.isfinite(sure["a"].log_strength)


def test_nobody_without_a_pair_and_nobody_against_themselves() -> None:
    assert games_to_strengths([]) == {}
    with pytest.raises(ValueError, match="nobody plays against themselves"):
        games_to_strengths([Game("a", "a", "tie")])
