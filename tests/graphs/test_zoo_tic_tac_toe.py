"""Owns: the zoo's tic-tac-toe: its rules against a minimax written apart, D along the moves, payoffs by hand, training.

A reply that is no free square costs its own side only and never ends a run.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.edge_rig import recorded_edges, recorded_trajectories, run_recorded
from support.zoo_rig import ZOO, train_zoo

from graphs import tic_tac_toe
from graphs.tic_tac_toe import EXAMPLES, MARKS
from graphs.tic_tac_toe_rules import (
    EMPTY,
    board_after,
    free_squares,
    images,
    mark_to_move,
    open_positions,
    winner,
    worst_square,
    worth_to_mover,
)
from marft_bridge.config.bridge import toml_to_config
from marft_bridge.model_calls.scripted_model import ScriptedPolicy
from marft_bridge.recording.recorder import Recorder
from marft_bridge.rollouts.app import split_tasks
from trace_store.journal import Journal

# -- the rules ------------------------------------------------------------------------------------------------------

# Sums of three squares of this magic square are 15 on a line and nowhere else.
MAGIC = (2, 7, 6, 9, 5, 1, 4, 3, 8)


def has_line(squares: frozenset[int]) -> bool:
    """By the magic square instead of a list of lines."""
    values = [MAGIC[square] for square in squares]
    return any(a + b + c == 15 for i, a in enumerate(values) for j, b in enumerate(values[:i]) for c in values[:j])


def solve() -> dict[tuple[frozenset[int], frozenset[int]], int]:
    """(squares of X, of O) -> what the game is worth to X: a minimax of sets of squares, the full boards first."""
    layers = [{(frozenset[int](), frozenset[int]())}]
    for marks in range(9):
        layer = set()
        for crosses, noughts in layers[-1]:
            if has_line(crosses) or has_line(noughts):
                continue
            for square in set(range(9)) - crosses - noughts:
                own = {square}
                layer.add((crosses | own, noughts) if marks % 2 == 0 else (crosses, noughts | own))
        layers.append(layer)
    worth: dict[tuple[frozenset[int], frozenset[int]], int] = {}
    for marks, layer in reversed([*enumerate(layers)]):
        for crosses, noughts in layer:
            if has_line(crosses) or has_line(noughts):
                worth[crosses, noughts] = 1 if has_line(crosses) else -1
                continue
            free = set(range(9)) - crosses - noughts
            if marks % 2 == 0:
                after = [worth[crosses | {square}, noughts] for square in free]
                worth[crosses, noughts] = max(after)
            else:
                after = [worth[crosses, noughts | {square}] for square in free]
                worth[crosses, noughts] = min(after, default=0)
            if not free:
                worth[crosses, noughts] = 0
    return worth


def sets_of(board: str) -> tuple[frozenset[int], frozenset[int]]:
    crosses, noughts = (frozenset(square for square in range(9) if board[square] == mark) for mark in "XO")
    return crosses, noughts


def reachable() -> set[str]:
    boards, newest = {EMPTY}, {EMPTY}
    while newest:
        newest = {board_after(board, square) for board in newest for square in free_squares(board)}
        boards |= newest
    return boards


def test_every_reachable_position_is_worth_what_a_minimax_written_apart_says() -> None:
    boards, solved = reachable(), solve()
    assert len(boards) == len(solved) == 5478  # as published
    for board in boards:
        sign = 1 if mark_to_move(board) == "X" else -1
        assert worth_to_mover(board) == sign * solved[sets_of(board)], board
        lines = [mark for mark, squares in zip("XO", sets_of(board), strict=True) if has_line(squares)]
        assert ([winner(board)] if winner(board) else []) == lines
    assert worth_to_mover(EMPTY) == 0


def test_what_an_illegal_reply_counts_as_is_never_better_for_its_side_than_a_free_square() -> None:
    """Everywhere where the game goes on, by the minimax written apart; of squares that are equal it is the first."""
    solved = solve()
    for board in reachable():
        if not (free := free_squares(board)):
            continue
        sign = 1 if mark_to_move(board) == "X" else -1
        worths = [sign * solved[sets_of(board_after(board, square))] for square in free]
        assert worst_square(board) == free[worths.index(min(worths))], board


def test_turning_and_mirroring_changes_nothing_and_leaves_the_published_numbers_of_positions() -> None:
    assert sorted(images("XO.......")) == sorted(
        ["XO.......", ".OX......", "X..O.....", "..X..O...", "......XO.", ".......OX", "...O..X..", ".....O..X"]
    )
    for board in random.Random(0).sample(sorted(reachable()), 40):
        assert {worth_to_mover(image) for image in images(board)} == {worth_to_mover(board)}
    assert [len(list(open_positions(marks))) for marks in range(5)] == [1, 3, 12, 38, 108]


# -- the graph ------------------------------------------------------------------------------------------------------

# X X 3      X wins at 3. Where it moves elsewhere, O wins at 6.
# O O 6
# 7 8 9
TASK = {"id": "t", "start": "XX.OO...."}


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(Journal(tmp_path / "journal"))


def run(recorder: Recorder, cross: list[str], nought: list[str]) -> tuple[dict[str, Any], ScriptedPolicy]:
    policy = ScriptedPolicy(answers={"cross": cross, "nought": nought})
    return run_recorded(tic_tac_toe.build(policy), tic_tac_toe.task_to_input(TASK), recorder), policy


def test_every_move_depends_on_all_moves_before_it_and_the_board_is_shown(recorder: Recorder) -> None:
    result, policy = run(recorder, ["6", "Square 3!"], ["9"])
    assert [(move.player, move.square) for move in result["moves"]] == [("cross", 5), ("nought", 8), ("cross", 2)]
    assert recorded_edges(recorder) == {
        "trigger": "cross1>nought nought>cross2",
        "data": "cross1>cross2 cross1>nought nought>cross2",
    }
    asked = [re.split(r"human: (?=[XO1])", call.prompt)[-1].removesuffix("\nai: ") for call in policy.asked]
    assert asked == [
        "X X 3\nO O 6\n7 8 9\nYou are X.",
        "X X 3\nO O X\n7 8 9\nYou are O.",
        "X X 3\nO O X\n7 8 O\nYou are X.",
    ]


@pytest.mark.parametrize(
    ("cross", "nought", "payoff", "legal", "sound", "judgement"),
    [
        (["3"], [], (1, -1), 1, 1, 1),
        # X gives the win away and O takes it: one of the two moves is sound.
        (["9"], ["6"], (-1, 1), 1, 1 / 2, 1 / 2),
        # What names no free square is 7, the first of three that lose, though 3 is free and wins. O wins.
        (["1"], ["6"], (-2, 1), 1 / 2, 1 / 2, 1),
        # The same, and O blocks at 3 where it could have won. X must block at 6. After that all squares are a draw.
        (["99999999999999999999999", "6", "8"], ["3", "9"], (-1, 0), 4 / 5, 3 / 5, 1 / 2),
        # X blocks where it could have won. O's reply counts as 7, since after 7, 8 and 9 X wins; X does.
        (["6", "3"], ["none"], (1, -2), 2 / 3, 1 / 3, 1 / 2),
        (["x" * 5000, "3"], ["\x00"], (0, -2), 1 / 3, 1 / 3, 1),
        # Nobody names one: X 7, O 8, X 9, O 3, X 6, a draw. No reply was legal, so there is no share of them.
        (["1", "", "x"], ["0", "10"], (-3, -2), 0, 0, None),
    ],
)
def test_payoffs_are_those_worked_out_by_hand_and_a_bad_reply_costs_its_own_side(
    cross: list[str],
    nought: list[str],
    payoff: tuple[int, int],
    legal: float,
    sound: float,
    judgement: float | None,
    recorder: Recorder,
) -> None:
    result, policy = run(recorder, cross, nought)
    assert len(policy.asked) == len(cross) + len(nought)
    (trajectory,) = recorded_trajectories(recorder)
    assert trajectory.episode.outcome == "terminated"
    found = tic_tac_toe.reward(TASK, result)
    assert found["payoff"] == {"agent:cross": payoff[0], "agent:nought": payoff[1]}
    assert (found["legal"], found["sound"]) == pytest.approx((legal, sound))
    assert found["judgement"] == (judgement if judgement is None else pytest.approx(judgement))


def test_naming_any_free_square_more_often_makes_replies_sound_and_hardly_raises_judgement() -> None:
    """Free squares at random on the held-out tasks. What is left is that other positions are come to."""
    means = {}
    _, heldout = split_tasks(list(tic_tac_toe.tasks()), toml_to_config(ZOO / "tic_tac_toe.toml").graph.heldout)
    for share in (0.5, 1.0):
        chance = random.Random(0)
        games = [tic_tac_toe.reward(task, random_game(task, share, chance)) for task in heldout for _ in range(40)]
        judged = [game["judgement"] for game in games if game["judgement"] is not None]
        means[share] = sum(game["sound"] for game in games) / len(games), sum(judged) / len(judged)
    (sound, judgement), (sound_legal, judgement_legal) = means.values()
    assert sound_legal - sound > 0.25
    assert (judgement, judgement_legal) == (pytest.approx(0.45, abs=0.03), pytest.approx(0.50, abs=0.03))  # the config


def random_game(task: dict[str, Any], share: float, chance: random.Random) -> dict[str, Any]:
    """A game in which this share of the replies names a free square, any of them."""
    board, moves = task["start"], []
    while free_squares(board):
        player = next(name for name, mark in MARKS.items() if mark == mark_to_move(board))
        legal = chance.random() < share
        square = chance.choice(free_squares(board)) if legal else worst_square(board)
        moves.append(tic_tac_toe.Move(player, square, legal))
        board = board_after(board, square)
    return {"moves": moves}


def test_players_that_play_perfectly_end_where_the_solved_game_does() -> None:
    """From every task, by the minimax written apart: the payoff is the worth, and every move was sound."""
    solved = solve()

    def best(board: str) -> int:
        pick = max if mark_to_move(board) == "X" else min
        return pick(free_squares(board), key=lambda square: solved[sets_of(board_after(board, square))])

    for task in tic_tac_toe.tasks():
        board, moves, could_err = task["start"], [], False
        while free_squares(board):
            player = next(name for name, mark in MARKS.items() if mark == mark_to_move(board))
            moves.append(tic_tac_toe.Move(player, best(board), legal=True))
            could_err |= len({solved[sets_of(board_after(board, square))] for square in free_squares(board)}) > 1
            board = board_after(board, moves[-1].square)
        worth = solved[sets_of(task["start"])]
        found = tic_tac_toe.reward(task, {"moves": moves})
        assert found == {
            "sound": 1.0,
            "legal": 1.0,
            "judgement": 1.0 if could_err else None,
            "drawn": float(worth == 0),
            "payoff": {"agent:cross": worth, "agent:nought": -worth},
        }


def test_the_worked_examples_are_sound_moves_of_positions_that_are_no_tasks() -> None:
    starts = {image for task in tic_tac_toe.tasks() for image in images(task["start"])}
    for question, answer in EXAMPLES:
        board = re.sub(r"\d", ".", "".join(question.split("\n")[:3]).replace(" ", ""))
        assert tic_tac_toe.board_to_prompt(board) == question
        assert board not in starts
        square = tic_tac_toe.reply_to_square(answer, board)
        assert square is not None
        assert -worth_to_mover(board_after(board, square)) == worth_to_mover(board)


def test_tasks_are_121_positions_of_which_none_is_another_one_turned() -> None:
    tasks = list(tic_tac_toe.tasks())
    assert tasks == list(tic_tac_toe.tasks())
    assert len(tasks) == len({task["id"] for task in tasks}) == len({min(images(t["start"])) for t in tasks}) == 121
    for task in tasks:
        assert mark_to_move(task["start"]) == "X"
        assert free_squares(task["start"])


def test_the_starts_favour_cross_by_as_much_as_is_told() -> None:
    assert Counter(worth_to_mover(task["start"]) for task in tic_tac_toe.tasks()) == {1: 92, 0: 24, -1: 5}


def plays(node: str, messages: list[dict[str, Any]], chance: random.Random) -> str:
    """A free square at random, and half of the time none at all."""
    if chance.random() < 0.5:
        return "zzzz zzzz"
    return chance.choice(re.findall(r"\d", messages[-1]["content"]))


@pytest.mark.slow
def test_the_rounds_pull_each_side_towards_its_own_payoff(tmp_path: Path) -> None:
    """Without the replay: what it imitates first are words that this model has never seen, whatever they paid."""
    changes = {"train.trainer.offline.mode": "off"}
    trained = train_zoo(ZOO / "tic_tac_toe.toml", plays, tmp_path, rounds=3, episodes=24, changes=changes)
    assert set(trained.norms) == set(MARKS)
    assert min(trained.norms.values()) > 0
    for node in MARKS:
        own = {
            r.episode_id: r.value for t in trained.trained for r in t.rewards if r.name == "payoff" and r.node == node
        }
        assert trained.pull(node, lambda trajectory, own=own: own[trajectory.episode.episode_id]) > 0.1
