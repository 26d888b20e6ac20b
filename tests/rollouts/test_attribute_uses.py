"""Owns: of an object, a node reaches what its code takes, and all of it where the code hands it on.

- Nodes that are methods of one object do not share its models: each is listed with those that it reaches.
- What is taken by way of another method, a property, a closure or an attribute's attribute is found.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.prompts import ChatPromptTemplate
from langgraph.graph import END, START, MessagesState, StateGraph
from support.edge_rig import SaysNext

from marft_bridge.rollouts.app_models import InspectedNode, inspect_nodes
from marft_bridge.rollouts.attribute_uses import Uses, variable_to_uses

# What code takes


def takes_attributes(desk: Any) -> Any:
    desk.note = desk.pen.ink(1)
    return desk.pen.cap, [desk.lamp for _ in range(2)]


def takes_inside(desk: Any) -> Callable[[], Any]:
    return lambda: desk.lamp.on()


def hands_on(desk: Any) -> Any:
    return desk.pen, id(desk)


def keeps(desk: Any) -> Any:
    other = desk
    return other.pen


def chooses(desk: Any, *, dark: bool) -> Any:
    return (desk.lamp if dark else desk.sun).light


@pytest.mark.parametrize(
    ("function", "uses"),
    [
        (takes_attributes, {"pen": {"ink": None, "cap": None}, "lamp": None}),
        (takes_inside, {"lamp": {"on": None}}),
        (chooses, {"lamp": None, "sun": {"light": None}}),
        (hands_on, None),
        (keeps, None),
    ],
)
def test_what_is_taken_is_listed_and_an_object_that_goes_on_is_taken_whole(
    function: Callable[..., Any], uses: Uses
) -> None:
    assert variable_to_uses(function.__code__, "desk") == uses


# Which models a node reaches


class NamedModel(SaysNext):
    model: str = ""


class Chains:
    """All chains of an app, as many keep them: one object, made once."""

    def __init__(self) -> None:
        self.sort = ChatPromptTemplate.from_template("{text}") | NamedModel(model="sorter")
        self.write = NamedModel(model="writer")
        self.judge = NamedModel(model="judge")


class Archive:
    def newest(self) -> str:
        return "x"


class Nodes:
    """The nodes of an app, as methods of one object."""

    def __init__(self) -> None:
        self.chains, self.archive = Chains(), Archive()

    def load(self, state: MessagesState) -> Any:
        return {"messages": [self.archive.newest()]}

    def sort(self, state: MessagesState) -> Any:
        return {"messages": [self.chains.sort.invoke({"text": "x"})]}

    def write(self, state: MessagesState) -> Any:
        return {"messages": [self._write()]}

    def _write(self) -> Any:
        return self.writer.invoke("x")

    @property
    def writer(self) -> Any:
        return self.chains.write

    @functools.cached_property
    def judge_of_all(self) -> Any:
        return self.chains.judge

    def judge(self, state: MessagesState) -> Any:
        return {"messages": [self.judge_of_all.invoke("x")]}

    def hand_on(self, state: MessagesState) -> Any:
        return {"messages": [ask_anybody(self)]}

    def route(self, state: MessagesState) -> str:
        return END if self.archive.newest() else "sort"


class MoreNodes(Nodes):
    def load(self, state: MessagesState) -> Any:
        return super().load(state)


class AnythingGoes(Nodes):
    def __getattr__(self, name: str) -> Any:
        return self.chains


def ask_anybody(nodes: Nodes) -> Any:
    return nodes.chains.write.invoke("x")


def listed_models(**nodes: Any) -> dict[str, set[str]]:
    graph = StateGraph(MessagesState)
    for name, node in nodes.items():
        graph.add_node(name, node)
        graph.add_edge(START, name)
    graph.add_conditional_edges("load", Nodes().route, [END])
    inspected: list[InspectedNode] = inspect_nodes(graph.compile())
    return {node.name: set(node.models) for node in inspected}


def test_nodes_that_are_methods_of_one_object_are_listed_each_with_the_models_that_it_reaches() -> None:
    nodes = Nodes()
    assert listed_models(load=nodes.load, sort=nodes.sort, write=nodes.write, judge=nodes.judge) == {
        "load": set(),
        "sort": {"sorter"},
        "write": {"writer"},
        "judge": {"judge"},
    }


def test_a_node_that_takes_an_object_from_around_it_is_listed_with_the_models_that_it_reaches() -> None:
    nodes = Nodes()

    def load(state: MessagesState) -> Any:
        return nodes.load(state)

    assert listed_models(load=load, sort=lambda state: nodes.sort(state)) == {"load": set(), "sort": {"sorter"}}


@pytest.mark.parametrize("load", [Nodes().hand_on, MoreNodes().load, AnythingGoes().load])
def test_an_object_that_is_handed_on_is_listed_with_all_its_models(load: Any) -> None:
    assert listed_models(load=load)["load"] == {"sorter", "writer", "judge"}
