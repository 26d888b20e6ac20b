"""Seeds -> customers' sentences with what is right for each node; a run's final state -> its rewards.

Invariants: the sentences of all tasks differ, those of the teacher's lessons from those of the app's tasks too; a run
in which each node says what is right earns 1, and any node's mistake costs.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from examples.hosted_to_local.app import (
    COLOURS,
    EXTRACTOR,
    LOOKUP,
    PRICES,
    ROUTER,
    WRITER,
    Order,
    call_tool,
    text_to_order,
)

Task = dict[str, Any]
TASKS, LESSONS = 800, 400
SEED, LESSON_SEED = 1, 2
COUNTS = {
    1: ("one", "a single"),
    2: ("two", "a pair of"),
    3: ("three",),
    4: ("four",),
    5: ("five",),
    6: ("six", "half a dozen"),
    8: ("eight",),
    10: ("ten",),
    12: ("twelve", "a dozen"),
}
PLURALS = {"knife": "knives", "box": "boxes", "shelf": "shelves", "brush": "brushes"}
SENTENCES = {
    "price": (
        "How much for {goods}?",
        "What would {goods} cost me?",
        "I would like an offer for {goods}.",
        "What do you ask for {goods}?",
    ),
    "stock": (
        "Do you have {goods} on the shelves?",
        "Can I pick up {goods} this afternoon?",
        "I need {goods} today, is that possible?",
        "Could I take {goods} with me now?",
    ),
    "return": (
        "I want to send back {goods}.",
        "You sent {goods} that I never ordered.",
        "My money back for {goods}, please.",
        "There are cracks in {goods} that I bought here.",
    ),
}
GREETINGS = ("", "Hello. ", "Good morning! ", "Hi there, ")


def seed_to_tasks(seed: int, count: int, taken: Iterable[str] = ()) -> list[Task]:
    """So many tasks with sentences of their own, none of which is `taken`."""
    draw, seen = random.Random(seed), set(taken)
    tasks: list[Task] = []
    while len(tasks) < count:
        route, item, colour = draw.choice(list(SENTENCES)), draw.choice(list(PRICES)), draw.choice(COLOURS)
        number = draw.choice(list(COUNTS))
        name = item if number == 1 else PLURALS.get(item, f"{item}s")
        goods = f"{draw.choice(COUNTS[number])} {colour} {name}"
        request = draw.choice(GREETINGS) + draw.choice(SENTENCES[route]).format(goods=goods)
        if request not in seen:
            seen.add(request)
            order = Order(item=item, colour=colour, count=number).model_dump()
            tasks.append({"id": f"{seed}-{len(tasks)}", "request": request, "route": route, "wanted": order})
    return tasks


def tasks() -> list[Task]:
    """The app's tasks."""
    return seed_to_tasks(SEED, TASKS)


def lessons() -> list[Task]:
    """What the teacher learns from: other sentences."""
    return seed_to_tasks(LESSON_SEED, LESSONS, [task["request"] for task in tasks()])


def task_to_input(task: Mapping[str, Any]) -> dict[str, str]:
    """The sentence alone."""
    return {"request": task["request"]}


# -- what is right ----------------------------------------------------------------------------------------------------


def right_call(route: str, order: Order) -> str:
    """The tool call for an order."""
    if route == "price":
        return f"quote({order.item}, {order.colour}, {order.count})"
    return f"stock({order.item}, {order.colour})"


def right_reply(route: str, order: Order, result: str) -> str:
    """The reply, given what the tool gave back."""
    return f"{order.count} x {order.colour} {order.item}: {'send it back' if route == 'return' else result}"


def task_to_reply(task: Mapping[str, Any]) -> str:
    """The reply that a task is to have."""
    order, route = Order(**task["wanted"]), task["route"]
    return right_reply(route, order, "" if route == "return" else call_tool(right_call(route, order)))


def reward(task: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, float]:
    """`correct`: the reply is right, letter by letter. `reward`: half of it, and a quarter for order and route each."""
    correct = float(state.get("answer") == task_to_reply(task))
    order = float(text_to_order(state.get("order", "")) == Order(**task["wanted"]))
    return {"correct": correct, "reward": 0.5 * correct + 0.25 * order + 0.25 * (state.get("route") == task["route"])}


class Oracle:
    """Who knows the tasks: each node's right answer to its own prompt."""

    def __init__(self, known_tasks: Sequence[Task]) -> None:
        self._tasks = {task["request"]: task for task in known_tasks}

    def answer(self, profile: str, text: str) -> str:
        """The right answer of the node with this profile; a prompt that tells of no order has an empty one."""
        if profile == EXTRACTOR:
            return Order(**self._tasks[text]["wanted"]).model_dump_json()
        if profile == ROUTER:
            return str(self._tasks[text]["route"])
        route, _, rest = text.partition(" ")
        order_text, end, result = rest.partition("}")
        order = text_to_order(order_text + end)
        if order is None or profile not in (LOOKUP, WRITER):
            return "none"
        return right_call(route, order) if profile == LOOKUP else right_reply(route, order, result.strip())
