"""Two plain nodes, each with a ChatOpenAI of its own: one plans, one answers."""

import sys
from typing import TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph

planner_model = ChatOpenAI(model="gpt-4o-mini", temperature=0)
writer_model = ChatOpenAI(model="gpt-4o-mini")


class State(TypedDict, total=False):
    question: str
    plan: str
    answer: str


def planner(state: State) -> State:
    reply = planner_model.invoke(f"In one line, how do you work this out? {state['question']}")
    return {"plan": str(reply.text)}


def writer(state: State) -> State:
    reply = writer_model.invoke(f"{state['question']}\nPlan: {state['plan']}\nAnswer with one number.")
    return {"answer": str(reply.text)}


builder = StateGraph(State)
builder.add_node("planner", planner)
builder.add_node("writer", writer)
builder.add_edge(START, "planner")
builder.add_edge("planner", "writer")
builder.add_edge("writer", END)
graph = builder.compile()

if __name__ == "__main__":
    print(graph.invoke({"question": sys.argv[1]})["answer"])
