"""Owns: an app that was not written for this tool is collected as it is, through a whole session.

- Trainable nodes reach the served model under their adapter, frozen ones as declared, all others their own model.
- Episodes of an app with a checkpointer do not share a memory, and leave none; one that interrupts is truncated.
- An app may use threads until its own exit is over; an error of that exit is one line.
- A trainable node that made no call to learn from is said, with the nodes that calls did come from.
"""

from __future__ import annotations

import asyncio
import io
import json
import operator
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypedDict

import httpx
import pytest
from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import interrupt
from rich.console import Console
from support.compare_rig import save_model
from support.fake_vllm import FakeVllm, running
from support.sessions import session_of

from marft_bridge.common.errors import GraphError
from marft_bridge.common.progress import Reporter
from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.rollouts.app import App, options_to_app
from marft_bridge.rollouts.app_graph import open_graph
from marft_bridge.rollouts.episode_plan import plan_episodes
from marft_bridge.rollouts.run_counts import Tally
from marft_bridge.runs.run_folder import RunFolder
from trace_store.records import Trajectory
from trace_store.store import TraceStore

TASKS = [{"id": f"t{n}", "log": [f"question {n}"]} for n in range(6)]


class Log(TypedDict):
    log: Annotated[list[str], operator.add]


@dataclass
class Lab:
    """Our server, the app's provider, and what the user was told."""

    ours: FakeVllm
    hosted: FakeVllm
    folder: Path
    said: list[str] = field(default_factory=list)

    def model(self) -> ChatOpenAI:
        return ChatOpenAI(model="base", base_url=f"{self.hosted.url}/v1", api_key="hosted", max_retries=0)

    def speaker(self, model: BaseChatModel | None = None) -> Callable[..., Any]:
        async def speak(state: Log) -> dict[str, Any]:
            answer = await (model or self.model()).ainvoke("; ".join(state["log"]))
            return {"log": [str(answer.content)]}

        return speak

    def graph(self, **nodes: Any) -> StateGraph[Any]:
        """The nodes one after the other."""
        graph = StateGraph(Log)
        for before, (name, node) in zip([START, *nodes], nodes.items(), strict=False):
            graph.add_node(name, node)
            graph.add_edge(before, name)
        graph.add_edge(list(nodes)[-1], END)
        return graph

    def collect(
        self, build: Callable[[BaseChatModel], Any], frozen: tuple[str, ...] = (), node: str = "writer"
    ) -> Tally:
        """Six episodes of the app with one node declared trainable."""
        graph = {"app": "a:b", "nodes": [node], "tasks": "t.jsonl", "reward": "a:r", "frozen": frozen}
        model = {"path": str(save_model(self.folder / "model"))}
        config = BridgeConfig.model_validate({"graph": graph, "model": model, "serve": {"attach": self.ours.url}})
        app = App(
            *(build, TASKS, TASKS, lambda task: {"log": task["log"]}, lambda _, state: len(state["log"]), "a:r"),
            nodes=config.graph.nodes,
            frozen=config.graph.frozen,
        )
        run = RunFolder(self.folder / "run")
        run.create()
        text = io.StringIO()
        reporter = Reporter(Console(file=text))
        plan = plan_episodes(TASKS, 6, 1, seed=0, run_id="r", split="train", adapters={node: 0})
        with session_of(config, run, reporter, app) as session:
            session.models.publish({node: 0})
            tally = session.run(plan, "collect", "reward")
        self.said = [line for line in text.getvalue().splitlines() if not line.endswith(" s]")]  # those are progress
        with TraceStore.open(run.store) as store:
            store.take_in()
            self.stored: list[Trajectory] = list(store.trajectories(run_ids=["r"]))
            self.outcomes = Counter((e.outcome, e.reason) for e in store.episodes(run_id="r"))
        return tally


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with running(FakeVllm()) as ours, running(FakeVllm()) as hosted:
        yield Lab(ours, hosted, tmp_path)


