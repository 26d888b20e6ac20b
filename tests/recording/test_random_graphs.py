"""Owns: on random graphs whose dependency matrix is known, the recorded one is equal to it, edge by edge.

The matrix is worked out here from the drawn graph alone, by a small simulation of supersteps that shares no code
with the recorder or the store.
"""

from __future__ import annotations

import asyncio
import operator
import tempfile
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from langgraph.graph import START, StateGraph
from pydantic import create_model
from support.edge_rig import recorded_trajectories, says, source_to_function

from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.wrap import wrap
from trace_store.journal import Journal

PLAIN, KEPT = ("k0", "k1", "k2"), ("log0", "log1")  # keys that hold the last value, and all values
KEYS = (*PLAIN, *KEPT)

Edges = set[tuple[str, str, str]]


@dataclass(frozen=True)
class Node:
    """A drawn node: `layer` is the superstep in which it runs."""

    name: str
    layer: int
    calls: bool  # whether it calls the model at all
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    after: tuple[str, ...]  # nodes of the layer before that trigger it; none in layer 1


@st.composite
def layered_graphs(draw: st.DrawFn) -> list[Node]:
    nodes: list[Node] = []
    before: list[str] = []
    for layer in range(1, draw(st.integers(2, 4)) + 1):
        free = list(PLAIN)  # two nodes of one superstep may not write the same plain key
        names = [f"n{layer}{number}" for number in range(draw(st.integers(1, 3)))]
        for name in names:
            plain = draw(st.lists(st.sampled_from(free), unique=True, max_size=2)) if free else []
            free = [key for key in free if key not in plain]
            nodes.append(
                Node(
                    name=name,
                    layer=layer,
                    calls=draw(st.integers(0, 3)) > 0,
                    reads=tuple(draw(st.lists(st.sampled_from(KEYS), unique=True, min_size=1, max_size=3))),
                    writes=(*plain, *draw(st.lists(st.sampled_from(KEPT), unique=True, max_size=1))),
                    after=tuple(draw(st.lists(st.sampled_from(before), unique=True, min_size=1))) if before else (),
                )
            )
        before = names
    return nodes


def nodes_to_edges(nodes: list[Node]) -> Edges:
    """The dependency matrix of the calls, by simulation."""
    by_name = {node.name: node for node in nodes}
    holders: dict[str, set[str]] = {key: set() for key in KEYS}
    read_from: dict[str, set[str]] = {}
    for layer in sorted({node.layer for node in nodes}):
        running = [node for node in nodes if node.layer == layer]
        for node in running:
            read_from[node.name] = set().union(*(holders[key] for key in node.reads))
        for node in running:
            for key in node.writes:
                holders[key] = {node.name} if key in PLAIN else holders[key] | {node.name}

    def triggered(name: str) -> set[str]:
        callers = set()
        for earlier in by_name[name].after:
            callers |= {earlier} if by_name[earlier].calls else triggered(earlier)
        return callers

    def made_of(name: str) -> set[str]:
        """The calls that a value written by `name` comes from."""
        if by_name[name].calls:
            return {name}
        sources = set(by_name[name].after) | read_from[name]
        return set().union(*(made_of(source) for source in sources))

    edges: Edges = set()
    for node in nodes:
        if node.calls:
            edges |= {(source, node.name, "trigger") for source in triggered(node.name)}
            edges |= {(source, node.name, "data") for writer in read_from[node.name] for source in made_of(writer)}
    return edges


def nodes_to_graph(nodes: list[Node], schema: Any, attributes: bool) -> Any:
    graph = StateGraph(schema)
    model = says()

    def body(node: Node) -> Any:
        # The state is read by code that names the keys, as an app's does.
        seen = ", ".join(f"state.{key}" if attributes else f"state.get({key!r})" for key in node.reads)

        def act(seen: list[Any]) -> dict[str, Any]:
            if node.calls:
                model.invoke(f"{seen}")
            return {key: node.name if key in PLAIN else [node.name] for key in node.writes}

        source = f"def node(state):\n    return act([{seen}])\n"
        if int(node.name[-1]) % 2:
            source = f"async def node(state):\n    await sleep(0)\n    return await to_thread(act, [{seen}])\n"
        return source_to_function(source, act=act, sleep=asyncio.sleep, to_thread=asyncio.to_thread)

    for node in nodes:
        graph.add_node(node.name, body(node))
        for earlier in node.after or (START,):
            graph.add_edge(earlier, node.name)
    return graph.compile()


def schema_of(kind: str) -> Any:
    kept = Annotated[list[str], operator.add]
    if kind == "dict":
        return TypedDict("Drawn", {**dict.fromkeys(PLAIN, str), **dict.fromkeys(KEPT, kept)}, total=False)  # type: ignore[operator]
    if kind == "pydantic":
        fields: dict[str, Any] = {**dict.fromkeys(PLAIN, (str, "")), **{key: (kept, []) for key in KEPT}}
        return create_model("Drawn", **fields)
    return make_dataclass("Drawn", [*((key, str, None) for key in PLAIN), *((key, kept, None) for key in KEPT)])


@pytest.mark.parametrize("kind", ["dict", "pydantic", "dataclass"])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(nodes=layered_graphs())
def test_the_recorded_dependencies_are_those_of_the_drawn_graph(kind: str, nodes: list[Node]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(Journal(Path(folder) / "journal"))
        recorded = wrap(nodes_to_graph(nodes, schema_of(kind), attributes=kind != "dict"), recorder)
        asyncio.run(recorded.ainvoke({key: [] if key in KEPT else "" for key in KEYS}))
        (trajectory,) = recorded_trajectories(recorder)
    label = {action.action_id: action.node for action in trajectory.actions}
    assert sorted(label.values()) == sorted(node.name for node in nodes if node.calls)
    assert {(label[e.src], label[e.dst], e.kind) for e in trajectory.edges} == nodes_to_edges(nodes)
    assert all(edge.exact for edge in trajectory.edges)


def test_the_simulation_itself_is_right_on_a_graph_worked_out_by_hand() -> None:
    nodes = [
        Node("n10", 1, True, ("k0",), ("k0", "log0"), ()),
        Node("n11", 1, True, ("k0",), ("k1", "log0"), ()),
        Node("n20", 2, False, ("k1",), ("k0",), ("n10",)),  # silent: made of n11, and of n10 that made it run
        Node("n30", 3, True, ("k0",), (), ("n20",)),
        Node("n31", 3, True, ("log0",), (), ("n20",)),
    ]
    triggers = {("n10", "n30", "trigger"), ("n10", "n31", "trigger")}
    data = {(source, sink, "data") for source in ("n10", "n11") for sink in ("n30", "n31")}
    assert nodes_to_edges(nodes) == triggers | data
