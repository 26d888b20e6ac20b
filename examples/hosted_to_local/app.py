"""A shop's desk: a customer's sentence -> what the desk replies, by four nodes on a hosted model.

It is written as such apps are: LangGraph, and `ChatOpenAI` on an OpenAI-compatible endpoint that three variables name:
HOSTED_BASE_URL, HOSTED_MODEL and HOSTED_API_KEY. Nothing here knows of training.

    extractor (structured output) -> router -+-> lookup (writes a tool call) -> writer
                                             +-> writer, where goods come back

Invariant: whatever the model says, a run comes to its end; what cannot be read is an empty order or `nothing found`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, TypedDict

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import BaseTool, tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from openai import LengthFinishReasonError
from pydantic import BaseModel, ConfigDict, SecretStr, ValidationError

PRICES = {
    "mug": 8,
    "lamp": 35,
    "chair": 60,
    "knife": 12,
    "box": 5,
    "shelf": 45,
    "brush": 4,
    "bowl": 9,
    "candle": 3,
    "cushion": 20,
    "vase": 25,
    "towel": 15,
}  # EUR of one
COLOURS = ("red", "blue", "green", "black", "white", "grey")
ROUTES = ("price", "stock", "return")
NOTHING = "nothing found"
MAX_TOKENS = 64

EXTRACTOR = "Read the customer's sentence. Answer in JSON: item (singular), colour, count."
ROUTER = "What does the customer want? Answer with one word: price, stock or return."
LOOKUP = "Write the call: quote(item, colour, count) for a price, stock(item, colour) for stock."
WRITER = "Write the reply in one line: count x colour item: result. Goods that come back: send it back."


class Order(BaseModel):
    """What the customer speaks of."""

    model_config = ConfigDict(extra="forbid")
    item: str
    colour: str
    count: int


class Desk(TypedDict, total=False):
    """The state that the nodes share."""

    request: str
    order: str  # an `Order` as JSON; empty where the extractor gave none
    route: str
    result: str  # of the tool
    answer: str


ORDER_FORM = {
    "type": "json_schema",
    "json_schema": {"name": "order", "strict": True, "schema": Order.model_json_schema()},
}


# -- tools ------------------------------------------------------------------------------------------------------------


@tool
def quote(item: str, colour: str, count: int) -> str:
    """What so many of an item cost in all."""
    return f"{PRICES[item] * count} EUR" if item in PRICES and colour in COLOURS else NOTHING


@tool
def stock(item: str, colour: str) -> str:
    """How many of an item are there."""
    if item not in PRICES or colour not in COLOURS:
        return NOTHING
    return f"{(7 * list(PRICES).index(item) + 5 * COLOURS.index(colour)) % 19} in stock"


TOOLS: Mapping[str, BaseTool] = {"quote": quote, "stock": stock}
_CALL = re.compile(r"\s*(\w+)\(([^()]*)\)\s*")


def call_tool(text: str) -> str:
    """Runs the call that a text is, as `stock(mug, blue)`; `NOTHING` where it is none."""
    call = _CALL.fullmatch(text)
    if call is None or call[1] not in TOOLS:
        return NOTHING
    chosen, values = TOOLS[call[1]], [value.strip() for value in call[2].split(",")]
    if len(values) != len(chosen.args) or ("count" in chosen.args and not re.fullmatch("[0-9]{1,4}", values[-1])):
        return NOTHING
    return str(chosen.invoke(dict(zip(chosen.args, values, strict=True))))


# -- nodes ------------------------------------------------------------------------------------------------------------


def hosted_model() -> ChatOpenAI:
    """The model that the app was written for."""
    return ChatOpenAI(
        model=os.environ.get("HOSTED_MODEL", "hosted-large"),
        base_url=os.environ.get("HOSTED_BASE_URL"),
        api_key=SecretStr(os.environ.get("HOSTED_API_KEY", "none")),
        temperature=0,
        max_completion_tokens=MAX_TOKENS,
    )


def text_to_order(text: str) -> Order | None:
    """The order that an answer holds; None where it holds none."""
    try:
        return Order.model_validate_json(text)
    except ValidationError:
        return None


def make_graph(model: BaseChatModel) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The desk, all of whose nodes call `model`."""
    with_form = model.bind(response_format=ORDER_FORM)

    def ask(profile: str, text: str, chosen: Any = model) -> str:
        return str(chosen.invoke([SystemMessage(profile), HumanMessage(text)]).text).strip()

    def extractor(state: Desk) -> Desk:
        try:
            order = text_to_order(ask(EXTRACTOR, state["request"], with_form))
        except LengthFinishReasonError:  # the client raises it where a form was cut at the limit
            order = None
        return {"order": "" if order is None else order.model_dump_json()}

    def router(state: Desk) -> Desk:
        return {"route": ask(ROUTER, state["request"]).lower()}

    def lookup(state: Desk) -> Desk:
        return {"result": call_tool(ask(LOOKUP, f"{state['route']} {state['order']}"))}

    def writer(state: Desk) -> Desk:
        return {"answer": ask(WRITER, f"{state['route']} {state['order']} {state.get('result', '')}".strip())}

    def where_to(state: Desk) -> str:
        return "writer" if state["route"] == "return" else "lookup"

    builder = StateGraph(Desk)
    builder.add_node("extractor", extractor)
    builder.add_node("router", router)
    builder.add_node("lookup", lookup)
    builder.add_node("writer", writer)
    builder.add_edge(START, "extractor")
    builder.add_edge("extractor", "router")
    builder.add_conditional_edges("router", where_to, ["lookup", "writer"])
    builder.add_edge("lookup", "writer")
    builder.add_edge("writer", END)
    return builder.compile(name="shop_desk")


def graph() -> CompiledStateGraph[Any, Any, Any, Any]:
    """The desk as it runs today."""
    return make_graph(hosted_model())
