"""A position -> tic-tac-toe played to its end by two agents of opposed interests.

After MARS, "Reinforcing Multi-Agent Reasoning of LLMs through Self-Play in Strategic Games", which trains on
tic-tac-toe among other games; its abstract was at hand. Ours: the prompts, and the start: a run begins at one of the
positions with up to four marks, since one empty board would be one task. These favour cross: by perfect play it wins 92
of the 121, nought wins 5, and 24 are drawn. Simplified: no reasoning before a move, which
is one digit; free squares are shown by their digits; a run may pass through the position of another task.

Invariant: both see the whole board. A reply without the number of a free square counts as the free square that is worth
least to its own side (`worst_square`), and costs that side `ILLEGAL_COST`: never the other, and never the run. So no
free square that it could have named leaves its side worse off.
"""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, Protocol, TypedDict

from langchain_core.language_models import BaseChatModel
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph

from graphs.few_shot import profile_to_messages
from graphs.tic_tac_toe_rules import (
    FREE,
    board_after,
    free_squares,
    images,
    mark_to_move,
    open_positions,
    sound_squares,
    winner,
    worst_square,
)

Player = Literal["cross", "nought"]
PLAYERS: tuple[Player, Player] = ("cross", "nought")
MARKS: dict[Player, str] = {"cross": "X", "nought": "O"}
ILLEGAL_COST = 1.0
"""For each reply that is no free square: as much as a win is worth."""

PROFILE = (
    "You play tic-tac-toe. Three of your marks in a row, a column or a diagonal win. Free squares are shown by their "
    "numbers. Reply with the number of one."
)
EXAMPLES = (  # of five and six marks, and no task has as many
    ("X X 3\nO O X\nO 8 9\nYou are X.", "3"),
    ("O 2 X\nX O 6\nX 8 9\nYou are O.", "9"),
    ("O X 3\nO X X\n7 O 9\nYou are X.", "7"),
)


class Move(NamedTuple):
    """One move as it counts, and whether the reply was one. Squares count from 0."""

    player: Player
    square: int
    legal: bool


class BoardState(TypedDict, total=False):
    """The state that the nodes share: the board that the run began with, and the moves so far."""

    start: str
    moves: Annotated[list[Move], operator.add]


class PlayerNode(Protocol):
    """A player's node."""

    async def __call__(self, state: BoardState) -> BoardState:
        """Adds the player's move."""


def build(model: BaseChatModel) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The compiled game, in which both players call `model`."""

    def player(name: Player) -> PlayerNode:
        async def move(state: BoardState) -> BoardState:
            position = state_to_board(state)
            reply = await model.ainvoke(profile_to_messages(PROFILE, EXAMPLES, board_to_prompt(position)))
            square = reply_to_square(str(reply.text), position)
            return {"moves": [Move(name, worst_square(position) if square is None else square, square is not None)]}

        return move

    def route(state: BoardState) -> str:
        position = state_to_board(state)
        mover = next(name for name, mark in MARKS.items() if mark == mark_to_move(position))
        return mover if free_squares(position) else END

    graph = StateGraph(BoardState)
    for name, rival in (PLAYERS, PLAYERS[::-1]):
        graph.add_node(name, player(name))
        graph.add_conditional_edges(name, route, {rival: rival, END: END})
    graph.add_edge(START, "cross")
    return graph.compile(name="tic_tac_toe")


def state_to_board(state: BoardState) -> str:
    """The board after all moves, as `tic_tac_toe_rules` has it."""
    position = state["start"]
    for move in state.get("moves", []):
        position = board_after(position, move.square)
    return position


def board_to_prompt(position: str) -> str:
    """What whoever is to move is asked: three rows with numbers on the free squares, and its mark."""
    cells = [str(square + 1) if mark == FREE else mark for square, mark in enumerate(position)]
    rows = [" ".join(cells[first : first + 3]) for first in (0, 3, 6)]
    return "\n".join([*rows, f"You are {mark_to_move(position)}."])


def reply_to_square(text: str, position: str) -> int | None:
    """The first number of a reply as a square from 0, where that one is free; else None."""
    match = re.search(r"[0-9]+", text[:200])
    square = int(match[0]) - 1 if match else None
    return square if square in free_squares(position) else None


def tasks() -> Iterator[dict[str, Any]]:
    """121 positions in one fixed order: all with 0, 2 or 4 marks, and none another one turned or mirrored."""
    rng = random.Random(0)
    boards = [rng.choice(images(position)) for marks in (0, 2, 4) for position in open_positions(marks)]
    rng.shuffle(boards)
    for position in boards:
        yield {"id": f"board-{position.replace(FREE, '-')}", "start": position}


def task_to_input(task: dict[str, Any]) -> BoardState:
    """The position: there is nothing to hide."""
    return {"start": task["start"]}


def reward(task: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Rewards of one episode, from its final state.

    `payoff` is each player's own: 1 for a win, -1 for a loss, 0 for a draw, less ILLEGAL_COST for every reply of its
    own that was no free square. Measures of the game: `sound` is the share of the replies that named a square by which
    perfect play of the rest ends no worse for their side than the position was; `legal` the share that named a free
    one; `judgement` the share of sound ones among the legal replies in positions where some free square is unsound:
    naming any free square hardly raises it, and it is absent where a game has no such reply; `drawn` is 1 for a draw.
    """
    moves: list[Move] = result["moves"]
    position, sound, judged = task["start"], 0, list[bool]()
    for move in moves:
        squares = sound_squares(position)
        if move.legal:
            sound += move.square in squares
            if len(squares) < len(free_squares(position)):
                judged.append(move.square in squares)
        position = board_after(position, move.square)
    won = {"X": 1.0, "O": -1.0, None: 0.0}[winner(position)]
    illegal = {player: sum(move.player == player and not move.legal for move in moves) for player in MARKS}
    return {
        "sound": sound / len(moves),
        "legal": 1 - sum(illegal.values()) / len(moves),
        "judgement": sum(judged) / len(judged) if judged else None,
        "drawn": float(won == 0),
        "payoff": {
            "agent:cross": won - ILLEGAL_COST * illegal["cross"],
            "agent:nought": -won - ILLEGAL_COST * illegal["nought"],
        },
    }
