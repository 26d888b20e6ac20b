"""Owns: a fork that begins at the app's own checkpoint is the fork that comes after a replay of the thread.

- The same prompts, the same D and the same state, on a chain, a loop, a gather with Send, a subgraph and one that keeps
  its own history; the app's checkpointer is read and not written.
- Where the thread has moved on, only what was there counts. Edits by `update_state` are in the checkpoint.
- Runs that resume, and apps that keep more than the thread, are replayed; where that cannot be done either, one line
  says so.
"""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, Send, interrupt
from pydantic import Field
from support.edge_rig import edges_of, recorded_traces

from marft_bridge import wrap
from marft_bridge.common.errors import GraphError
from marft_bridge.forks.fork_plan import ForkChange, plan_forks
from marft_bridge.forks.given_tools import given_tools
from marft_bridge.forks.recorded_prefix import run_to_prefix
from marft_bridge.forks.thread_start import ThreadStart, load_forked, run_to_start
from marft_bridge.model_calls.redirect import redirected_models
from marft_bridge.recording.recorder import Recorder
from marft_bridge.replay.private_memory import PrivateMemory, private_memory
from marft_bridge.replay.recorded_run import RecordedRun, spans_to_run
from marft_bridge.replay.replayed_run import to_comparable_output
from marft_bridge.rollouts.app import App
from marft_bridge.rollouts.collector import OWN_MODELS, Collector
from trace_store.journal import Journal
from trace_store.store import TraceStore

T: Any = {"configurable": {"thread_id": "t"}}


class Echo(BaseChatModel):
    """Says the same to the same prompt, always: a deterministic policy."""

    @property
    def _llm_type(self) -> str:
        return "echo"

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **_: Any) -> ChatResult:
        text = str(messages[-1].content)
        message = AIMessage(f"<{text.split()[0]} {sum(map(ord, text)) % 997}>")
        return ChatResult(generations=[ChatGeneration(message=message)])


class State(TypedDict, total=False):
    ask: str
    log: Annotated[list[str], operator.add]
    turns: int


def say(name: str) -> Callable[[State], dict[str, Any]]:
    def node(state: State) -> dict[str, Any]:
        return {"log": [str(Echo().invoke(f"{name} {state['ask']} {state.get('log', [])}").text)]}

    return node


def chain(saver: Any, **_: Any) -> Any:
    graph = StateGraph(State)
    for name in "abc":
        graph.add_node(name, say(name))
    for one, other in zip([START, *"abc"], [*"abc", END], strict=True):
        graph.add_edge(one, other)
    return graph.compile(checkpointer=saver)


def loop(saver: Any) -> Any:
    graph = StateGraph(State)
    graph.add_node("a", say("a"))
    graph.add_edge(START, "a")
    graph.add_conditional_edges("a", lambda state: "a" if len(state["log"]) % 3 else END, ["a", END])
    return graph.compile(checkpointer=saver)


def gather(saver: Any) -> Any:
    graph = StateGraph(State)
    for name in "abc":
        graph.add_node(name, say(name))
    graph.add_edge(START, "a")
    packets = lambda state: [Send("b", {"ask": f"{state['ask']}{n}"}) for n in range(3)]  # noqa: E731
    graph.add_conditional_edges("a", packets, ["b"])
    graph.add_edge("b", "c")
    return graph.compile(checkpointer=saver)


def nested(saver: Any, inner_saver: Any = None) -> Any:
    inner = StateGraph(State)
    inner.add_node("x", lambda state: say("x")(state) | {"turns": state.get("turns", 0) + 1})
    inner.add_node("y", lambda state: say(f"y{state['turns']}")(state))
    inner.add_edge(START, "x")
    inner.add_edge("x", "y")
    graph = StateGraph(State)
    graph.add_node("a", say("a"))
    graph.add_node("in", inner.compile(checkpointer=inner_saver))
    graph.add_edge(START, "a")
    graph.add_edge("a", "in")
    return graph.compile(checkpointer=saver)


def keeping(saver: Any) -> Any:
    """Its subgraph keeps a history of its own on the thread."""
    return nested(saver, inner_saver=True)


GRAPHS = {"chain": (chain, "b"), "loop": (loop, "a"), "gather": (gather, "b"), "nested": (nested, "in/x")}
GRAPHS["keeping"] = (keeping, "in/y")


class Lab:
    """An app on its own models, the runs of one thread of it, and forks of the run of the second turn."""

    def __init__(self, folder: Path, build: Callable[[Any], Any]) -> None:
        self.folder, self.saver = folder, InMemorySaver()
        self.graph = build(self.saver)
        self.recorded = wrap(self.graph, folder / "traces.duckdb")

    def turns(self, *inputs: Any) -> None:
        for each in inputs:
            self.recorded.invoke({"ask": each} if isinstance(each, str) else each, T)

    def load(self, number: int) -> Any:
        """The run with this number, from 0, as `fork` loads it."""
        self.recorded.recorder.journal.sync()
        with TraceStore.open(self.folder / "traces.duckdb") as store:
            store.take_in()
            return load_forked(store, [each.episode_id for each in store.episodes()][number])

    def fork(self, number: int, at: str, graph: Any = None) -> tuple[RecordedRun, ThreadStart]:
        """A fork of the run at the first call of a node."""
        forked, graph = self.load(number), self.graph if graph is None else graph
        call = next(each for each in forked.run.calls if each.node == at)
        (request,) = plan_forks(
            forked.run, run_to_prefix(forked.run, call), ForkChange(), run_id="f", samples=1, seed=0
        )
        journal = Journal(self.folder / f"journal-{id(graph)}")
        recorder = Recorder(journal)
        app = App(lambda _: graph, [], [], dict, lambda task, state: 1.0, "reward")
        recorded = wrap(graph, recorder)
        with asyncio.Runner() as runner, redirected_models(), given_tools():
            start = run_to_start(recorded, forked, tools="recorded", settings={}, runner=runner)
            with private_memory(PrivateMemory()):
                collector = Collector(graph=recorded, app=app, backend=OWN_MODELS)
                tally = runner.run(collector.requests_to_episodes([replace(request, start=start)]))
        assert tally.outcomes["failed"] == 0, tally.failures
        recorded.unwrap()
        made = spans_to_run(recorded_traces(recorder)[-1])
        journal.close()
        return made, start


def facts(run: RecordedRun) -> Any:
    """What both ways have to give: calls and who was asked anew, D, and the end."""
    replayed = {action.action_id: action.replayed_from for action in run.trajectory.actions}
    calls = sorted((call.node, str(call.prompt), replayed[call.action_id] or "") for call in run.calls)
    return calls, edges_of(run.trajectory), to_comparable_output(run.output), run.trajectory.episode.from_checkpoint


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
