"""A pool of things and what each is worth to either side -> a negotiation: two agents in turns offer, and one accepts.

After "Deal or No Deal? End-to-End Learning for Negotiation Dialogues" (Lewis et al., arXiv 1706.05125). Theirs: five to
seven things of three kinds; each side knows its own values only, and all things together are worth 10 to it; every kind
is worth something to one side at least, and one kind to both; without a deal both get 0. Simplified: an offer is a line
of a checked language instead of free talk; the other side accepts it or makes its own, where theirs write down the
split apart; at most six turns; what an offer would leave is added up in the prompt.

Invariant: a side's prompt never holds the other's values. A reply that is no line of the language counts as saying
nothing: offers stand as they were. It costs its own side `ILLEGAL_COST`, which no deal makes up for, never the other,
and never the run.
"""

from __future__ import annotations

import itertools
import operator
import random
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Protocol, TypedDict

from langchain_core.language_models import BaseChatModel
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph

from graphs.few_shot import profile_to_messages

Player = Literal["first", "second"]
PLAYERS: tuple[Player, Player] = ("first", "second")
TURNS = 6
TOTAL = 10
"""What all things together are worth to each side."""
ILLEGAL_COST = 1.0
"""For each reply that is no line of the language: what all things together are worth."""
TASKS = 160
KINDS = ("books", "hats", "balls", "cups", "keys", "maps")

PROFILE = (
    "You divide things with a partner, in turns. Reply with accept, or with take and how many of each you want; your "
    "partner gets the others. Without a deal both get nothing."
)
EXAMPLES = (  # with things that are in no task
    ("pens 2, worth 3 each to you; bags 1, worth 0; pots 4, worth 1.\nNo offer yet.\nTurn 1 of 6.", "take 2 0 3"),
    (
        "pens 3, worth 1 each to you; bags 2, worth 3; pots 1, worth 1.\n"
        "Your partner takes 1 0 1, which leaves you 2 2 0, worth 8 to you.\nTurn 2 of 6.",
        "accept",
    ),
    (
        "pens 1, worth 4 each to you; bags 3, worth 2; pots 2, worth 0.\n"
        "Your partner takes 1 3 0, which leaves you 0 0 2, worth 0 to you.\nTurn 4 of 6.",
        "take 1 2 0",
    ),
)

Counts = tuple[int, ...]
"""How many of each kind."""


class Turn(NamedTuple):
    """One turn as it counts. `claim`: what the player would take, None where it made no offer."""

    player: Player
    claim: Counts | None
    accepted: bool
    legal: bool


class TalkState(TypedDict, total=False):
    """The state that the nodes share. `values`: player -> what one thing of each kind is worth to it."""

    kinds: list[str]
    counts: list[int]
    values: dict[str, list[int]]
    turns: Annotated[list[Turn], operator.add]


class PlayerNode(Protocol):
    """A player's node."""

    async def __call__(self, state: TalkState) -> TalkState:
        """Adds the player's turn."""


def build(model: BaseChatModel) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The compiled negotiation, in which both sides call `model`."""

    def player(name: Player) -> PlayerNode:
        async def speak(state: TalkState) -> TalkState:
            reply = await model.ainvoke(profile_to_messages(PROFILE, EXAMPLES, state_to_prompt(state, name)))
            offered = standing_offer(state.get("turns", []), name) is not None
            return {"turns": [reply_to_turn(str(reply.text), name, state["counts"], may_accept=offered)]}

        return speak

    def route(state: TalkState) -> str:
        turns = state["turns"]
        return END if turns[-1].accepted or len(turns) == TURNS else PLAYERS[len(turns) % 2]

    graph = StateGraph(TalkState)
    for name, rival in (PLAYERS, PLAYERS[::-1]):
        graph.add_node(name, player(name))
        graph.add_conditional_edges(name, route, {rival: rival, END: END})
    graph.add_edge(START, "first")
    return graph.compile(name="negotiation")


def standing_offer(turns: Sequence[Turn], player: Player) -> Counts | None:
    """What the other side would take by the newest offer of all; None where there is none or it is the player's own."""
    newest = next((turn for turn in reversed(turns) if turn.claim is not None), None)
    return None if newest is None or newest.player == player else newest.claim


def rest_of(counts: Sequence[int], claim: Counts) -> Counts:
    """What is left of each kind."""
    return tuple(count - number for count, number in zip(counts, claim, strict=True))


def worth_of(counts: Sequence[int], values: Sequence[int]) -> int:
    """What so many of each kind are worth to a side."""
    return sum(number * value for number, value in zip(counts, values, strict=True))


def state_to_prompt(state: TalkState, player: Player) -> str:
    """What one side is asked: the pool and its own values, the other side's offer, and which turn it is."""
    turns, values = state.get("turns", []), state["values"][player]
    kinds = list(zip(state["kinds"], state["counts"], values, strict=True))
    pool_parts = [f"{kinds[0][0]} {kinds[0][1]}, worth {kinds[0][2]} each to you"]
    pool_parts += [f"{kind} {count}, worth {value}" for kind, count, value in kinds[1:]]
    claim = standing_offer(turns, player)
    if claim is not None:
        rest = rest_of(state["counts"], claim)
        offer = (
            f"Your partner takes {' '.join(map(str, claim))}, which leaves you {' '.join(map(str, rest))}, worth "
            f"{worth_of(rest, values)} to you."
        )
    else:
        offer = "Your partner did not answer." if any(turn.claim for turn in turns) else "No offer yet."
    return f"{'; '.join(pool_parts)}.\n{offer}\nTurn {len(turns) + 1} of {TURNS}."


