"""A LangGraph app as people write them, with folders `graphs/` and `trainers/` of its own, and no key of any provider.

The wheel installs a package `trainers` too; the app's must be the one that the app gets.
"""

from __future__ import annotations

from pathlib import Path

FILES = {
    "graphs/__init__.py": "",
    "graphs/support.py": """
from typing import TypedDict

from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langgraph.graph import END, START, StateGraph

from trainers.coach import ADVICE


class State(TypedDict, total=False):
    question: str
    draft: str
    answer: str


def build():
    model = GenericFakeChatModel(messages=iter(AIMessage(f"{ADVICE} {n}") for n in range(1000)))
    graph = StateGraph(State)
    graph.add_node("writer", lambda state: {"draft": model.invoke(state["question"]).content})
    graph.add_node("editor", lambda state: {"answer": model.invoke(state["draft"]).content})
    graph.add_edge(START, "writer")
    graph.add_edge("writer", "editor")
    graph.add_edge("editor", END)
    return graph.compile()


def reward(task, state):
    return float(ADVICE in state["answer"])
""",
    "trainers/__init__.py": "",
    "trainers/coach.py": 'ADVICE = "breathe"\n',
    "tasks.jsonl": "".join(f'{{"id": "{n}", "question": "How fast is runner {n}?"}}\n' for n in range(8)),
    "wrapped.py": """
import sys

from marft_bridge import wrap
from graphs.support import build

graph = wrap(build(), sys.argv[1])
print(graph.invoke({"question": "How fast?"})["answer"])
""",
    "plain.py": """
from graphs.support import build

print(build().invoke({"question": "How fast?"})["answer"])
""",
}


def write_app(folder: Path) -> Path:
    """Writes the app into a folder, which is made."""
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder
