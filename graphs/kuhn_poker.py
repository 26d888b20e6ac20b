"""Three cards, two players, one bet -> Kuhn poker, played by two agents of opposed interests.

After MARS, "Reinforcing Multi-Agent Reasoning of LLMs through Self-Play in Strategic Games", which trains on Kuhn poker
among other games; its abstract was at hand. Ours: the prompts; ranks drawn from 2 to 10, so that there are more than
six deals; a player is asked whether it puts a chip in, since a small model that may check or bet never bets.
Simplified: one hand a run, no reasoning before a move.

Invariant: a player's prompt never holds its rival's card. A reply that begins with neither yes nor no counts as no, and
costs its own side `ILLEGAL_COST`, never the other, and never the run.
"""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple, Protocol, TypedDict

from langchain_core.language_models import BaseChatModel
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph

from graphs.few_shot import profile_to_messages
from graphs.kuhn_rules import (
    PLAYERS,
    RANKS,
    History,
    Player,
    is_sound,
    legal_moves,
    payoff_to_first,
    player_to_move,
)

ILLEGAL_COST = 1.0
"""Chips, for each reply that is neither yes nor no."""
DECKS = 40

PROFILE = (
    "You play poker with one card each. Both put 1 chip in the pot; a bet is 1 chip more. The higher card wins. Reply "
    "with yes or no."
)
EXAMPLES = (
    ("The cards are 12, 13 and 14. You hold 12, the lowest. Your rival bets 1 chip. Do you call?", "no"),
    ("The cards are 12, 13 and 14. You hold 12, the lowest. Nobody has bet. Do you bet 1 chip?", "no"),
    ("The cards are 12, 13 and 14. You hold 14, the highest. Your rival bets 1 chip. Do you call?", "yes"),
    ("The cards are 12, 13 and 14. You hold 14, the highest. Nobody has bet. Do you bet 1 chip?", "yes"),
)


class Move(NamedTuple):
    """One move as it counts, and whether the reply was one."""

    player: Player
    word: str
    legal: bool


class PokerState(TypedDict, total=False):
    """The state that the nodes share: three ranks, the card of each player, and the moves so far."""

    deck: list[int]
    hands: dict[str, int]
    moves: Annotated[list[Move], operator.add]


class PlayerNode(Protocol):
    """A player's node."""

    async def __call__(self, state: PokerState) -> PokerState:
        """Adds the player's move."""


def build(model: BaseChatModel) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The compiled game, in which both players call `model`."""

    def player(name: Player) -> PlayerNode:
        async def move(state: PokerState) -> PokerState:
            reply = await model.ainvoke(profile_to_messages(PROFILE, EXAMPLES, state_to_prompt(state, name)))
            allowed = legal_moves(moves_to_history(state.get("moves", [])))
            word = reply_to_move(str(reply.text), allowed)
            return {"moves": [Move(name, allowed[0] if word is None else word, legal=word is not None)]}

        return move

    def route(state: PokerState) -> str:
        return player_to_move(moves_to_history(state["moves"])) or END

    graph = StateGraph(PokerState)
    for name, rival in (PLAYERS, PLAYERS[::-1]):
        graph.add_node(name, player(name))
        graph.add_conditional_edges(name, route, {rival: rival, END: END})
    graph.add_edge(START, "first")
    return graph.compile(name="kuhn_poker")


def moves_to_history(moves: list[Move]) -> History:
    """The words of the moves."""
    return tuple(move.word for move in moves)


def state_to_prompt(state: PokerState, player: Player) -> str:
    """What one player is asked: the three ranks, its own card, and whether its rival has bet."""
    low, middle, high = state["deck"]
    card = state["hands"][player]
    _, bold = legal_moves(moves_to_history(state.get("moves", [])))
    question = "Your rival bets 1 chip. Do you call?" if bold == "call" else "Nobody has bet. Do you bet 1 chip?"
    rank = RANKS[state["deck"].index(card)]
    return f"The cards are {low}, {middle} and {high}. You hold {card}, the {rank}. {question}"


def reply_to_move(text: str, allowed: tuple[str, str]) -> str | None:
    """The move that a reply names by its first word, in whatever case: yes puts a chip in; None where it is neither."""
    match = re.search(r"[a-z]+", text[:200].lower())
    return dict(zip(("no", "yes"), allowed, strict=True)).get(match[0]) if match else None


def tasks() -> Iterator[dict[str, Any]]:
    """240 deals in one fixed order: every deal of 40 decks of three ranks from 2 to 10."""
    rng = random.Random(0)
    decks = [[a, b, c] for a in range(2, 11) for b in range(a + 1, 11) for c in range(b + 1, 11)]
    for deck in rng.sample(decks, DECKS):
        deals = [(a, b) for a in deck for b in deck if a != b]
        rng.shuffle(deals)
        for first, second in deals:
            name = "-".join(map(str, deck))
            yield {"id": f"deal-{name}-{first}-{second}", "deck": deck, "first": first, "second": second}


def task_to_input(task: dict[str, Any]) -> PokerState:
    """The deal."""
    return {"deck": task["deck"], "hands": {player: task[player] for player in PLAYERS}}


def task_to_ranks(task: dict[str, Any]) -> tuple[int, int]:
    """The ranks of both cards, from 0, as `kuhn_rules` has them."""
    return task["deck"].index(task["first"]), task["deck"].index(task["second"])


def task_id_to_ranks(task_id: str) -> tuple[int, int]:
    """The same of a task's id, which holds its deck and both cards."""
    *deck, first, second = map(int, task_id.removeprefix("deal-").split("-"))
    return deck.index(first), deck.index(second)


def reward(task: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Rewards of one episode, from its final state.

    `payoff` is each player's own: the chips that it won from the other, less ILLEGAL_COST for every reply of its own
    that was neither yes nor no. Measures of the game: `sound` is the share of the replies that are a move which some
    equilibrium makes, `legal` that of replies that are a move; `showdown` is 1 where nobody folded, `bets` how many
    chips were bet or called.
    """
    moves: list[Move] = result["moves"]
    history = moves_to_history(moves)
    ranks = task_to_ranks(task)
    won = payoff_to_first(ranks, history)
    illegal = {player: sum(move.player == player and not move.legal for move in moves) for player in PLAYERS}
    sound = [
        move.legal and is_sound(move.player, (ranks[turn % 2], history[:turn]), move.word)
        for turn, move in enumerate(moves)
    ]
    return {
        "sound": sum(sound) / len(moves),
        "legal": 1 - sum(illegal.values()) / len(moves),
        "showdown": float(history[-1] != "fold"),
        "bets": float(sum(word in ("bet", "call") for word in history)),
        "payoff": {
            "agent:first": won - ILLEGAL_COST * illegal["first"],
            "agent:second": -won - ILLEGAL_COST * illegal["second"],
        },
    }
