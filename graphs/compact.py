"""Agents that tell each other what was done and how things stand, and pay for length (PACT), on a box that fills.

A clerk takes up one event after another and writes a record of it; each time it sees only the event and the record
before, never the whole history; a reporter answers from the last record. So what a message leaves out is lost, and what
it says too much costs: compression is part of the action.

From the paper (arXiv 2606.05304): communication as a public update of a state, a compact record of action and state
in the place of raw text in a shared history, judged by performance against cost. Simplified: there a protocol projects
each raw output into a record, here the message is what the agent writes, its length has a price in the reward, and the
form of a record is only shown by two wordy examples, which leave something to save; one clerk for all events.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypedDict

from langchain_core.language_models import BaseChatModel
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph

from graphs.few_shot import FewShot
from graphs.last_number import last_number, number_credit

CLERK = FewShot(
    "You keep the record of a box. After an event, write the new record: what was done, and how many there are now.",
    (
        ("Record: have: 4\nEvent: cups put in: 1\nNew record:", "We added 1 cup to the box. have: 5"),
        ("Record: have: 6\nEvent: cups taken out: 2\nNew record:", "We took 2 cups out of the box. have: 4"),
    ),
)
REPORTER = FewShot(
    "You read the record of a box. Reply with the number that the box has now.",
    (("Record: We added 1 cup to the box. have: 5\nHow many are in the box now?", "5"),),
)

THINGS = ("apples", "pens", "shells", "coins")
TASKS = 160
MOST_EVENTS = 3

RECORD_LETTERS = 80  # of a record that reach the next agent; a message of this length or more costs PRICE
PRICE = 0.2


class BoxState(TypedDict, total=False):
    """What the nodes share. `record` is all that is said between agents; `records` keeps them for the reward."""

    events: list[str]
    place: int
    record: str
    records: Annotated[list[str], operator.add]
    answer: str


def build(model: BaseChatModel) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The compiled pipeline, in which clerk and reporter call `model`."""

    async def clerk(state: BoxState) -> BoxState:
        place = state["place"]
        asked = f"Record: {state['record']}\nEvent: {state['events'][place]}\nNew record:"
        reply = await model.ainvoke(CLERK.messages(asked))
        message = str(reply.text).strip()
        return {"place": place + 1, "record": message[:RECORD_LETTERS], "records": [message]}

    def who_is_next(state: BoxState) -> Literal["clerk", "reporter"]:
        return "clerk" if state["place"] < len(state["events"]) else "reporter"

    async def reporter(state: BoxState) -> BoxState:
        asked = f"Record: {state['record']}\nHow many are in the box now?"
        reply = await model.ainvoke(REPORTER.messages(asked))
        return {"answer": str(reply.text)}

    graph = StateGraph(BoxState)
    graph.add_node("clerk", clerk)
    graph.add_node("reporter", reporter)
    graph.add_conditional_edges(START, who_is_next)
    graph.add_conditional_edges("clerk", who_is_next)
    graph.add_edge("reporter", END)
    return graph.compile(name="compact")


def tasks() -> Iterator[dict[str, Any]]:
    """160 tasks of one to three events, as many of each length as can be, in one fixed order. No box goes below 1."""
    pick = random.Random(0)
    for number in range(TASKS):
        thing, have = pick.choice(THINGS), pick.randint(2, 6)
        start, events, states = f"have: {have}", [], []
        for _ in range(1 + number % MOST_EVENTS):
            change = pick.randint(1, 3) * (1 if have <= 3 else pick.choice((1, -1)))
            have += change
            events.append(f"{thing} {'put in' if change > 0 else 'taken out'}: {abs(change)}")
            states.append(have)
        yield {"id": f"box-{number}", "start": start, "events": events, "states": states, "answer": have}


def task_to_input(task: dict[str, Any]) -> BoxState:
    """The graph never sees how things stand after an event."""
    return {"events": list(task["events"]), "place": 0, "record": task["start"]}


def reward(task: dict[str, Any], result: dict[str, Any], run: Any) -> dict[str, Any]:
    """Rewards of one recorded episode; `run.game()` is its trajectory.

    Of the team: `correct`, 1 where the reporter's last number is right; `length_cost`, the mean over the records of
    their letters / RECORD_LETTERS, at most 1 each; and `reward`, which is trained on: 1 where it is correct, 0.1 where
    the right number occurs at all, minus PRICE * length_cost. Of each record: `kept`, 1 where its last number is how
    things stand then; absent where the clerk's calls were not all recorded.
    """
    records = result["records"]
    worth = number_credit(result["answer"], task["answer"])
    length_cost = sum(min(len(record) / RECORD_LETTERS, 1.0) for record in records) / len(records)
    calls = sorted((a.index, a.action_id) for a in run.game().actions if a.node == "clerk")
    kept = [float(last_number(record) == have) for record, have in zip(records, task["states"], strict=True)]
    each = {f"step:{call}": value for (_, call), value in zip(calls, kept, strict=False)}
    return {
        "correct": float(worth == 1.0),
        "reward": worth - PRICE * length_cost,
        "length_cost": length_cost,
        "kept": each if len(calls) == len(kept) else None,
    }
