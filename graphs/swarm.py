"""A shop of three desks that hand a customer to each other: who speaks decides who speaks next.

After LangGraph's swarm: no supervisor; each agent may hand over by `Command(goto=...)`, and whoever has the customer
stays active. Here each desk has a price list of its own, so only one of them can answer; lists are other ones every
day, so that no price can be learned by heart. Simplified: a handoff is text ("HANDOFF garden") and no tool call,
because so small a model calls no tools, and an episode is one question. A reply that says "handoff", or has no number,
and names another desk hands over; every other reply is the answer. After `MOST_HANDOFFS` the customer stays where they
are. A desk that gets the customer again is a loop, which costs.
"""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Callable, Iterator
from typing import Annotated, Any, TypedDict

from langchain_core.language_models import BaseChatModel
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.types import Command

from graphs.few_shot import Example, profile_to_messages

THINGS = {
    "kitchen": ("pot", "pan", "cup", "bowl"),
    "garden": ("rake", "hose", "bench", "fence"),
    "office": ("pen", "ruler", "lamp", "stamp"),
}
DESKS = tuple(THINGS)
EXAMPLES = {"kitchen": "kettle", "garden": "shears", "office": "stapler"}
"""A further thing of each desk, which no task asks for."""
QUESTION = "What does the {thing} cost?"
TASKS = 180

MOST_HANDOFFS = 3
LOOP_PENALTY = 0.2


class ShopState(TypedDict, total=False):
    """What the desks share. `path` holds the desks in the order in which they spoke."""

    question: str
    day: int
    active: str
    path: Annotated[list[str], operator.add]
    answer: str


def build(model: BaseChatModel) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The compiled swarm, in which every desk calls `model`."""

    def desk(name: str) -> Callable[..., Any]:
        async def node(state: ShopState) -> Command[str]:
            before = state.get("path", [])
            asked = [*([f"Sent here by: {', '.join(before)}."] if before else []), state["question"]]
            profile, examples = desk_to_profile(name, state["day"])
            reply = await model.ainvoke(profile_to_messages(profile, examples, "\n".join(asked)))
            text = str(reply.text)
            other = reply_to_handoff(text, name) if len(before) < MOST_HANDOFFS else None
            if other is None:
                return Command(goto=END, update={"path": [name], "answer": text})
            return Command(goto=other, update={"path": [name], "active": other})

        return node

    graph = StateGraph(ShopState)
    for name in DESKS:
        graph.add_node(name, desk(name), destinations=(*(other for other in DESKS if other != name), END))
    graph.add_conditional_edges(START, lambda state: state["active"], list(DESKS))
    return graph.compile(name="swarm")


def desk_to_prices(name: str, day: int) -> dict[str, int]:
    """What a desk knows on one day: its own things, each with another price, from 2 to 29."""
    things = (*THINGS[name], EXAMPLES[name])
    return dict(zip(things, random.Random(f"{name} {day}").sample(range(2, 30), len(things)), strict=True))


def desk_to_profile(name: str, day: int) -> tuple[str, list[Example]]:
    """The profile of a desk, with its prices of that day; and how it answers for its own thing and for two others."""
    known = desk_to_prices(name, day)
    prices = ", ".join(f"{thing} {price}" for thing, price in known.items())
    profile = (
        f"You are the {name} desk. Your prices: {prices}. If the thing is on your list, reply with its price. If it "
        "is not, reply HANDOFF and the desk that has it."
    )
    answers = {other: f"HANDOFF {other}" for other in DESKS} | {name: str(known[EXAMPLES[name]])}
    return profile, [(QUESTION.format(thing=thing), answers[desk]) for desk, thing in EXAMPLES.items()]


def reply_to_handoff(text: str, name: str) -> str | None:
    """The desk that a reply of desk `name` hands over to, the first that it names; None where it is an answer."""
    if re.search(r"\d", text) and "handoff" not in text.lower():
        return None
    named = [word for word in re.findall(r"[a-z]+", text.lower()) if word in DESKS and word != name]
    return named[0] if named else None


def tasks() -> Iterator[dict[str, Any]]:
    """180 tasks in one fixed order, one a day: each desk is asked as often for its own things as for each other's."""
    pick = random.Random(0)
    pairs = [(first, owner) for first in DESKS for owner in DESKS]
    for day in range(TASKS):
        first, owner = pairs[day % len(pairs)]
        thing = pick.choice(THINGS[owner])
        yield {
            "id": f"day-{day}",
            "question": QUESTION.format(thing=thing),
            "day": day,
            "first": first,
            "desk": owner,
            "answer": desk_to_prices(owner, day)[thing],
        }


def task_to_input(task: dict[str, Any]) -> ShopState:
    """The graph sees the question, the day and whom it is asked, never whose thing it is."""
    return {"question": task["question"], "day": task["day"], "active": task["first"]}


def reward(task: dict[str, Any], result: dict[str, Any]) -> dict[str, float]:
    """Team rewards of one episode, from its final state.

    `correct` is 1 where the last number of the answer is the price. `loops` counts how often a desk got the customer
    again, `handoffs` all handoffs. `reward`, which is trained on, is 1 for a correct answer, else 0.2 where the right
    desk was asked last; less LOOP_PENALTY for every loop. A handoff to a desk that was not asked yet costs nothing.
    """
    path = result.get("path", [])
    numbers = re.findall(r"\d{1,9}", result.get("answer", ""))
    correct = bool(numbers) and int(numbers[-1]) == task["answer"]
    loops = len(path) - len(set(path))
    earned = 1.0 if correct else 0.2 * (path[-1:] == [task["desk"]])
    return {
        "correct": float(correct),
        "loops": float(loops),
        "handoffs": float(max(len(path) - 1, 0)),
        "reward": earned - LOOP_PENALTY * loops,
    }
