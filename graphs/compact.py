"""Agents that pass on a record of action and state, and pay for its length (PACT), counting objects in a box.

A clerk handles one event after another and writes a new record for each; it sees only the event and the previous
record, never the whole history; a reporter answers from the last record. So what a message leaves out is lost, and what
is superfluous costs: compression is part of the action.

From the paper (arXiv 2606.05304): communication as a public update of a state, a compact record of action and state
instead of raw text in a shared history, judged by performance against cost. Simplified: there a protocol projects each
raw output into a record, here the message is what the agent writes, its length has a price in the reward, and the form
of a record is only shown by two wordy examples, which can be shortened; one clerk for all events.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypedDict

from langchain_core.language_models import BaseChatModel
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph

from graphs.few_shot import FewShotPrompt
from graphs.last_number import last_number, number_credit

CLERK = FewShotPrompt(
    "You keep the record of a box. After an event, write the new record: what was done, and how many there are now.",
    (
        ("Record: have: 4\nEvent: cups put in: 1\nNew record:", "We added 1 cup to the box. have: 5"),
        ("Record: have: 6\nEvent: cups taken out: 2\nNew record:", "We took 2 cups out of the box. have: 4"),
    ),
)
REPORTER = FewShotPrompt(
    "You read the record of a box. Reply with the number that the box has now.",
    (("Record: We added 1 cup to the box. have: 5\nHow many are in the box now?", "5"),),
)

OBJECTS = ("apples", "pens", "shells", "coins")
TASKS = 160
MAX_EVENTS = 3

RECORD_CHARACTERS = 80  # of a record that reach the next agent; a message of this length or more costs LENGTH_PRICE
LENGTH_PRICE = 0.2


class BoxState(TypedDict, total=False):
    """The state that the nodes share. Agents read only the last `record`; `records` holds all, for the reward."""

    events: list[str]
    event_index: int
    record: str
    records: Annotated[list[str], operator.add]
    answer: str


def build(model: BaseChatModel) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The compiled pipeline, in which clerk and reporter call `model`."""

    async def clerk(state: BoxState) -> BoxState:
        index = state["event_index"]
        prompt = f"Record: {state['record']}\nEvent: {state['events'][index]}\nNew record:"
        reply = await model.ainvoke(CLERK.messages(prompt))
        message = str(reply.text).strip()
        return {"event_index": index + 1, "record": message[:RECORD_CHARACTERS], "records": [message]}

    def route_next_event(state: BoxState) -> Literal["clerk", "reporter"]:
        return "clerk" if state["event_index"] < len(state["events"]) else "reporter"

    async def reporter(state: BoxState) -> BoxState:
        prompt = f"Record: {state['record']}\nHow many are in the box now?"
        reply = await model.ainvoke(REPORTER.messages(prompt))
        return {"answer": str(reply.text)}

    graph = StateGraph(BoxState)
    graph.add_node("clerk", clerk)
    graph.add_node("reporter", reporter)
    graph.add_conditional_edges(START, route_next_event)
    graph.add_conditional_edges("clerk", route_next_event)
    graph.add_edge("reporter", END)
    return graph.compile(name="compact")


def tasks() -> Iterator[dict[str, Any]]:
    """160 tasks of one to three events, as many of each length as can be, in one fixed order. No box goes below 1.

    No two have the same start and events; some differ in the objects alone.
    """
    rng = random.Random(0)
    boxes: set[tuple[str, ...]] = set()
    while (number := len(boxes)) < TASKS:
        noun, count = rng.choice(OBJECTS), rng.randint(2, 6)
        start, events, states = f"have: {count}", [], []
        for _ in range(1 + number % MAX_EVENTS):
            change = rng.randint(1, 3) * (1 if count <= 3 else rng.choice((1, -1)))
            count += change
            events.append(f"{noun} {'put in' if change > 0 else 'taken out'}: {abs(change)}")
            states.append(count)
        box = (start, *events)
        if box in boxes:
            continue
        boxes.add(box)
        yield {"id": f"box-{number}", "start": start, "events": events, "states": states, "answer": count}


def task_to_input(task: dict[str, Any]) -> BoxState:
    """The start and the events: the graph never sees the true count after an event."""
    return {"events": list(task["events"]), "event_index": 0, "record": task["start"]}


def reward(task: dict[str, Any], result: dict[str, Any], run: Any) -> dict[str, Any]:
    """Rewards of one recorded episode; `run.game()` is its trajectory.

    Of the team: `correct`, 1 where the reporter's last number is right; `length_cost`, the mean over the records of
    their characters / RECORD_CHARACTERS, at most 1 each; and `reward`, which is trained on: 1 where it is correct, 0.1
    where the right number occurs at all, minus LENGTH_PRICE * length_cost. Of each record: `kept`, 1 where the last
    number of what is shown of it is the true count after the event; absent where a call of the clerk is not recorded.
    """
    records = result["records"]
    answer_credit = number_credit(result["answer"], task["answer"])
    length_cost = sum(min(len(record) / RECORD_CHARACTERS, 1.0) for record in records) / len(records)
    calls = sorted((action.index, action.action_id) for action in run.game().actions if action.node == "clerk")
    counts = [last_number(record[:RECORD_CHARACTERS]) for record in records]
    record_scores = [float(read == count) for read, count in zip(counts, task["states"], strict=True)]
    step_rewards = {f"step:{call}": score for (_, call), score in zip(calls, record_scores, strict=False)}
    return {
        "correct": float(answer_credit == 1.0),
        "reward": answer_credit - LENGTH_PRICE * length_cost,
        "length_cost": length_cost,
        "kept": step_rewards if len(calls) == len(record_scores) else None,
    }
