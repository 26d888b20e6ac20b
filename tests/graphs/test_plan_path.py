"""Owns: Plan-Path (AT-GRPO): its grids, its published rewards by hand, and its ways against an independent search.

- Every task has a way, as long as it says, and walking it solves the task; levels are ordered by its length.
- What a move pays is theirs: -0.01, or -0.1 where it is refused, the shaping, 1 for the goal and 0.5 for a way
  that is the shortest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from graphs import plan_path

Cell = tuple[int, int]


def position_of(grid: list[str], at: Cell, goal: Cell, shortest: int = 99, step_limit: int = 99) -> dict[str, Any]:
    return {
        "grid": grid, "at": list(at), "goal": list(goal), "shortest": shortest, "steps": 0, "step_limit": step_limit
    }  # fmt: skip


def solve(rows: list[str], start: Cell, goal: Cell) -> list[str] | None:
    """Moves of a shortest way, by levelling distances from the goal until nothing changes; None where there is none."""
    free = {(r, c) for r, row in enumerate(rows) for c, symbol in enumerate(row) if symbol == "."}
    lengths = {cell: 0 if cell == goal else 10**9 for cell in free}
    changed = True
    while changed:
        changed = False
        for cell in free:
            best = min((lengths[beside] + 1 for _, beside in beside_of(cell) if beside in free), default=10**9)
            if best < lengths[cell]:
                lengths[cell], changed = best, True
    if lengths[start] >= 10**9:
        return None
    moves: list[str] = []
    while start != goal:
        move, start = next((m, b) for m, b in beside_of(start) if b in free and lengths[b] == lengths[start] - 1)
        moves.append(move)
    return moves


def beside_of(cell: Cell) -> Iterator[tuple[str, Cell]]:
    row, column = cell
    yield from (("U", (row - 1, column)), ("D", (row + 1, column)), ("L", (row, column - 1)), ("R", (row, column + 1)))


@pytest.mark.parametrize("level", plan_path.LEVELS, ids=lambda level: level.name)
def test_every_task_is_solved_by_a_way_of_the_length_it_says(level: plan_path.Level) -> None:
    for task in plan_path.level_to_tasks(level, range(80)):
        moves = solve(task["grid"], tuple(task["start"]), tuple(task["goal"]))
        assert moves is not None
        assert len(moves) == task["shortest"]
        assert level.shortest <= len(moves) <= min(level.longest, level.step_limit)
        assert len(task["grid"]) == len(task["grid"][0]) == level.side
        played = plan_path.play(plan_path.task_to_input(task)["position"], " ".join(moves))
        assert (played.solved, played.bad_moves) == (True, 0)


def test_no_way_is_found_where_there_is_none() -> None:
    walled = [".#.", "##.", "..."]
    assert plan_path.shortest_way(walled, (0, 0), (2, 2)) is None
    assert solve(walled, (0, 0), (2, 2)) is None


def test_the_levels_are_ordered_by_the_length_of_their_ways() -> None:
    means = []
    for level in plan_path.LEVELS:
        lengths = [task["shortest"] for task in plan_path.level_to_tasks(level, range(300))]
        means.append(sum(lengths) / len(lengths))
    assert means == sorted(means)
    assert means[-1] > 3 * means[0]


def test_a_tenth_to_a_quarter_of_a_published_grid_is_blocked() -> None:
    cells = "".join("".join(task["grid"]) for task in plan_path.tasks())
    assert cells.count("#") / len(cells) == pytest.approx(0.22, abs=0.02)


def test_a_straight_way_pays_as_worked_by_hand() -> None:
    # Two moves of -0.01, each of them one nearer; 1 for the goal, 0.5 as two is the fewest.
    played = plan_path.play(position_of(["..."], (0, 0), (0, 2), shortest=2), "R2")
    assert played.reward == pytest.approx(-0.02 + 2 + 1.5)
    assert (played.solved, played.position["at"], played.position["steps"]) == (True, [0, 2], 2)
    assert played.note == "R R, at r1 c3, 0 bad, goal"


def test_a_way_that_is_not_the_shortest_goes_without_the_bonus() -> None:
    # Four moves of -0.01, in all two nearer; 1 for the goal.
    played = plan_path.play(position_of(["..."], (0, 0), (0, 2), shortest=2), "R L R R")
    assert played.reward == pytest.approx(-0.04 + 2 + 1.0)


@pytest.mark.parametrize(("move", "grid"), [("U", ["..", ".."]), ("L", ["..", ".."]), ("R", [".#", ".."])])
def test_a_refused_move_pays_a_tenth_and_changes_nothing_but_the_count(move: str, grid: list[str]) -> None:
    played = plan_path.play(position_of(grid, (0, 0), (1, 1)), move)
    assert played.reward == pytest.approx(-0.1)
    assert (played.position["at"], played.position["steps"], played.bad_moves) == ([0, 0], 1, 1)
    assert (played.solved, played.over) == (False, False)


@pytest.mark.parametrize("text", ["L R " * 50, "U " * 100, "U D L R " * 25, "R9 L9", "D U " * 50 + "L9"])
def test_wandering_and_bumping_pay_nothing_but_the_nearness_that_they_end_with(text: str) -> None:
    for task in plan_path.level_to_tasks(plan_path.PUBLISHED, range(60)):
        position = plan_path.task_to_input(task)["position"]
        played = plan_path.play(position, text)
        if played.solved:
            continue
        goal = tuple(position["goal"])
        gained = plan_path.distance(tuple(position["at"]), goal) - plan_path.distance(
            tuple(played.position["at"]), goal
        )
        assert played.reward < gained or not played.position["steps"]


def test_moves_after_the_goal_are_not_walked() -> None:
    played = plan_path.play(position_of([".."], (0, 0), (0, 1), shortest=1), "R L L L")
    assert (played.solved, played.position["at"], played.position["steps"]) == (True, [0, 1], 1)


def test_with_the_last_move_allowed_the_run_has_failed() -> None:
    played = plan_path.play(position_of(["...."], (0, 0), (0, 3), step_limit=2), "R3")
    assert (played.solved, played.over, played.position["at"]) == (False, True, [0, 2])
    assert played.reward == pytest.approx(-0.02 + 2 - 1.0)
    reached = plan_path.play(position_of(["..."], (0, 0), (0, 2), step_limit=2), "R2")
    assert (reached.solved, reached.over) == (True, False)


def test_a_question_shows_the_grid_and_says_where_one_is() -> None:
    shown = plan_path.describe(position_of([".#", ".."], (0, 0), (1, 1), step_limit=7))
    assert shown == "S #\n. G\nYou r1 c1, goal r2 c2, 7 moves left."
