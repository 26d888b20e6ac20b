"""Owns: how much an action or token counts in the loss of a round.

Shares are worked by hand, as fractions.
"""

from __future__ import annotations

from fractions import Fraction

import pytest

from trainers.config import Granularity, Weighting
from trainers.objective.weighting import unit_shares

# two episodes; the first has three actions of 1, 2 and 3 tokens, the second one of 4
LENGTHS = [1, 2, 3, 4]
EPISODES = [7, 7, 7, 2]
BY_HAND = {
    ("action", "episode"): ["1/6", "1/6", "1/6", "1/2"],
    ("action", "action"): ["1/4", "1/4", "1/4", "1/4"],
    ("action", "token"): ["1/10", "2/10", "3/10", "4/10"],
    ("token", "episode"): ["1/12", "1/12", "1/12", "1/8"],
    ("token", "action"): ["1/4", "1/8", "1/12", "1/16"],
    ("token", "token"): ["1/10", "1/10", "1/10", "1/10"],
}


@pytest.mark.parametrize("granularity", ["action", "token"])
@pytest.mark.parametrize("weighting", ["episode", "action", "token"])
def test_shares_by_hand(weighting: Weighting, granularity: Granularity) -> None:
    expected = [float(Fraction(text)) for text in BY_HAND[granularity, weighting]]
    assert unit_shares(LENGTHS, EPISODES, weighting, granularity) == pytest.approx(expected)


@pytest.mark.parametrize("weighting", ["episode", "action", "token"])
def test_all_shares_of_a_round_add_up_to_1(weighting: Weighting) -> None:
    lengths, episodes = [5, 1, 17, 2, 2, 900], [0, 3, 0, 1, 3, 3]
    assert sum(unit_shares(lengths, episodes, weighting, "action")) == pytest.approx(1)
    per_token = unit_shares(lengths, episodes, weighting, "token")
    assert sum(n * share for n, share in zip(lengths, per_token, strict=True)) == pytest.approx(1)


def test_by_episode_a_long_run_counts_as_much_as_a_short_one() -> None:
    for granularity in ("action", "token"):
        shares = unit_shares([10] * 51, [0] * 50 + [1], "episode", granularity)
        assert sum(shares[:50]) == pytest.approx(shares[50])


def test_the_sum_over_minibatches_is_the_same_however_they_are_cut() -> None:
    # losses of the tokens: their position; a mean over each minibatch would give 4.5 for one cut and not for the other
    losses = [[0.0], [1.0, 2.0], [3.0, 4.0, 5.0], [6.0, 7.0, 8.0, 9.0]]
    shares = unit_shares(LENGTHS, EPISODES, "token", "token")
    for cut in ([[0, 1, 2, 3]], [[0], [1, 2, 3]], [[3, 0], [2], [1]]):
        total = sum(shares[i] * loss for part in cut for i in part for loss in losses[i])
        assert total == pytest.approx(4.5)


def test_one_action_is_the_whole_round() -> None:
    for weighting in ("episode", "action", "token"):
        assert unit_shares([8], [0], weighting, "action") == [1.0]
        assert unit_shares([8], [0], weighting, "token") == [1 / 8]


def test_a_round_without_actions_has_no_shares() -> None:
    assert unit_shares([], [], "episode", "action") == []


def test_what_cannot_be_weighed_is_refused() -> None:
    with pytest.raises(ValueError, match="no tokens"):
        unit_shares([3, 0], [0, 1], "token", "action")
    with pytest.raises(ValueError, match="2 lengths for 1 actions"):
        unit_shares([3, 2], [0], "token", "action")
