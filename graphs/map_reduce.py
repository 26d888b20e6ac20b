"""A list of sums -> its largest result: one worker for each sum by `Send`, and a reducer that reads all results.

After LangGraph's map-reduce pattern: there are as many workers as parts, so the number of calls in D differs from task
to task; workers run in one superstep and never depend on each other. Simplified: the list is split by code, not by a
model, and `worker` is one node, so that all workers share one adapter. A list without a sum goes to the reducer at
once. The answer is the last number that the reducer writes.
"""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Iterator
from typing import Annotated, Any, TypedDict

from langchain_core.language_models import BaseChatModel
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.types import Send

from graphs.few_shot import profile_to_messages
from graphs.last_number import last_number

WORKER = "Add the two numbers. Reply with the result only."
WORKER_EXAMPLES = (("What is 10 + 2?", "12"), ("What is 5 + 10?", "15"))
REDUCER = "Workers sent you their results. Reply with the largest number only."
REDUCER_EXAMPLES = (
    ("Worker 1: 12\nWorker 2: 15\nWhich is the largest number?", "15"),
    ("Worker 1: 20\nWhich is the largest number?", "20"),
)

MAX_PARTS = 4  # of a task; a longer list in a question is cut there
TASKS = 160


class ListState(TypedDict, total=False):
    """The state that the nodes share. `results` holds (index of the part, what its worker wrote)."""

    question: str
    results: Annotated[list[tuple[int, str]], operator.add]
    answer: str


class Part(TypedDict):
    """The input of one worker: a part of the list, with its index."""

    index: int
    text: str


def build(model: BaseChatModel) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The compiled graph, in which workers and reducer call `model`."""

    def route_to_workers(state: ListState) -> list[Send] | str:
        parts = question_to_parts(state["question"])
        return [Send("worker", Part(index=index, text=text)) for index, text in enumerate(parts)] or "reducer"

    async def worker(state: Part) -> ListState:
        reply = await model.ainvoke(profile_to_messages(WORKER, WORKER_EXAMPLES, f"What is {state['text']}?"))
        return {"results": [(state["index"], str(reply.text).strip())]}

    async def reducer(state: ListState) -> ListState:
        lines = [f"Worker {index + 1}: {text[:40]}" for index, text in sorted(state.get("results", []))]
        prompt = "\n".join([*lines, "Which is the largest number?"])
        reply = await model.ainvoke(profile_to_messages(REDUCER, REDUCER_EXAMPLES, prompt))
        return {"answer": str(reply.text)}

    graph = StateGraph(ListState)
    graph.add_node("worker", worker, input_schema=Part)
    graph.add_node("reducer", reducer)
    graph.add_conditional_edges(START, route_to_workers, ["worker", "reducer"])
    graph.add_edge("worker", "reducer")
    graph.add_edge("reducer", END)
    return graph.compile(name="map_reduce")


def question_to_parts(question: str) -> list[str]:
    """The sums of a question: `Largest of: 3 + 4; 2 + 2` -> `["3 + 4", "2 + 2"]`, at most MAX_PARTS."""
    return [f"{a} + {b}" for a, b in re.findall(r"(\d+) \+ (\d+)", question)][:MAX_PARTS]


def tasks() -> Iterator[dict[str, Any]]:
    """160 tasks of one to four sums of one-digit numbers, as many of each length, in one fixed order; none twice."""
    pairs = [(a, b) for a in range(1, 10) for b in range(1, 10)]
    random.Random(0).shuffle(pairs)
    for number in range(TASKS):
        first, length = number // MAX_PARTS, 1 + number % MAX_PARTS
        parts = [pairs[(first + length * k) % len(pairs)] for k in range(length)]
        sums = [a + b for a, b in parts]
        question = "Largest of: " + "; ".join(f"{a} + {b}" for a, b in parts)
        yield {"id": f"list-{number}", "question": question, "sums": sums, "answer": max(sums)}


def task_to_input(task: dict[str, Any]) -> ListState:
    """The question only: the graph never sees the sums."""
    return {"question": task["question"]}


def reward(task: dict[str, Any], result: dict[str, Any]) -> dict[str, float]:
    """Team rewards of one episode, from its final state.

    `parts` is the share of the sums that their workers got right (by the last number that each wrote), `correct` is
    1 where the reducer's last number is the largest sum. `reward`, which is trained on, is 1 for a correct answer and
    otherwise 0.4 * parts: a worker earns something for a right part although the answer is wrong.
    """
    worker_numbers = {index: last_number(text) for index, text in result.get("results", [])}
    parts = sum(worker_numbers.get(index) == value for index, value in enumerate(task["sums"])) / len(task["sums"])
    correct = float(last_number(result.get("answer", "")) == task["answer"])
    return {"correct": correct, "parts": parts, "reward": 1.0 if correct else 0.4 * parts}
