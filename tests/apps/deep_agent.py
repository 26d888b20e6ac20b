"""A deep agent with three sub-agents that it calls by name, by deepagents."""

from deepagents import create_deep_agent
from langchain_openai import ChatOpenAI

model = ChatOpenAI(model="gpt-4o-mini")

LIBRARY = {"owl": "Owls turn their heads by 270 degrees.", "bee": "A bee visits 1500 flowers a day."}


def search_library(topic: str) -> str:
    """Looks a topic up in the library."""
    return LIBRARY.get(topic, "nothing")


graph = create_deep_agent(
    model=model,
    tools=[],
    system_prompt="Write one sentence on the topic. Have it researched, then criticised and checked.",
    subagents=[
        {
            "name": "research-agent",
            "description": "Researches one topic.",
            "system_prompt": "You research one topic in the library.",
            "tools": [search_library],
        },
        {
            "name": "critique-agent",
            "description": "Criticises a sentence.",
            "system_prompt": "You criticise how a sentence is written.",
        },
        {
            "name": "fact-checker",
            "description": "Checks what a sentence says.",
            "system_prompt": "You check whether a sentence is true.",
        },
    ],
)

tasks = [
    {"id": f"{topic}-{n}", "messages": [{"role": "user", "content": f"The {topic}, please ({n})."}], "topic": topic}
    for topic in sorted(LIBRARY)
    for n in range(6)
]


def reward(task, state):
    return float(task["topic"] in state["messages"][-1].text.lower())
