"""Owns: the zoo's poker: D along the moves, what a player sees, chips by hand, and that sides learn apart.

A reply that is no move costs its own side only and never ends a run.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.edge_rig import recorded_edges, recorded_trajectories, run_recorded
from support.tiny_policy import make_action, make_trajectory
from support.zoo_rig import ZOO, train_zoo

from examples.zoo.exploitability import (
    CARD_BLIND,
    trajectories_to_compared,
    trajectories_to_rows,
    trajectories_to_versions,
    trajectory_to_game,
)
from graphs import kuhn_poker
from graphs.kuhn_poker import Move
from graphs.kuhn_rules import (
    DECISIONS,
    PLAYERS,
    best_response_payoff,
    exploitability,
    exploitability_bounds,
    games_to_strategies,
)
from marft_bridge.model_calls.scripted_model import ScriptedPolicy
from marft_bridge.recording.recorder import Recorder
from trace_store.journal import Journal
from trace_store.records import Trajectory

TASK = {"id": "t", "deck": [3, 6, 9], "first": 6, "second": 9}


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(Journal(tmp_path / "journal"))


def run(recorder: Recorder, first: list[str], second: list[str]) -> tuple[dict[str, Any], ScriptedPolicy]:
    policy = ScriptedPolicy(answers={"first": first, "second": second})
    return run_recorded(kuhn_poker.build(policy), kuhn_poker.task_to_input(TASK), recorder), policy


def test_every_move_depends_on_all_moves_before_it(recorder: Recorder) -> None:
    result, policy = run(recorder, ["no", "No."], ["yes"])
    assert [move.word for move in result["moves"]] == ["check", "bet", "fold"]
    assert recorded_edges(recorder) == {
        "trigger": "first1>second second>first2",
        "data": "first1>first2 first1>second second>first2",
    }
    asked = [call.prompt.splitlines()[-2] for call in policy.asked]  # the last line is the answer's
    cards = "human: The cards are 3, 6 and 9. You hold"
    assert asked == [
        f"{cards} 6, the middle. Nobody has bet. Do you bet 1 chip?",
        f"{cards} 9, the highest. Nobody has bet. Do you bet 1 chip?",
        f"{cards} 6, the middle. Your rival bets 1 chip. Do you call?",
    ]


@pytest.mark.parametrize(
    ("first", "second", "words", "payoff", "legal"),
    [
        (["no"], ["no"], ("check", "check"), (-1, 1), 1),
        (["yes"], ["yes"], ("bet", "call"), (-2, 2), 1),
        (["yes"], ["no"], ("bet", "fold"), (1, -1), 1),
        # What is no move puts no chip in, and costs its own side 1: a check, a fold.
        (["call"], ["no"], ("check", "check"), (-2, 1), 1 / 2),
        (["yes"], ["I fold"], ("bet", "fold"), (1, -2), 1 / 2),
        (["no", ""], ["yes"], ("check", "bet", "fold"), (-2, 1), 2 / 3),
        (["x" * 5000], ["\x00"], ("check", "check"), (-2, 0), 0),
    ],
)
def test_chips_are_those_worked_out_by_hand_and_a_bad_reply_costs_its_own_side(
    first: list[str],
    second: list[str],
    words: tuple[str, ...],
    payoff: tuple[int, int],
    legal: float,
    recorder: Recorder,
) -> None:
    result, _ = run(recorder, first, second)
    assert tuple(move.word for move in result["moves"]) == words
    (trajectory,) = recorded_trajectories(recorder)
    assert trajectory.episode.outcome == "terminated"
    found = kuhn_poker.reward(TASK, result)
    assert found["payoff"] == {"agent:first": payoff[0], "agent:second": payoff[1]}
    assert found["legal"] == pytest.approx(legal)


def test_what_is_measured_of_a_game() -> None:
    """The middle card never bets first and the highest never folds, by Kuhn's equilibria."""
    moves = [Move("first", "bet", True), Move("second", "call", True)]
    found = kuhn_poker.reward(TASK, {"moves": moves})
    assert (found["sound"], found["legal"], found["showdown"], found["bets"]) == (0.5, 1.0, 1.0, 2.0)
    moves = [Move("first", "check", True), Move("second", "bet", True), Move("first", "fold", False)]
    found = kuhn_poker.reward(TASK, {"moves": moves})
    # The last reply was no move: that it counts as one that an equilibrium makes does not make it sound.
    assert (found["showdown"], found["bets"]) == (0.0, 1.0)
    assert [found["sound"], found["legal"]] == pytest.approx([2 / 3, 2 / 3])


