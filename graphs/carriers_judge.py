"""The carriers' house with ReAd's judge: a move that is worse than it could be is written once more before it is done.

A carrier's line goes to the judge, who asks no model. It scores the move by its sequential advantage: what the house is
worth after it, less what it was worth after the moves before it in the same round::

    A_i(s, a_1 .. a_i) = Q(s, a_1 .. a_i) - Q(s, a_1 .. a_i-1)

A carrier whose move scores below LEAST_ADVANTAGE is told why and writes its line again; the second line stands as it
is. A rejected line moves nothing, takes no turn and says nothing to the partner; it is an action of its carrier.

After ReAd (Towards Efficient LLM Grounding for Embodied Multi-Agent Collaboration, arXiv 2405.14314). Theirs: the local
advantage of one agent's action given those before it (ReAd-S), from a critic that sees the whole state; a plan that
scores below a threshold goes back to its planner with the reason. Ours: no critic is learned: the worth is exact, by a
search of all plays that are left, as if both carriers saw the whole house. It is the reward's own points at the end (a
thing in the hall counts 1, one in a hand TAKEN), less LATE for every thing and move that it is not in the hall. So what
can still be brought in the moves left comes first, and sooner is better than later; a turn in which nothing is lost is
not judged bad, whatever is written. Simplified: a move is written again once, where they go on until the score is good
enough; no history of scores in the prompt; ReAd-J, which judges the plan of all agents at once, is left out.

Invariants: the best move's advantage is 0 and no move's is above it. What the judge says names no room and no thing,
so that a carrier learns no more of the house than how good its own line was. No move is asked for more than twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from langchain_core.language_models import BaseChatModel
from langgraph.graph import START, StateGraph
from langgraph.graph.state import CompiledStateGraph

from graphs import carriers
from graphs.carriers import HALL, MAX_ROUNDS, NAMES, ROOMS, TAKEN, HouseState, Move, World
from graphs.few_shot import FewShotPrompt
from graphs.first_line import first_line

SECOND_LINE = FewShotPrompt(
    "You carry things to the hall. A judge refused your move. Reply with a better one: GO and a room or TAKE and a "
    "thing; SAY what your partner should know.",
    (
        (
            "Room: attic. Here: bell, coat. You carry: nothing. Partner says: nothing.\n"
            "You wrote: GO cellar\nJudge: time is lost.\nMove?",
            "TAKE bell SAY coat in attic",
        ),
        (
            "Room: attic. Here: coat. You carry: bell. Partner says: nothing.\n"
            "You wrote: TAKE coat\nJudge: it cannot be done, and time is lost.\nMove?",
            "GO hall SAY coat in attic",
        ),
        (
            "Room: hall. Here: nothing. You carry: nothing. Partner says: nothing.\n"
            "You wrote: GO attic\nJudge: time is lost.\nMove?",
            "GO cellar",
        ),
        (
            "Room: garden. Here: nothing. You carry: nothing. Partner says: rug in kitchen.\n"
            "You wrote: GO hall\nJudge: less is brought in time.\nMove?",
            "GO kitchen",
        ),
    ),
)

_Value = TypeVar("_Value")

JUDGE = "judge"
LATE = 0.01
"""What a thing costs, in things, for each move after which it is not in the hall.

