"""Sudoku of 4 x 4 cells, by a tool writer and a planner, turn by turn.

After the benchmark Sudoku 4x4 of PettingLLMs (AT-GRPO, arXiv 2510.11062); see `graphs.game_turns` for the agents and
the turns. Theirs, as their code has it: an answer is a whole grid or a list of entries; what an entry pays is STEP,
what its choices, progress and constraints add (`_pay_entry`), or BAD_ENTRY; SOLVED and FAST on top at the end. Ours:
entries only, written `r1c2=3`, so that a given cell stays what it is (theirs does not compare a whole grid with the
given cells); an entry of one's own may be replaced, which pays STEP alone, where theirs mends an entry by a whole grid;
an answer ends where the grid is solved; every puzzle has exactly one solution (of the 400 puzzles that their script
makes, 324 have none that keeps the given cells and 17 several); 8 given cells at `published`, where theirs has 3 to 11,
7.7 on average; the levels with more of them.

Invariants: the same seed gives the same task; no two tasks of a level are the same puzzle; every puzzle has exactly one
solution, and no given cell ever changes.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from langchain_core.language_models import BaseChatModel
from langgraph.graph.state import CompiledStateGraph

from graphs.few_shot import FewShotPrompt
from graphs.game_turns import (
    UNREADABLE,
    Agent,
    Game,
    GameState,
    Played,
    Position,
    RunProgram,
    distinct_tasks,
    game_to_graph,
    task_to_state,
    text_to_answer,
    turns_to_rewards,
)

SIDE, BOX = 4, 2
STEP, BAD_ENTRY, SOLVED, FAST = -0.01, -0.3, 2.0, 0.5
ONLY_CHOICE, OF_TWO_CHOICES, PROGRESS_GAIN, CONSTRAINT, PROGRESS, CELLS_LEFT = 0.2, 0.1, 0.5, 0.02, 0.1, 0.05
MAX_ENTRIES = 32
"""Entries that are read of an answer."""
TASKS = 400
"""Tasks of a level."""
_ENTRY = re.compile(r"r ?([1-4]) ?,? ?c ?([1-4]) ?= ?([1-4])(?![0-9])")

Grid = list[list[int]]
Entry = tuple[int, int, int]
"""Row, column, digit, from 0, 0 and 1."""


class Level(NamedTuple):
    """How hard: how many cells are given, and the turns allowed."""

    name: str
    given: int
    turn_limit: int


FIRST = Level("first", 15, turn_limit=2)
EASY = Level("easy", 13, turn_limit=3)
MIDDLE = Level("middle", 11, turn_limit=4)
PUBLISHED = Level("published", 8, turn_limit=4)
LEVELS = (FIRST, EASY, MIDDLE, PUBLISHED)


def level_to_tasks(level: Level, seeds: Iterable[int]) -> Iterator[dict[str, Any]]:
    """One task for each seed, but for those whose puzzle an earlier seed gave."""
    made = (_seed_to_task(level, seed) for seed in seeds)
    return distinct_tasks(made, lambda task: tuple(itertools.chain.from_iterable(task["grid"])))


def _seed_to_task(level: Level, seed: int) -> dict[str, Any]:
    draw = random.Random(f"sudoku {level.name} {seed}")
    while True:
        grid = _draw_solution(draw)
        cells = list(itertools.product(range(SIDE), repeat=2))
        for row, column in draw.sample(cells, SIDE * SIDE - level.given):
            grid[row][column] = 0
        if count_solutions(grid, 2) == 1:
            return {"id": f"{level.name}-{seed}", "grid": grid, "turn_limit": level.turn_limit}


def _draw_solution(draw: random.Random) -> Grid:
    grid = [[0] * SIDE for _ in range(SIDE)]

    def fill(index: int) -> bool:
        if index == SIDE * SIDE:
            return True
        row, column = divmod(index, SIDE)
        for digit in draw.sample(range(1, SIDE + 1), SIDE):
            if digit in choices(grid, row, column):
                grid[row][column] = digit
                if fill(index + 1):
                    return True
                grid[row][column] = 0
        return False

    fill(0)
    return grid


def count_solutions(grid: Grid, limit: int) -> int:
    """How many ways there are to fill the empty cells, counted up to `limit`."""
    empty = next(((r, c) for r in range(SIDE) for c in range(SIDE) if not grid[r][c]), None)
    if empty is None:
        return 1
    row, column = empty
    count = 0
    for digit in choices(grid, row, column):
        grid[row][column] = digit
        count += count_solutions(grid, limit - count)
        grid[row][column] = 0
        if count >= limit:
            break
    return count


def choices(grid: Grid, row: int, column: int) -> set[int]:
    """The digits that neither the row nor the column nor the box of a cell has, whatever is in the cell."""
    top, left = row // BOX * BOX, column // BOX * BOX
    used = {grid[row][c] for c in range(SIDE) if c != column} | {grid[r][column] for r in range(SIDE) if r != row}
    used |= {grid[r][c] for r in range(top, top + BOX) for c in range(left, left + BOX) if (r, c) != (row, column)}
    return set(range(1, SIDE + 1)) - used


def is_solved(grid: Grid) -> bool:
    """Whether every cell is filled and every digit is a choice of its cell."""
    return all(grid[r][c] in choices(grid, r, c) for r in range(SIDE) for c in range(SIDE))


def count_constraints(grid: Grid) -> int:
    """Over rows, columns and boxes without a repeated digit: their filled cells beyond the first."""
    units = [list(row) for row in grid] + [list(column) for column in zip(*grid, strict=True)]
    units += [
        [grid[top + r][left + c] for r in range(BOX) for c in range(BOX)]
        for top in range(0, SIDE, BOX)
        for left in range(0, SIDE, BOX)
    ]
    filled = [[digit for digit in unit if digit] for unit in units]
    return sum(max(len(digits) - 1, 0) for digits in filled if len(digits) == len(set(digits)))


def first_tasks() -> Iterator[dict[str, Any]]:
    """One empty cell: what a model of 135M parameters can begin on."""
    return level_to_tasks(FIRST, range(TASKS))


def easy_tasks() -> Iterator[dict[str, Any]]:
    """Three empty cells."""
    return level_to_tasks(EASY, range(TASKS))


def middle_tasks() -> Iterator[dict[str, Any]]:
    """Five empty cells."""
    return level_to_tasks(MIDDLE, range(TASKS))


def tasks() -> Iterator[dict[str, Any]]:
    """Eight empty cells, about as published."""
    return level_to_tasks(PUBLISHED, range(TASKS))


def describe(position: Position) -> str:
    """The grid, a dot for each empty cell, and where these are."""
    grid = position["grid"]
    lines = [" ".join(str(digit) if digit else "." for digit in row) for row in grid]
    empty = [f"r{r + 1}c{c + 1}" for r in range(SIDE) for c in range(SIDE) if not grid[r][c]]
    lines.append(f"Empty: {' '.join(empty)}" if empty else "Empty: none")
    return "\n".join(lines)


def text_to_entries(text: str) -> list[Entry]:
    """The entries of a text's answer: `r1c2=3 r4 c4 = 1`."""
    found_entries = _ENTRY.findall(text_to_answer(text))[:MAX_ENTRIES]
    return [(int(row) - 1, int(column) - 1, int(digit)) for row, column, digit in found_entries]


