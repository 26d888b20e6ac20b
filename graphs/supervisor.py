"""A sum, a product, or a sum that is multiplied -> a number: a supervisor routes between specialists with tools.

After LangGraph's supervisor: it reads what was done so far and names the next specialist, each specialist reports back
to it, and the run ends when it says so; so the number of acting agents, and D, are learned. Simplified: the supervisor
is an ordinary node that writes a route as text ("ROUTE: ADDER") and goes there by `Command(goto=...)`, because so small
a model makes no tool calls (a test records langgraph-supervisor itself). A specialist writes the two numbers that its
tool needs; the tool is a LangChain tool, and its result becomes the value. After `MAX_ROUTES` routes the run ends
with the current value, and nobody is asked who is next; it ends so after a route that names no specialist, too.
"""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Callable, Iterator
from typing import Annotated, Any, TypedDict

from langchain_core.language_models import BaseChatModel
from langchain_core.tools import tool
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.types import Command

from graphs.few_shot import profile_to_messages

SUPERVISOR = (
    "You route between ADDER, who adds two numbers, and MULTIPLIER, who multiplies two numbers. Reply with ROUTE: and "
    "who is next, or ROUTE: DONE when the result is there."
)
SUPERVISOR_EXAMPLES = (
    ("What is 10 plus 2?\nWho is next?", "ROUTE: ADDER"),
    ("What is 10 times 2?\nWho is next?", "ROUTE: MULTIPLIER"),
    ("What is 10 plus 2?\nADDER: 10, 2 = 12\nWho is next?", "ROUTE: DONE"),
)
SPECIALIST = "You {verb} two numbers. Reply with the two numbers that you need next."
SPECIALIST_EXAMPLES = {
    "adder": (("What is 10 plus 2?\nThe two numbers?", "10, 2"),),
    "multiplier": (
        ("What is 10 times 2?\nThe two numbers?", "10, 2"),
        ("What is 10 plus 2, times 6?\nADDER: 10, 2 = 12\nThe two numbers?", "12, 6"),
    ),
}

MAX_ROUTES = 3
TASKS = 162


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@tool
def multiply(a: int, b: int) -> int:
    """Multiplies two numbers."""
    return a * b


VERBS = {"adder": "add", "multiplier": "multiply"}
TOOLS = {"adder": add, "multiplier": multiply}


class TeamState(TypedDict, total=False):
    """The state that the nodes share. `calls` holds (specialist, its two numbers, the result of its tool), in order."""

    question: str
    routes: Annotated[list[str], operator.add]
    calls: Annotated[list[tuple[str, tuple[int, int] | None, int | None]], operator.add]
    value: int


