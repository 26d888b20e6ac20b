r"""The paper's duo, Reasoner -> Actor (MARFT, appendix B.3), on small word problems that can be checked.

A task -> a graph input, and the final state of the graph -> named rewards. The graph is plain LangGraph: it takes any
LangChain chat model and has no code for spans, adapters or training. The profiles are those of the paper, shortened
to what a 135M model can follow; the answer is the last number that the Actor writes instead of a \boxed{} expression,
which so small a model almost never produces.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, TypedDict

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage, SystemMessage
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph

from graphs.last_number import number_credit

REASONER = (
    "Two LLM agents (Reasoner -> Actor) collaborate to solve math problems. You are the Reasoner: guide the Actor "
    "with one short hint."
)
ACTOR = (
    "Two LLM agents (Reasoner -> Actor) collaborate. You are the Actor: execute the operation with the Reasoner's "
    "guidance and reply with the final number only."
)

TEMPLATES = (
    "{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?",
    "There are {a} {things} in a box and {b} {things} in a bag. How many {things} are there in total?",
    "{name} picks {a} {things} in the morning and {b} {things} in the evening. How many {things} does {name} pick?",
    "What is {a} + {b}?",
    "Add {b} to {a}. What is the result?",
)
NAMES = ("Ann", "Tom", "Mia", "Leo")
OBJECTS = ("apples", "pens", "shells", "coins")


class DuoState(TypedDict, total=False):
    """The state that the two nodes share."""

    question: str
    guidance: str
    answer: str


def build(model: BaseChatModel) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The compiled duo, in which both nodes call `model`."""

    async def reasoner(state: DuoState) -> DuoState:
        reply = await model.ainvoke([SystemMessage(REASONER), HumanMessage(state["question"])])
        return {"guidance": str(reply.text).strip()}

    async def actor(state: DuoState) -> DuoState:
        problem = f"{state['question']}\nReasoner: {state['guidance']}\nActor, what is the number?"
        reply = await model.ainvoke([SystemMessage(ACTOR), HumanMessage(problem)])
        return {"answer": str(reply.text)}

    graph = StateGraph(DuoState)
    graph.add_node("reasoner", reasoner)
    graph.add_node("actor", actor)
    graph.add_edge(START, "reasoner")
    graph.add_edge("reasoner", "actor")
    graph.add_edge("actor", END)
    return graph.compile(name="math_duo")


def tasks() -> Iterator[dict[str, Any]]:
    """All 405 tasks: every sum of two numbers from 1 to 9 in every template, in one fixed order."""
    rng = random.Random(0)
    for template_number, template in enumerate(TEMPLATES):
        for a in range(1, 10):
            for b in range(1, 10):
                question = template.format(name=rng.choice(NAMES), things=rng.choice(OBJECTS), a=a, b=b)
                yield {"id": f"sum-{template_number}-{a}-{b}", "question": question, "answer": a + b}


def task_to_input(task: dict[str, Any]) -> DuoState:
    """The question only: the graph never sees the answer."""
    return {"question": task["question"]}


def reward(task: dict[str, Any], result: dict[str, Any]) -> dict[str, float]:
    """Team rewards of one episode, from its final state.

    `correct` is 1 where the last number of the Actor's answer is the right one. `reward`, which is trained on,
    adds partial credit: 0.1 where the right number occurs at all, so that rounds without a correct answer still teach.
    """
    credit = number_credit(result.get("answer", ""), task["answer"])
    return {"correct": float(credit == 1.0), "reward": credit}
