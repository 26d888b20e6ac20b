"""Owns: the rules of Kuhn poker and exact exploitability, against the published equilibria and another computation.

Kuhn (1950): the value is -1/18 for the first player, at every strategy of its family; nobody gains there. The other
computation is a best response by backward induction over information sets, with the rival's chances of each card.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs.kuhn_rules import (
    DECISIONS,
    PLAYERS,
    Decision,
    History,
    Player,
    Strategy,
    best_response_payoff,
    equilibrium,
    expected_payoff,
    exploitability,
    exploitability_bounds,
    games_to_strategies,
    is_sound,
    legal_moves,
    payoff_to_first,
    player_to_move,
)


def always(chance: float) -> dict[Player, dict[Decision, float]]:
    return {player: dict.fromkeys(DECISIONS[player], chance) for player in PLAYERS}


def by_induction(player: Player, rival: Strategy) -> float:
    """What a best response wins: at each of its decisions the better move, given how likely each rival card is."""
    seat = PLAYERS.index(player)

    def best(rank: int, history: History, reach: Mapping[int, float]) -> float:
        mover = player_to_move(history)
        if mover is None:
            sign = 1 if player == "first" else -1
            pairs = {card: (rank, card) if seat == 0 else (card, rank) for card in reach}
            return sum(chance * sign * payoff_to_first(pairs[card], history) for card, chance in reach.items())
        moves = legal_moves(history)
        if mover == player:
            return max(best(rank, (*history, move), reach) for move in moves)
        after = 0.0
        for number, move in enumerate(moves):
            odds = {card: (1 - rival[card, history], rival[card, history])[number] for card in reach}
            after += best(rank, (*history, move), {card: reach[card] * odds[card] for card in reach})
        return after

    return sum(best(rank, (), {card: 1 / 6 for card in range(3) if card != rank}) for rank in range(3))


@pytest.mark.parametrize("bluff", [0.0, 0.1, 1 / 6, 1 / 3])
def test_the_published_family_has_the_value_and_cannot_be_exploited(bluff: float) -> None:
    first, second = equilibrium(bluff)
    assert expected_payoff(first, second) == pytest.approx(-1 / 18, abs=1e-12)
    assert exploitability(first, second) == pytest.approx(0, abs=1e-12)
    assert best_response_payoff("first", second) == pytest.approx(-1 / 18, abs=1e-12)
    assert best_response_payoff("second", first) == pytest.approx(1 / 18, abs=1e-12)


def test_a_first_player_that_bluffs_too_often_can_be_exploited() -> None:
    first, second = equilibrium(0.5)
    first = {decision: min(chance, 1.0) for decision, chance in first.items()}
    assert exploitability(first, second) > 0.01


def test_players_that_always_bet_and_call_are_exploited_by_a_third_of_a_chip() -> None:
    """Against either: 2 with the highest card, 0 with the middle one (called as often won as lost), -1 by folding the
    lowest; (2 + 0 - 1) / 3 a game."""
    bold = always(1.0)
    assert best_response_payoff("first", bold["second"]) == pytest.approx(1 / 3)
    assert best_response_payoff("second", bold["first"]) == pytest.approx(1 / 3)
    assert exploitability(bold["first"], bold["second"]) == pytest.approx(1 / 3)
    assert expected_payoff(bold["first"], bold["second"]) == pytest.approx(0)


def test_players_that_never_put_a_chip_in_lose_a_chip_to_every_bet() -> None:
    calm = always(0.0)
    # The first bets whatever it holds, and the second folds: 1. The second bets after every check: 1.
    assert exploitability(calm["first"], calm["second"]) == pytest.approx(1)
    assert expected_payoff(calm["first"], calm["second"]) == pytest.approx(0)


CHANCES = st.lists(st.floats(0, 1), min_size=6, max_size=6)


@settings(max_examples=25, deadline=None)
@given(CHANCES, CHANCES)
def test_best_responses_are_those_of_backward_induction(
    first_chances: list[float], second_chances: list[float]
) -> None:
    first = dict(zip(DECISIONS["first"], first_chances, strict=True))
    second = dict(zip(DECISIONS["second"], second_chances, strict=True))
    assert best_response_payoff("first", second) == pytest.approx(by_induction("first", second), abs=1e-9)
    assert best_response_payoff("second", first) == pytest.approx(by_induction("second", first), abs=1e-9)
    assert exploitability(first, second) >= -1e-12


@pytest.mark.parametrize("bluff", [0.0, 1 / 6, 1 / 3])
def test_nothing_open_leaves_no_interval_and_an_equilibrium_has_nothing_to_lose(bluff: float) -> None:
    assert exploitability_bounds(*equilibrium(bluff)) == pytest.approx((0, 0), abs=1e-12)
    calm = always(0.0)
    assert exploitability_bounds(calm["first"], calm["second"]) == pytest.approx((1, 1))


def test_bold_players_with_six_open_decisions_lose_between_a_third_of_a_chip_and_five_twelfths() -> None:
    """What the second does after a check is open: betting the highest and the lowest card the first wins 2 and -1 at
    least and at most; checking the middle one wins it between 0, as betting does, and 1.5 - 1 a game where the second
    bets the lowest alone. So it wins between 1/3 and 1/2. The second never sees the first check: 1/3."""
    first = {decision: None if decision[1] else 1.0 for decision in DECISIONS["first"]}
    second = {decision: None if decision[1] == ("check",) else 1.0 for decision in DECISIONS["second"]}
    assert exploitability_bounds(first, second) == pytest.approx((1 / 3, 5 / 12))


OPEN = st.lists(st.booleans(), min_size=6, max_size=6).filter(lambda places: sum(places) <= 3)


@settings(max_examples=15, deadline=None)
@given(CHANCES, CHANCES, OPEN, OPEN)
def test_whatever_is_done_in_an_open_place_lies_within_the_bounds(
    first_chances: list[float], second_chances: list[float], first_open: list[bool], second_open: list[bool]
) -> None:
    first = dict(zip(DECISIONS["first"], first_chances, strict=True))
    second = dict(zip(DECISIONS["second"], second_chances, strict=True))
    low, high = exploitability_bounds(
        {decision: None if is_open else first[decision] for decision, is_open in zip(first, first_open, strict=True)},
        {
            decision: None if is_open else second[decision]
            for decision, is_open in zip(second, second_open, strict=True)
        },
    )
    assert low - 1e-9 <= exploitability(first, second) <= high + 1e-9
    if not any((*first_open, *second_open)):
        assert low == pytest.approx(high, abs=1e-9)


@pytest.mark.parametrize(
    ("history", "payoffs"),
    [
        (("check", "check"), (1, -1)),
        (("check", "bet", "fold"), (-1, -1)),
        (("check", "bet", "call"), (2, -2)),
        (("bet", "fold"), (1, 1)),
        (("bet", "call"), (2, -2)),
    ],
)
def test_the_five_ends_of_the_game_pay_as_the_rules_say(history: History, payoffs: tuple[int, int]) -> None:
    assert player_to_move(history) is None
    assert (payoff_to_first((2, 0), history), payoff_to_first((0, 1), history)) == payoffs


def test_only_the_legal_moves_lead_to_those_five_ends() -> None:
    ends, open_histories = [], [()]
    while open_histories:
        history = open_histories.pop()
        if player_to_move(history) is None:
            ends.append(history)
        else:
            open_histories += [(*history, move) for move in legal_moves(history)]
    assert len(ends) == 5
    assert {player_to_move(h) for _, h in DECISIONS["first"]} == {"first"}
    assert {player_to_move(h) for _, h in DECISIONS["second"]} == {"second"}


def test_played_games_tell_how_often_each_player_was_bold_and_absent_is_none() -> None:
    games = [
        ((2, 0), ("bet", "fold")),
        ((2, 0), ("check", "bet", "call")),
        ((2, 1), ("bet", "call")),
        ((2, 1), ("bet", "fold")),
    ]
    found = games_to_strategies(games)
    assert {d: chance for d, chance in found["first"].items() if chance is not None} == {
        (2, ()): 0.75,
        (2, ("check", "bet")): 1.0,
    }
    assert {d: chance for d, chance in found["second"].items() if chance is not None} == {
        (0, ("bet",)): 0.0,
        (0, ("check",)): 1.0,
        (1, ("bet",)): 0.5,
    }
    assert sum(chance is None for of in found.values() for chance in of.values()) == 7


def test_frequencies_of_every_deal_are_the_strategy_that_was_played() -> None:
    games = []
    for ranks in itertools.permutations(range(3), 2):
        games += [(ranks, ("bet", "call")), (ranks, ("check", "bet", "call"))]
    found = games_to_strategies(games)
    assert set(found["first"].values()) == {0.5, 1.0}
    assert set(found["second"].values()) == {1.0}


def test_a_move_is_sound_where_some_equilibrium_makes_it() -> None:
    """Kuhn (1950): the middle card never bets first, the lowest never calls, the highest never folds and, second, bets;
    with the lowest and the highest the first player may do either, and both players answer a bet with the middle."""
    unsound = {
        (player, decision, move)
        for player in PLAYERS
        for decision in DECISIONS[player]
        for move in legal_moves(decision[1])
        if not is_sound(player, decision, move)
    }
    assert unsound == {
        ("first", (1, ()), "bet"),
        ("first", (0, ("check", "bet")), "call"),
        ("first", (2, ("check", "bet")), "fold"),
        ("second", (1, ("check",)), "bet"),
        ("second", (2, ("check",)), "check"),
        ("second", (0, ("bet",)), "call"),
        ("second", (2, ("bet",)), "fold"),
    }