def play(position: Position, text: str) -> Played:
    """Writes the entries of a text that fit; the others are refused."""
    entries = text_to_entries(text)
    if not entries:
        return Played(position, UNREADABLE, bad_moves=1, readable=False, note="no entries", solved=False, over=False)
    grid, attempts = [list(row) for row in position["grid"]], position["attempts"]
    earned, bad_moves, notes = 0.0, 0, []
    for row, column, digit in entries:
        attempts += 1
        stands = grid[row][column]
        fits = not position["given"][row][column] and digit != stands and digit in choices(grid, row, column)
        notes.append(f"r{row + 1}c{column + 1}={digit} {'ok' if fits else 'bad'}")
        if fits:  # a cell is paid for once: what stands in it may be mended, and not written again for more
            earned += STEP if stands else _pay_entry(grid, (row, column, digit))
            grid[row][column] = digit
        else:
            earned += BAD_ENTRY
            bad_moves += 1
        if is_solved(grid):
            break
    solved = is_solved(grid)
    if solved:
        empty_at_first = sum(not given for given_row in position["given"] for given in given_row)
        earned += SOLVED + (FAST if attempts <= empty_at_first else 0.0)
    note = f"{' '.join(notes)}, {'solved' if solved else 'not solved'}"
    # Their count of steps goes up once more with every turn.
    following = {**position, "grid": grid, "attempts": attempts + 1}
    return Played(following, earned, bad_moves, readable=True, note=note, solved=solved, over=False)


