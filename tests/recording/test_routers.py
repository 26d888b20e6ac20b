"""Owns: a routing function that asks a model is an agent of its own, and its edges are those worked out by hand.

As in test_edges: `a>b` is exact, `a?b` a bound from above.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, TypedDict

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import RetryPolicy, Send
from support.edge_rig import edges_of, node_of, recorded_edges, recorded_trajectories, says

from marft_bridge.model_calls.routing import calling_node
from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.wrap import wrap
from trace_store.journal import Journal


class Keys(TypedDict, total=False):
    q: str
    v: str
    w: str


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(Journal(tmp_path / "journal"))


model = says()


def run(graph: Any, recorder: Recorder, start: Any, asynchronous: bool = False) -> Any:
    recorded = wrap(graph, recorder)
    return asyncio.run(recorded.ainvoke(start)) if asynchronous else recorded.invoke(start)


def routed(*answers: str) -> Any:
    router = says(*answers)
    return lambda state: router.invoke(str(state)).content


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_model_that_routes_from_the_start_triggers_where_it_goes(asynchronous: bool, recorder: Recorder) -> None:
    graph = StateGraph(Keys)
    graph.add_node("web", node_of(model, ["q"], {"v": "1"}))
    graph.add_node("rag", node_of(model, ["q"], {"v": "1"}))
    graph.add_conditional_edges(START, routed("web"), ["web", "rag"])
    run(graph.compile(), recorder, {"q": "?"}, asynchronous)
    # web read the question, which comes from outside.
    assert recorded_edges(recorder) == {"trigger": "__start__:router>web"}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_router_after_a_node_is_another_agent_than_the_node(asynchronous: bool, recorder: Recorder) -> None:
    graph = StateGraph(Keys)
    graph.add_node("writer", lambda _: {"v": model.invoke("q").content})
    graph.add_node("next", node_of(model, ["v"], {}))
    graph.add_node("aside", node_of(model, ["v"], {}))
    graph.add_edge(START, "writer")
    graph.add_conditional_edges("writer", routed("next"), ["next", "aside"])
    run(graph.compile(), recorder, {"q": "?"}, asynchronous)
    # What the router looked at of its state is not seen; next read v, which the writer wrote.
    assert recorded_edges(recorder) == {
        "trigger": "writer:router>next writer>writer:router",
        "data": "writer>next writer?writer:router",
    }


def test_two_routers_after_one_node_are_two_agents_and_one_without_a_model_is_none(recorder: Recorder) -> None:
    def grade_length(state: Keys) -> str:
        return str(says("left").invoke(state["v"]).content)

    def silent(state: Keys) -> str:
        return "middle"

    def grade_tone(state: Keys) -> str:
        return str(says("right").invoke(state["v"]).content)

    graph = StateGraph(Keys)
    graph.add_node("writer", node_of(model, ["q"], {"v": "1"}))
    for name in ("left", "middle", "right"):
        graph.add_node(name, node_of(model, ["q"], {}))
    graph.add_edge(START, "writer")
    for router in (grade_length, silent, grade_tone):
        graph.add_conditional_edges("writer", router, ["left", "middle", "right"])
    run(graph.compile(), recorder, {"q": "?"})
    assert recorded_edges(recorder) == {
        "trigger": "writer:router>left writer:router_3>right writer>middle writer>writer:router writer>writer:router_3",
        "data": "writer?writer:router writer?writer:router_3",
    }


def test_what_a_router_sends_is_sent_by_it(recorder: Recorder) -> None:
    plan = says("xy")
    graph = StateGraph(Keys)
    graph.add_node("topics", lambda _: {"v": "1"})  # without a call
    graph.add_node("worker", lambda part: {"w": None} if model.invoke(part) is None else {})
    graph.add_edge(START, "topics")
    graph.add_conditional_edges(
        "topics", lambda state: [Send("worker", c) for c in str(plan.invoke("?").content)], ["worker"]
    )
    run(graph.compile(), recorder, {"q": "?"})
    assert recorded_edges(recorder) == {"send": "topics:router>worker1 topics:router>worker2"}


def test_a_loop_by_a_router_that_asks_a_model_depends_turn_by_turn(recorder: Recorder) -> None:
    graph = StateGraph(Keys)
    graph.add_node("writer", node_of(model, ["v"], {"v": "draft"}))
    graph.add_edge(START, "writer")
    graph.add_conditional_edges("writer", routed("writer", END), ["writer", END])
    run(graph.compile(), recorder, {"q": "?", "v": ""})
    assert recorded_edges(recorder) == {
        "trigger": "writer1>writer:router1 writer2>writer:router2 writer:router1>writer2",
        "data": "writer1>writer2 writer1?writer:router1 writer2?writer:router2",
    }


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_agent_that_a_router_runs_is_named_after_the_router(asynchronous: bool, recorder: Recorder) -> None:
    names: list[str] = []

    def judge(state: Keys) -> dict[str, Any]:
        names.append(calling_node())
        return {"w": model.invoke(str(state["v"])).content}

    inner = StateGraph(Keys)
    inner.add_node("judge", judge)
    inner.add_edge(START, "judge")
    inner.add_conditional_edges("judge", routed(END, END), ["judge", END])
    judging = inner.compile()
    graph = StateGraph(Keys)
    graph.add_node("writer", lambda state: {"v": judging.invoke({"v": state["q"]})["w"]})
    graph.add_node("last", node_of(model, ["v"], {}))
    graph.add_edge(START, "writer")
    graph.add_conditional_edges("writer", lambda state: judging.invoke({"v": state["v"]}) and "last", ["last"])
    run(graph.compile(), recorder, {"q": "?"}, asynchronous)
    assert names == ["writer/judge", "writer:router/judge"]  # as the calls are served
    # The inner router, too, is given the state of its graph, in which v may be made of what the writer wrote.
    assert recorded_edges(recorder) == {
        "trigger": "writer/judge:router>writer:router/judge writer/judge>writer/judge:router"
        " writer:router/judge:router>last writer:router/judge>writer:router/judge:router",
        "data": "writer/judge:router>last writer/judge:router?writer:router/judge"
        " writer/judge:router?writer:router/judge:router"
        " writer/judge?writer/judge:router writer:router/judge?writer:router/judge:router",
    }


def test_a_router_of_an_attempt_that_failed_does_not_count(recorder: Recorder) -> None:
    attempts: list[int] = []

    def shaky(state: Keys) -> str:
        attempts.append(1)
        if len(attempts) == 1:
            model.invoke("lost")
            raise ConnectionError("once")
        return str(says("next").invoke(state["v"]).content)

    graph = StateGraph(Keys)
    graph.add_node(
        "writer", node_of(model, ["q"], {"v": "1"}), retry_policy=RetryPolicy(initial_interval=0.01, max_attempts=2)
    )
    graph.add_node("next", node_of(model, ["v"], {}))
    graph.add_edge(START, "writer")
    graph.add_conditional_edges("writer", shaky, ["next"])
    run(graph.compile(), recorder, {"q": "?"})
    (trajectory,) = recorded_trajectories(recorder)
    lost = {a.action_id: a.node for a in trajectory.actions if a.untrainable_reason == "attempt failed and was retried"}
    assert sorted(lost.values()) == ["writer", "writer:router"]
    assert not set(lost) & {end for edge in trajectory.edges for end in (edge.src, edge.dst)}
    assert len(edges_of(trajectory)["trigger"].split()) == 2


def test_a_call_of_a_router_with_callbacks_of_its_own_is_the_routers(recorder: Recorder) -> None:
    graph = StateGraph(Keys)
    graph.add_node("writer", node_of(model, ["q"], {"v": "1"}))
    graph.add_edge(START, "writer")
    graph.add_conditional_edges("writer", lambda _: model.invoke("?", {"callbacks": []}) and END, [END])
    run(graph.compile(), recorder, {"q": "?"})
    (trajectory,) = recorded_trajectories(recorder)
    assert sorted(action.node for action in trajectory.actions) == ["writer", "writer:router"]


def test_runs_that_go_on_from_one_checkpoint_keep_their_own_spans(recorder: Recorder) -> None:
    # Their tasks have equal ids, which LangGraph derives from the checkpoint.
    async def writer(state: Keys) -> Keys:
        await asyncio.sleep(0.02)
        await model.ainvoke(state["q"], {"callbacks": []})
        return {"v": "1"}

    async def route(_: Keys) -> str:
        await asyncio.sleep(0.02)
        await model.ainvoke("?")
        return END

    graph = StateGraph(Keys)
    graph.add_node("writer", writer)
    graph.add_edge(START, "writer")
    graph.add_conditional_edges("writer", route, [END])
    recorded = wrap(graph.compile(checkpointer=InMemorySaver(), interrupt_before=["writer"]), recorder)
    thread: Any = {"configurable": {"thread_id": "t"}}

    async def go_on() -> None:
        await recorded.ainvoke({"q": "?"}, thread)
        await asyncio.gather(*(recorded.ainvoke(None, thread) for _ in range(3)))

    asyncio.run(go_on())
    _, *resumed = recorded_trajectories(recorder)
    nodes = [[action.node for action in trajectory.actions] for trajectory in resumed]
    assert nodes == [["writer", "writer:router"]] * 3
    assert recorder.failures == 0