def test_a_compiled_app_is_collected_unedited_and_only_its_trainable_node_moves(lab: Lab) -> None:
    app = lab.graph(writer=lab.speaker(), judge=lab.speaker()).compile()
    tally = lab.collect(lambda _: app)
    assert dict(tally.outcomes) == {"terminated": 6}
    assert {body["model"] for body in lab.ours.asked} == {"writer@0"}
    assert {body["model"] for body in lab.hosted.asked} == {"base"}
    assert (len(lab.ours.asked), len(lab.hosted.asked)) == (6, 6)
    for trajectory in lab.stored:
        writer, judge = trajectory.actions
        assert (writer.node, writer.adapter, writer.adapter_version, writer.trainable) == (
            "writer",
            "writer@0",
            0,
            True,
        )
        assert (judge.node, judge.adapter, judge.trainable) == ("judge", None, False)
        assert [edge.src for edge in trajectory.edges] == [writer.action_id] * len(trajectory.edges)
    assert lab.said == []


@pytest.mark.parametrize("given", [True, False], ids=["model of the factory", "model of its own"])
def test_a_frozen_node_runs_on_the_served_model_and_is_never_trained(lab: Lab, given: bool) -> None:
    def build(model: BaseChatModel) -> Any:
        judge = lab.speaker(model if given else None)
        return lab.graph(writer=lab.speaker(model), judge=judge).compile()

    lab.collect(build, frozen=("judge",))
    assert lab.hosted.asked == []
    assert Counter(body["model"] for body in lab.ours.asked) == {"writer@0": 6, "judge@0": 6}
    for trajectory in lab.stored:
        writer, judge = trajectory.actions
        assert writer.trainable
        assert (judge.adapter, judge.untrainable_reason) == ("judge@0", "node judge is declared frozen")
        assert judge.sampled_ids is not None


def test_a_served_model_in_a_node_that_is_not_declared_is_refused_by_name(lab: Lab) -> None:
    tally = lab.collect(lambda model: lab.graph(writer=lab.speaker(model), judge=lab.speaker(model)).compile())
    ((reason, count),) = tally.reasons.items()
    assert count == 6
    assert "node 'judge' calls the served model but has no route" in reason
    assert "graph.frozen" in reason


def test_episodes_of_an_app_with_a_checkpointer_share_nothing_and_leave_nothing(lab: Lab) -> None:
    memory = InMemorySaver()
    app = lab.graph(writer=lab.speaker()).compile(checkpointer=memory)
    lab.collect(lambda _: app)
    asked = sorted(body["messages"][0]["content"] for body in lab.ours.asked)
    assert asked == [f"question {n}" for n in range(6)]  # not one of another episode's answers
    assert not memory.storage
    assert not memory.writes
    assert not memory.blobs


@pytest.mark.parametrize("at", ["in the node", "before the node"])
@pytest.mark.parametrize("remembers", [True, False])
def test_an_app_that_stops_to_ask_somebody_is_truncated(lab: Lab, at: str, remembers: bool) -> None:
    def ask(_: Log) -> dict[str, Any]:
        return {"log": [interrupt("more?")]} if at == "in the node" else {"log": []}

    stops = ["ask"] if at == "before the node" else None
    graph = lab.graph(writer=lab.speaker(), ask=ask)
    app = graph.compile(checkpointer=InMemorySaver() if remembers else None, interrupt_before=stops)
    tally = lab.collect(lambda _: app)
    assert lab.outcomes == {("truncated", "interrupted"): 6}
    assert dict(tally.outcomes) == {"truncated": 6}
    assert tally.failure_lines() == []
    assert not tally.reward_counts


def test_a_trainable_node_that_calls_no_client_we_know_is_said(lab: Lab) -> None:
    def raw(_: Log) -> dict[str, Any]:
        body = {"model": "base", "messages": [{"role": "user", "content": "hi"}]}
        headers = {"Authorization": "Bearer hosted"}
        answer = httpx.post(f"{lab.hosted.url}/v1/chat/completions", json=body, headers=headers, trust_env=False)
        return {"log": [str(answer.json()["choices"][0]["message"]["content"])]}

    app = lab.graph(writer=raw, judge=lab.speaker()).compile()
    lab.collect(lambda _: app)
    (line,) = lab.said
    assert line.startswith("node 'writer' made no recorded call through its adapter in 6 episodes: it did not run, or")
    assert line.endswith("calls came from nodes that are not in graph.nodes: judge (6)")