Points come before time: each carrier brings one thing at most in its moves, so that two plays differ in time by less
than TAKEN in all.
"""
LEAST_ADVANTAGE = -LATE / 2  # the least loss is one thing's one move; half of it lets rounding pass
SHOWN_CHARACTERS = 40  # of a rejected line, in the prompt for the second


class Position(NamedTuple):
    """What decides about the worth of a house, where things of one room are alike. By carrier: `rooms`, `carries`."""

    rooms: tuple[str, ...]
    carries: tuple[bool, ...]
    lying: tuple[int, ...]  # by room, in the order of ROOMS
    moves_left: int  # of both carriers


class Outlook(NamedTuple):
    """What is still earned from a position on, in things: `value` has the time in it, `points` have not."""

    value: float
    points: float


class Judgement(NamedTuple):
    """Of one move: its sequential advantage in things, at most 0, and the reason why it should be written again.

    `reason` is "" where nothing is lost.
    """

    advantage: float
    reason: str


class Verdict(NamedTuple):
    """What became of one line: its carrier, its sequential advantage, whether it was to be written again."""

    carrier: str
    advantage: float
    is_rejected: bool


class JudgedState(HouseState, total=False):
    """The house's state, the line that waits for the judge, and what it said.

    `reason` is "" but between a rejected line and the second; `verdicts` has one entry for every line, in order.
    """

    line: str
    reason: str
    verdicts: list[Verdict]


class LineNode(Protocol):
    """A carrier's node in the judged house."""

    async def __call__(self, state: JudgedState) -> JudgedState:
        """Writes a line for the judge."""


def build_with_judge(model: BaseChatModel) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The judged house, in which both carriers call `model` and the judge none."""
    first, second = NAMES
    graph = StateGraph(JudgedState)
    graph.add_node(JUDGE, judge_line)
    for name, partner in ((first, second), (second, first)):
        graph.add_node(name, _make_carrier(model, name, partner))
        graph.add_edge(name, JUDGE)
    graph.add_edge(START, first)
    graph.add_conditional_edges(JUDGE, route_after_judge)
    return graph.compile(name="carriers_with_judge")


def _make_carrier(model: BaseChatModel, name: str, partner: str) -> LineNode:
    async def carrier(state: JudgedState) -> JudgedState:
        turn = carriers.describe_turn(state["world"], name, state.get("messages", {}).get(partner, ""))
        if reason := state.get("reason", ""):
            prompt = f"{turn}\nYou wrote: {first_line(state['line'])[:SHOWN_CHARACTERS]}\nJudge: {reason}\nMove?"
            reply = await model.ainvoke(SECOND_LINE.messages(prompt))
        else:
            reply = await model.ainvoke(carriers.CARRIER.messages(f"{turn}\nMove?"))
        return {"line": str(reply.text)}

    return carrier


def judge_line(state: JudgedState) -> JudgedState:
    """Rejects the line that waits, or does its move. A second line is scored too, and done whatever its score."""
    world = state["world"]
    name, move = carrier_to_move(world), carriers.text_to_move(state["line"])
    judgement = judge_move(world, name, move)
    is_rejected = bool(judgement.reason) and not state.get("reason", "")
    verdicts = [*state.get("verdicts", []), Verdict(name, judgement.advantage, is_rejected)]
    if is_rejected:
        return {"reason": judgement.reason, "verdicts": verdicts}
    next_world, is_done = carriers.apply_move(world, name, move)
    return {
        "world": next_world,
        "messages": state.get("messages", {}) | {name: move.message},
        "bad": carriers.count_for(name, state.get("bad", {}), not is_done),
        "spoken": carriers.count_for(name, state.get("spoken", {}), bool(move.message)),
        "reason": "",
        "verdicts": verdicts,
    }


def route_after_judge(state: JudgedState) -> Literal["carrier_a", "carrier_b", "__end__"]:
    """To whose turn it is, which is still the same carrier's where its line was rejected."""
    if carriers.is_over(state["world"]):
        return "__end__"
    return "carrier_a" if carrier_to_move(state["world"]) == NAMES[0] else "carrier_b"


def carrier_to_move(world: World) -> str:
    """Whose turn it is."""
    return NAMES[world["moves"] % len(NAMES)]


