"""Owns: apps built with published packages and patterns are recorded whole, with the edges worked out by hand.

`langgraph-supervisor` and `langgraph-swarm` come from the package index; plan-and-execute is written after the
pattern of LangGraph's tutorial. The models are scripted, everything else is theirs.
"""

from __future__ import annotations

import asyncio
import operator
import re
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph_supervisor import create_supervisor
from langgraph_swarm import create_handoff_tool, create_swarm
from support.edge_rig import calls_tool, edges_of, recorded_trajectories, says

from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.wrap import wrap
from trace_store.journal import Journal

# langgraph-supervisor 0.0.31 still builds on LangGraph's older agent.
pytestmark = pytest.mark.filterwarnings("ignore::langgraph.warnings.LangGraphDeprecatedSinceV10")


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(Journal(tmp_path / "journal"))


@tool
def add(x: int, y: int) -> int:
    """Adds two numbers."""
    return x + y


def supervisor() -> Any:
    solver = create_agent(says(calls_tool("add", x=1, y=2), "three"), [add], name="solver")
    writer = create_agent(says("the answer is three"), [], name="writer")
    boss = says(calls_tool("transfer_to_solver"), calls_tool("transfer_to_writer"), "done")
    return create_supervisor([solver, writer], model=boss, supervisor_name="boss").compile()


def test_a_supervisor_hands_over_to_its_agents_and_hears_from_them(recorder: Recorder) -> None:
    question = {"messages": [HumanMessage("1 + 2, in words")]}
    result = wrap(supervisor(), recorder).invoke(question)
    assert [m.content for m in result["messages"]] == [m.content for m in supervisor().invoke(question)["messages"]]
    (trajectory,) = recorded_trajectories(recorder)
    everyone = "boss1>boss2 boss1>boss3 boss1>solver1 boss1>solver2 boss1>writer boss2>boss3 boss2>writer"
    assert _short(edges_of(trajectory)) == {
        "trigger": "boss1>solver1 boss2>writer solver1>solver2 solver2>boss2 writer>boss3",
        "tool": f"{everyone} solver1>solver2",  # the handoffs, which all later prompts show, and the sum
        # Of each agent only its last message goes back to the others.
        "data": f"{everyone} solver1>solver2 solver2>boss2 solver2>boss3 solver2>writer writer>boss3",
    }


def _short(edges: dict[str, str]) -> dict[str, str]:
    return {kind: " ".join(sorted(re.sub("/(agent|model)", "", text).split())) for kind, text in edges.items()}


def swarm() -> Any:
    alice = create_agent(
        says(calls_tool("add", x=1, y=2), calls_tool("transfer_to_bob"), "bye from alice"),
        [add, create_handoff_tool(agent_name="bob")],
        name="alice",
    )
    bob = create_agent(
        says("ahoy", calls_tool("transfer_to_alice")), [create_handoff_tool(agent_name="alice")], name="bob"
    )
    return create_swarm([alice, bob], default_active_agent="alice").compile(checkpointer=InMemorySaver())


def test_a_swarm_hands_off_and_stays_with_the_active_agent(recorder: Recorder) -> None:
    recorded = wrap(swarm(), recorder)
    thread: Any = {"configurable": {"thread_id": "t"}}
    asyncio.run(recorded.ainvoke({"messages": [HumanMessage("1 + 2, then bob")]}, thread))
    asyncio.run(recorded.ainvoke({"messages": [HumanMessage("and back")]}, thread))
    first, second = (_short(edges_of(trajectory)) for trajectory in recorded_trajectories(recorder))
    seen = "alice1>alice2 alice1>bob alice2>bob"
    assert first == {"trigger": "alice1>alice2 alice2>bob", "data": seen, "tool": seen}
    # The thread goes on with bob; what was said in the first run is no action of the second.
    assert second == {"trigger": "bob>alice", "data": "bob>alice", "tool": "bob>alice"}


class Plan(TypedDict, total=False):
    input: str
    plan: list[str]
    past_steps: Annotated[list[tuple[str, str]], operator.add]
    response: str


def plan_and_execute() -> Any:
    planner, replanner = says("find it; say it"), says("say it", "END it is 3")
    executor = create_agent(says(calls_tool("add", x=1, y=2), "found 3", "said 3"), [add], name="executor")

    def plan(state: Plan) -> dict[str, Any]:
        return {"plan": str(planner.invoke(state["input"]).content).split("; ")}

    async def execute(state: Plan) -> dict[str, Any]:
        step = state["plan"][0]
        answer = await executor.ainvoke({"messages": [HumanMessage(step)]})
        return {"past_steps": [(step, answer["messages"][-1].content)]}

    def replan(state: Plan) -> dict[str, Any]:
        answer = str(replanner.invoke(f"{state['input']} {state['plan']} {state['past_steps']}").content)
        return {"response": answer} if answer.startswith("END") else {"plan": answer.split("; ")}

    graph = StateGraph(Plan)
    graph.add_node("planner", plan)
    graph.add_node("agent", execute)
    graph.add_node("replan", replan)
    for src, dst in [(START, "planner"), ("planner", "agent"), ("agent", "replan")]:
        graph.add_edge(src, dst)
    graph.add_conditional_edges("replan", lambda state: END if state.get("response") else "agent", ["agent", END])
    return graph.compile()


def test_plan_and_execute_with_an_agent_inside_a_node(recorder: Recorder) -> None:
    result = asyncio.run(wrap(plan_and_execute(), recorder).ainvoke({"input": "1 + 2"}))
    assert result["response"] == "END it is 3"
    (trajectory,) = recorded_trajectories(recorder)
    assert _short(edges_of(trajectory)) == {
        "trigger": "executor1>executor2 executor2>replan1 executor3>replan2 planner>executor1 replan1>executor3",
        "tool": "executor1>executor2",
        # The node asks the agent in words of its own, made from what it read: a bound.
        "data": "executor1>executor2 executor2>replan1 executor2>replan2 executor3>replan2"
        " planner>replan1 planner?executor1 planner?executor2 replan1>replan2 replan1?executor3",
    }
