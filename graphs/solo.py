r"""The paper's single agent (MARFT, appendix B.3), on the duo's word problems: the baseline of every team.

The graph is one node that reads a question and writes the answer. Tasks, input and rewards are those of
`graphs.math_duo`, so that one agent and teams are compared on the same tasks. From the paper: the single-agent
profile, here shortened. Simplified: the answer is the last number that the agent writes instead of a \boxed{}
expression, which a 135M model almost never produces.
"""

from __future__ import annotations

from typing import Any, TypedDict

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage, SystemMessage
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph

ACTOR = (
    "You are the Actor, an LLM agent that solves math problems. Execute the calculation and reply with the final "
    "number only."
)


class SoloState(TypedDict, total=False):
    """The state that the node reads and writes."""

    question: str
    answer: str


def build(model: BaseChatModel) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The compiled graph, whose only node calls `model` once."""

    async def actor(state: SoloState) -> SoloState:
        reply = await model.ainvoke([SystemMessage(ACTOR), HumanMessage(state["question"])])
        return {"answer": str(reply.text)}

    graph = StateGraph(SoloState)
    graph.add_node("actor", actor)
    graph.add_edge(START, "actor")
    graph.add_edge("actor", END)
    return graph.compile(name="solo")