def _pay_entry(grid: Grid, entry: Entry) -> float:
    """What their environment pays for an entry that fits, written into a copy of `grid`."""
    row, column, digit = entry
    emptied = [list(cells) for cells in grid]
    emptied[row][column] = 0
    options = len(choices(emptied, row, column))
    filled_grid = [list(cells) for cells in grid]
    filled_grid[row][column] = digit
    cells = SIDE * SIDE
    before, after = (sum(bool(value) for cells in table for value in cells) / cells for table in (grid, filled_grid))
    paid = STEP + (ONLY_CHOICE if options == 1 else OF_TWO_CHOICES if options == 2 else 0.0)
    paid += PROGRESS_GAIN * (after - before) + PROGRESS * after
    paid += CONSTRAINT * (count_constraints(filled_grid) - count_constraints(grid))
    # Theirs compares the choices of the cell that was just filled, which are none, with the mean of the empty cells.
    return paid + (CELLS_LEFT if after < 1 else 0.0)


_EXAMPLE = "1 2 3 4\n3 4 . 2\n2 1 4 3\n4 3 2 .\nEmpty: r2c3 r4c4"
GAME = Game(
    "sudoku",
    describe,
    play,
    writer=Agent(
        "tool_writer",
        FewShotPrompt(
            "You are the Tool writer. Write a program of entries for the empty cells of the Sudoku, as r1c2=3.",
            ((f"{_EXAMPLE}\nProgram?", "r2c3=1 r4c4=1"),),
        ),
        "Program?",
    ),
    planner=Agent(
        "planner",
        FewShotPrompt(
            "You are the Planner. Read what the Tool checked, and write the entries for the empty cells.",
            (
                (f"{_EXAMPLE}\nTool: r2c3=1 ok r4c4=1 ok, solved\nEntries?", "r2c3=1 r4c4=1"),
                (f"{_EXAMPLE}\nTool: r2c3=4 bad r4c4=1 ok, not solved\nEntries?", "r2c3=1 r4c4=1"),
            ),
        ),
        "Entries?",
    ),
    programmer=FewShotPrompt(
        "You are the Tool writer. Write a Python program that solves the Sudoku of 4 x 4 cells with boxes of 2 x 2. "
        "Put it between ```python and ```. It must print the entries for the empty cells in one line and "
        "nothing else, as r1c2=3 r4c4=1.",
        (),
    ),
)


def build(model: BaseChatModel, run_program: RunProgram | None = None) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The compiled graph; see `graphs.game_turns.game_to_graph`."""
    return game_to_graph(GAME, model, run_program)


def task_to_input(task: dict[str, Any]) -> GameState:
    """The puzzle, without its solution."""
    given = [[bool(digit) for digit in row] for row in task["grid"]]
    return task_to_state({"grid": task["grid"], "given": given, "attempts": 0}, task["turn_limit"])


def reward(_task: dict[str, Any], result: dict[str, Any], run: Any) -> dict[str, Any]:
    """See `graphs.game_turns.turns_to_rewards`."""
    return turns_to_rewards(GAME, result, run)
