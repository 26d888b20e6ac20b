"""The workload of the rollout benches: two agents, prompts of 40 to 400 tokens, answers that end by themselves.

A plain LangGraph app, as a user has one. How long a prompt is depends on how many facts a task brings along; how long
an answer is, the model decides, up to 128 tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, TypedDict

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage, SystemMessage
from langgraph.graph import END, START, StateGraph

NODES = ("reader", "writer")
PROFILES = {"reader": "Name the one fact that matters.", "writer": "Answer in one short sentence."}
THINGS = ("apples", "pens", "shells", "coins", "cups", "books")
NAMES = ("Ann", "Tom", "Mia", "Leo", "Eva", "Sam")
FACTS = (1, 2, 4, 6, 10, 14, 18, 22)
TASKS = 256


class State(TypedDict, total=False):
    question: str
    fact: str
    answer: str


def writer_prompt(question: str, fact: str) -> str:
    """What the second agent is asked, from the question and the first agent's answer."""
    return f"{question}\nReader: {fact}\nWriter:"


def build(model: BaseChatModel) -> Any:
    """reader -> writer."""

    async def reader(state: State) -> State:
        reply = await model.ainvoke([SystemMessage(PROFILES["reader"]), HumanMessage(state["question"])])
        return {"fact": str(reply.text).strip()}

    async def writer(state: State) -> State:
        prompt = writer_prompt(state["question"], state["fact"])
        reply = await model.ainvoke([SystemMessage(PROFILES["writer"]), HumanMessage(prompt)])
        return {"answer": str(reply.text)}

    graph = StateGraph(State)
    graph.add_node("reader", reader)
    graph.add_node("writer", writer)
    for edge in ((START, "reader"), ("reader", "writer"), ("writer", END)):
        graph.add_edge(*edge)
    return graph.compile(name="reader_writer")


def tasks() -> Iterator[dict[str, Any]]:
    """The same ones every time."""
    pick = random.Random(0)
    for number in range(TASKS):
        facts = [
            f"{pick.choice(NAMES)} has {pick.randint(2, 60)} {pick.choice(THINGS)} in bag {pick.randint(1, 9)}."
            for _ in range(FACTS[number % len(FACTS)])
        ]
        who, what = pick.choice(NAMES), pick.choice(THINGS)
        yield {"id": f"task-{number}", "question": " ".join([*facts, f"What may {who} do with the {what}?"])}


def task_to_input(task: dict[str, Any]) -> State:
    return {"question": task["question"]}


def reward(task: dict[str, Any], result: dict[str, Any]) -> float:
    """Anything: only speed is measured."""
    return float(len(result["answer"]) < 200)
