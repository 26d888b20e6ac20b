"""Owns: a fork that begins at the app's own checkpoint is the fork that comes after a replay of the thread.

- The same prompts, the same D and the same state, on a chain, a loop, a gather with Send, a subgraph and one that keeps
  its own history; the app's checkpointer is read and not written.
- Where the thread has moved on, only what was there counts. Edits by `update_state` are in the checkpoint.
- Runs that resume, and apps that keep more than the thread, are replayed; where that cannot be done either, one line
  says so.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from langchain_core.outputs import ChatResult
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from langgraph.types import Command, interrupt
from pydantic import Field
from support.edge_rig import edges_of
from support.thread_rig import GRAPHS, Echo, Lab, State, T, chain, facts, say

from marft_bridge.common.errors import GraphError
from marft_bridge.replay.replayed_run import to_comparable_output


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "keeping" else pytest.mark.slow) for name in GRAPHS]
)
def test_a_fork_from_the_apps_checkpoint_is_the_fork_after_a_replay(name: str, tmp_path: Path) -> None:
    build, at = GRAPHS[name]
    lab = Lab(tmp_path, build)
    lab.turns("one", "two", "three", "four")
    held = {key: len(each) for key, each in lab.saver.storage["t"].items()}
    from_checkpoint, start = lab.fork(2, at)
    assert (start.thread.begins_at is not None, start.replayed_count) == (True, 0)
    after_replay, start = lab.fork(2, at, graph=build(InMemorySaver()))
    assert (start.thread.begins_at is not None, start.replayed_count) == (False, 2)
    assert facts(from_checkpoint) == facts(after_replay)
    parent = lab.load(2).run
    assert edges_of(from_checkpoint.trajectory) == edges_of(parent.trajectory)
    assert to_comparable_output(from_checkpoint.output) == to_comparable_output(parent.output)
    assert sum(action.replayed_from is None for action in from_checkpoint.trajectory.actions) > 0
    assert {key: len(each) for key, each in lab.saver.storage["t"].items()} == held


@pytest.mark.slow
def test_an_edit_of_the_thread_is_in_the_checkpoint_and_runs_that_are_not_recorded_are_not_needed(
    tmp_path: Path,
) -> None:
    lab = Lab(tmp_path, chain)
    lab.graph.invoke({"ask": "unrecorded"}, T)
    lab.graph.update_state(T, {"log": ["edited"]})
    lab.turns("two", "three")
    for number in (0, 1):
        fork, start = lab.fork(number, "c")
        assert start.thread.begins_at is not None
        assert "edited" in str(fork.calls[0].prompt)
        assert to_comparable_output(fork.output) == to_comparable_output(lab.load(number).run.output)
    for number in (0, 1):
        with pytest.raises(GraphError, match=r"fork: episode \w+ goes on with a run of its thread that is not in the"):
            lab.fork(number, "c", graph=chain(InMemorySaver()))


@pytest.mark.slow
def test_a_run_that_resumes_is_replayed(tmp_path: Path) -> None:
    def build(saver: Any) -> Any:
        graph = StateGraph(State)
        graph.add_node("a", say("a"))
        graph.add_node("b", lambda state: say(f"b {interrupt('how')}")(state))
        graph.add_edge(START, "a")
        graph.add_edge("a", "b")
        return graph.compile(checkpointer=saver)

    lab = Lab(tmp_path, build)
    lab.turns("one", Command(resume="well"), "two")
    _, start = lab.fork(1, "b")
    assert (start.thread.begins_at, start.replayed_count) == (None, 1)
    _, start = lab.fork(2, "a")
    assert start.thread.begins_at is not None


@pytest.mark.slow
def test_an_app_that_keeps_more_than_the_thread_is_replayed(tmp_path: Path) -> None:
    inner = chain(InMemorySaver())

    def build(saver: Any) -> Any:
        graph = StateGraph(State)
        config: Any = {"configurable": {"thread_id": "inner"}}
        graph.add_node("a", lambda state: {"log": inner.invoke({"ask": state["ask"]}, config)["log"][-1:]})
        graph.add_node("b", say("b"))
        graph.add_edge(START, "a")
        graph.add_edge("a", "b")
        return graph.compile(checkpointer=saver)

    lab = Lab(tmp_path, build)
    lab.turns("one", "two")
    fork, start = lab.fork(1, "b")
    assert (start.thread.begins_at, start.replayed_count) == (None, 1)
    assert to_comparable_output(fork.output) == to_comparable_output(lab.load(1).run.output)


@pytest.mark.slow
def test_a_graph_that_is_given_its_checkpointer_by_a_server_is_forked_too(tmp_path: Path) -> None:
    lab = Lab(tmp_path, chain)
    lab.turns("one", "two")
    fork, start = lab.fork(1, "b", graph=chain(None))
    assert (start.thread.begins_at, start.replayed_count) == (None, 1)
    assert to_comparable_output(fork.output) == to_comparable_output(lab.load(1).run.output)


@pytest.mark.slow
def test_a_fork_of_a_run_without_a_thread_has_none(tmp_path: Path) -> None:
    lab = Lab(tmp_path, lambda _: chain(None))
    lab.recorded.invoke({"ask": "one"})
    fork, start = lab.fork(0, "b")
    assert (start.replayed_count, fork.trajectory.episode.thread_id) == (0, None)
    assert to_comparable_output(fork.output) == to_comparable_output(lab.load(0).run.output)


class Failing(Echo):
    """Fails as long as it is told to, for one word."""

    fails_at: list[str] = Field(default_factory=lambda: ["c"])

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **_: Any) -> ChatResult:
        if str(messages[-1].content).split()[0] in self.fails_at:
            raise RuntimeError("overloaded")
        return super()._generate(messages)


@pytest.mark.slow
def test_a_run_that_goes_on_after_one_that_failed_is_forked(tmp_path: Path) -> None:
    model = Failing()

    def build(saver: Any) -> Any:
        graph = chain(saver)
        for name in "abc":
            graph.nodes[name].bound.func = lambda state, name=name: {
                "log": [str(model.invoke(f"{name} {state['ask']} {state.get('log', [])}").text)]
            }
        return graph

    lab = Lab(tmp_path, build)
    with pytest.raises(RuntimeError, match="overloaded"):
        lab.turns("one")
    model.fails_at.clear()
    lab.recorded.invoke(None, T)
    lab.turns("two")
    for number, at, count in ((1, "c", 1), (2, "b", 2)):
        for graph in (lab.graph, build(InMemorySaver())):
            fork, start = lab.fork(number, at, graph=graph)
            assert to_comparable_output(fork.output) == to_comparable_output(lab.load(number).run.output)
            assert start.thread.begins_at is not None or start.replayed_count == count


@pytest.mark.slow
def test_a_turn_after_a_stream_that_was_closed_is_forked(tmp_path: Path) -> None:
    lab = Lab(tmp_path, chain)
    steps = lab.recorded.stream({"ask": "one"}, T, durability="sync")
    next(steps)
    steps.close()
    lab.turns("two")
    for graph, count in ((lab.graph, 0), (chain(InMemorySaver()), 1)):
        fork, start = lab.fork(1, "b", graph=graph)
        assert to_comparable_output(fork.output) == to_comparable_output(lab.load(1).run.output)
        assert start.replayed_count == count


class SyncOnly(InMemorySaver):
    """A checkpointer with the one kind of methods, as the one for SQLite is."""

    async def aget_tuple(self, config: Any) -> Any:
        raise NotImplementedError

    async def alist(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError
        yield


@pytest.mark.slow
def test_a_checkpointer_without_async_methods_is_read_too(tmp_path: Path) -> None:
    saver = SyncOnly()
    lab = Lab(tmp_path, lambda _: chain(saver))
    lab.turns("one", "two")
    _, start = lab.fork(1, "c")
    assert start.thread.begins_at is not None


@pytest.mark.slow
def test_a_checkpointer_that_cannot_be_read_leads_to_a_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(tmp_path, chain)
    lab.turns("one", "two")

    async def broken(*_: Any) -> Any:
        raise OSError("gone")

    monkeypatch.setattr(lab.saver, "aget_tuple", broken)
    _, start = lab.fork(1, "c")
    assert (start.thread.begins_at, start.replayed_count) == (None, 1)


def resumed_with_router(saver: Any) -> Any:
    async def asks(state: State) -> State:
        interrupt("go on?")
        await asyncio.sleep(0.02)
        return {"log": [str((await Echo().ainvoke(state["ask"], {"callbacks": []})).text)]}

    async def route(state: State) -> str:
        await asyncio.sleep(0.02)
        await Echo().ainvoke(f"route {state['ask']}")
        return "c"

    graph = StateGraph(State)
    graph.add_node("b", asks)
    graph.add_node("c", say("c"))
    graph.add_edge(START, "b")
    graph.add_conditional_edges("b", route, ["c"])
    return graph.compile(checkpointer=saver)


def test_forks_of_a_resumed_run_that_run_at_once_keep_their_own_spans(tmp_path: Path) -> None:
    # All three go on from one checkpoint, so that their tasks have equal ids.
    with asyncio.Runner() as runner:
        lab = Lab(tmp_path, resumed_with_router, runner=runner)
        lab.turns("one", Command(resume="yes"))
        made, _ = lab.fork(1, "c", samples=3)
    assert [action.node for action in made.trajectory.actions] == ["b", "b:router", "c"]