def test_no_prompt_holds_the_card_of_the_rival_by_name() -> None:
    for task in kuhn_poker.tasks():
        state = kuhn_poker.task_to_input(task)
        first, second = (kuhn_poker.state_to_prompt(state, player) for player in PLAYERS)
        assert f"You hold {task['first']}," in first
        assert f"You hold {task['second']}," in second
        swapped = {**task, "second": next(card for card in task["deck"] if card not in (task["first"], task["second"]))}
        assert kuhn_poker.state_to_prompt(kuhn_poker.task_to_input(swapped), "first") == first


def test_tasks_are_distinct_deals_of_three_ranks() -> None:
    tasks = list(kuhn_poker.tasks())
    assert tasks == list(kuhn_poker.tasks())
    assert len(tasks) == len({task["id"] for task in tasks}) == 240
    for task in tasks:
        assert sorted(set(task["deck"])) == task["deck"]
        assert {task["first"], task["second"]} < set(task["deck"])
        assert len({*kuhn_poker.task_to_ranks(task)}) == 2
        assert kuhn_poker.task_id_to_ranks(task["id"]) == kuhn_poker.task_to_ranks(task)


def played(version: dict[str, int], task_id: str, *replies: str | None) -> Trajectory:
    """One recorded game, by its replies."""
    nodes = ("first", "second", "first")
    actions = [replace(make_action(nodes[i], [1], [2]), completion=reply) for i, reply in enumerate(replies)]
    trajectory = make_trajectory(actions, 1.0, task_id=task_id)
    return replace(trajectory, episode=replace(trajectory.episode, adapters=version))


DEALS = [f"deal-3-6-9-{a}-{b}" for a in (3, 6, 9) for b in (3, 6, 9) if a != b]


def test_a_run_tells_how_exploitable_each_version_was_and_names_the_decisions_that_it_never_met() -> None:
    """Both always bet and call, which loses a third of a chip (tests/graphs/test_kuhn_rules.py)."""
    own = {"first": 1, "second": 1}
    games = [played(own, deal, "yes", "yes") for deal in DEALS]
    games.append(played(own, DEALS[0], None))  # not recorded
    told = trajectories_to_versions(games)[1]
    assert (told.games, told.low, told.high) == (6, pytest.approx(1 / 3), pytest.approx(5 / 12))
    (row,) = trajectories_to_rows(games)
    assert row.splitlines() == [
        "version 1: 6 games, exploitability 0.333 to 0.417 (6 of 12 decisions never met), "
        "yes with the lowest/middle/highest card 1.00/1.00/1.00, legal replies 1.00",
        *(f"    never met: first with the {rank} after check and bet" for rank in ("lowest", "middle", "highest")),
        *(f"    never met: second with the {rank} after check" for rank in ("lowest", "middle", "highest")),
    ]


def test_a_player_is_told_by_all_games_in_which_it_had_its_seat_whoever_its_rival_was() -> None:
    """Version 1 comes to its other decisions in games against version 0 alone; its rival's moves are not its own."""
    own = [played({"first": 1, "second": 1}, deal, "yes", "yes") for deal in DEALS]
    as_first = [played({"first": 1, "second": 0}, deal, "zzzz", "yes", "yes") for deal in DEALS]
    as_second = [played({"first": 0, "second": 1}, deal, "no", "yes", "no") for deal in DEALS]
    games = [*own, *as_first, *as_second]
    base, told = trajectories_to_versions(games).values()
    assert (told.games, told.unmet) == (18, ())
    first = {decision: 1.0 if decision[1] else 0.5 for decision in DECISIONS["first"]}  # zzzz is a check
    second = dict.fromkeys(DECISIONS["second"], 1.0)
    assert told.text == f"{exploitability(first, second):.3f}"
    # Version 0 as second answered no bet: those three decisions alone it never met.
    assert (base.games, len(base.unmet)) == (12, 3)


def test_how_often_a_version_says_yes_is_told_by_its_card_and_replies_that_are_no_move_apart() -> None:
    """Version 1 bets first with the highest card alone, and once says what is no move; as second it calls with it."""
    own = {"first": 1, "second": 0}
    games = [
        played(own, "deal-3-6-9-9-3", "yes", "no"),
        played(own, "deal-3-6-9-3-6", "no", "no"),
        played(own, "deal-3-6-9-3-9", "zzzz", "yes", "no"),
        played({"first": 0, "second": 1}, "deal-3-6-9-3-9", "yes", "Yes!"),
    ]
    own_row, other = (row.splitlines()[0].split(", yes with the ")[1] for row in trajectories_to_rows(games)[::-1])
    # Lowest: no, zzzz, no; highest: yes, yes. Of its five replies one is no move.
    assert own_row == "lowest/middle/highest card 0.00/-/1.00, legal replies 0.80"
    # Version 0 as second: no with the lowest, no with the middle, yes with the highest; as first yes with the lowest.
    assert other == "lowest/middle/highest card 0.50/0.00/1.00, legal replies 1.00"