def test_a_name_that_covers_a_subgraph_says_which_of_its_nodes_call(lab: Lab) -> None:
    inner = lab.graph(draft=lab.speaker()).compile()

    async def writer(state: Log) -> Any:  # by its code it may ask a model itself
        return {"log": (await inner.ainvoke(state))["log"][len(state["log"]) :]}

    app = lab.graph(writer=writer).compile()
    lab.collect(lambda _: app)
    (line,) = lab.said
    assert line.endswith("calls came from nodes that are not in graph.nodes: writer/draft (6)")


@pytest.mark.parametrize("is_async", [False, True])
def test_an_app_that_is_open_may_use_threads_until_its_exit_is_over(lab: Lab, is_async: bool) -> None:
    app, closed = lab.graph(writer=lab.speaker()).compile(), list[str]()

    def close() -> None:
        closed.append(threading.current_thread().name)

    @asynccontextmanager
    async def opened() -> AsyncIterator[Any]:
        yield app
        await asyncio.to_thread(close)
        await asyncio.get_running_loop().getaddrinfo("localhost", 80)

    @contextmanager
    def opened_sync() -> Iterator[Any]:
        yield app
        close()

    tally = lab.collect(lambda _: opened() if is_async else opened_sync())
    assert dict(tally.outcomes) == {"terminated": 6}
    assert len(closed) == 1
    assert lab.said == []


@pytest.mark.parametrize("is_async", [False, True])
def test_an_error_of_an_apps_own_exit_is_one_line_and_hides_no_other(lab: Lab, is_async: bool) -> None:
    app = lab.graph(writer=lab.speaker()).compile()

    @asynccontextmanager
    async def opened() -> AsyncIterator[Any]:
        try:
            yield app
        finally:
            raise OSError("the pool is gone")

    @contextmanager
    def opened_sync() -> Iterator[Any]:
        try:
            yield app
        finally:
            raise OSError("the pool is gone")

    def source() -> Any:
        return opened() if is_async else opened_sync()

    with pytest.raises(GraphError, match=r"^graph.app: closing 'the app' failed: OSError: the pool is gone$"):
        lab.collect(lambda _: source())
    with (
        asyncio.Runner() as runner,
        pytest.raises(KeyError, match="of the block"),
        open_graph(source(), "a:b", runner),
    ):
        raise KeyError("of the block")


def test_options_make_the_app_that_the_engine_opens(lab: Lab) -> None:
    (lab.folder / "t.jsonl").write_text("".join(json.dumps({"id": n, "q": n}) + "\n" for n in range(40)))
    options = {
        "app": "graphs.math_duo:build",
        "nodes": ["reasoner"],
        "frozen": ["actor"],
        "tasks": str(lab.folder / "t.jsonl"),
        "reward": "graphs.math_duo:reward",
    }
    app = options_to_app(BridgeConfig.model_validate({"graph": options}).graph)
    assert (app.name, app.nodes, app.frozen) == ("graphs.math_duo:build", ("reasoner",), ("actor",))


def test_an_agent_with_tools_is_collected_under_the_name_of_its_model_node(lab: Lab) -> None:
    @tool
    def look_up(word: str) -> str:
        """Looks a word up."""
        return f"{word} is a bird"

    def answer(body: dict[str, Any]) -> Any:
        return "a bird" if body["messages"][-1]["role"] == "tool" else [("look_up", {"word": "owl"})]

    class Chat(TypedDict):
        messages: Annotated[list[Any], add_messages]
        log: Annotated[list[str], operator.add]

    lab.ours.answer, lab.ours.auto_tools = answer, True
    agent = create_agent(lab.model(), [look_up])
    graph = StateGraph(Chat)
    graph.add_node("ask", lambda state: {"messages": [("user", state["log"][0])]})
    graph.add_node("researcher", agent)
    graph.add_edge(START, "ask")
    graph.add_edge("ask", "researcher")
    app = graph.compile()
    lab.collect(lambda _: app, node="researcher/model")
    assert lab.hosted.asked == []
    for trajectory in lab.stored:
        first, second = trajectory.actions
        assert [action.trainable for action in (first, second)] == [True, True]
        assert (first.node, first.adapter, first.finish_reason) == (
            *("researcher/model", "researcher.2Fmodel@0", "tool_calls"),
        )
        assert second.finish_reason == "stop"
        assert (first.action_id, second.action_id) in {(edge.src, edge.dst) for edge in trajectory.edges}
    assert lab.said == []
