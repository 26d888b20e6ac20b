"""Owns: a replay touches no checkpointer and no store of the app's, whichever of its graphs holds it.

- A graph that a node calls on a thread of its own, one below a graph without a checkpointer, one inside a tool.
- What an inner graph keeps from turn to turn is there in the replay of the next turn, as it was in the run.
- A store is searched by meaning as the app does, with its embeddings; where that is not known it is said.
- Afterwards every graph holds again what it held.
"""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any, TypedDict

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.config import get_store
from langgraph.graph import END, START, StateGraph
from langgraph.pregel import Pregel
from langgraph.store.base import BaseStore
from langgraph.store.memory import InMemoryStore
from support.edge_rig import says
from support.replay_rig import differences, record_runs, replay_all

from marft_bridge.replay.private_memory import PrivateMemory, memory_of_run, private_memory


class Kept(TypedDict, total=False):
    text: str
    log: list[str]


def remembering(model: Any, saver: Any, store: Any = None) -> Any:
    """One node, which is told what the graph's thread and store already hold, and adds to both."""

    def answer(state: dict[str, Any]) -> dict[str, Any]:
        kept = None if store is None else get_store()
        notes = [] if kept is None else [item.value["text"] for item in kept.search(("notes",))]
        said = model.invoke(f"{state['text']} after {state.get('log', [])} and {notes}").text
        if kept is not None:
            kept.put(("notes",), said, {"text": said})
        return {"log": [*state.get("log", []), said]}

    graph = StateGraph(Kept)
    graph.add_node("answer", answer)
    graph.add_edge(START, "answer")
    graph.add_edge("answer", END)
    return graph.compile(checkpointer=saver, store=store)


class App:
    """An outer graph, whose node calls an inner one on a thread of its own; and everything that the two hold."""

    def __init__(self, *answers: str, outer_saver: Any = None, sync: bool = True) -> None:
        self.saver, self.store = InMemorySaver(), InMemoryStore()
        self.inner = remembering(says(*answers), self.saver, self.store)
        inner = self.inner

        def call(state: dict[str, Any]) -> dict[str, Any]:
            config: Any = {"configurable": {"thread_id": "inner"}}
            done = inner.invoke({"text": state["text"]}, config)
            return {"log": [*done["log"], str(len(list(inner.get_state_history(config))))]}

        async def acall(state: dict[str, Any]) -> dict[str, Any]:
            config: Any = {"configurable": {"thread_id": "inner"}}
            done = await inner.ainvoke({"text": state["text"]}, config)
            return {"log": [*done["log"], str(len([each async for each in inner.aget_state_history(config)]))]}

        graph = StateGraph(Kept)
        graph.add_node("call", call if sync else acall)
        graph.add_edge(START, "call")
        graph.add_edge("call", END)
        self.graph = graph.compile(checkpointer=outer_saver)

    def held(self) -> list[Any]:
        return [len(list(self.saver.list(None))), len(self.store.search((), limit=100))]


@pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])
@pytest.mark.parametrize("has_outer", [True, False], ids=["outer keeps", "outer keeps nothing"])
def test_an_inner_graph_keeps_its_turns_in_the_replay_and_nothing_in_the_apps(
    tmp_path: Path, sync: bool, has_outer: bool
) -> None:
    app = App("one", "two", outer_saver=InMemorySaver() if has_outer else None, sync=sync)
    inputs = [{"text": "first"}, {"text": "second"}]
    runs = record_runs(app.graph, inputs, tmp_path, is_async=not sync, config={"configurable": {"thread_id": "t"}})
    assert "['one']" in str(runs[1].calls[0].prompt)
    assert app.held() == [6, 2]
    quiet = App(outer_saver=InMemorySaver() if has_outer else None, sync=sync)
    assert differences(replay_all(quiet.graph, runs)) == [None, None]
    assert quiet.held() == [0, 0]
    assert differences(replay_all(app.graph, runs)) == [None, None]
    assert app.held() == [6, 2]
    assert app.inner.checkpointer is app.saver
    assert not isinstance(vars(Pregel)["checkpointer"], property)


def test_graphs_that_hold_one_object_find_what_another_one_kept() -> None:
    saver = InMemorySaver()
    one, other = (remembering(says("one", "two"), saver) for _ in range(2))
    config: Any = {"configurable": {"thread_id": "t"}}
    memory = PrivateMemory()
    with private_memory(memory):
        one.invoke({"text": "x"}, config)
        assert other.get_state(config).values["log"] == ["one"]
        copied = memory.copy()
        one.invoke({"text": "x"}, config)
        with memory_of_run(copied):
            assert other.get_state(config).values["log"] == ["one"]
        memory.restore(copied)
        assert one.get_state(config).values["log"] == ["one"]
    assert one.get_state(config).values == {}


def test_a_run_beside_another_has_a_memory_of_its_own_and_no_thread_falls_back_on_the_apps() -> None:
    graph = remembering(says("one", "two", "three"), InMemorySaver())
    config: Any = {"configurable": {"thread_id": "t"}}
    mine, rest = PrivateMemory(), PrivateMemory()
    logs = []
    with private_memory(rest):
        with memory_of_run(mine):
            graph.invoke({"text": "x"}, config)
            thread = threading.Thread(target=lambda: logs.append(graph.invoke({"text": "x"}, config)["log"]))
            thread.start()
            thread.join()
            assert graph.get_state(config).values["log"] == ["one"]
        assert logs == [["two"]]
        assert graph.get_state(config).values["log"] == ["two"]
    assert graph.get_state(config).values == {}


@pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])
def test_a_run_that_was_given_a_store_from_outside_finds_one_in_the_replay(tmp_path: Path, sync: bool) -> None:
    """As LangGraph's server gives it, or an app that sets it when it starts."""

    def graph_of(model: Any) -> Any:
        def count(state: dict[str, Any], store: BaseStore) -> dict[str, Any]:
            item = store.get(("counts",), "calls")
            number = 1 + (item.value["number"] if item is not None else 0)
            store.put(("counts",), "calls", {"number": number})
            return {"log": [f"{model.invoke(state['text']).content} {number}"]}

        graph = StateGraph(Kept)
        graph.add_node("count", count)
        graph.add_edge(START, "count")
        return graph.compile()

    recorded = graph_of(says("one", "two"))
    recorded.store = InMemoryStore()
    inputs = [{"text": "first"}, {"text": "second"}]
    runs = record_runs(recorded, inputs, tmp_path, is_async=not sync)
    assert "two 2" in str(runs[1].output)
    quiet = graph_of(says())
    assert differences(replay_all(quiet, runs)) == [None, None]
    assert quiet.store is None
    assert differences(replay_all(quiet, runs)) == [None, None]  # each time from an empty one


# -- search by meaning ----------------------------------------------------------------------------------------------

embedded: list[str] = []


def embed(texts: list[str]) -> list[list[float]]:
    embedded.extend(texts)
    return [[float(text.count("cat")), float(text.count("dog")), 0.1] for text in texts]


def animals(store: BaseStore, *, is_async: bool = False) -> Any:
    """A node that keeps two animals, one of them by a field that it names itself, and asks about what is like a cat."""

    def answer(_: dict[str, Any]) -> dict[str, Any]:
        held = get_store()
        held.put(("animals",), "1", {"text": "dog dog"})
        held.put(("animals",), "2", {"text": "dog", "likes": "cat cat"}, index=["likes"])
        (found,) = held.search(("animals",), query="cat", limit=1)
        return {"log": [model.invoke(f"{found.value} {found.score is not None}").text]}

    async def aanswer(_: dict[str, Any]) -> dict[str, Any]:
        held = get_store()
        await held.aput(("animals",), "1", {"text": "dog dog"})
        await held.aput(("animals",), "2", {"text": "dog", "likes": "cat cat"}, index=["likes"])
        (found,) = await held.asearch(("animals",), query="cat", limit=1)
        return {"log": [(await model.ainvoke(f"{found.value} {found.score is not None}")).text]}

    model = says("one", "two", "three")
    graph = StateGraph(Kept)
    graph.add_node("answer", aanswer if is_async else answer)
    graph.add_edge(START, "answer")
    graph.add_edge("answer", END)
    return graph.compile(store=store)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_store_with_an_index_is_searched_by_meaning_in_a_replay(tmp_path: Path, is_async: bool) -> None:
    graph = animals(InMemoryStore(index={"dims": 3, "embed": embed}), is_async=is_async)
    runs = record_runs(graph, [{"text": "x"}], tmp_path, is_async=is_async)
    assert "cat cat" in str(runs[0].calls[0].prompt)
    assert "True" in str(runs[0].calls[0].prompt)
    assert differences(replay_all(graph, runs)) == [None]


def test_a_copy_of_a_store_finds_the_same_and_embeds_nothing_again() -> None:
    store, memory = InMemoryStore(index={"dims": 3, "embed": embed}), PrivateMemory()
    stand_in = memory.stand_in(store)
    stand_in.put(("animals",), "1", {"text": "dog dog"})
    stand_in.put(("animals",), "2", {"text": "dog", "likes": "cat cat"}, index=["likes"])
    embedded.clear()
    copied = memory.copy().stand_in(store)
    assert embedded == []
    for each in (stand_in, copied):
        assert [item.key for item in each.search(("animals",), query="cat", limit=1)] == ["2"]
    copied.put(("animals",), "2", {"text": "dog"})
    copied.search(("animals",))[0].value["text"] = "changed"
    assert [item.value["text"] for item in stand_in.search(("animals",))] == ["dog dog", "dog"]
    assert store.search(()) == []


class OwnStore(BaseStore):
    """A store of the app's own, which does not say how it searches."""

    def batch(self, ops: Any) -> Any:
        return self.beneath.batch(ops)

    async def abatch(self, ops: Any) -> Any:
        return await self.beneath.abatch(ops)

    def __init__(self) -> None:
        self.beneath = InMemoryStore(index={"dims": 3, "embed": embed})


def test_a_search_by_meaning_whose_index_is_not_known_is_refused_in_one_line(tmp_path: Path) -> None:
    graph = animals(OwnStore())
    runs = record_runs(graph, [{"text": "x"}], tmp_path, is_async=False)
    (difference,) = differences(replay_all(graph, runs))
    assert "the app searches its OwnStore by meaning, and that store does not say how" in str(difference)
    assert PrivateMemory().stand_in(OwnStore()).search(("animals",)) == []


def test_what_embeddings_connect_to_is_refused_in_a_replay(tmp_path: Path) -> None:
    """Also what they connect to from the threads that LangGraph's store embeds queries in."""
    is_replayed: list[bool] = []

    def connecting(texts: list[str]) -> list[list[float]]:
        if is_replayed and texts == ["cat"]:
            socket.create_connection(("127.0.0.1", 9))
        return embed(texts)

    graph = animals(InMemoryStore(index={"dims": 3, "embed": connecting}))
    runs = record_runs(graph, [{"text": "x"}], tmp_path, is_async=False)
    is_replayed.append(True)
    assert differences(replay_all(graph, runs)) == ["answer: it connects to 127.0.0.1:9, past its models and tools"]
