"""Owns: what a node does inside (subgraphs in sequence and at once, agents behind tools, functional code) has the edges
that were worked out by hand.

As in test_edges: `a>b` is exact, `a?b` a bound from above. Two things that a node does one after the other are a bound;
two that it does at once have no edge.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from typing import Any, TypedDict

import pytest
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from support.edge_rig import calls_tool, node_of, recorded_edges, says, source_to_function

from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.wrap import wrap
from trace_store.journal import Journal


class Keys(TypedDict, total=False):
    q: str
    plan: str
    out: str


KEEPS = """
def node(state):
    model.invoke(str(state.get("plan")))
    return {"plan": "kept", "out": "done"}
"""


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(Journal(tmp_path / "journal"))


model = says()


def run(graph: Any, recorder: Recorder, start: Any, asynchronous: bool = False) -> Any:
    recorded = wrap(graph, recorder)
    return asyncio.run(recorded.ainvoke(start)) if asynchronous else recorded.invoke(start)


def agent(name: str, *before_answering: Any) -> Any:
    """A graph of one node of this name, which does something and then asks a model."""

    def act(state: MessagesState) -> dict[str, Any]:
        for action in before_answering:
            action()
        return {"messages": [model.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node(name, act)
    graph.add_edge(START, name)
    return graph.compile()


def ask(graph: Any, text: str) -> str:
    return str(graph.invoke({"messages": [("user", text)]})["messages"][-1].content)


def planned(team: Any) -> Any:
    """plan -> team -> judge; team reads the plan, judge what the team gave out."""
    graph = StateGraph(Keys)
    graph.add_node("plan", node_of(model, ["q"], {"plan": "the plan"}))
    graph.add_node("team", team)
    graph.add_node("judge", node_of(model, ["out"], {}))
    for src, dst in [(START, "plan"), ("plan", "team"), ("team", "judge")]:
        graph.add_edge(src, dst)
    return graph.compile()


def test_two_subgraphs_one_after_the_other_are_a_chain(recorder: Recorder) -> None:
    researcher, writer = agent("r"), agent("w")
    run(planned(lambda s: {"out": ask(writer, ask(researcher, s["plan"]))}), recorder, {"q": "?"})
    assert recorded_edges(recorder) == {
        "trigger": "plan>team/r team/w>judge",
        "data": "plan?team/r plan?team/w team/r?team/w team/w>judge",
    }


def test_a_call_between_two_subgraphs_lies_between_them(recorder: Recorder) -> None:
    researcher, writer = agent("r"), agent("w")

    def team(state: Keys) -> dict[str, Any]:
        notes = ask(researcher, state["plan"])
        return {"out": ask(writer, str(model.invoke(notes).content))}

    run(planned(team), recorder, {"q": "?"})
    assert recorded_edges(recorder) == {
        "trigger": "plan>team/r team/w>judge",
        "data": "plan>team plan?team/r plan?team/w team/r?team team/w>judge team?team/w",
    }


@pytest.mark.parametrize("asynchronous", [False, True])
def test_subgraphs_that_a_node_runs_at_once_do_not_depend_on_each_other(asynchronous: bool, recorder: Recorder) -> None:
    both_run = threading.Barrier(2, timeout=30)
    left, right = agent("l", both_run.wait), agent("r", both_run.wait)

    async def gathers(state: Keys) -> dict[str, Any]:
        texts = await asyncio.gather(*(asyncio.to_thread(ask, graph, state["plan"]) for graph in (left, right)))
        return {"out": "".join(texts)}

    def pools(state: Keys) -> dict[str, Any]:
        with ThreadPoolExecutor() as pool:
            runs = [pool.submit(copy_context().run, ask, graph, state["plan"]) for graph in (left, right)]
            return {"out": "".join(run.result() for run in runs)}

    run(planned(gathers if asynchronous else pools), recorder, {"q": "?"}, asynchronous)
    assert recorded_edges(recorder) == {
        "trigger": "plan>team/l plan>team/r team/l>judge team/r>judge",
        "data": "plan?team/l plan?team/r team/l>judge team/r>judge",
    }


def test_a_graph_that_is_given_what_a_whole_node_made_depends_on_the_end_of_that_node(recorder: Recorder) -> None:
    researcher, writer = agent("r"), agent("w")
    graph = StateGraph(Keys)
    graph.add_node("x", lambda s: {"plan": model.invoke(ask(researcher, s["q"])).content})
    graph.add_node("y", lambda s: {"out": ask(writer, s["plan"])})
    graph.add_edge(START, "x")
    graph.add_edge("x", "y")
    run(graph.compile(), recorder, {"q": "?"})
    assert recorded_edges(recorder) == {"trigger": "x>y/w", "data": "x/r?x x?y/w"}


def test_one_subgraph_that_a_node_runs_twice_acts_twice(recorder: Recorder) -> None:
    drafter = agent("d")
    run(planned(lambda s: {"out": ask(drafter, ask(drafter, s["plan"]))}), recorder, {"q": "?"})
    assert recorded_edges(recorder) == {
        "trigger": "plan>team/d1 team/d2>judge",
        "data": "plan?team/d1 plan?team/d2 team/d1?team/d2 team/d2>judge",
    }


OWN: Any = {"configurable": {"thread_id": "own"}}
"""A config with a `configurable` of its own, in place of LangGraph's: the graph is run as if it were the outermost."""


