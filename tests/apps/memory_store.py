"""LangChain's memory template: an agent that writes what it learns of a user into LangGraph's store."""

import uuid
from dataclasses import dataclass, field
from typing import Annotated

from langchain.chat_models import init_chat_model
from langchain_core.messages import AnyMessage
from langgraph.graph import END, StateGraph, add_messages
from langgraph.runtime import Runtime
from langgraph.store.memory import InMemoryStore


@dataclass(kw_only=True)
class Context:
    """Who speaks, and to which model."""

    user_id: str = "default"
    model: str = "openai/gpt-4o-mini"
    system_prompt: str = "You are a friendly chatbot. What you know of the user: {user_info}"


@dataclass(kw_only=True)
class State:
    """The conversation."""

    messages: Annotated[list[AnyMessage], add_messages] = field(default_factory=list)


def upsert_memory(content: str, context: str) -> None:
    """Stores a fact about the user, and what it was said about."""


async def call_model(state: State, runtime: Runtime[Context]):
    memories = await runtime.store.asearch(("memories", runtime.context.user_id), limit=10)
    user_info = "; ".join(memory.value["content"] for memory in memories)
    provider, name = runtime.context.model.split("/", maxsplit=1)
    model = init_chat_model(name, model_provider=provider).bind_tools([upsert_memory])
    system = runtime.context.system_prompt.format(user_info=user_info)
    return {"messages": [await model.ainvoke([{"role": "system", "content": system}, *state.messages])]}


async def store_memory(state: State, runtime: Runtime[Context]):
    results = []
    for call in state.messages[-1].tool_calls:
        await runtime.store.aput(("memories", runtime.context.user_id), str(uuid.uuid4()), call["args"])
        results.append({"role": "tool", "content": "stored", "tool_call_id": call["id"]})
    return {"messages": results}


def route_message(state: State):
    return "store_memory" if state.messages[-1].tool_calls else END


builder = StateGraph(State, context_schema=Context)
builder.add_node(call_model)
builder.add_node(store_memory)
builder.add_edge("__start__", "call_model")
builder.add_conditional_edges("call_model", route_message, ["store_memory", END])
builder.add_edge("store_memory", "call_model")
graph = builder.compile(store=InMemoryStore())

tasks = [
    {"id": f"{name}-{n}", "messages": [("user", f"I am {name}, and I like tea ({n}).")], "name": name}
    for name in ("Ada", "Bo", "Cy")
    for n in range(4)
]


def reward(task, state):
    return float(task["name"] in state["messages"][-1].text)