def build(model: BaseChatModel) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The compiled graph, in which the supervisor and both specialists call `model`."""

    async def supervisor(state: TeamState) -> Command[str]:
        if len(state.get("calls", [])) == MAX_ROUTES:  # one for each route
            return Command(goto=END)
        prompt = _state_to_transcript(state) + "\nWho is next?"
        reply = await model.ainvoke(profile_to_messages(SUPERVISOR, SUPERVISOR_EXAMPLES, prompt))
        route = reply_to_route(str(reply.text))
        return Command(goto=route, update={"routes": [] if route == END else [route]})

    def specialist(name: str) -> Callable[..., Any]:
        async def node(state: TeamState) -> TeamState:
            profile, prompt = SPECIALIST.format(verb=VERBS[name]), _state_to_transcript(state) + "\nThe two numbers?"
            reply = await model.ainvoke(profile_to_messages(profile, SPECIALIST_EXAMPLES[name], prompt))
            numbers = reply_to_numbers(str(reply.text))
            if numbers is None:
                return {"calls": [(name, None, None)]}
            value = int(await TOOLS[name].ainvoke({"a": numbers[0], "b": numbers[1]}))
            return {"calls": [(name, numbers, value)], "value": value}

        return node

    graph = StateGraph(TeamState)
    graph.add_node("supervisor", supervisor, destinations=(*VERBS, END))
    graph.add_edge(START, "supervisor")
    for name in VERBS:
        graph.add_node(name, specialist(name))
        graph.add_edge(name, "supervisor")
    return graph.compile(name="supervisor")


def _state_to_transcript(state: TeamState) -> str:
    """The question, and a line for each call."""
    lines = [state["question"]]
    for name, numbers, value in state.get("calls", []):
        outcome = f"{numbers[0]}, {numbers[1]} = {value}" if numbers else "no two numbers"
        lines.append(f"{name.upper()}: {outcome}")
    return "\n".join(lines)


def reply_to_route(text: str) -> str:
    """The first word that begins like ADDER, MULTIPLIER or DONE, in whatever case, as a node; END where none does."""
    match = re.search(r"\b(add|multi|done)", text.lower())
    return {"add": "adder", "multi": "multiplier"}.get(match[1], END) if match else END


def reply_to_numbers(text: str) -> tuple[int, int] | None:
    """The first two numbers of a reply, of at most six digits each; None where there are not two."""
    numbers = re.findall(r"(?<![0-9])[0-9]{1,6}(?![0-9])", text)
    return (int(numbers[0]), int(numbers[1])) if len(numbers) >= 2 else None


def tasks() -> Iterator[dict[str, Any]]:
    """162 tasks in one fixed order: in turn a sum, a product, and a sum that is multiplied.

    `steps` holds [specialist, number, number] for each call that is needed.
    """
    rng = random.Random(0)
    pairs = [(a, b) for a in range(1, 10) for b in range(1, 10)]
    rng.shuffle(pairs)
    for number in range(TASKS):
        a, b = pairs[number // 3]
        c = rng.randint(2, 5)
        question, steps, answer = (
            (f"What is {a} plus {b}?", [["adder", a, b]], a + b),
            (f"What is {a} times {b}?", [["multiplier", a, b]], a * b),
            (f"What is {a} plus {b}, times {c}?", [["adder", a, b], ["multiplier", a + b, c]], (a + b) * c),
        )[number % 3]
        yield {"id": f"team-{number}", "question": question, "steps": steps, "answer": answer}


def task_to_input(task: dict[str, Any]) -> TeamState:
    """The question only: the graph sees neither the answer nor the steps."""
    return {"question": task["question"]}


def reward(task: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Rewards of one episode, from its final state.

    `correct` is 1 where the value at the end is the answer. `reward`, which is trained on, is 1 for that; else 0.2
    where the first route is right, and 0.2 more where that specialist's numbers are. Every call beyond the steps that
    are needed costs 0.1. `local` is the own reward of each acting agent, for configurations that weight agents: the
    supervisor's is the share of the steps that it routed in order before its first mistake, a specialist's is 1 where
    its last call had the numbers of one of its steps.
    """
    calls, steps, routes = result.get("calls", []), task["steps"], result.get("routes", [])
    correct = result.get("value") == task["answer"]
    correct_routes = 0
    while correct_routes < min(len(routes), len(steps)) and routes[correct_routes] == steps[correct_routes][0]:
        correct_routes += 1
    partial_credit = 0.2 * (correct_routes > 0) + 0.2 * (correct_routes > 0 and _is_step(calls[0], steps[:1]))
    local = {"agent:supervisor": correct_routes / len(steps)}
    local |= {f"agent:{call[0]}": float(_is_step(call, steps)) for call in calls}
    return {
        "correct": float(correct),
        "calls": float(len(calls)),
        "reward": (1.0 if correct else partial_credit) - 0.1 * max(len(calls) - len(steps), 0),
        "local": local,
    }


def _is_step(call: tuple[str, tuple[int, int] | None, int | None], steps: list[list[Any]]) -> bool:
    """Whether a specialist was called with the numbers of one of its steps, in either order."""
    name, numbers, _ = call
    return any(name == step[0] and sorted(numbers or ()) == sorted(step[1:]) for step in steps)
