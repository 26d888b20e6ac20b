"""Four payoffs -> an iterated prisoner's dilemma: two agents who share or keep, at the same time, round after round.

After "Learning Robust Social Strategies with Large Language Models" (arXiv 2511.19405), which trains on social dilemmas
with Advantage Alignment (Duque et al., arXiv 2406.14662); its abstract and its code were at hand. "How Exploration
Breaks Cooperation in Shared-Policy Multi-Agent Reinforcement Learning" is why each agent has an adapter of its own; in
`examples/zoo/social_dilemma-shared.toml` both have one. Ours: the words, and payoffs drawn for each task. Simplified: a
fixed number of rounds that both are told, where theirs has ten and tells nobody which it is; moves of one word, no talk
between them.

Advantage Alignment keeps what there is of cooperation, and does not make it from nothing: players that share half of
the time learn to keep with it too. Theirs are large models, which share at first; so that a small one does, four of
five examples share. And players are asked for yes or no: asked for the moves by name a small model hardly ever keeps,
and who never keeps does not find out what that pays.

Invariant: the moves of one round never depend on each other. A reply that begins with no move counts as sharing, which
pays the other side as sharing does, and costs its own `ILLEGAL_COST`; it never ends the run, and is no cooperation. No
reward of the other side holds that cost. Its advantages do by Advantage Alignment, which counts what a rival gains.
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

PLAYERS = ("left", "right")
SHARE, KEEP = "share", "keep"
ROUNDS = 8
MEMORY = 2
"""Rounds that a player is told of."""
ILLEGAL_COST = 1.0
"""For each reply that is no move, in units of the largest payoff: more than any move can gain."""
TASKS = 160
THINGS = ("coins", "apples", "shells", "stamps", "nuts", "books")

YES, NO = "yes", "no"
PROFILE = (
    "You play a game of several rounds with a partner. Both move at once: share or keep. Reply with yes to share, or "
    "no to keep."
)
_PENS, _PINS = (  # larger payoffs than those of any task
    "Both share: 20 pens each. Both keep: 8 each. One keeps: 30, the other 2.\n",
    "Both share: 22 pins each. Both keep: 12 each. One keeps: 40, the other 3.\n",
)
EXAMPLES = (
    (f"{_PENS}Round 1: you share, your partner keeps.\nRound 2 of 3. Do you share?", NO),
    (f"{_PINS}Round 1 of 3. Do you share?", YES),
    (f"{_PENS}Round 1 of 3. Do you share?", YES),
    (f"{_PENS}Round 1: you share, your partner shares.\nRound 2 of 3. Do you share?", YES),
    (
        f"{_PINS}Round 1: you share, your partner shares.\nRound 2: you share, your partner shares.\nRound 3 of 3. "
        "Do you share?",
        YES,
    ),
)
_MOVES = {YES: SHARE, NO: KEEP}


class Move(NamedTuple):
    """One player's move of one round as it counts, and whether the reply was one; rounds count from 0."""

    round: int
    player: str
    word: str
    legal: bool


class DilemmaState(TypedDict, total=False):
    """The state that the nodes share. `payoffs`: share, keep, temptation, sucker, as in a task."""

    thing: str
    payoffs: dict[str, int]
    round: int
    moves: Annotated[list[Move], operator.add]


class PlayerNode(Protocol):
    """A player's node."""

    async def __call__(self, state: DilemmaState) -> DilemmaState:
        """Adds the player's move."""