def judge_move(world: World, name: str, move: Move) -> Judgement:
    """The sequential advantage of a move that is not done yet, and what is said against it.

    Raises:
        ValueError: it is not this carrier's turn, or all moves are made: such a move has no worth.
    """
    if carriers.is_over(world) or name != carrier_to_move(world):
        raise ValueError(f"{name} cannot move now: {world['moves']} moves are made, {carrier_to_move(world)} is next")
    next_world, is_done = carriers.apply_move(world, name, move)
    position = world_to_position(world)
    best, chosen = find_outlook(position), _outlook_through(position, world_to_position(next_world))
    # What the round has earned before this move stands in both Q alike, and falls out of the difference.
    advantage = chosen.value - best.value
    if advantage >= LEAST_ADVANTAGE:
        return Judgement(advantage, "")
    # Points come before time, so a best play earns all the points that can still be earned.
    loss = "less is brought in time" if best.points - chosen.points > -LEAST_ADVANTAGE else "time is lost"
    return Judgement(advantage, f"{loss}." if is_done else f"it cannot be done, and {loss}.")


def world_to_position(world: World) -> Position:
    """A world without what its worth does not depend on: names of things, and what is in the hall already."""
    return Position(
        rooms=tuple(world["room"][name] for name in NAMES),
        carries=tuple(bool(world["carried"][name]) for name in NAMES),
        lying=tuple(len(world["lying"].get(room, [])) for room in ROOMS),
        moves_left=MAX_ROUNDS * len(NAMES) - world["moves"],
    )


@lru_cache(maxsize=1 << 16)  # all houses of `tasks` together have some thousand positions
def find_outlook(position: Position) -> Outlook:
    """What the best play of both carriers still earns from a position on, by search of all plays."""
    if not position.moves_left or not count_left(position):
        return Outlook(0.0, 0.0)
    return max(_outlook_through(position, successor) for successor in _positions_after(position))


def _outlook_through(position: Position, successor: Position) -> Outlook:
    """What is earned by the move between two positions, and by the best play after it."""
    delivered = count_left(position) - count_left(successor)
    earned = delivered + TAKEN * (sum(successor.carries) - sum(position.carries))
    rest = find_outlook(successor)
    return Outlook(earned - LATE * count_left(successor) + rest.value, earned + rest.points)


def count_left(position: Position) -> int:
    """How many things are not in the hall yet."""
    return sum(position.lying) + sum(position.carries)


def _positions_after(position: Position) -> Iterator[Position]:
    """What every move of the carrier whose turn it is leads to, the move that does nothing first."""
    waited = position._replace(moves_left=position.moves_left - 1)
    mover = -position.moves_left % len(NAMES)
    room, carries = position.rooms[mover], position.carries[mover]
    yield waited
    for target in ROOMS:
        if target != room:
            rooms = _replaced(position.rooms, mover, target)
            yield waited._replace(rooms=rooms, carries=_replaced(position.carries, mover, carries and target != HALL))
    room_index = ROOMS.index(room)
    if position.lying[room_index] and not carries:
        yield waited._replace(
            carries=_replaced(position.carries, mover, True),
            lying=_replaced(position.lying, room_index, position.lying[room_index] - 1),
        )


def _replaced(values: tuple[_Value, ...], index: int, value: _Value) -> tuple[_Value, ...]:
    return (*values[:index], value, *values[index + 1 :])


def reward(task: dict[str, Any], result: dict[str, Any], run: Any) -> dict[str, Any]:
    """Rewards of one episode, from its final state and its record: those of the house, and two about the judge.

    Of the team: `rejections`, how many lines were to be written again. Of each call: `rejected`, a step reward, 1
    where the judge rejected its line, else 0; absent where the record does not have exactly one call for each line. A
    rejected call shares in the team's reward as any other call of its carrier; `rejected` has no part in that, and is
    learned from only where a configuration shapes by it. `bad_moves` counts the lines that were done: a rejected one
    is not among them.
    """
    verdicts = [Verdict(*verdict) for verdict in result["verdicts"]]
    calls = [(action.action_id, action.node) for action in run.game().actions if action.node in NAMES]
    rejected = None
    if [node for _, node in calls] == [verdict.carrier for verdict in verdicts]:
        rejected = {
            f"step:{call}": float(verdict.is_rejected) for (call, _), verdict in zip(calls, verdicts, strict=True)
        }
    rejections = float(sum(verdict.is_rejected for verdict in verdicts))
    return carriers.reward(task, result) | {"rejections": rejections, "rejected": rejected}