def test_no_player_that_plays_alike_with_every_card_is_less_exploitable_than_is_told_beside_the_figures() -> None:
    """Both seats add up, so each is searched alone: by how often it bets and calls, in steps of a sixth."""
    least = 0.0
    for player, rival in (PLAYERS, PLAYERS[::-1]):
        decisions = DECISIONS[player]
        alike = [
            {decision: call if decision[1][-1:] == ("bet",) else bet for decision in decisions}
            for bet in np.linspace(0, 1, 7)
            for call in np.linspace(0, 1, 7)
        ]
        least += min(best_response_payoff(rival, strategy) for strategy in alike) / 2
    assert least == pytest.approx(CARD_BLIND)


def test_a_comparison_tells_of_the_base_and_the_trained_version_by_all_their_games() -> None:
    def compared(variant: str, versions: tuple[int, int], *replies: str) -> list[Trajectory]:
        games = [played(dict(zip(PLAYERS, versions, strict=True)), deal, *replies) for deal in DEALS]
        return [replace(game, episode=replace(game.episode, variant=variant)) for game in games]

    bold, calm = compared("before", (0, 0), "yes", "yes"), compared("after", (4, 4), "no", "no")
    told = trajectories_to_compared([*bold, *calm, *compared("version 2", (2, 2), "yes", "no")], resamples=3)
    before, after = told.before, told.after
    assert (before.games, after.games, len(before.unmet), len(after.unmet)) == (6, 6, 6, 6)
    assert f"exploitability {before.text}" in trajectories_to_rows(bold)[0]
    assert f"exploitability {after.text}" in trajectories_to_rows(calm)[0]
    seated = compared("before as first, after as second", (0, 4), "yes", "no")
    seated += compared("after as first, before as second", (4, 0), "no", "yes", "no")
    told = trajectories_to_compared([*bold, *calm, *seated], resamples=3)
    before, after = told.before, told.after
    assert (before.games, after.games, len(before.unmet), len(after.unmet)) == (18, 18, 3, 0)
    with pytest.raises(ValueError, match="the comparison has no game of after"):
        trajectories_to_compared(bold)


def test_the_share_of_exploitability_that_is_left_is_told_by_deals_drawn_anew() -> None:
    """Two deals: a draw is one of them twice, the other twice, or both; the interval is from the least to the most."""
    bold, meek = [("yes", "yes"), ("no", "yes", "yes")], [("yes", "no"), ("no", "yes", "no")]
    both, first, second = [*bold, *meek], DEALS[0], DEALS[2]
    replies = {"before": {first: bold, second: both}, "after": {first: both, second: meek}}

    def games(variant: str, deal: str) -> list[Trajectory]:
        version = dict.fromkeys(PLAYERS, ("before", "after").index(variant))
        each = [played(version, deal, *game) for game in replies[variant][deal]]
        return [replace(game, episode=replace(game.episode, variant=variant)) for game in each]

    def bounds(variant: str, deals: tuple[str, ...]) -> tuple[float, float]:
        told = [trajectory_to_game(game) for deal in deals for game in games(variant, deal)]
        strategies = games_to_strategies([game for game in told if game is not None])
        return exploitability_bounds(strategies["first"], strategies["second"])

    draws = [(first, first), (first, second), (second, second)]
    shares = [(bounds("after", draw), bounds("before", draw)) for draw in draws]
    every = [game for variant in replies for deal in (first, second) for game in games(variant, deal)]
    left = trajectories_to_compared(every, resamples=16).share_left
    assert left == (
        pytest.approx(min(after[0] / before[1] for after, before in shares)),
        pytest.approx(max(after[1] / before[0] for after, before in shares)),
    )


def plays(node: str, messages: list[dict[str, Any]], chance: random.Random) -> str:
    """Moves at random, and half of the time none at all."""
    if chance.random() < 0.5:
        return "zzzz zzzz"
    return chance.choice(["no", "yes"])


@pytest.mark.slow
def test_each_side_is_pulled_towards_its_own_chips(tmp_path: Path) -> None:
    trained = train_zoo(ZOO / "kuhn_poker.toml", plays, tmp_path, rounds=3, episodes=24)
    assert set(trained.norms) == {"first", "second"}
    versions = trajectories_to_versions([*trained.collected, *trained.trained])
    assert list(versions) == list(range(4))
    assert min(trained.norms.values()) > 0
    for node in PLAYERS:
        own = {
            r.episode_id: r.value for t in trained.trained for r in t.rewards if r.name == "payoff" and r.node == node
        }
        assert trained.pull(node, lambda trajectory, own=own: own[trajectory.episode.episode_id]) > 0.2
