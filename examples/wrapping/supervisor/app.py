"""A supervisor that hands questions to two agents, by langgraph-supervisor."""

import sys

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from langgraph_supervisor import create_supervisor

model = ChatOpenAI(model="gpt-4o-mini")


def add(a: int, b: int) -> int:
    """Adds two whole numbers."""
    return a + b


solver = create_agent(model, [add], name="solver", system_prompt="Work out sums with the tool.")
writer = create_agent(model, [], name="writer", system_prompt="Say the result as one number.")
graph = create_supervisor(
    [solver, writer],
    model=model,
    prompt="Have the solver work the question out, then the writer say it. Then repeat the number.",
).compile()

if __name__ == "__main__":
    print(graph.invoke({"messages": [("user", sys.argv[1])]})["messages"][-1].text)