def team_of(checkpointer: Any) -> Any:
    """reads -> writes, with keys of the graph around: `plan` is written inside, and kept inside."""
    deep = StateGraph(Keys)
    deep.add_node("writes", node_of(model, ["plan"], {"out": "inner"}))
    deep.add_edge(START, "writes")
    graph = StateGraph(Keys)
    graph.add_node("reads", node_of(model, ["q"], {"plan": "inner"}))
    graph.add_node("deep", deep.compile())
    graph.add_edge(START, "reads")
    graph.add_edge("reads", "deep")
    return graph.compile(checkpointer=checkpointer)


@pytest.mark.parametrize("checkpointer", [None, InMemorySaver()])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_graph_that_is_run_with_a_configurable_of_its_own_lies_in_its_node(
    asynchronous: bool, checkpointer: Any, recorder: Recorder
) -> None:
    # judge reads the plan of the graph around, not the one that is written inside the team.
    team = team_of(checkpointer)
    graph = StateGraph(Keys)
    graph.add_node("plan", node_of(model, ["q"], {"plan": "outer"}))
    if asynchronous:

        async def calls_team(state: Keys) -> dict[str, Any]:
            return {"out": (await team.ainvoke({"q": state["q"]}, OWN))["out"]}

        graph.add_node("team", calls_team)
    else:
        graph.add_node("team", lambda s: {"out": team.invoke({"q": s["q"]}, OWN)["out"]})
    graph.add_node("judge", node_of(model, ["plan"], {}))
    for src, dst in [(START, "plan"), ("plan", "team"), ("team", "judge")]:
        graph.add_edge(src, dst)
    run(graph.compile(), recorder, {"q": "?"}, asynchronous)
    assert recorded_edges(recorder) == {
        "trigger": "plan>team/reads team/deep/writes>judge team/reads>team/deep/writes",
        "data": "plan>judge team/reads>team/deep/writes",
    }


@pytest.mark.parametrize(("checkpointer", "kept"), [(None, ""), (InMemorySaver(), "team/keeps1>team/keeps2")])
def test_a_graph_that_is_run_twice_with_a_configurable_of_its_own_reads_of_the_first_run_what_its_thread_kept(
    checkpointer: Any, kept: str, recorder: Recorder
) -> None:
    keeper = StateGraph(Keys)
    keeper.add_node("keeps", source_to_function(KEEPS, model=model))
    keeper.add_edge(START, "keeps")
    compiled = keeper.compile(checkpointer=checkpointer)

    def team(state: Keys) -> dict[str, Any]:
        outs = [compiled.invoke({"q": "?"}, OWN)["out"] for _ in range(2)]
        return {"out": "".join(outs)}

    run(planned(team), recorder, {"q": "?"})
    data = recorded_edges(recorder)["data"].split()
    assert [edge for edge in data if edge.startswith("team/keeps1>team")] == ([kept] if kept else [])
    assert "plan?team/keeps1" not in data  # the node had read nothing
    assert recorded_edges(recorder)["trigger"] == "plan>team/keeps1 team/keeps2>judge"