def reply_to_turn(text: str, player: Player, counts: Sequence[int], *, may_accept: bool) -> Turn:
    """The line that a reply begins with, in whatever case: `accept`, or `take` and as many numbers as kinds.

    Behind either nothing but a mark of punctuation may stand: what goes on may take back what was said.
    """
    line = next(iter(text[:200].strip().lower().splitlines()), "").rstrip(" .!")
    if may_accept and line == "accept":
        return Turn(player, None, accepted=True, legal=True)
    match = re.fullmatch(rf"take((?: [0-9]{{1,3}}){{{len(counts)}}})", line)
    claim = tuple(map(int, match[1].split())) if match else None
    if claim is None or min(rest_of(counts, claim)) < 0:
        return Turn(player, None, accepted=False, legal=False)
    return Turn(player, claim, accepted=False, legal=True)


def turns_to_deal(turns: Sequence[Turn], counts: Sequence[int]) -> dict[Player, Counts] | None:
    """What each side gets; None without a deal."""
    if not turns[-1].accepted:
        return None
    acceptor = turns[-1].player
    proposer = PLAYERS[acceptor == "first"]
    claim = standing_offer(turns, acceptor)
    assert claim is not None  # else it could not be accepted
    return {proposer: claim, acceptor: rest_of(counts, claim)}


def tasks() -> Iterator[dict[str, Any]]:
    """160 pools with values in one fixed order, which differ by more than the order of the kinds or of the sides."""
    rng = random.Random(0)
    pools = [pool for pool in itertools.product(range(1, 6), repeat=3) if 5 <= sum(pool) <= 7]
    pool_keys: set[tuple[Counts, ...]] = set()
    while len(pool_keys) < TASKS:
        counts = rng.choice(pools)
        all_values = [v for v in itertools.product(range(TOTAL + 1), repeat=3) if worth_of(counts, v) == TOTAL]
        first, second = rng.choice(all_values), rng.choice(all_values)
        pairs = list(zip(first, second, strict=True))
        key = min(_sorted_kinds(counts, first, second), _sorted_kinds(counts, second, first))
        if key in pool_keys or not all(map(any, pairs)) or not any(map(all, pairs)):
            continue
        pool_keys.add(key)
        name = "-".join(map(str, (*counts, *first, *second)))
        values = {"first": list(first), "second": list(second)}
        yield {"id": f"pool-{name}", "kinds": rng.sample(KINDS, 3), "counts": list(counts), "values": values}


def _sorted_kinds(*columns: Counts) -> tuple[Counts, ...]:
    """How many of each kind and what one is worth to either side, whatever the order of the kinds."""
    return tuple(sorted(zip(*columns, strict=True)))


def task_to_input(task: dict[str, Any]) -> TalkState:
    """All of it; each side's prompt holds its own values only."""
    return {"kinds": task["kinds"], "counts": task["counts"], "values": task["values"]}


def splits(task: dict[str, Any]) -> list[tuple[int, int]]:
    """What every way to divide the pool is worth to the first side and to the second."""
    first, second = (task["values"][player] for player in PLAYERS)
    shares = itertools.product(*(range(count + 1) for count in task["counts"]))
    return [(worth_of(share, first), worth_of(rest_of(task["counts"], share), second)) for share in shares]


def reward(task: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Rewards of one episode, from its final state.

    `payoff` is each side's own: what it got, as a share of all things by its own values, 0 without a deal; less
    ILLEGAL_COST for every reply of its own that was no line of the language. Measures of the game, 0 without a deal:
    `nash` is the product of what both got, as a share of the best product; `welfare` the same of the sum; `pareto` is 1
    where no other split gives one side more and the other no less; `agreed` is 1. `legal` is the share of the replies
    that were lines of the language.
    """
    turns: list[Turn] = result["turns"]
    deal = turns_to_deal(turns, task["counts"])
    illegal = {player: sum(turn.player == player and not turn.legal for turn in turns) for player in PLAYERS}
    gained = {player: 0 if deal is None else worth_of(deal[player], task["values"][player]) for player in PLAYERS}
    first_worth, second_worth = gained["first"], gained["second"]
    possible = splits(task)
    better = any(a >= first_worth and b >= second_worth and (a, b) != (first_worth, second_worth) for a, b in possible)
    return {
        "nash": first_worth * second_worth / max(a * b for a, b in possible),
        "welfare": (first_worth + second_worth) / max(a + b for a, b in possible),
        "pareto": float(deal is not None and not better),
        "agreed": float(deal is not None),
        "legal": sum(turn.legal for turn in turns) / len(turns),
        "payoff": {f"agent:{player}": gained[player] / TOTAL - ILLEGAL_COST * illegal[player] for player in PLAYERS},
    }
