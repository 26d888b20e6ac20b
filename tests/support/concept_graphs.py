"""The five graphs of docs/concepts.md -> their recorded trajectories.

Each is an ordinary LangGraph graph, run once on scripted answers and recorded as any app would be. Invariant: nothing
that a picture shows depends on the clock or on which branch was quicker. It does not know how they are drawn.
"""

from __future__ import annotations

import operator
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import Command, Send

from marft_bridge.model_calls.scripted_model import ScriptedPolicy
from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.wrap import wrap
from support.edge_rig import calls_tool, recorded_trajectories, says, source_to_function
from trace_store.journal import Journal
from trace_store.records import Trajectory

Node = Callable[[Any], Any]


class Shared(TypedDict, total=False):
    question: str
    plan: str
    draft: str
    notes: str
    final: str
    parts: Annotated[list[str], operator.add]


def reads_and_writes(model: BaseChatModel, reads: Sequence[str], writes: str) -> Node:
    """A node that calls the model with these keys of the state, which its code names, and writes the answer to one."""
    seen = ", ".join(f"str(state.get({key!r}))" for key in reads)
    source = f"def node(state):\n    return {{writes: model.invoke(' '.join([{seen}])).text}}\n"
    return source_to_function(source, model=model, writes=writes)


def chain(model: BaseChatModel) -> tuple[Any, dict[str, Any]]:
    """planner -> writer -> editor; the editor also reads the plan."""
    graph: Any = StateGraph(Shared)
    graph.add_node("planner", reads_and_writes(model, ["question"], "plan"))
    graph.add_node("writer", reads_and_writes(model, ["plan"], "draft"))
    graph.add_node("editor", reads_and_writes(model, ["plan", "draft"], "final"))
    for src, dst in [(START, "planner"), ("planner", "writer"), ("writer", "editor")]:
        graph.add_edge(src, dst)
    return graph.compile(), {"question": "q"}


def join(model: BaseChatModel) -> tuple[Any, dict[str, Any]]:
    """Two solvers in one superstep, and a judge who waits for both and reads both."""
    graph: Any = StateGraph(Shared)
    graph.add_node("algebra", reads_and_writes(model, ["question"], "draft"))
    graph.add_node("geometry", reads_and_writes(model, ["question"], "notes"))
    graph.add_node("judge", reads_and_writes(model, ["draft", "notes"], "final"))
    graph.add_edge(START, "algebra")
    graph.add_edge(START, "geometry")
    graph.add_edge(["algebra", "geometry"], "judge")
    return graph.compile(), {"question": "q"}


def loop(model: BaseChatModel) -> tuple[Any, dict[str, Any]]:
    """A coder and a reviewer, who sends the first draft back."""
    graph: Any = StateGraph(Shared)
    graph.add_node("coder", reads_and_writes(model, ["question", "notes"], "draft"))
    graph.add_node("reviewer", reads_and_writes(model, ["draft"], "notes"))
    graph.add_edge(START, "coder")
    graph.add_edge("coder", "reviewer")
    graph.add_conditional_edges("reviewer", lambda state: END if state["notes"] == "good" else "coder", ["coder", END])
    return graph.compile(), {"question": "q"}


def send(model: BaseChatModel) -> tuple[Any, dict[str, Any]]:
    """A planner who sends one part to each of as many workers as there are parts, and a reducer."""

    def worker(state: Shared) -> dict[str, list[str]]:
        return {"parts": [str(model.invoke(state["draft"]).text)]}

    def reducer(state: Shared) -> dict[str, str]:
        return {"final": str(model.invoke(" ".join(state["parts"])).text)}

    def packets(state: Shared) -> list[Send]:
        return [Send("worker", {"draft": part}) for part in state["plan"].split()]

    graph: Any = StateGraph(Shared)
    graph.add_node("planner", reads_and_writes(model, ["question"], "plan"))
    graph.add_node("worker", worker)
    graph.add_node("reducer", reducer)
    graph.add_edge(START, "planner")
    graph.add_conditional_edges("planner", packets, ["worker"])
    graph.add_edge("worker", "reducer")
    return graph.compile(), {"question": "q"}


@tool
def add(x: int, y: int) -> int:
    """Adds two numbers."""
    return x + y


def supervisor(_: BaseChatModel) -> tuple[Any, dict[str, Any]]:
    """A boss who decides who acts next, and a solver who calls a tool."""
    boss_says, solver_says = says("solver", "done"), says(calls_tool("add", x=3, y=4), "7")

    def boss(state: MessagesState) -> Command[Literal["solver", "__end__"]]:
        reply = boss_says.invoke(state["messages"])
        goto: Literal["solver", "__end__"] = "solver" if reply.text == "solver" else "__end__"
        return Command(goto=goto, update={"messages": [reply]})

    def solver(state: MessagesState) -> dict[str, Any]:
        return {"messages": [solver_says.invoke(state["messages"])]}

    graph: Any = StateGraph(MessagesState)
    graph.add_node("boss", boss)
    graph.add_node("solver", solver)
    graph.add_node("tools", ToolNode([add]))
    graph.add_edge(START, "boss")
    graph.add_conditional_edges(
        "solver", lambda state: "tools" if state["messages"][-1].tool_calls else "boss", ["tools", "boss"]
    )
    graph.add_edge("tools", "solver")
    return graph.compile(), {"messages": [HumanMessage("3 + 4?")]}


GRAPHS: dict[str, tuple[Callable[[BaseChatModel], tuple[Any, dict[str, Any]]], dict[str, list[str]]]] = {
    "chain": (chain, {"planner": ["plan"], "writer": ["draft"], "editor": ["text"]}),
    "join": (join, {"algebra": ["1"], "geometry": ["2"], "judge": ["1"]}),
    "loop": (loop, {"coder": ["first", "second"], "reviewer": ["again", "good"]}),
    "send": (send, {"planner": ["one two three"], "worker": ["done"] * 3, "reducer": ["all"]}),
    "supervisor": (supervisor, {}),
}


def trajectory_of(name: str) -> Trajectory:
    """One recorded run of this graph."""
    build, answers = GRAPHS[name]
    graph, start = build(ScriptedPolicy(answers=answers))
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(Journal(Path(folder) / "journal"))
        wrap(graph, recorder).invoke(start)
        (trajectory,) = recorded_trajectories(recorder)
    return trajectory
