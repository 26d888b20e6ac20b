"""A house with things in it -> things in the hall: two carriers that see one room each, and tell each other of it.

The carriers move in turns, at most MAX_ROUNDS times each. A move is one line: `GO attic` or `TAKE cup`, and after it
perhaps `SAY hat in attic`, which the other reads before its next move. A carrier holds one thing, and lays it down on
entering the hall. It knows its room, what it carries, what was said, and nothing else.

After ReAd (Towards Efficient LLM Grounding for Embodied Multi-Agent Collaboration) and LIET (Learn as Individuals,
Evolve as a Team). Theirs: bodies in a world with partial sight that plan by language, one after the other, and talk;
ReAd's sequential advantage, by which a move is held against those before it, is what the trainer's GAE along D
estimates. Simplified: five rooms with doors between all, instead of kitchens and simulated homes; LIET's utility
function and its shared list of what was learned about cooperation are left out. ReAd's judge, which has a move
written again, is in `graphs.carriers_judge`.

A message is part of a move, so nobody can tell what it alone is worth. In `build_with_voices` each carrier has a second
node that writes it after the move; `marft-bridge credit --substitute silent` tells a message that helps from one that
nobody heeds.

Invariant: a line that is no move, or cannot be done, leaves the world as it is and costs its carrier alone.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, Protocol, TypedDict

from langchain_core.language_models import BaseChatModel
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph

from graphs.few_shot import FewShotPrompt
from graphs.first_line import first_line

CARRIER = FewShotPrompt(
    "You carry things to the hall. Reply with GO and a room or TAKE and a thing; SAY what your partner should know.",
    (
        ("Room: hall. Here: nothing. You carry: nothing. Partner says: nothing.\nMove?", "GO attic"),
        (
            "Room: attic. Here: bell, coat. You carry: nothing. Partner says: nothing.\nMove?",
            "TAKE bell SAY coat in attic",
        ),
        ("Room: attic. Here: coat. You carry: bell. Partner says: nothing.\nMove?", "GO hall SAY coat in attic"),
        ("Room: hall. Here: nothing. You carry: nothing. Partner says: coat in attic.\nMove?", "GO attic"),
        ("Room: attic. Here: nothing. You carry: nothing. Partner says: nothing.\nMove?", "GO cellar"),
        ("Room: kitchen. Here: rug. You carry: nothing. Partner says: nothing.\nMove?", "TAKE rug"),
        ("Room: garden. Here: flag. You carry: nothing. Partner says: rug in kitchen.\nMove?", "TAKE flag"),
    ),
)
VOICE = FewShotPrompt(
    "You carry things to the hall. Say in a few words what your partner should know.",
    (
        ("Room: attic. Here: coat. You carry: bell.\nMessage?", "coat in attic"),
        ("Room: kitchen. Here: rug, flag. You carry: nothing.\nMessage?", "rug in kitchen"),
        ("Room: cellar. Here: nothing. You carry: nothing.\nMessage?", "nothing in cellar"),
    ),
)

HALL = "hall"
ROOMS = (HALL, "kitchen", "garden", "attic", "cellar")
THINGS = ("cup", "hat", "pen", "lamp", "book", "vase", "drum", "rope")
NAMES = ("carrier_a", "carrier_b")
VOICES = ("voice_a", "voice_b")  # of each carrier, in `build_with_voices`
THINGS_OF_TASK = 2
MAX_ROUNDS = 4
MESSAGE_CHARACTERS = 30  # that reach the partner
TAKEN = 0.3  # what a thing counts while it is carried; 1 once it is in the hall


class World(TypedDict):
    """Where everything is. `room` and `carried` are by carrier, `lying` by room; `moves` counts those of both."""

    room: dict[str, str]
    carried: dict[str, str]
    lying: dict[str, list[str]]
    delivered: list[str]
    moves: int


class Move(NamedTuple):
    """One line of a carrier. `verb` is NONE where it is no move."""

    verb: Literal["GO", "TAKE", "NONE"]
    target: str
    message: str


class HouseState(TypedDict, total=False):
    """The state that the nodes share. By carrier: `messages` are the last ones, `bad` and `spoken` are counts."""

    world: World
    messages: dict[str, str]
    bad: dict[str, int]
    spoken: dict[str, int]


class HouseNode(Protocol):
    """A node of the house."""

    async def __call__(self, state: HouseState) -> HouseState:
        """Makes a move or writes a message."""


def build(model: BaseChatModel) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The compiled house, in which both carriers call `model`."""
    first, second = NAMES
    graph = StateGraph(HouseState)
    graph.add_node(first, _make_carrier(model, first, second))
    graph.add_node(second, _make_carrier(model, second, first))
    graph.add_edge(START, first)
    graph.add_conditional_edges(first, route_next, {"next": second, "__end__": END})
    graph.add_conditional_edges(second, route_next, {"next": first, "__end__": END})
    return graph.compile(name="carriers")


