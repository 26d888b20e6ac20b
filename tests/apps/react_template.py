"""LangChain's ReAct template: a model and its tools in a loop; a context schema names the model and the prompt."""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated

from langchain.chat_models import init_chat_model
from langchain_core.messages import AIMessage, AnyMessage
from langgraph.graph import StateGraph, add_messages
from langgraph.managed import IsLastStep
from langgraph.prebuilt import ToolNode
from langgraph.runtime import Runtime


@dataclass(kw_only=True)
class Context:
    """What a run of the agent may set."""

    model: str
    system_prompt: str = "You are a helpful assistant. The year is {year}."
    max_search_results: int = 2


@dataclass
class InputState:
    """What the agent is given."""

    messages: Annotated[list[AnyMessage], add_messages] = field(default_factory=list)


@dataclass
class State(InputState):
    """What the agent knows."""

    is_last_step: IsLastStep = field(default=False)


CAPITALS = {
    "France": "Paris",
    "Peru": "Lima",
    "Ghana": "Accra",
    "Japan": "Tokyo",
    "Chad": "N'Djamena",
    "Iraq": "Baghdad",
}


def search(country: str) -> str:
    """Searches for the capital of a country."""
    return CAPITALS.get(country, "no results")


async def call_model(state: State, runtime: Runtime[Context]):
    provider, name = runtime.context.model.split("/", maxsplit=1)
    model = init_chat_model(name, model_provider=provider).bind_tools([search])
    prompt = runtime.context.system_prompt.format(year=datetime.now(tz=UTC).year)
    response = await model.ainvoke([{"role": "system", "content": prompt}, *state.messages])
    if state.is_last_step and response.tool_calls:
        return {"messages": [AIMessage(id=response.id, content="I could not find it in so many steps.")]}
    return {"messages": [response]}


def route_model_output(state: State):
    return "tools" if state.messages[-1].tool_calls else "__end__"


builder = StateGraph(State, input_schema=InputState, context_schema=Context)
builder.add_node(call_model)
builder.add_node("tools", ToolNode([search]))
builder.add_edge("__start__", "call_model")
builder.add_conditional_edges("call_model", route_model_output)
builder.add_edge("tools", "call_model")
graph = builder.compile(name="ReAct Agent")

tasks = [
    {"id": f"{country}-{n}", "messages": [("user", f"What is the capital of {country}? ({n})")], "gold": capital}
    for country, capital in CAPITALS.items()
    for n in range(2)
]


def reward(task, state):
    return float(task["gold"] in state["messages"][-1].text)
