"""A text -> moves on a grid: U, D, L and R, each with a count or without.

Invariant: a word that merely has such a letter in it is no move, and a text yields at most MAX_MOVES of them.
"""

from __future__ import annotations

import re

from graphs.game_turns import text_to_answer

MAX_MOVES = 200
DIRECTIONS = {"U": (-1, 0), "D": (1, 0), "L": (0, -1), "R": (0, 1)}
# A quote may stand before a move, as Python prints a list of them, but not one that follows a letter, as in I'D.
_MOVE = re.compile(r"(?<![A-Za-z0-9])(?<![A-Za-z0-9]')([UDLR]) ?([1-9])?(?![A-Za-z0-9])")

Cell = tuple[int, int]


def text_to_moves(text: str) -> list[str]:
    """The moves of a text's answer: `R2 D` and `["R", "R", "D"]` are the same three."""
    moves = [move for move, count in _MOVE.findall(text_to_answer(text)) for _ in range(int(count or 1))]
    return moves[:MAX_MOVES]


def step_from(cell: Cell, move: str) -> Cell:
    """The cell beside `cell`, inside the grid or not."""
    row, column = DIRECTIONS[move]
    return cell[0] + row, cell[1] + column


def moves_to_text(moves: list[str], shown: int = 24) -> str:
    """`R R D`; of a long line its beginning."""
    return " ".join(moves[:shown]) + (" ..." if len(moves) > shown else "")


def distance(first: Cell, second: Cell) -> int:
    """Rows and columns between two cells."""
    return abs(first[0] - second[0]) + abs(first[1] - second[1])
