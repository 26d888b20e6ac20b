"""A human in the loop, as LangGraph documents it: a draft is criticised, then shown to somebody who approves or asks
for another."""

from typing import Literal, TypedDict

from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, interrupt

model = ChatOpenAI(model="gpt-4o-mini")


class State(TypedDict, total=False):
    request: str
    feedback: str
    draft: str
    critique: str


def write(state: State):
    wish = state.get("feedback") or "none yet"
    return {"draft": model.invoke(f"Draft an email: {state['request']}. Feedback: {wish}").text}


def criticise(state: State):
    return {"critique": model.invoke(f"Criticise this draft: {state['draft']}").text}


def human_review(state: State) -> Command[Literal["write", "__end__"]]:
    decision = interrupt({"draft": state["draft"], "critique": state["critique"]})
    if decision == "approve":
        return Command(goto=END)
    return Command(goto="write", update={"feedback": decision})


builder = StateGraph(State)
for node in (write, criticise, human_review):
    builder.add_node(node)
builder.add_edge(START, "write")
builder.add_edge("write", "criticise")
builder.add_edge("criticise", "human_review")
graph = builder.compile(checkpointer=InMemorySaver())

tasks = [{"id": str(n), "request": f"thank team {n}"} for n in range(12)]


def reward(task, state):
    return float("thank" in state["draft"].lower())
