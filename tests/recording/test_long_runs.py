"""Owns: what a recorder holds of a long run grows with its length, not with the square of it.

The run is a loop whose list of messages grows by two each turn, so that each turn depends on all before it. What it
does for N packets that one task sends grows with N, too.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Send
from support.edge_rig import SaysNext, recorded_trajectories

from marft_bridge.common.library_internals import TASKS
from marft_bridge.recording import journal_exporter, write_ledger
from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.wrap import wrap
from marft_bridge.recording.write_ledger import TaskStart, TaskWrites, WriteLedger
from trace_store.journal import Journal

TURNS = (200, 400, 800)


class Watched(SaysNext):
    """Answers at once, and reports the length of each prompt."""

    watch: Callable[[int], None]

    def _generate(self, messages: list[Any], *args: Any, **kwargs: Any) -> ChatResult:
        self.watch(len(messages))
        return ChatResult(generations=[ChatGeneration(message=AIMessage("an answer of some words"))])


def loop_of(turns: int, watch: Callable[[int], None], *, in_subgraph: bool) -> Any:
    model = Watched(watch=watch)

    def answer(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    inner = StateGraph(MessagesState)
    inner.add_node("say", answer)
    inner.add_edge(START, "say")
    graph = StateGraph(MessagesState)
    graph.add_node("ask", lambda _: {"messages": [HumanMessage("a question of some words")]})
    graph.add_node("answer", inner.compile() if in_subgraph else answer)
    graph.add_edge(START, "ask")
    graph.add_edge("ask", "answer")
    graph.add_conditional_edges("answer", lambda state: END if len(state["messages"]) >= 2 * turns else "ask")
    return graph.compile()


def held_bytes(turns: int, folder: Path, *, in_subgraph: bool) -> int:
    """What is held in the last turn, without what the same run holds that is not recorded."""
    held = {}
    for is_recorded in (False, True):

        def watch(length: int, is_recorded: bool = is_recorded) -> None:
            if length == 2 * turns - 1:
                gc.collect()
                held[is_recorded] = tracemalloc.get_traced_memory()[0]

        graph = loop_of(turns, watch, in_subgraph=in_subgraph)
        if is_recorded:
            graph = wrap(graph, Recorder(Journal(folder / f"journal-{turns}")))
        tracemalloc.start()
        try:
            graph.invoke({"messages": []}, {"recursion_limit": 10 * turns})
        finally:
            tracemalloc.stop()
    return held[True] - held[False]


@pytest.mark.slow
@pytest.mark.parametrize("in_subgraph", [False, True])
def test_a_loop_of_800_turns_holds_four_times_what_one_of_200_turns_does(
    in_subgraph: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_exporter, "BATCH", 1)  # spans that wait to be written are at most 64, of any length
    held_bytes(10, tmp_path, in_subgraph=in_subgraph)  # what is imported and cached once
    short, middle, long = (held_bytes(turns, tmp_path, in_subgraph=in_subgraph) for turns in TURNS)
    # Twice what the step before took where it grows with the length, four times where with the square of it. What
    # happens to be held at that moment moves each figure by some 20 kB, so that the first ratio may be 2.3.
    assert long - middle < 2.6 * (middle - short)
    assert long < 5 * short


def test_what_is_forgotten_of_a_long_run_is_no_edge_lost(tmp_path: Path) -> None:
    for in_subgraph in (False, True):
        recorder = Recorder(Journal(tmp_path / f"journal-{in_subgraph}"))
        turns = 12
        wrap(loop_of(turns, lambda _: None, in_subgraph=in_subgraph), recorder).invoke(
            {"messages": []}, {"recursion_limit": 100}
        )
        (trajectory,) = recorded_trajectories(recorder)
        order = {action.action_id: number for number, action in enumerate(trajectory.actions)}
        data = {(order[edge.src], order[edge.dst]) for edge in trajectory.edges if edge.kind == "data" and edge.exact}
        assert data == {(src, dst) for dst in range(turns) for src in range(dst)}
        triggers = {(order[edge.src], order[edge.dst]) for edge in trajectory.edges if edge.kind == "trigger"}
        assert triggers == {(turn, turn + 1) for turn in range(turns - 1)}


class Place:
    """A sender's place among the tasks. Counts how often it is compared."""

    uses = 0

    def __eq__(self, other: object) -> bool:
        Place.uses += 1
        return True  # all packets are of one sender

    __hash__ = None  # type: ignore[assignment]


class WatchedSend(Send):
    """A packet. Counts how often it is looked into."""

    uses = 0

    def __getattribute__(self, name: str) -> Any:
        WatchedSend.uses += 1
        return super().__getattribute__(name)


def uses_of_packets(count: int, *, numbers_fit: bool) -> int:
    """How often the ledger compares or looks into packets, of which one task sends so many, and each becomes a task."""

    def start(ns: str, step: int, path: tuple[Any, ...], task_input: Any) -> TaskStart:
        return TaskStart(ns, ns[0], step, path=path, subscribed=(), input=task_input, graph="", is_entry=False)

    ledger, inputs = WriteLedger(), [{"number": number} for number in range(count)]
    commit = TaskWrites(
        start("a:1", 1, ("__pregel_pull", "a"), {}), [(TASKS, WatchedSend("w", each)) for each in inputs]
    )
    shift = 0 if numbers_fit else count
    starts = [start(f"w:{n}", 2, ("__pregel_push", n + shift, False), each) for n, each in enumerate(inputs)]
    Place.uses = WatchedSend.uses = 0
    ledger.note_writes(commit, {}, lambda _: False)
    assert [ledger.start_task(task, ()).sent_by for task in starts] == [["a:1"]] * count
    return Place.uses + WatchedSend.uses


@pytest.mark.parametrize("numbers_fit", [True, False])
def test_800_packets_are_looked_at_eight_times_as_often_as_100(
    numbers_fit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_ledger, "writes_sort_key", lambda _: Place())
    few, many = (uses_of_packets(count, numbers_fit=numbers_fit) for count in (100, 800))
    assert few >= 100
    assert many < 10 * few
