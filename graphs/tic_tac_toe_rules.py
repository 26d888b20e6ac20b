"""Tic-tac-toe as pure functions: its moves and ends, what a position is worth, and the positions that look alike.

A board is nine characters, row by row: X, O, or a dot where nobody moved. X moves where both have as many marks.

Invariant: exact: a position is worth what perfect play of both makes of it. It knows nothing of models or graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

FREE = "."
EMPTY = FREE * 9
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
_TURNED, _MIRRORED = (6, 3, 0, 7, 4, 1, 8, 5, 2), (2, 1, 0, 5, 4, 3, 8, 7, 6)
"""Where each square of a board that was turned by a quarter, or mirrored, was before."""


def mark_to_move(position: str) -> str:
    """X or O, whether or not the game is over."""
    return "X" if position.count("X") == position.count("O") else "O"


def winner(position: str) -> str | None:
    """The mark that has three in a line; None where nobody has."""
    return next(
        (position[a] for a, b, c in LINES if position[a] != FREE and position[a] == position[b] == position[c]), None
    )


def free_squares(position: str) -> list[int]:
    """The squares from 0 to 8 on which a mark may be set; none where the game is over."""
    return [] if winner(position) else [square for square, mark in enumerate(position) if mark == FREE]


def board_after(position: str, square: int) -> str:
    """The board with the mark of whoever is to move on a free square."""
    return f"{position[:square]}{mark_to_move(position)}{position[square + 1 :]}"


@cache
def worth_to_mover(position: str) -> int:
    """What perfect play ends in for whoever is to move: 1 a win, 0 a draw, -1 a loss; of an ended game, what it was."""
    if winner(position):
        return -1  # by the mark that was set last
    return max((-worth_to_mover(board_after(position, square)) for square in free_squares(position)), default=0)


def sound_squares(position: str) -> list[int]:
    """The free squares after which perfect play ends no worse for whoever is to move than the position was."""
    worth = worth_to_mover(position)
    return [square for square in free_squares(position) if -worth_to_mover(board_after(position, square)) == worth]


def worst_square(position: str) -> int:
    """The free square that is worth least to whoever is to move, by perfect play of the rest; of equal ones the first.

    Raises:
        ValueError: the game is over.
    """
    return max(free_squares(position), key=lambda square: worth_to_mover(board_after(position, square)))


def images(position: str) -> list[str]:
    """The eight boards that are this one turned or mirrored, itself first; some may be equal."""
    turned = [position]
    for _ in range(3):
        turned.append(_moved(turned[-1], _TURNED))
    return [*turned, *(_moved(image, _MIRRORED) for image in turned)]


def open_positions(marks: int) -> Iterator[str]:
    """Every position with so many marks in which the game goes on, one of all that are the same turned or mirrored."""
    boards = {EMPTY}
    for _ in range(marks):
        boards = {
            min(images(board_after(position, square))) for position in boards for square in free_squares(position)
        }
    yield from sorted(position for position in boards if free_squares(position))


def _moved(position: str, source: tuple[int, ...]) -> str:
    return "".join(position[square] for square in source)
