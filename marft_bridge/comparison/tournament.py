"""Games between variants, seat by seat -> who won how often, and Elo ratings with intervals.

A side's payoff is what its agents earned by `shaping`, weights and all: what training pays them by. Whoever earned more
has won a game, equal payoffs are a draw. Invariants: every two variants are rated by both seats; a game in which a side
has no payoff is left out and counted, and the deciding metric has no say in it; the base has the rating 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from marft_bridge.comparison.records import Match, Rated, Tournament
from marft_bridge.comparison.variants import Lineup, Seating
from marft_bridge.statistics.bradley_terry import Game, Outcome
from marft_bridge.statistics.elo import games_to_ratings
from trace_store.records import Trajectory
from trainers.config import TrainerOptions
from trainers.rewards import trajectory_to_rewards

_SAME = 1e-9  # payoffs: sums of the same terms in another order do not make a winner


@dataclass(frozen=True, slots=True)
class PlayedGame:
    """One game of two variants: who sat on the first side and who on the second, and what each side earned."""

    first: str
    second: str
    task_id: str
    payoff_first: float
    payoff_second: float

    @property
    def outcome(self) -> Outcome:
        """Who earned more."""
        if math.isclose(self.payoff_first, self.payoff_second, rel_tol=_SAME, abs_tol=_SAME):
            return "tie"
        return "first" if self.payoff_first > self.payoff_second else "second"


def trajectory_to_game(trajectory: Trajectory, seating: Seating, options: TrainerOptions) -> PlayedGame | None:
    """A recorded episode of a seating into its game; None where one of the two sides has no payoff."""
    payoffs = trajectory_to_payoffs(trajectory, options)
    first, second = (payoffs.get(side) for side in options.sides)
    if first is None or second is None:
        return None
    return PlayedGame(
        seating.first, seating.second, trajectory.episode.task_id, payoff_first=first, payoff_second=second
    )


def trajectory_to_payoffs(trajectory: Trajectory, options: TrainerOptions) -> dict[str, float]:
    """Side -> what its agents earned in an episode by the shaping terms; a side without any is absent."""
    side_of = options.side_of or {}
    rewards, _ = trajectory_to_rewards(
        trajectory,
        (options.reward, 0.0),
        options.shaping,
        edges=(),
        is_kept_A=[True] * len(trajectory.actions),
        side_of=side_of,
    )
    earned: dict[str, list[float]] = {}
    for by_agent in rewards.private.values():
        for agent, value in by_agent.items():
            earned.setdefault(side_of[agent], []).append(value)
    for steps in rewards.step.values():
        for step in steps:
            (position,) = step.links  # without edges it reaches the action that it arrived with, and no other
            earned.setdefault(side_of[trajectory.actions[position].node], []).append(step.value)
    return {side: math.fsum(values) for side, values in earned.items()}


def games_to_tournament(
    games: Sequence[PlayedGame], lineup: Lineup, options: TrainerOptions, *, left_out: int, seed: int
) -> Tournament | None:
    """Games into a tournament; None where some two variants have no game on some seat.

    Args:
        left_out: planned games that are not among them.
        seed: of the bootstrap.
    """
    by_seat: dict[tuple[str, str], list[PlayedGame]] = {(s.first, s.second): [] for s in lineup.seatings}
    for game in games:
        by_seat[game.first, game.second].append(game)
    if not all(by_seat.values()):
        return None
    ratings = games_to_ratings(
        [Game(game.first, game.second, game.outcome) for game in games],
        [game.task_id for game in games],
        lineup.base.name,
        seed=seed,
    )
    matches = tuple(_games_to_match(first, second, played) for (first, second), played in by_seat.items())
    first_side, second_side = options.sides
    return Tournament(
        sides=(first_side, second_side),
        ratings=tuple(
            Rated(
                variant=team.name,
                **ratings.by_player[team.name]._asdict(),
                won=sum(m.won * (m.first == team.name) + m.lost * (m.second == team.name) for m in matches),
                drawn=sum(m.drawn * (team.name in (m.first, m.second)) for m in matches),
                lost=sum(m.lost * (m.first == team.name) + m.won * (m.second == team.name) for m in matches),
            )
            for team in lineup.teams
        ),
        finite=ratings.finite,
        matches=matches,
        left_out=left_out,
    )


def _games_to_match(first: str, second: str, games: Sequence[PlayedGame]) -> Match:
    outcomes = [game.outcome for game in games]
    return Match(
        first=first,
        second=second,
        won=outcomes.count("first"),
        drawn=outcomes.count("tie"),
        lost=outcomes.count("second"),
        payoff_first=math.fsum(game.payoff_first for game in games) / len(games),
        payoff_second=math.fsum(game.payoff_second for game in games) / len(games),
    )
