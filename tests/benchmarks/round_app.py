"""What the benches of a round train besides the demo: chains, and the demo's tasks made longer.

A word of WORDS is one token of SmolLM2's (a space and the word), so that a text of n words has n tokens.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypedDict

from langchain_core.language_models import BaseChatModel
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph

from graphs import math_duo
from graphs.chain import EXAMPLE_QUESTIONS, NUMBER_ONLY, TRIO, profiles_to_graph, text_to_tail
from graphs.few_shot import profile_to_messages
from graphs.first_line import first_line

PAIR = TRIO[:2]
EXAMPLE_ANSWER = "24"  # to each of EXAMPLE_QUESTIONS
NOTHING_YET = "00"  # what the first agent of a line reads of one before it: as many tokens as a sum mostly has
QUOTED_BYTES = 8  # of the agent before
WORDS = (
    *("house", "river", "green", "table", "water", "light", "paper", "music", "stone", "bread", "night", "garden"),
    *("road", "tree", "book", "door", "hand", "city", "field", "bridge", "summer", "winter", "letter", "window"),
)


def build_pair(model: BaseChatModel) -> CompiledStateGraph[Any, Any, Any, Any]:
    """Reasoner -> Actor, as the zoo's longer chains are made."""
    return profiles_to_graph(model, "pair", PAIR)


def long_tasks(words: int) -> Iterator[dict[str, Any]]:
    """The demo's tasks, each with a text of its own before the question: `words` words, drawn by the task's id."""
    for task in math_duo.tasks():
        pick = random.Random(task["id"])
        yield task | {"question": " ".join([*pick.choices(WORDS, k=words), task["question"]])}


class LineState(TypedDict, total=False):
    """The question, and the last word of whoever answered it last."""

    question: str
    answer: str


def line_nodes(agents: int) -> list[str]:
    """The nodes of a line of so many."""
    return [f"agent_{number:02}" for number in range(1, agents + 1)]


def _line(agents: int) -> Callable[[BaseChatModel], CompiledStateGraph[Any, Any, Any, Any]]:
    """A line of so many, in which each reads the question and what the one before it said, and answers anew.

    So calls are of one length wherever they stand and however many there are; in the zoo's chains later ones are
    longer.
    """

    def build(model: BaseChatModel) -> CompiledStateGraph[Any, Any, Any, Any]:
        graph = StateGraph(LineState)
        nodes = line_nodes(agents)
        for number, (node, before) in enumerate(zip(nodes, [START, *nodes], strict=False), 1):
            graph.add_node(node, _line_node(model, f"{number:02}"))
            graph.add_edge(before, node)
        graph.add_edge(nodes[-1], END)
        return graph.compile(name="line")

    return build


build_line_2, build_line_4, build_line_8, build_line_12 = map(_line, (2, 4, 8, 12))


def _line_node(model: BaseChatModel, number: str) -> Callable[[LineState], Awaitable[LineState]]:
    system = f"Some LLM agents solve a math problem one after another. You are agent {number}. {NUMBER_ONLY}"
    examples = [(_line_prompt(question, EXAMPLE_ANSWER), EXAMPLE_ANSWER) for question in EXAMPLE_QUESTIONS]

    async def node(state: LineState) -> LineState:
        prompt = _line_prompt(state["question"], state.get("answer", NOTHING_YET))
        reply = await model.ainvoke(profile_to_messages(system, examples, prompt))
        return {"answer": text_to_tail(first_line(str(reply.text)), QUOTED_BYTES)}

    return node


def _line_prompt(question: str, answer_before: str) -> str:
    return f"{question}\nThe agent before you: {answer_before}\nThe number?"


def even_sum(task: dict[str, Any], _result: dict[str, Any]) -> dict[str, float]:
    """Half of the tasks are worth 1, whatever is said: then rounds of all lines have the same steps to take."""
    return {"reward": float(task["answer"] % 2 == 0)}