def supervisor(*tools: Any, calls: tuple[str, ...]) -> Any:
    """A ReAct loop with one node that runs all tools of a message."""
    boss = says(calls_tool(*calls, text="go"), "done")
    graph = StateGraph(MessagesState)
    graph.add_node("boss", lambda state: {"messages": [boss.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode(list(tools)))
    graph.add_edge(START, "boss")
    graph.add_conditional_edges("boss", lambda s: "tools" if s["messages"][-1].tool_calls else "__end__")
    graph.add_edge("tools", "boss")
    return graph.compile()


def agent_tool(name: str, asynchronous: bool, *before_answering: Any) -> Any:
    graph = agent(f"{name}_agent", *before_answering)

    if asynchronous:

        async def call(text: str) -> str:
            """Asks an agent."""
            return str((await graph.ainvoke({"messages": [("user", text)]}))["messages"][-1].content)
    else:

        def call(text: str) -> str:
            """Asks an agent."""
            return ask(graph, text)

    return tool(name)(call)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_agent_behind_a_tool_lies_between_the_call_and_its_result(asynchronous: bool, recorder: Recorder) -> None:
    app = supervisor(agent_tool("search", asynchronous), calls=("search",))
    run(app, recorder, {"messages": [HumanMessage("go")]}, asynchronous)
    # The tools node reads the message that called; what its agent was given was made of that.
    assert recorded_edges(recorder) == {
        "trigger": "boss1>tools/search_agent tools/search_agent>boss2",
        "data": "boss1>boss2 boss1?tools/search_agent tools/search_agent>boss2",
        "tool": "boss1>boss2",
    }


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("waits", ["first", "second"])
def test_agents_behind_two_tools_of_one_message_do_not_depend_on_each_other(
    asynchronous: bool, waits: str, recorder: Recorder
) -> None:
    """Whichever is slower: one ends before the other asks its model."""
    is_done = threading.Event()

    def wait() -> None:
        assert is_done.wait(30)

    slow = agent_tool("slow", asynchronous, wait)

    def finishing(text: str) -> str:
        """Asks an agent, and lets the other go on."""
        answer = ask(agent("quick_agent"), text)
        is_done.set()
        return answer

    async def afinishing(text: str) -> str:
        """The same."""
        return await asyncio.to_thread(finishing, text)

    quick = tool("quick")(afinishing if asynchronous else finishing)
    calls = ("slow", "quick") if waits == "first" else ("quick", "slow")
    run(supervisor(slow, quick, calls=calls), recorder, {"messages": [HumanMessage("go")]}, asynchronous)
    agents = ("tools/quick_agent", "tools/slow_agent")
    assert recorded_edges(recorder) == {
        "trigger": " ".join(sorted([*(f"boss1>{a}" for a in agents), *(f"{a}>boss2" for a in agents)])),
        "data": " ".join(sorted(["boss1>boss2", *(f"boss1?{a}" for a in agents), *(f"{a}>boss2" for a in agents)])),
        "tool": "boss1>boss2",
    }


def test_agents_as_tools_of_create_agent_are_sent_what_they_are_asked(recorder: Recorder) -> None:
    boss = says(calls_tool("search", "write", text="go"), "done")
    app = create_agent(boss, [agent_tool("search", False), agent_tool("write", False)])
    run(app, recorder, {"messages": [HumanMessage("go")]})
    agents = ("tools/search_agent", "tools/write_agent")
    assert recorded_edges(recorder) == {
        "send": " ".join(f"model1>{a}" for a in agents),
        "trigger": " ".join(f"{a}>model2" for a in agents),
        "data": "model1>model2 " + " ".join(sorted(f"model1?{a}" for a in agents) + [f"{a}>model2" for a in agents]),
        "tool": "model1>model2",
    }


def test_an_entrypoint_that_calls_agents_and_tasks(recorder: Recorder) -> None:
    researcher, writer = agent("r"), agent("w")

    @task
    def outline(text: str) -> str:
        return str(model.invoke(text).content) + "!"

    @task
    def polish(text: str) -> str:
        return str(model.invoke(text).content)

    @entrypoint()
    def app(topic: str) -> str:
        given = outline(topic).result()
        notes = ask(researcher, topic)
        draft = ask(writer, notes)
        return polish(given).result() + draft

    run(app, recorder, "tides")
    # polish was given outline's very result; the rest is only known to have come one after the other.
    assert recorded_edges(recorder) == {"data": "app/outline>app/polish app/outline?app/r app/r?app/w app/w?app/polish"}


def test_a_task_that_runs_agents_is_one_task(recorder: Recorder) -> None:
    researcher, writer = agent("r"), agent("w")

    @task
    def team(topic: str) -> str:
        return ask(writer, ask(researcher, topic)) + "!"

    @task
    def judge(text: str) -> str:
        return str(model.invoke(text).content)

    @entrypoint()
    def app(topic: str) -> str:
        return judge(team(topic).result()).result()

    run(app, recorder, "tides")
    assert recorded_edges(recorder) == {"data": "app/team/r?app/team/w app/team/w>app/judge"}
