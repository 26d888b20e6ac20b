"""A team of two on a thread: `plan` asks a model, then an agent named `worker` asks, calls a tool, and asks again."""

from __future__ import annotations

from typing import Any

from langchain.agents import create_agent
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph

from support.edge_rig import calls_tool, says

THREAD = "thread-1"
D_BY_HAND = {
    "trigger": "plan>worker1 worker1>worker2",
    "data": "plan>worker1 plan>worker2 worker1>worker2",
    "tool": "worker1>worker2",
}


@tool
def look_up(city: str) -> str:
    """Looks a city up."""
    return f"{city} is rainy"


def tool_team() -> Any:
    """The graph; its calls are scripted."""
    planner = says("look it up")
    worker = create_agent(says(calls_tool("look_up", city="Oslo"), "rain, then"), [look_up], name="worker")

    def plan(state: MessagesState) -> dict[str, Any]:
        return {"messages": [planner.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("plan", plan)
    graph.add_node("worker", worker)
    graph.add_edge(START, "plan")
    graph.add_edge("plan", "worker")
    return graph.compile(checkpointer=InMemorySaver(), name="weather")


def run_tool_team(recorded: Any) -> Any:
    """One run of the recorded team, on its thread."""
    question = {"messages": [("user", "what is it like in Oslo?")]}
    return recorded.invoke(question, {"configurable": {"thread_id": THREAD}})
