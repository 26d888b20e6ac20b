"""Two agents that hand the conversation to each other and remember who had it, by langgraph-swarm."""

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph_swarm import create_handoff_tool, create_swarm

model = ChatOpenAI(model="gpt-4o-mini")


def add(a: int, b: int) -> int:
    """Adds two whole numbers."""
    return a + b


alice = create_agent(
    model,
    [add, create_handoff_tool(agent_name="Bob", description="Hands over to Bob, who speaks like a pirate.")],
    system_prompt="You are Alice, an expert in sums.",
    name="Alice",
)
bob = create_agent(
    model,
    [create_handoff_tool(agent_name="Alice", description="Hands over to Alice, who can do sums.")],
    system_prompt="You are Bob. You speak like a pirate.",
    name="Bob",
)
graph = create_swarm([alice, bob], default_active_agent="Alice").compile(checkpointer=InMemorySaver())

tasks = [
    {
        "id": str(n),
        "messages": [{"role": "user", "content": f"What is {n} + 7? I want to hear it from Bob."}],
        "gold": n + 7,
    }
    for n in range(12)
]


def reward(task, state):
    said = state["messages"][-1].text
    return float(str(task["gold"]) in said) * (1.0 if "arr" in said.lower() else 0.5)
