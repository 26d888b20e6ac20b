"""Kuhn poker as pure functions: its moves and payoffs, and how far two strategies are from not being exploitable.

Three cards of different rank, one for each player, one chip each in the pot. The first player checks or bets one chip;
whoever faces a bet calls or folds; after check and bet the first player answers. The higher card takes the pot unless
somebody folded (Kuhn, 1950). The value of the game is -1/18 for the first player.

Invariant: exact: expectations are sums over the six deals and all moves, best responses the best of all 64 pure
strategies. Where a strategy does not say what it does at a decision, bounds hold whatever it does there. It knows
nothing of models or graphs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

Player = Literal["first", "second"]
History = tuple[str, ...]
"""The moves so far, in order."""
Decision = tuple[int, History]
"""What a player knows: the rank of its card (0 low, 1 middle, 2 high), and the moves so far."""
Strategy = Mapping[Decision, float]
"""For every decision of one player: the chance that it bets or calls; else it checks or folds."""

PLAYERS: tuple[Player, Player] = ("first", "second")
RANKS = ("lowest", "middle", "highest")
DECISIONS: Mapping[Player, tuple[Decision, ...]] = {
    "first": tuple((rank, history) for rank in range(3) for history in ((), ("check", "bet"))),
    "second": tuple((rank, history) for rank in range(3) for history in (("check",), ("bet",))),
}


def legal_moves(history: History) -> tuple[str, str]:
    """The two moves that are allowed next: the one that puts no chip in, then the one that does."""
    return ("fold", "call") if history[-1:] == ("bet",) else ("check", "bet")


def player_to_move(history: History) -> Player | None:
    """Whose turn it is; None where the game is over."""
    if history[-1:] in (("call",), ("fold",)) or history == ("check", "check"):
        return None
    return PLAYERS[len(history) % 2]


def payoff_to_first(ranks: tuple[int, int], history: History) -> int:
    """Chips that the first player wins from the second in a game that is over.

    Args:
        ranks: of the first player's card and the second's.
    """
    if history[-1] == "fold":
        return 1 if len(history) % 2 == 0 else -1  # whoever moved last gave up
    stake = 2 if history[-1] == "call" else 1
    return stake if ranks[0] > ranks[1] else -stake


def expected_payoff(first: Strategy, second: Strategy) -> float:
    """What the first player wins a game, over all deals and moves."""
    deals = list(itertools.permutations(range(3), 2))
    return sum(_payoff_from(ranks, (), first, second=second) for ranks in deals) / len(deals)


def best_response_payoff(player: Player, rival: Strategy) -> float:
    """What `player` wins a game by the best of its pure strategies, against a rival's strategy."""
    return max(_payoff_of(player, pure, rival) for pure in _pure_strategies(player))


def exploitability(first: Strategy, second: Strategy) -> float:
    """Chips a game that a best response wins from these two, on average over both seats; 0 at an equilibrium.

    Half of NashConv: the game is of constant sum, so what both best responses win is what both players could gain.
    """
    return (best_response_payoff("first", second) + best_response_payoff("second", first)) / 2


def exploitability_bounds(
    first: Mapping[Decision, float | None], second: Mapping[Decision, float | None]
) -> tuple[float, float]:
    """Between what the exploitability lies, whatever the players do at the decisions whose chance is None.

    What a best response wins is convex in each single chance, so it is largest where all open ones are 0 or 1, and the
    upper bound is reached. The lower one is what some one pure response wins at least: true, and perhaps not reached.
    """
    low = high = 0.0
    for player, rival in zip(PLAYERS, (second, first), strict=True):
        settled = list(_settle(rival))
        won = [[_payoff_of(player, own, other) for other in settled] for own in _pure_strategies(player)]
        low += max(map(min, won)) / 2
        high += max(map(max, won)) / 2
    return max(low, 0.0), high


def equilibrium(bluff: float) -> tuple[Strategy, Strategy]:
    """An equilibrium of Kuhn's family, by how often the first player bets with the lowest card: from 0 to 1/3."""
    first: Strategy = {
        (0, ()): bluff,
        (1, ()): 0.0,
        (2, ()): 3 * bluff,
        (0, ("check", "bet")): 0.0,
        (1, ("check", "bet")): bluff + 1 / 3,
        (2, ("check", "bet")): 1.0,
    }
    second: Strategy = {
        (0, ("check",)): 1 / 3,
        (1, ("check",)): 0.0,
        (2, ("check",)): 1.0,
        (0, ("bet",)): 0.0,
        (1, ("bet",)): 1 / 3,
        (2, ("bet",)): 1.0,
    }
    return first, second


def is_sound(player: Player, decision: Decision, move: str) -> bool:
    """Whether any equilibrium of Kuhn's family makes this move here; one that none makes gives chips away."""
    chances = [equilibrium(bluff)[PLAYERS.index(player)][decision] for bluff in (0.0, 1 / 3)]
    calm, bold = legal_moves(decision[1])
    return (move == calm and min(chances) < 1) or (move == bold and max(chances) > 0)


def games_to_strategies(games: Iterable[tuple[tuple[int, int], History]]) -> dict[Player, dict[Decision, float | None]]:
    """Played games to how often each player bet or called at each decision; None where it never came to one.

    Args:
        games: the ranks of both cards, and the moves as they counted.
    """
    counts = {player: {decision: [0, 0] for decision in DECISIONS[player]} for player in PLAYERS}
    for ranks, history in games:
        for turn, move in enumerate(history):
            player = PLAYERS[turn % 2]
            counts[player][ranks[turn % 2], history[:turn]][legal_moves(history[:turn]).index(move)] += 1
    return {
        player: {decision: bold / (calm + bold) if calm + bold else None for decision, (calm, bold) in of.items()}
        for player, of in counts.items()
    }


def _payoff_from(ranks: tuple[int, int], history: History, first: Strategy, *, second: Strategy) -> float:
    player = player_to_move(history)
    if player is None:
        return payoff_to_first(ranks, history)
    strategy, rank = (first, ranks[0]) if player == "first" else (second, ranks[1])
    bold = strategy[rank, history]
    return sum(
        chance * _payoff_from(ranks, (*history, move), first, second=second)
        for move, chance in zip(legal_moves(history), (1 - bold, bold), strict=True)
        if chance
    )


def _payoff_of(player: Player, own: Strategy, rival: Strategy) -> float:
    return expected_payoff(own, rival) if player == "first" else -expected_payoff(rival, own)


def _settle(strategy: Mapping[Decision, float | None]) -> Iterator[Strategy]:
    """The strategy with its open decisions settled for good, one way or the other, in every combination."""
    settled = {decision: chance for decision, chance in strategy.items() if chance is not None}
    undecided = strategy.keys() - settled.keys()
    for choices in itertools.product((0.0, 1.0), repeat=len(undecided)):
        yield settled | dict(zip(undecided, choices, strict=True))


def _pure_strategies(player: Player) -> Iterator[Strategy]:
    decisions = DECISIONS[player]
    for choices in itertools.product((0.0, 1.0), repeat=len(decisions)):
        yield dict(zip(decisions, choices, strict=True))