def build_with_voices(model: BaseChatModel) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The same house, in which a second node of each carrier writes its message after its move.

    What a carrier itself says after SAY reaches nobody.
    """
    graph = StateGraph(HouseState)
    graph.add_edge(START, NAMES[0])
    for (name, partner), voice in zip(itertools.permutations(NAMES), VOICES, strict=True):
        graph.add_node(name, _make_carrier(model, name, partner, has_voice=True))
        graph.add_node(voice, _make_voice(model, name))
        graph.add_conditional_edges(name, route_next, {"next": voice, "__end__": END})
        graph.add_edge(voice, partner)
    return graph.compile(name="carriers_with_voices")


def _make_carrier(model: BaseChatModel, name: str, partner: str, has_voice: bool = False) -> HouseNode:
    async def carrier(state: HouseState) -> HouseState:
        messages = state.get("messages", {})
        turn = describe_turn(state["world"], name, messages.get(partner, ""))
        reply = await model.ainvoke(CARRIER.messages(f"{turn}\nMove?"))
        move = text_to_move(str(reply.text))
        world, is_done = apply_move(state["world"], name, move)
        message = "" if has_voice else move.message
        return {
            "world": world,
            "messages": messages | {name: message},
            "bad": count_for(name, state.get("bad", {}), not is_done),
            "spoken": count_for(name, state.get("spoken", {}), bool(message)),
        }

    return carrier


def _make_voice(model: BaseChatModel, name: str) -> HouseNode:
    async def voice(state: HouseState) -> HouseState:
        reply = await model.ainvoke(VOICE.messages(f"{world_to_view(state['world'], name)}\nMessage?"))
        message = text_to_message(first_line(str(reply.text)))
        return {
            "messages": state["messages"] | {name: message},
            "spoken": count_for(name, state["spoken"], bool(message)),
        }

    return voice


def route_next(state: HouseState) -> Literal["next", "__end__"]:
    """To whoever acts after a move, until all things are in the hall or all moves are made."""
    return "__end__" if is_over(state["world"]) else "next"


def is_over(world: World) -> bool:
    """Whether all things are in the hall, or all moves are made."""
    return not things_left(world) or world["moves"] == MAX_ROUNDS * len(NAMES)


def count_for(name: str, counts: Mapping[str, int], applies: bool) -> dict[str, int]:
    """The counts by carrier, with one more for `name` where it applies; a carrier that is counted has an entry."""
    return {**counts, name: counts.get(name, 0) + applies}


def describe_turn(world: World, name: str, message: str) -> str:
    """What a carrier knows when it is to move: what it sees, and the last message of its partner."""
    return f"{world_to_view(world, name)} Partner says: {message or 'nothing'}."


def world_to_view(world: World, name: str) -> str:
    """What a carrier sees: its room, what lies there, and what it carries."""
    room = world["room"][name]
    here = ", ".join(world["lying"].get(room, [])) or "nothing"
    return f"Room: {room}. Here: {here}. You carry: {world['carried'][name] or 'nothing'}."


def text_to_move(text: str) -> Move:
    """The move that the first line of a text begins with, and what it says after SAY."""
    line = first_line(text)
    command, _, message = re.split(r"\b(SAY)\b", line, maxsplit=1) if re.search(r"\bSAY\b", line) else (line, "", "")
    message = text_to_message(message)
    match = re.match(r"\W*(GO|TAKE)\b(?:\s+(?:to|the)\b)*\W+(\w+)", command, flags=re.IGNORECASE)
    if match is None:
        return Move("NONE", "", message)
    return Move("GO" if match[1].upper() == "GO" else "TAKE", match[2].lower(), message)


def text_to_message(text: str) -> str:
    """What reaches the partner of a text."""
    return text.strip(" :.")[:MESSAGE_CHARACTERS]


def apply_move(world: World, name: str, move: Move) -> tuple[World, bool]:
    """The world after a move, and whether it could be done; where it could not, only `moves` is another."""
    room, carried = world["room"][name], world["carried"][name]
    after: World = {**world, "moves": world["moves"] + 1}
    if move.verb == "GO" and move.target in ROOMS and move.target != room:
        after["room"] = {**world["room"], name: move.target}
        if move.target == HALL and carried:
            after["carried"] = {**world["carried"], name: ""}
            after["delivered"] = [*world["delivered"], carried]
        return after, True
    lying = world["lying"].get(room, [])
    if move.verb == "TAKE" and move.target in lying and not carried:
        after["carried"] = {**world["carried"], name: move.target}
        after["lying"] = {**world["lying"], room: [thing for thing in lying if thing != move.target]}
        return after, True
    return after, False


def things_left(world: World) -> int:
    """How many things are not in the hall yet."""
    return sum(map(len, world["lying"].values())) + sum(map(bool, world["carried"].values()))


def tasks() -> Iterator[dict[str, Any]]:
    """132 houses in one fixed order, each of which differs from all others by more than the names of its things.

    Nothing lies in the hall, and one carrier at least begins beside a thing, so that there is something to learn from.
    Things that change places make no other house: both are to be carried to the hall.
    """
    rng = random.Random(0)
    houses = [
        (rooms, starts)
        for rooms in itertools.combinations_with_replacement(ROOMS[1:], THINGS_OF_TASK)
        for starts in itertools.product(ROOMS, repeat=len(NAMES))
        if {*rooms} & {*starts}
    ]
    rng.shuffle(houses)
    for rooms, starts in houses:
        lies_in = dict(zip(rng.sample(THINGS, THINGS_OF_TASK), rooms, strict=True))
        yield {"id": "-".join((*rooms, *starts)), "lies_in": lies_in, "starts": dict(zip(NAMES, starts, strict=True))}


def task_to_input(task: dict[str, Any]) -> HouseState:
    """The world as it begins; no carrier sees more of it than its room."""
    rooms_to_things: dict[str, list[str]] = {}
    for thing, room in task["lies_in"].items():
        rooms_to_things.setdefault(room, []).append(thing)
    world: World = {
        "room": dict(task["starts"]),
        "carried": dict.fromkeys(NAMES, ""),
        "lying": rooms_to_things,
        "delivered": [],
        "moves": 0,
    }
    return {"world": world}


def reward(task: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Rewards of one episode, from its final state.

    Of the team: `correct`, 1 where all things are in the hall; `reward`, which is trained on: the share of the things
    that are there, each that is still carried counted as TAKEN; `moves` and `messages`, counts. Of each carrier that
    moved: `bad_moves`, the share of its lines that were no move or could not be done.
    """
    world, count = result["world"], len(task["lies_in"])
    carried = sum(map(bool, world["carried"].values()))
    # The carriers move in turns, the first of them first.
    move_counts = {name: (world["moves"] + 1 - index) // 2 for index, name in enumerate(NAMES)}
    return {
        "correct": float(len(world["delivered"]) == count),
        "reward": (len(world["delivered"]) + TAKEN * carried) / count,
        "moves": float(world["moves"]),
        "messages": float(sum(result["spoken"].values())),
        "bad_moves": {f"agent:{name}": result["bad"][name] / moves for name, moves in move_counts.items() if moves},
    }