def build(model: BaseChatModel, rounds: int = ROUNDS) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The compiled game, in which both players call `model`."""

    def player(name: str) -> PlayerNode:
        async def move(state: DilemmaState) -> DilemmaState:
            prompt = state_to_prompt(state, name, rounds)
            reply = await model.ainvoke(profile_to_messages(PROFILE, EXAMPLES, prompt))
            word = reply_to_move(str(reply.text))
            word_played = SHARE if word is None else word
            return {"moves": [Move(state.get("round", 0), name, word_played, legal=word is not None)]}

        return move

    def end_of_round(state: DilemmaState) -> DilemmaState:
        return {"round": state.get("round", 0) + 1}

    def route_after_round(state: DilemmaState) -> list[str]:
        return [END] if state["round"] >= rounds else list(PLAYERS)

    graph = StateGraph(DilemmaState)
    graph.add_node("end_of_round", end_of_round)
    for name in PLAYERS:
        graph.add_node(name, player(name))
        graph.add_edge(START, name)
    graph.add_edge(list(PLAYERS), "end_of_round")
    graph.add_conditional_edges("end_of_round", route_after_round, [END, *PLAYERS])
    return graph.compile(name="social_dilemma")


def state_to_prompt(state: DilemmaState, player: str, rounds: int) -> str:
    """What one player is asked: the payoffs, the last rounds as it saw them, and which round it is."""
    number, payoffs = state.get("round", 0), state["payoffs"]
    lines = [
        f"Both share: {payoffs['share']} {state['thing']} each. Both keep: {payoffs['keep']} each. "
        f"One keeps: {payoffs['temptation']}, the other {payoffs['sucker']}."
    ]
    for earlier in range(max(0, number - MEMORY), number):
        words = {move.player == player: move.word for move in state["moves"] if move.round == earlier}
        lines.append(f"Round {earlier + 1}: you {words[True]}, your partner {words[False]}s.")
    lines.append(f"Round {number + 1} of {rounds}. Do you share?")
    return "\n".join(lines)


def reply_to_move(text: str) -> str | None:
    """The move that the first word of a reply stands for, in whatever case; None where it is neither yes nor no."""
    match = re.search(r"[a-z]+", text[:200].lower())
    return _MOVES.get(match[0]) if match else None


def tasks() -> Iterator[dict[str, Any]]:
    """160 dilemmas in one fixed order, no two with the same payoffs.

    temptation > share > keep > sucker, and 2 * share > temptation + sucker: sharing is best for both together, keeping
    for each alone.
    """
    rng = random.Random(0)
    all_payoffs = [
        {"share": share, "keep": keep, "temptation": temptation, "sucker": sucker}
        for share in range(4, 10)
        for keep in range(2, share)
        for temptation in range(share + 1, 2 * share)
        for sucker in range(keep)
        if 2 * share > temptation + sucker
    ]
    for payoffs in rng.sample(all_payoffs, TASKS):
        name = "-".join(map(str, payoffs.values()))
        yield {"id": f"dilemma-{name}", "thing": rng.choice(THINGS), "payoffs": payoffs}


def task_to_input(task: dict[str, Any]) -> DilemmaState:
    """All of it: there is nothing to hide."""
    return {"thing": task["thing"], "payoffs": task["payoffs"]}


def payoff_of(payoffs: dict[str, int], own: str, partner: str) -> int:
    """What a round earns whoever makes the first of two moves."""
    if own == partner:
        return payoffs[own]
    return payoffs["temptation"] if own == KEEP else payoffs["sucker"]


def reward(task: dict[str, Any], result: dict[str, Any], run: Any) -> dict[str, Any]:
    """Rewards of one episode, from its final state and its record.

    `payoff` is a step reward, one for each call of each player: what the round earned it, as a share of the
    temptation, less ILLEGAL_COST where its reply was no move. It is absent where the record has not one call for each
    move. Measures of the game: `cooperation` is the share of the rounds in which both said share; `welfare` what both
    earned together, as a share of what sharing always would have; `legal` the share of replies that were moves.
    """
    payoffs, moves = task["payoffs"], result["moves"]
    word_of = {(move.round, move.player): move.word for move in moves}
    rounds = len(moves) // len(PLAYERS)
    shared = {(move.round, move.player) for move in moves if move.legal and move.word == SHARE}
    earned: dict[str, float] = {}
    total = 0.0
    calls_of = {player: [a.action_id for a in run.game().actions if a.node == player] for player in PLAYERS}
    for move in moves:
        partner = word_of[move.round, PLAYERS[move.player == PLAYERS[0]]]
        chips = payoff_of(payoffs, move.word, partner)
        total += chips
        if len(calls_of[move.player]) == rounds:
            cost = 0.0 if move.legal else ILLEGAL_COST
            earned[f"step:{calls_of[move.player][move.round]}"] = chips / payoffs["temptation"] - cost
    return {
        "cooperation": sum(all((number, player) in shared for player in PLAYERS) for number in range(rounds)) / rounds,
        "welfare": total / (2 * payoffs["share"] * rounds),
        "legal": sum(move.legal for move in moves) / len(moves),
        "payoff": earned if len(earned) == len(moves) else None,
    }
