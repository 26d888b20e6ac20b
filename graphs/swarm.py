"""A shop of three desks that hand a customer to each other: each speaker decides who speaks next.

After LangGraph's swarm: no supervisor; each agent may hand over by `Command(goto=...)`, and whoever has the customer
stays active. Here each desk has a price list of its own, so only one of them can answer; the lists
change every day, so that no price can be memorised. Simplified: a handoff is text ("HANDOFF garden") and no tool call,
because so small a model calls no tools, and an episode is one question. A reply that says "handoff", or has no number,
and names another desk hands over; every other reply is the answer. After `MAX_HANDOFFS` handoffs the customer
stays. A desk that gets the customer again is a loop, which is penalised.
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
from graphs.last_number import last_number

PRODUCTS = {
    "kitchen": ("pot", "pan", "cup", "bowl"),
    "garden": ("rake", "hose", "bench", "fence"),
    "office": ("pen", "ruler", "lamp", "stamp"),
}
DESKS = tuple(PRODUCTS)
EXAMPLE_PRODUCTS = {"kitchen": "kettle", "garden": "shears", "office": "stapler"}
"""One more product of each desk, which no task asks for."""
QUESTION = "What does the {thing} cost?"
TASKS = 180

MAX_HANDOFFS = 3
LOOP_PENALTY = 0.2


class ShopState(TypedDict, total=False):
    """The state that the desks share. `path` holds the desks in the order in which they spoke."""

    question: str
    day: int
    active: str
    path: Annotated[list[str], operator.add]
    answer: str


def build(model: BaseChatModel) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The compiled swarm, in which every desk calls `model`."""

    def desk(name: str) -> Callable[..., Any]:
        async def node(state: ShopState) -> Command[str]:
            path = state.get("path", [])
            lines = [*([f"Sent here by: {', '.join(path)}."] if path else []), state["question"]]
            profile, examples = desk_to_profile(name, state["day"])
            reply = await model.ainvoke(profile_to_messages(profile, examples, "\n".join(lines)))
            text = str(reply.text)
            next_desk = reply_to_handoff(text, name) if len(path) < MAX_HANDOFFS else None
            if next_desk is None:
                return Command(goto=END, update={"path": [name], "answer": text})
            return Command(goto=next_desk, update={"path": [name], "active": next_desk})

        return node

    graph = StateGraph(ShopState)
    for name in DESKS:
        graph.add_node(name, desk(name), destinations=(*(target for target in DESKS if target != name), END))
    graph.add_conditional_edges(START, lambda state: state["active"], list(DESKS))
    return graph.compile(name="swarm")


def desk_to_prices(name: str, day: int) -> dict[str, int]:
    """The price list of a desk on one day: its own products, each with a different price from 2 to 29."""
    products = (*PRODUCTS[name], EXAMPLE_PRODUCTS[name])
    return dict(zip(products, random.Random(f"{name} {day}").sample(range(2, 30), len(products)), strict=True))


def desk_to_profile(name: str, day: int) -> tuple[str, list[Example]]:
    """The profile of a desk with its prices of that day, and its example answers for one product of each desk."""
    prices = desk_to_prices(name, day)
    catalogue = ", ".join(f"{product} {price}" for product, price in prices.items())
    profile = (
        f"You are the {name} desk. Your prices: {catalogue}. If the thing is on your list, reply with its price. If it "
        "is not, reply HANDOFF and the desk that has it."
    )
    answers = {desk: f"HANDOFF {desk}" for desk in DESKS} | {name: str(prices[EXAMPLE_PRODUCTS[name]])}
    return profile, [(QUESTION.format(thing=product), answers[desk]) for desk, product in EXAMPLE_PRODUCTS.items()]


def reply_to_handoff(text: str, name: str) -> str | None:
    """The desk that a reply of desk `name` hands over to, the first that it names; None where it is an answer."""
    if re.search(r"[0-9]", text) and "handoff" not in text.lower():
        return None
    desks = [word for word in re.findall(r"[a-z]+", text.lower()) if word in DESKS and word != name]
    return desks[0] if desks else None


def tasks() -> Iterator[dict[str, Any]]:
    """180 tasks in one fixed order, one a day: each desk is asked equally often for the products of every desk."""
    rng = random.Random(0)
    pairs = [(first_desk, owner) for first_desk in DESKS for owner in DESKS]
    for day in range(TASKS):
        first_desk, owner = pairs[day % len(pairs)]
        product = rng.choice(PRODUCTS[owner])
        yield {
            "id": f"day-{day}",
            "question": QUESTION.format(thing=product),
            "day": day,
            "first": first_desk,
            "desk": owner,
            "answer": desk_to_prices(owner, day)[product],
        }


def task_to_input(task: dict[str, Any]) -> ShopState:
    """The question, the day and the desk that is asked first; the graph never sees whose product it is."""
    return {"question": task["question"], "day": task["day"], "active": task["first"]}


def reward(task: dict[str, Any], result: dict[str, Any]) -> dict[str, float]:
    """Team rewards of one episode, from its final state.

    `correct` is 1 where the last number of the answer is the price. `loops` counts how often a desk got the customer
    again, `handoffs` the handoffs. `reward`, which is trained on, is 1 for a correct answer, else 0.2 where the right
    desk was asked last; less LOOP_PENALTY for every loop. A handoff to a desk that was not asked yet costs nothing.
    """
    path = result.get("path", [])
    correct = last_number(result.get("answer", "")) == task["answer"]
    loops = len(path) - len(set(path))
    earned = 1.0 if correct else 0.2 * (path[-1:] == [task["desk"]])
    return {
        "correct": float(correct),
        "loops": float(loops),
        "handoffs": float(max(len(path) - 1, 0)),
        "reward": earned - LOOP_PENALTY * loops,
    }
