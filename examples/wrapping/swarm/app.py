"""Two agents that hand over to each other, by langgraph-swarm."""

import sys

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from langgraph_swarm import create_handoff_tool, create_swarm

model = ChatOpenAI(model="gpt-4o-mini")


def add(a: int, b: int) -> int:
    """Adds two whole numbers."""
    return a + b


solver = create_agent(
    model,
    [add, create_handoff_tool(agent_name="writer")],
    name="solver",
    system_prompt="Work out sums with the tool, then hand over to the writer.",
)
writer = create_agent(
    model,
    [create_handoff_tool(agent_name="solver")],
    name="writer",
    system_prompt="Say the result as one number. Hand over to the solver if there is none yet.",
)
graph = create_swarm([solver, writer], default_active_agent="solver").compile()

if __name__ == "__main__":
    print(graph.invoke({"messages": [("user", sys.argv[1])]})["messages"][-1].text)
