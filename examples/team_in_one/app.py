"""The duo in one (Chain-of-Agents, arXiv 2508.13167): a single node that says what Reasoner and Actor said.

Input and rewards are those of `graphs.math_duo`; so are the tasks, but for held-out ones that are too like a training
task (`tasks.py`). `marft-bridge distil` makes the duo's good runs this node's training; the last number that it writes
is its answer.
"""

from __future__ import annotations

from typing import Any, TypedDict

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage, SystemMessage
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph

PROFILE = (
    "You are a team of two that solves math problems. First the Reasoner gives one short hint, between <reasoner> and "
    "</reasoner>. Then reply with the final number only."
)


class SolverState(TypedDict, total=False):
    """The state that the node reads and writes."""

    question: str
    answer: str


def build(model: BaseChatModel) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The compiled graph, whose only node calls `model` once."""

    async def solver(state: SolverState) -> SolverState:
        reply = await model.ainvoke([SystemMessage(PROFILE), HumanMessage(state["question"])])
        return {"answer": str(reply.text)}

    graph = StateGraph(SolverState)
    graph.add_node("solver", solver)
    graph.add_edge(START, "solver")
    graph.add_edge("solver", END)
    return graph.compile(name="team_in_one")
