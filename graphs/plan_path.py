"""Plan-Path: a way through a grid with obstacles, by a tool writer and a planner, turn by turn.

After the benchmark Plan-Path of PettingLLMs (AT-GRPO, arXiv 2510.11062); see `graphs.game_turns` for the agents and the
turns. Theirs, as their code has it: a grid of 10 x 10, each cell blocked with probability 0.22, start and goal drawn
among the free cells with a way between them; moves U, D, L and R; the rewards of a move, which are STEP, BAD_MOVE,
GOAL, SHORTEST and FAILED here, with a shaping of 0.99 * potential after - potential before, the potential being minus
the distance in rows and columns. Ours: the shaping is what a move gains on the potential, without the 0.99, so that
returns, which nothing discounts here, pay for nearness alone and not for standing far from the goal; where the agent
and the goal are is told as row and column, too; the levels below `published`; a turn's moves may carry counts (`R3`);
at most grid_moves.MAX_MOVES of an answer are walked.

Invariants: the same seed gives the same task; no two tasks of a level are the same grid with the same ends; every task
has a way, whose length is known.
"""

from __future__ import annotations

import random
from collections import deque
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
    turns_to_rewards,
)
from graphs.grid_moves import DIRECTIONS, Cell, distance, moves_to_text, step_from, text_to_moves

STEP, BAD_MOVE, GOAL, SHORTEST, FAILED = -0.01, -0.10, 1.0, 0.5, -1.0
TASKS = 400
"""Tasks of a level."""


class Level(NamedTuple):
    """How hard: the grid's side, the share of blocked cells, the shortest way's length, moves and turns allowed."""

    name: str
    side: int
    blocked: float
    shortest: int
    longest: int
    step_limit: int
    turn_limit: int


FIRST = Level("first", 4, blocked=0.1, shortest=1, longest=3, step_limit=12, turn_limit=2)
EASY = Level("easy", 5, blocked=0.15, shortest=3, longest=5, step_limit=20, turn_limit=3)
MIDDLE = Level("middle", 7, blocked=0.2, shortest=4, longest=10, step_limit=40, turn_limit=4)
PUBLISHED = Level("published", 10, blocked=0.22, shortest=1, longest=99, step_limit=10_000, turn_limit=4)
LEVELS = (FIRST, EASY, MIDDLE, PUBLISHED)


def level_to_tasks(level: Level, seeds: Iterable[int]) -> Iterator[dict[str, Any]]:
    """One task for each seed, but for those whose grid and ends an earlier seed gave."""
    made = (_seed_to_task(level, seed) for seed in seeds)
    return distinct_tasks(made, lambda task: (*task["grid"], *task["start"], *task["goal"]))


def _seed_to_task(level: Level, seed: int) -> dict[str, Any]:
    draw = random.Random(f"plan_path {level.name} {seed}")
    cells = [(row, column) for row in range(level.side) for column in range(level.side)]
    while True:
        blocked = {cell for cell in cells if draw.random() < level.blocked}
        free = [cell for cell in cells if cell not in blocked]
        if len(free) < 2:
            continue
        start, goal = draw.sample(free, 2)
        rows = ["".join("#" if (r, c) in blocked else "." for c in range(level.side)) for r in range(level.side)]
        length = shortest_way(rows, start, goal)
        if length is not None and level.shortest <= length <= level.longest:
            return {
                "id": f"{level.name}-{seed}",
                "grid": rows,
                "start": list(start),
                "goal": list(goal),
                "shortest": length,
                "step_limit": level.step_limit,
                "turn_limit": level.turn_limit,
            }


def shortest_way(rows: list[str], start: Cell, goal: Cell) -> int | None:
    """The number of moves from start to goal; None where there is no way."""
    lengths = {start: 0}
    queue = deque([start])
    while queue:
        cell = queue.popleft()
        if cell == goal:
            return lengths[cell]
        for move in DIRECTIONS:
            beside = step_from(cell, move)
            if beside not in lengths and is_free(rows, beside):
                lengths[beside] = lengths[cell] + 1
                queue.append(beside)
    return None


def is_free(rows: list[str], cell: Cell) -> bool:
    """Whether a cell is inside the grid and not blocked."""
    row, column = cell
    return 0 <= row < len(rows) and 0 <= column < len(rows[0]) and rows[row][column] != "#"


def first_tasks() -> Iterator[dict[str, Any]]:
    """4 x 4, hardly an obstacle, one to three moves: what a model of 135M parameters can begin on."""
    return level_to_tasks(FIRST, range(TASKS))


def easy_tasks() -> Iterator[dict[str, Any]]:
    """5 x 5, three to five moves."""
    return level_to_tasks(EASY, range(TASKS))


def middle_tasks() -> Iterator[dict[str, Any]]:
    """7 x 7, four to ten moves."""
    return level_to_tasks(MIDDLE, range(TASKS))


def tasks() -> Iterator[dict[str, Any]]:
    """10 x 10, as published."""
    return level_to_tasks(PUBLISHED, range(TASKS))


def describe(position: Position) -> str:
    """The grid, where the agent and the goal are, and the moves that are left."""
    at, goal = tuple(position["at"]), tuple(position["goal"])
    marks = {at: "S", goal: "G"}
    lines = [
        " ".join(marks.get((r, c), symbol) for c, symbol in enumerate(row)) for r, row in enumerate(position["grid"])
    ]
    lines.append(f"You {_name(at)}, goal {_name(goal)}, {position['step_limit'] - position['steps']} moves left.")
    return "\n".join(lines)


def _name(cell: Cell) -> str:
    return f"r{cell[0] + 1} c{cell[1] + 1}"


def play(position: Position, text: str) -> Played:
    """Walks the moves of a text, until the goal, the end of the text or that of the moves allowed."""
    moves = text_to_moves(text)
    at, goal = (position["at"][0], position["at"][1]), (position["goal"][0], position["goal"][1])
    if not moves:
        return Played(position, UNREADABLE, bad_moves=1, readable=False, note="no moves", solved=False, over=False)
    earned, bad_moves, steps, walked = 0.0, 0, position["steps"], 0
    while walked < len(moves) and at != goal and steps < position["step_limit"]:
        beside = step_from(at, moves[walked])
        reached = beside if is_free(position["grid"], beside) else at
        bad_moves += reached == at
        earned += BAD_MOVE if reached == at else STEP
        earned += distance(at, goal) - distance(reached, goal)
        at, steps, walked = reached, steps + 1, walked + 1
    solved, over = at == goal, at != goal and steps >= position["step_limit"]
    if solved:
        earned += GOAL + (SHORTEST if steps == position["shortest"] else 0.0)
    elif over:
        earned += FAILED
    note = f"{moves_to_text(moves[:walked])}, at {_name(at)}, {bad_moves} bad, {'goal' if solved else 'no goal'}"
    return Played(
        {**position, "at": list(at), "steps": steps},
        earned,
        bad_moves,
        readable=True,
        note=note,
        solved=solved,
        over=over,
    )


_EXAMPLE = "S . .\n# # .\n. . G\nYou r1 c1, goal r3 c3, 9 moves left."
GAME = Game(
    "plan_path",
    describe,
    play,
    writer=Agent(
        "tool_writer",
        FewShotPrompt(
            "You are the Tool writer. Write a program of moves from S to G: U, D, L or R, with a count.",
            ((f"{_EXAMPLE}\nProgram?", "R2 D2"),),
        ),
        "Program?",
    ),
    planner=Agent(
        "planner",
        FewShotPrompt(
            "You are the Planner. Read what the Tool did, and write the moves from S to G: U, D, L, R.",
            (
                (f"{_EXAMPLE}\nTool: R R D D, at r3 c3, 0 bad, goal\nMoves?", "R R D D"),
                (f"{_EXAMPLE}\nTool: R D D, at r1 c2, 2 bad, no goal\nMoves?", "R R D D"),
            ),
        ),
        "Moves?",
    ),
    programmer=FewShotPrompt(
        "You are the Tool writer. Write a Python program that finds the moves from S to G in the grid, by a search "
        "such as BFS; # is blocked. Put it between ```python and ```. It must print the moves "
        "and nothing else: U, D, L, R.",
        (),
    ),
)


def build(model: BaseChatModel, run_program: RunProgram | None = None) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The compiled graph; see `graphs.game_turns.game_to_graph`."""
    return game_to_graph(GAME, model, run_program)


def task_to_input(task: dict[str, Any]) -> GameState:
    """The position at the start."""
    position = {name: task[name] for name in ("grid", "goal", "shortest", "step_limit")}
    return task_to_state({**position, "at": task["start"], "steps": 0}, task["turn_limit"])


def reward(_task: dict[str, Any], result: dict[str, Any], run: Any) -> dict[str, Any]:
    """See `graphs.game_turns.turns_to_rewards`."""
    return turns_to_rewards(GAME, result, run)
