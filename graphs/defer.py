"""A question -> an answer, by an agent that answers itself or defers to an expert, at a cost.

After HILA (Human-in-the-Loop Multi-Agent Collaboration): the agent's policy governs when to solve a problem alone and
when to defer, trained by a cost-aware reward with groups of samples. Deferring pays for knowledge that the agent cannot
have: half of the tasks are sums, half ask for a shelf of a catalogue that only the expert has. In `build` the expert is
a frozen node (the same base model with the catalogue's line in its prompt, hence better informed); `build_with_human`
asks a person by `interrupt`, and the run goes on with `Command(resume="...")`.

Simplified: HILA's agent also chooses between judging what others said and creating something new; here there is one
agent and one choice. Its outer loop, which trains on the expert's answers, is left out: here the agent learns to defer,
not what the expert knows.
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
from graphs.last_number import last_number

AGENT = "If you can work it out, reply with the number only. If you cannot know it, reply DEFER: an expert will answer."
AGENT_EXAMPLES = (("On which shelf is the old map?", "DEFER"), ("What is 10 + 2?", "12"))
EXPERT = "You are the expert. Reply with the number only."
EXPERT_EXAMPLES = (
    ("Catalogue: the old map is on shelf 52.\nOn which shelf is the old map?", "52"),
    ("What is 10 + 2?", "12"),
)

COLOURS = ("red", "blue", "green", "white", "black", "brown", "grey", "yellow", "pink", "golden")
OBJECTS = ("lamp", "chair", "clock", "vase", "desk", "globe", "drum", "flute")
SHELVES = dict(
    zip(
        ((colour, noun) for colour in COLOURS for noun in OBJECTS),
        random.Random(0).sample(range(11, 99), len(COLOURS) * len(OBJECTS)),
        strict=True,
    )
)
"""The catalogue: (colour, noun) -> shelf, for 80 objects on different shelves. The agent never sees it."""

DEFER_COST = 0.3


class QuestionState(TypedDict, total=False):
    """The state that the nodes share."""

    question: str
    deferred: bool
    answer: str


def build(model: BaseChatModel) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The compiled graph with a model as the expert; both nodes call `model`."""

    async def expert(state: QuestionState) -> QuestionState:
        prompt = question_to_knowledge(state["question"]) + state["question"]
        reply = await model.ainvoke(profile_to_messages(EXPERT, EXPERT_EXAMPLES, prompt))
        return {"answer": str(reply.text)}

    return _build_graph("expert", expert, model).compile(name="defer")


def build_with_human(
    model: BaseChatModel, checkpointer: BaseCheckpointSaver[Any]
) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The compiled graph with a person as the expert; `checkpointer` stores the runs that wait for them."""

    async def human(state: QuestionState) -> QuestionState:
        return {"answer": str(interrupt({"question": state["question"]}))}

    return _build_graph("human", human, model).compile(checkpointer=checkpointer, name="defer_to_human")


def _build_graph(expert_name: str, expert: Callable[..., Any], model: BaseChatModel) -> StateGraph[Any, Any, Any, Any]:
    async def agent(state: QuestionState) -> Command[str]:
        reply = await model.ainvoke(profile_to_messages(AGENT, AGENT_EXAMPLES, state["question"]))
        if is_deferral(str(reply.text)):
            return Command(goto=expert_name, update={"deferred": True})
        return Command(goto=END, update={"deferred": False, "answer": str(reply.text)})

    graph = StateGraph(QuestionState)
    graph.add_node("agent", agent, destinations=(expert_name, END))
    graph.add_node(expert_name, expert)
    graph.add_edge(START, "agent")
    graph.add_edge(expert_name, END)
    return graph


def is_deferral(text: str) -> bool:
    """Whether a reply of the agent defers: it has a word that begins with "defer" or "expert"."""
    return re.search(r"\b(defer|expert)", text, flags=re.IGNORECASE) is not None


def question_to_knowledge(question: str) -> str:
    """The catalogue's line about the object that a question names, with a newline; "" where it names none."""
    words = set(re.findall(r"[a-z]+", question.lower()))
    for (colour, noun), shelf in SHELVES.items():
        if {colour, noun} <= words:
            return f"Catalogue: the {colour} {noun} is on shelf {shelf}.\n"
    return ""


def tasks() -> Iterator[dict[str, Any]]:
    """160 tasks in one fixed order: the shelf of each of the 80 objects, and 80 sums of one-digit numbers."""
    shelves = [
        {
            "id": f"shelf-{colour}-{noun}",
            "question": f"On which shelf is the {colour} {noun}?",
            "answer": shelf,
            "known": False,
        }
        for (colour, noun), shelf in SHELVES.items()
    ]
    pairs = [(a, b) for a in range(1, 10) for b in range(1, 10)][: len(shelves)]
    sums = [{"id": f"sum-{a}-{b}", "question": f"What is {a} + {b}?", "answer": a + b, "known": True} for a, b in pairs]
    mixed_tasks = shelves + sums
    random.Random(0).shuffle(mixed_tasks)
    yield from mixed_tasks


def task_to_input(task: dict[str, Any]) -> QuestionState:
    """The question only: the graph sees neither the answer nor whether it can be known."""
    return {"question": task["question"]}


def reward(task: dict[str, Any], result: dict[str, Any]) -> dict[str, float]:
    """Team rewards of one episode, from its final state.

    `correct` is 1 where the last number of the answer is right, whoever answered; `deferred` is 1 where the agent
    deferred. `reward`, which is trained on, is correct - DEFER_COST * deferred: answering a sum earns more than
    deferring it (1 against 0.7), deferring a shelf more than guessing it (0.7 against 0), and a deferred question that
    is answered wrongly less than nothing.
    """
    correct = float(last_number(result.get("answer", "")) == task["answer"])
    deferred = float(bool(result.get("deferred", False)))
    return {"correct": correct, "deferred": deferred, "reward": correct - DEFER_COST * deferred}
