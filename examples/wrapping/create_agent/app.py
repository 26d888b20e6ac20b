"""An agent with a tool, by LangChain's create_agent."""

import sys

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI


def add(a: int, b: int) -> int:
    """Adds two whole numbers."""
    return a + b


graph = create_agent(
    ChatOpenAI(model="gpt-4o-mini"),
    [add],
    system_prompt="Work out the question with the tool. Answer with one number.",
)

if __name__ == "__main__":
    print(graph.invoke({"messages": [("user", sys.argv[1])]})["messages"][-1].text)
