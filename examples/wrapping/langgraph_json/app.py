"""An app as `langgraph new` lays it out: a langgraph.json names the graph, and LangGraph's own server runs it."""

import os
import sys

from langchain.chat_models import init_chat_model
from langchain_core.runnables import RunnableConfig
from langgraph.graph import END, START, MessagesState, StateGraph

MODEL = "openai:gpt-4o-mini"


async def make_graph(config: RunnableConfig):
    """What the server calls for each run."""
    model = init_chat_model(MODEL)

    async def solve(state: MessagesState):
        return {"messages": [await model.ainvoke([("system", "Work it out step by step."), *state["messages"]])]}

    async def say(state: MessagesState):
        return {"messages": [await model.ainvoke([*state["messages"], ("user", os.environ["SUMS_STYLE"])])]}

    builder = StateGraph(MessagesState)
    builder.add_node("solve", solve)
    builder.add_node("say", say)
    builder.add_edge(START, "solve")
    builder.add_edge("solve", "say")
    builder.add_edge("say", END)
    return builder.compile()


async def main(question: str) -> None:
    """One question, without the server."""
    graph = await make_graph({})
    print((await graph.ainvoke({"messages": [("user", question)]}))["messages"][-1].text)


if __name__ == "__main__":
    import asyncio

    asyncio.run(main(sys.argv[1]))
