"""A question to an answer, by an agent that answers itself or defers to somebody who knows more, at a cost.

After HILA (Human-in-the-Loop Multi-Agent Collaboration): the agent's policy governs when to solve a problem alone and
when to defer, trained by a cost-aware reward with groups of samples. Its point is knowledge that the agent cannot have:
half of the tasks are sums, half ask for a shelf of a catalogue that only the expert holds. `build` has a frozen node as
the expert (the same base model with the catalogue's line in its prompt: a stronger model by what it may read);
`build_with_human` asks a person by `interrupt`, and the run goes on with `Command(resume="...")`.

Simplified: HILA's agent also chooses between judging what others said and creating something new; here there is one
agent and one choice. Its outer loop, which trains on what the expert said, is left out: here deferring is learned, not
the expert's knowledge.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from typing import Any, TypedDict

from langchain_core.language_models import BaseChatModel
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.types import Command, interrupt

from graphs.few_shot import profile_to_messages

AGENT = "If you can work it out, reply with the number only. If you cannot know it, reply DEFER: an expert will answer."
AGENT_EXAMPLES = (("On which shelf is the old map?", "DEFER"), ("What is 10 + 2?", "12"))
EXPERT = "You are the expert. Reply with the number only."
EXPERT_EXAMPLES = (
    ("Catalogue: the old map is on shelf 52.\nOn which shelf is the old map?", "52"),
    ("What is 10 + 2?", "12"),
)

COLOURS = ("red", "blue", "green", "white", "black", "brown", "grey", "yellow", "pink", "golden")
THINGS = ("lamp", "chair", "clock", "vase", "desk", "globe", "drum", "flute")
SHELVES = dict(
    zip(
        ((colour, thing) for colour in COLOURS for thing in THINGS),
        random.Random(0).sample(range(11, 99), len(COLOURS) * len(THINGS)),
        strict=True,
    )
)
"""The catalogue: 80 things, each on a shelf of its own. The agent never sees it."""

COST = 0.3


class QuestionState(TypedDict, total=False):
    """What the nodes share."""

    question: str
    deferred: bool
    answer: str


def build(model: BaseChatModel) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The compiled graph with a model as the expert; both nodes call `model`."""

    async def expert(state: QuestionState) -> QuestionState:
        asked = question_to_knowledge(state["question"]) + state["question"]
        reply = await model.ainvoke(profile_to_messages(EXPERT, EXPERT_EXAMPLES, asked))
        return {"answer": str(reply.text)}

    return _agent_and("expert", expert, model).compile(name="defer")


def build_with_human(
    model: BaseChatModel, checkpointer: BaseCheckpointSaver[Any]
) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The compiled graph with a person as the expert; a run that waits for them is kept by `checkpointer`."""

    async def human(state: QuestionState) -> QuestionState:
        return {"answer": str(interrupt({"question": state["question"]}))}

    return _agent_and("human", human, model).compile(checkpointer=checkpointer, name="defer_to_human")


def _agent_and(name: str, expert: Callable[..., Any], model: BaseChatModel) -> StateGraph[Any, Any, Any, Any]:
    async def agent(state: QuestionState) -> Command[str]:
        reply = await model.ainvoke(profile_to_messages(AGENT, AGENT_EXAMPLES, state["question"]))
        if defers(str(reply.text)):
            return Command(goto=name, update={"deferred": True})
        return Command(goto=END, update={"deferred": False, "answer": str(reply.text)})

    graph = StateGraph(QuestionState)
    graph.add_node("agent", agent, destinations=(name, END))
    graph.add_node(name, expert)
    graph.add_edge(START, "agent")
    graph.add_edge(name, END)
    return graph


def defers(text: str) -> bool:
    """Whether the agent hands the question on: it says "defer" or "expert"."""
    return re.search(r"\b(defer|expert)", text, flags=re.IGNORECASE) is not None


def question_to_knowledge(question: str) -> str:
    """The catalogue's line about the thing that a question names, and a line's end; empty where it names none."""
    words = set(re.findall(r"[a-z]+", question.lower()))
    for (colour, thing), shelf in SHELVES.items():
        if {colour, thing} <= words:
            return f"Catalogue: the {colour} {thing} is on shelf {shelf}.\n"
    return ""


def tasks() -> Iterator[dict[str, Any]]:
    """160 tasks in one fixed order: the shelf of each of the 80 things, and 80 sums of one-digit numbers."""
    shelves = [
        {
            "id": f"shelf-{colour}-{thing}",
            "question": f"On which shelf is the {colour} {thing}?",
            "answer": shelf,
            "known": False,
        }
        for (colour, thing), shelf in SHELVES.items()
    ]
    pairs = [(a, b) for a in range(1, 10) for b in range(1, 10)][: len(shelves)]
    sums = [{"id": f"sum-{a}-{b}", "question": f"What is {a} + {b}?", "answer": a + b, "known": True} for a, b in pairs]
    found = shelves + sums
    random.Random(0).shuffle(found)
    yield from found


def task_to_input(task: dict[str, Any]) -> QuestionState:
    """The graph sees neither the answer nor whether it can be known."""
    return {"question": task["question"]}


def reward(task: dict[str, Any], result: dict[str, Any]) -> dict[str, float]:
    """Team rewards of one episode, from its final state.

    `correct` is 1 where the last number of the answer is right, whoever gave it; `deferred` is 1 where somebody else
    was asked. `reward`, which is trained on, is correct - COST * deferred: answering a sum is worth more than asking
    (1 against 0.7), asking for a shelf more than guessing (0.7 against 0), and asking in vain is worse than nothing.
    """
    numbers = re.findall(r"-?\d{1,9}", result.get("answer", ""))
    correct = float(bool(numbers) and int(numbers[-1]) == task["answer"])
    deferred = float(bool(result.get("deferred", False)))
    return {"correct": correct, "deferred": deferred, "reward": correct - COST * deferred}
