"""The smallest graph that tests of recording run: two nodes that each call a made-up model once."""

from __future__ import annotations

from typing import Any, TypedDict

from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langgraph.graph import END, START, StateGraph


class Text(TypedDict):
    text: str


def fake_model() -> GenericFakeChatModel:
    return GenericFakeChatModel(messages=iter(lambda: AIMessage("fine"), None))


def graph_of(model: GenericFakeChatModel) -> Any:
    """START -> draft -> edit -> END; each node calls the model once."""
    graph = StateGraph(Text)
    for name in ("draft", "edit"):
        graph.add_node(name, lambda state: {"text": model.invoke(state["text"]).text})
    graph.add_edge(START, "draft")
    graph.add_edge("draft", "edit")
    graph.add_edge("edit", END)
    return graph.compile()
