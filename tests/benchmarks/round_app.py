"""What the benches of a round train besides the demo: a chain of two, and the demo's tasks made longer.

A word of WORDS is one token of SmolLM2's (a space and the word), so that a text of n words has n tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from langchain_core.language_models import BaseChatModel
from langgraph.graph.state import CompiledStateGraph

from graphs import math_duo
from graphs.chain import TRIO, profiles_to_graph

PAIR = TRIO[:2]
WORDS = (
    *("house", "river", "green", "table", "water", "light", "paper", "music", "stone", "bread", "night", "garden"),
    *("road", "tree", "book", "door", "hand", "city", "field", "bridge", "summer", "winter", "letter", "window"),
)


def build_pair(model: BaseChatModel) -> CompiledStateGraph[Any, Any, Any, Any]:
    """Reasoner -> Actor, as the zoo's longer chains are made."""
    return profiles_to_graph(model, "pair", PAIR)


def long_tasks(words: int) -> Iterator[dict[str, Any]]:
    """The demo's tasks, each with a text of its own before the question: `words` words, drawn by the task's id."""
    for task in math_duo.tasks():
        pick = random.Random(task["id"])
        yield task | {"question": " ".join([*pick.choices(WORDS, k=words), task["question"]])}
