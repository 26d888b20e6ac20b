"""Sokoban: boxes to push onto goals in a small room, by a tool writer and a planner, turn by turn.

After the benchmark Sokoban of PettingLLMs (AT-GRPO, arXiv 2510.11062); see `graphs.game_turns` for the agents and the
turns. Theirs, as their code has it: a room of 6 x 6 with walls around and one box, at least two cells from its goal; at
most 200 moves; the rewards STEP, BAD_MOVE, ON_GOAL, OFF_GOAL, WON and FAILED, with a shaping of 0.1 * (0.99 * potential
after - potential before), the potential being minus the distance of each box to its nearest goal. Ours: the shaping
without the 0.99, and OFF_GOAL the whole of ON_GOAL where theirs is half of it, so that nothing is earned by standing
far from a goal or by pushing a box on and off one; a room is drawn at random and kept where a search over all positions
solves it, instead of playing backwards from the end; the levels below and above `published`, by moves and boxes; a free
cell is written `_`, and where the agent is is told in words, too; a turn's moves may carry counts.

Invariants: the same seed gives the same task; no two tasks of a level are the same room; every task can be solved, in
the number of moves that it names and no fewer.
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

STEP, BAD_MOVE, ON_GOAL, OFF_GOAL, WON, FAILED = -0.01, -0.05, 1.0, -1.0, 10.0, -5.0
SHAPING = 0.1
TASKS = 400
"""Tasks of a level."""


class Level(NamedTuple):
    """How hard: the room's side, the share of walls inside, boxes, the shortest solution's moves, what is allowed."""

    name: str
    side: int
    walls: float
    boxes: int
    shortest: int
    longest: int
    box_distance: int
    step_limit: int
    turn_limit: int


FIRST = Level("first", 6, walls=0.05, boxes=1, shortest=1, longest=3, box_distance=1, step_limit=12, turn_limit=2)
EASY = Level("easy", 6, walls=0.1, boxes=1, shortest=3, longest=5, box_distance=1, step_limit=20, turn_limit=3)
MIDDLE = Level("middle", 6, walls=0.15, boxes=1, shortest=4, longest=9, box_distance=2, step_limit=40, turn_limit=4)
PUBLISHED = Level(
    "published", 6, walls=0.2, boxes=1, shortest=2, longest=99, box_distance=2, step_limit=200, turn_limit=4
)
TWO_BOXES = Level(
    "two_boxes", 6, walls=0.1, boxes=2, shortest=8, longest=99, box_distance=1, step_limit=200, turn_limit=4
)
LEVELS = (FIRST, EASY, MIDDLE, PUBLISHED, TWO_BOXES)


def level_to_tasks(level: Level, seeds: Iterable[int]) -> Iterator[dict[str, Any]]:
    """One task for each seed, but for those whose room an earlier seed gave."""
    made = (_seed_to_task(level, seed) for seed in seeds)
    return distinct_tasks(made, lambda task: tuple(task["room"]))


def _seed_to_task(level: Level, seed: int) -> dict[str, Any]:
    draw = random.Random(f"sokoban {level.name} {seed}")
    inside = [(r, c) for r in range(1, level.side - 1) for c in range(1, level.side - 1)]
    while True:
        walls = {cell for cell in inside if draw.random() < level.walls}
        free = [cell for cell in inside if cell not in walls]
        if len(free) < 2 * level.boxes + 1:
            continue
        player, *rest = draw.sample(free, 2 * level.boxes + 1)
        boxes, goals = rest[: level.boxes], rest[level.boxes :]
        if any(min(distance(box, goal) for goal in goals) < level.box_distance for box in boxes):
            continue
        floor = frozenset(free)
        length = shortest_solution(floor, player, boxes=boxes, goals=goals)
        if length is not None and level.shortest <= length <= level.longest:
            return {
                "id": f"{level.name}-{seed}",
                "room": _draw_room(
                    (level.side, level.side), Room(floor, player=player, boxes=frozenset(boxes), goals=frozenset(goals))
                ),
                "shortest": length,
                "step_limit": level.step_limit,
                "turn_limit": level.turn_limit,
            }


def shortest_solution(floor: frozenset[Cell], player: Cell, boxes: list[Cell], goals: list[Cell]) -> int | None:
    """The number of moves that put every box on a goal; None where none do. Searches all positions."""
    aim = frozenset(goals)
    start = (player, frozenset(boxes))
    lengths = {start: 0}
    queue = deque([start])
    while queue:
        position = queue.popleft()
        if position[1] == aim:
            return lengths[position]
        for move in DIRECTIONS:
            following = push(floor, position, move)
            if following is not None and following not in lengths:
                lengths[following] = lengths[position] + 1
                queue.append(following)
    return None


def push(
    floor: frozenset[Cell], position: tuple[Cell, frozenset[Cell]], move: str
) -> tuple[Cell, frozenset[Cell]] | None:
    """Player and boxes after a move; None where a wall or a box that cannot move is in the way."""
    player, boxes = position
    beside = step_from(player, move)
    if beside not in floor:
        return None
    if beside not in boxes:
        return beside, boxes
    behind = step_from(beside, move)
    if behind not in floor or behind in boxes:
        return None
    return beside, boxes - {beside} | {behind}


class Room(NamedTuple):
    """A drawn room as sets of cells."""

    floor: frozenset[Cell]
    player: Cell
    boxes: frozenset[Cell]
    goals: frozenset[Cell]


def _draw_room(size: tuple[int, int], room: Room) -> list[str]:
    """Rows of symbols, as many as `size` says, and as long."""

    def symbol(cell: Cell) -> str:
        if cell not in room.floor:
            return "#"
        if cell == room.player:
            return "+" if cell in room.goals else "@"
        if cell in room.boxes:
            return "*" if cell in room.goals else "$"
        return "." if cell in room.goals else "_"

    return ["".join(symbol((row, column)) for column in range(size[1])) for row in range(size[0])]


def read_room(rows: list[str]) -> Room:
    """The inverse of what `describe` shows."""
    cells = {(r, c): symbol for r, row in enumerate(rows) for c, symbol in enumerate(row)}
    (player,) = (cell for cell, symbol in cells.items() if symbol in "@+")
    return Room(
        floor=frozenset(cell for cell, symbol in cells.items() if symbol != "#"),
        player=player,
        boxes=frozenset(cell for cell, symbol in cells.items() if symbol in "$*"),
        goals=frozenset(cell for cell, symbol in cells.items() if symbol in ".*+"),
    )


def first_tasks() -> Iterator[dict[str, Any]]:
    """An almost empty room, one box, one to three moves: what a model of 135M parameters can begin on."""
    return level_to_tasks(FIRST, range(TASKS))


def easy_tasks() -> Iterator[dict[str, Any]]:
    """One box, three to five moves."""
    return level_to_tasks(EASY, range(TASKS))


def middle_tasks() -> Iterator[dict[str, Any]]:
    """One box, four to nine moves, with walls inside."""
    return level_to_tasks(MIDDLE, range(TASKS))


def tasks() -> Iterator[dict[str, Any]]:
    """6 x 6 and one box, as published."""
    return level_to_tasks(PUBLISHED, range(TASKS))


def two_box_tasks() -> Iterator[dict[str, Any]]:
    """6 x 6 and two boxes: above what was published."""
    return level_to_tasks(TWO_BOXES, range(TASKS))


def describe(position: Position) -> str:
    """The room, where the agent is, and the moves that are left."""
    room = read_room(position["room"])
    lines = [" ".join(row) for row in position["room"]]
    left = position["step_limit"] - position["steps"]
    lines.append(
        f"You {_name(room.player)}, {len(room.boxes & room.goals)} of {len(room.boxes)} boxes, {left} moves left."
    )
    return "\n".join(lines)


def _name(cell: Cell) -> str:
    return f"r{cell[0] + 1} c{cell[1] + 1}"


def _potential(boxes: frozenset[Cell], goals: frozenset[Cell]) -> float:
    return -float(sum(min(distance(box, goal) for goal in goals) for box in boxes))


def play(position: Position, text: str) -> Played:
    """Makes the moves of a text, until the game is solved, the text ends or no move is left."""
    moves = text_to_moves(text)
    if not moves:
        return Played(position, UNREADABLE, bad_moves=1, readable=False, note="no moves", solved=False, over=False)
    room = read_room(position["room"])
    player, boxes = room.player, room.boxes
    earned, bad_moves, steps, walked = 0.0, 0, position["steps"], 0
    while walked < len(moves) and boxes != room.goals and steps < position["step_limit"]:
        following = push(room.floor, (player, boxes), moves[walked])
        bad_moves += following is None
        next_player, next_boxes = following or (player, boxes)
        gained = len(next_boxes & room.goals) - len(boxes & room.goals)
        earned += BAD_MOVE if following is None else STEP
        earned += ON_GOAL if gained > 0 else OFF_GOAL if gained < 0 else 0.0
        earned += SHAPING * (_potential(next_boxes, room.goals) - _potential(boxes, room.goals))
        player, boxes, steps, walked = next_player, next_boxes, steps + 1, walked + 1
    solved = boxes == room.goals
    over = not solved and steps >= position["step_limit"]
    earned += WON if solved else FAILED if over else 0.0
    done = len(boxes & room.goals)
    note = f"{moves_to_text(moves[:walked])}, at {_name(player)}, {bad_moves} bad, {done} of {len(boxes)} boxes"
    size = (len(position["room"]), len(position["room"][0]))
    rows = _draw_room(size, room._replace(player=player, boxes=boxes))
    return Played(
        {**position, "room": rows, "steps": steps},
        earned,
        bad_moves,
        readable=True,
        note=note,
        solved=solved,
        over=over,
    )


_EXAMPLE = "# # # # #\n# @ $ . #\n# _ _ _ #\n# # # # #\nYou r2 c2, 0 of 1 boxes, 9 moves left."
_FAR_EXAMPLE = "# # # # #\n# _ $ . #\n# @ _ _ #\n# # # # #\nYou r3 c2, 0 of 1 boxes, 9 moves left."
GAME = Game(
    "sokoban",
    describe,
    play,
    writer=Agent(
        "tool_writer",
        FewShotPrompt(
            "You are the Tool writer. Write a program of moves that pushes the box $ onto the goal . : U, D, L or R.",
            ((f"{_EXAMPLE}\nProgram?", "R"), (f"{_FAR_EXAMPLE}\nProgram?", "U R")),
        ),
        "Program?",
    ),
    planner=Agent(
        "planner",
        FewShotPrompt(
            "You are the Planner. Read what the Tool did, and write the moves that push the box onto the goal.",
            (
                (f"{_EXAMPLE}\nTool: R, at r2 c3, 0 bad, 1 of 1 boxes\nMoves?", "R"),
                (f"{_FAR_EXAMPLE}\nTool: R R, at r3 c4, 0 bad, 0 of 1 boxes\nMoves?", "U R"),
            ),
        ),
        "Moves?",
    ),
    programmer=FewShotPrompt(
        "You are the Tool writer. Write a Python program that solves the Sokoban room by a search such as BFS: # wall, "
        "_ floor, . goal, $ box, @ you, * box on goal, + you on goal. Put it between ```python and ```. It must print "
        "the moves and nothing else: U, D, L, R.",
        (),
    ),
)


def build(model: BaseChatModel, run_program: RunProgram | None = None) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The compiled graph; see `graphs.game_turns.game_to_graph`."""
    return game_to_graph(GAME, model, run_program)


def task_to_input(task: dict[str, Any]) -> GameState:
    """The room at the start."""
    return task_to_state({"room": task["room"], "steps": 0, "step_limit": task["step_limit"]}, task["turn_limit"])


def reward(_task: dict[str, Any], result: dict[str, Any], run: Any) -> dict[str, Any]:
    """See `graphs.game_turns.turns_to_rewards`."""
    return turns_to_rewards(GAME, result, run)
