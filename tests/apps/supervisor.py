"""A supervisor that hands the question to a research expert and a math expert, by langgraph-supervisor."""

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from langgraph_supervisor import create_supervisor

model = ChatOpenAI(model="gpt-4o-mini")

HEADCOUNTS = {"Acme": 1200, "Globex": 800, "Initech": 450, "Umbrella": 2100}


def add(a: int, b: int) -> int:
    """Adds two whole numbers."""
    return a + b


def headcounts(companies: list[str]) -> str:
    """Looks up how many people work at each company."""
    return "; ".join(f"{name}: {HEADCOUNTS.get(name, 'unknown')}" for name in companies)


research_expert = create_agent(
    model, [headcounts], name="research_expert", system_prompt="You look facts up. You do no sums."
)
math_expert = create_agent(model, [add], name="math_expert", system_prompt="You do sums, with one tool at a time.")

graph = create_supervisor(
    [research_expert, math_expert],
    model=model,
    prompt="You lead a research expert and a math expert. For facts ask the one, for sums the other.",
).compile()

NAMES = sorted(HEADCOUNTS)
PAIRS = [(first, second) for first in NAMES for second in NAMES if first != second]
tasks = [
    {
        "id": f"{first}-{second}",
        "messages": [{"role": "user", "content": f"How many people work at {first} and {second} together?"}],
        "gold": HEADCOUNTS[first] + HEADCOUNTS[second],
    }
    for first, second in PAIRS
]


def reward(task, state):
    return float(str(task["gold"]) in state["messages"][-1].text)
