"""Owns: Sudoku 4x4 (AT-GRPO): its puzzles, its published rewards by hand, and its solutions against an independent one.

- Every puzzle has exactly one solution, of all grids there are, and entering it solves the puzzle.
- An entry that clashes, or that would change a given cell, is refused; one of one's own can be replaced.
- What an entry pays is theirs: choices, progress, constraints, and the end.
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest

from graphs import sudoku

FULL = [[1, 2, 3, 4], [3, 4, 1, 2], [2, 1, 4, 3], [4, 3, 2, 1]]


@cache
def all_grids() -> list[tuple[tuple[int, ...], ...]]:
    """The 288 solved grids, from the permutations of four rows."""
    digits = {1, 2, 3, 4}
    rows = list(itertools.permutations(sorted(digits)))
    return [
        grid
        for grid in itertools.product(rows, repeat=4)
        if all(set(column) == digits for column in zip(*grid, strict=True))
        and all({*grid[t][c : c + 2], *grid[t + 1][c : c + 2]} == digits for t in (0, 2) for c in (0, 2))
    ]


def position_of(grid: list[list[int]], given: list[list[int]] | None = None, attempts: int = 0) -> dict[str, Any]:
    return {"grid": grid, "given": [[bool(x) for x in row] for row in given or grid], "attempts": attempts}


def without(*cells: tuple[int, int]) -> list[list[int]]:
    return [[0 if (r, c) in cells else digit for c, digit in enumerate(row)] for r, row in enumerate(FULL)]


def test_there_are_as_many_solved_grids_as_there_should_be() -> None:
    assert len(all_grids()) == 288
    assert all(sudoku.is_solved([list(row) for row in grid]) for grid in all_grids())


@pytest.mark.parametrize("level", sudoku.LEVELS, ids=lambda level: level.name)
def test_every_puzzle_has_exactly_one_solution_which_solves_it(level: sudoku.Level) -> None:
    for task in sudoku.level_to_tasks(level, range(60)):
        grid = task["grid"]
        (solution,) = (
            full
            for full in all_grids()
            if all(not grid[r][c] or grid[r][c] == full[r][c] for r in range(4) for c in range(4))
        )
        empty = [(r, c) for r in range(4) for c in range(4) if not grid[r][c]]
        assert len(empty) == 16 - level.given
        answer = " ".join(f"r{r + 1}c{c + 1}={solution[r][c]}" for r, c in empty)
        played = sudoku.play(sudoku.task_to_input(task)["position"], answer)
        assert (played.solved, played.bad_moves) == (True, 0)
        assert str(list(solution)) not in str(task)  # no task holds its solution


def test_solutions_are_counted_up_to_the_limit() -> None:
    two_ways = without((0, 0), (0, 1), (2, 0), (2, 1))  # 1 2 over 2 1, or 2 1 over 1 2
    assert sudoku.count_solutions(two_ways, 9) == 2
    assert sudoku.count_solutions([[0] * 4 for _ in range(4)], 500) == 288
    assert sudoku.count_solutions([[0] * 4 for _ in range(4)], 2) == 2
    assert sudoku.count_solutions([[1, 0, 0, 0], [0, 0, 1, 0], [0, 1, 0, 0], [2, 0, 0, 0]], 9) <= 9


def test_the_levels_are_ordered_by_their_empty_cells() -> None:
    given = [level.given for level in sudoku.LEVELS]
    assert given == sorted(given, reverse=True)


def test_the_last_entry_pays_as_worked_by_hand() -> None:
    # Of 15 cells: rows, columns and boxes hold 12 * 3 constraints, three less for the empty cell's three units.
    assert sudoku.count_constraints(FULL) == 36
    assert sudoku.count_constraints(without((0, 0))) == 33
    played = sudoku.play(position_of(without((0, 0))), "r1c1=1")
    # -0.01; one choice 0.2; 0.5 / 16; three constraints of 0.02; 0.1 of a full grid; no cells left; 2 and 0.5.
    assert played.reward == pytest.approx(-0.01 + 0.2 + 0.5 / 16 + 0.06 + 0.1 + 2.5)
    assert (played.solved, played.note) == (True, "r1c1=1 ok, solved")


def test_an_entry_of_two_choices_pays_half_of_that_and_for_the_cells_left() -> None:
    puzzle = without((0, 0), (0, 1), (1, 1), (2, 0), (3, 0), (3, 1))
    assert sudoku.choices(puzzle, 0, 0) == {1, 2}
    before = sudoku.count_constraints(puzzle)
    played = sudoku.play(position_of(puzzle), "r1c1=1")
    gained = sudoku.count_constraints(played.position["grid"]) - before
    assert gained == 3  # a row, a column and a box have one filled cell more, none repeated
    assert played.reward == pytest.approx(-0.01 + 0.1 + 0.5 / 16 + 0.02 * 3 + 0.1 * 11 / 16 + 0.05)


@pytest.mark.parametrize("entry", ["r1c1=2", "r1c2=2", "r1c2=1"])
def test_an_entry_that_clashes_or_changes_a_given_cell_is_refused_and_costs(entry: str) -> None:
    puzzle = without((0, 0), (3, 3))
    played = sudoku.play(position_of(puzzle), entry)
    assert (played.reward, played.bad_moves) == (pytest.approx(-0.3), 1)
    assert played.position["grid"] == puzzle
    assert (played.solved, played.over) == (False, False)


def test_an_entry_of_ones_own_can_be_replaced() -> None:
    puzzle = without((0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1))
    wrong = sudoku.play(position_of(puzzle), "r1c1=2")
    assert wrong.bad_moves == 0  # it fits, but leads nowhere: 1 is right
    mended = sudoku.play(wrong.position, "r1c1=1")
    assert (mended.bad_moves, mended.position["grid"][0][0]) == (0, 1)


def test_a_cell_is_paid_for_once_however_often_it_is_written() -> None:
    last = position_of(without((0, 0)))
    assert sudoku.play(last, "r1c1=1 " * 10).reward == sudoku.play(last, "r1c1=1").reward  # it ends where it is solved
    puzzle = position_of(without((0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)))
    once = sudoku.play(puzzle, "r1c1=2").reward
    assert sudoku.play(puzzle, "r1c1=2 r1c1=2").reward == pytest.approx(once - 0.3)
    assert sudoku.play(puzzle, "r1c1=2 r1c1=1 r1c1=2 r1c1=1").reward == pytest.approx(once - 3 * 0.01)
    first = sudoku.play(puzzle, "r1c1=2")
    assert sudoku.play(first.position, "r1c1=1").reward == pytest.approx(-0.01)  # of a later turn, too


def earnings(grid: list[list[int]], detours: bool) -> float:
    """The most that a way to fill the grid earns, entry by entry, of all ways; with `detours` also by replacing.

    A way has as many attempts as entries; a detour is one more, whenever it is made.
    """
    empty = [(r, c) for r in range(4) for c in range(4) if not grid[r][c]]
    best = {(tuple(map(tuple, grid)), False): 0.0}
    waiting, end = list(best), float("-inf")
    while waiting:
        now, mended = state = waiting.pop(0)
        filled = sum(bool(now[r][c]) for r, c in empty)
        position = position_of([list(row) for row in now], grid, attempts=filled + mended)
        for (r, c), digit in itertools.product(empty, range(1, 5)):
            if now[r][c] and not detours:
                continue
            played = sudoku.play(position, f"r{r + 1}c{c + 1}={digit}")
            earned = best[state] + played.reward
            assert earned < len(empty) + 3, "an entry pays again and again"
            if played.solved:
                end = max(end, earned)
            elif not played.bad_moves:
                following = (tuple(map(tuple, played.position["grid"])), mended or bool(now[r][c]))
                if earned > best.get(following, float("-inf")) + 1e-9:
                    best[following] = earned
                    waiting.append(following)
    assert max(best.values()) < end  # nor does it pay to leave the puzzle unsolved
    return end


@pytest.mark.parametrize("level", [sudoku.FIRST, sudoku.EASY, sudoku.MIDDLE], ids=lambda level: level.name)
def test_no_way_of_replacing_entries_earns_more_than_the_best_way_to_solve(level: sudoku.Level) -> None:
    for task in sudoku.level_to_tasks(level, range(12)):
        assert earnings(task["grid"], detours=True) == pytest.approx(earnings(task["grid"], detours=False))


def test_the_fast_end_counts_every_entry_and_every_turn() -> None:
    puzzle = position_of(without((0, 0), (3, 3)))
    fast = sudoku.play(puzzle, "r1c1=1 r4c4=1")
    refused = sudoku.play(puzzle, "r1c1=2 r1c1=1 r4c4=1")
    assert fast.reward - refused.reward == pytest.approx(0.5 + 0.3)
    first = sudoku.play(puzzle, "r1c1=1")
    assert first.position["attempts"] == 2
    later = sudoku.play(first.position, "r4c4=1")  # the third attempt, of two empty cells
    assert later.solved
    assert first.reward + later.reward == pytest.approx(fast.reward - 0.5)


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("r1c2=3 r4c4=1", [(0, 1, 3), (3, 3, 1)]),
        ("r1 c2 = 3, r4 c4 = 1", [(0, 1, 3), (3, 3, 1)]),
        ("r1c2=33", []),
        ("r5c1=1", []),
        ("r1c1=5", []),
        ("[[1,2],[3,4]]", []),
    ],
)
def test_entries_are_read_as_row_column_and_digit(text: str, entries: list[tuple[int, int, int]]) -> None:
    assert sudoku.text_to_entries(text) == entries


def test_an_answer_has_a_bounded_number_of_entries() -> None:
    assert len(sudoku.text_to_entries("r1c1=1 " * 1000)) == sudoku.MAX_ENTRIES
