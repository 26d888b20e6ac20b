"""Owns: answers to questions by their ids reach the same questions in a replay, whose ids are others.

Questions beside each other, one after the other in one node, and inside a subgraph.
"""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Annotated, Any, TypedDict

from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from langgraph.types import Command, interrupt
from support.edge_rig import says

from marft_bridge import wrap
from marft_bridge.testing import replay
from trace_store.store import TraceStore


class Said(TypedDict):
    said: Annotated[list[str], operator.add]


def asking(model: Any) -> Any:
    """left asks twice, and right, which is a graph of its own, once."""

    def left(_: Said) -> dict[str, Any]:
        answers = [interrupt("first"), interrupt("second")]
        return {"said": [model.invoke(f"left {answers}").text]}

    def ask(_: Said) -> dict[str, Any]:
        return {"said": [model.invoke(f"right {interrupt('third')}").text]}

    right = StateGraph(Said)
    right.add_node("ask", ask)
    right.add_edge(START, "ask")
    graph = StateGraph(Said)
    graph.add_node("left", left)
    graph.add_node("right", right.compile())
    graph.add_edge(START, "left")
    graph.add_edge(START, "right")
    return graph.compile(checkpointer=InMemorySaver())


def test_answers_by_id_reach_the_same_questions(tmp_path: Path) -> None:
    store = tmp_path / "traces.duckdb"
    recorded = wrap(asking(says("one", "two")), store)
    config: Any = {"configurable": {"thread_id": "t"}}
    asked = {each.value: each.id for each in recorded.invoke({"said": []}, config)["__interrupt__"]}
    assert sorted(asked) == ["first", "third"]
    answers = {asked["first"]: "a", asked["third"]: "c"}
    (second,) = recorded.invoke(Command(resume=answers), config)["__interrupt__"]
    assert second.value == "second"
    done = recorded.invoke(Command(resume={second.id: "b"}), config)
    assert done["said"] == ["two", "one"]
    recorded.recorder.journal.close()
    with TraceStore.open(store, read_only=True) as reader:
        ids = [episode.episode_id for episode in reader.episodes()]
    assert [replay(asking(says()), each, store=store).call_count for each in ids] == [0, 1, 1]
