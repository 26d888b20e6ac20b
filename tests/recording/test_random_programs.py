"""Owns: on random graphs of random programs the recorded D is the one worked out from the drawing, edge by edge, and
whatever reached a prompt is reached by its edges.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from support.edge_rig import recorded_trajectories
from support.own_process import hold_for_drawn_programs
from support.random_programs import (
    Drawing,
    Item,
    Node,
    Router,
    Witness,
    drawing_to_graph,
    drawings,
    drawn_to_edges,
    drawn_to_labels,
)

from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.wrap import wrap
from trace_store.journal import Journal
from trace_store.records import Trajectory


def record(drawing: Drawing, witness: Witness) -> Trajectory:
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(Journal(Path(folder) / "journal"))
        asyncio.run(wrap(drawing_to_graph(drawing, witness), recorder).ainvoke({"k0": "", "log": []}))
        (trajectory,) = recorded_trajectories(recorder)
    return trajectory


def check(drawing: Drawing) -> None:
    witness = Witness()
    trajectory = record(drawing, witness)
    label = {action.action_id: str(action.completion) for action in trajectory.actions}
    assert {label[action.action_id]: action.node for action in trajectory.actions} == drawn_to_labels(drawing)
    recorded = {(label[edge.src], label[edge.dst], edge.kind, edge.exact) for edge in trajectory.edges}
    expected = drawn_to_edges(drawing)
    assert {"too many": recorded - expected, "missing": expected - recorded} == {"too many": set(), "missing": set()}
    ancestors: dict[str, set[str]] = {name: set() for name in label.values()}
    for action in trajectory.actions:  # in topological order
        for edge in trajectory.edges:
            if edge.dst == action.action_id:
                ancestors[label[edge.dst]] |= {label[edge.src], *ancestors[label[edge.src]]}
    for name, sources in witness.prompts.items():
        assert sources <= ancestors[name], f"{sources - ancestors[name]} reached the prompt of {name}"


LAW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@LAW
@given(drawing=drawings())
def test_the_recorded_dependencies_are_those_of_the_drawn_programs(drawing: Drawing) -> None:
    check(drawing)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_recorded_dependencies_are_those_of_two_thousand_drawn_programs() -> None:
    hold_for_drawn_programs("recording.test_random_programs", max_examples=2000)


def test_the_matrix_itself_is_right_on_a_graph_worked_out_by_hand() -> None:
    def node(name: str, program: tuple[Item, ...], *reads: str, writes: tuple[str, ...] = (), **rest: object) -> Node:
        given = {"window_entries": 1, "removes": None, "after": (), **rest}
        return Node(name, int(name[1]), program, reads, writes, **given)  # type: ignore[arg-type]

    agent, call = Item("agent", ("<A1>", "<A2>")), Item("call", ("<C>",))
    gather = Item("gather", (), (Item("call", ("<G1>",)), Item("tool", (), (Item("call", ("<G2>",)),))))
    drawing = Drawing(
        nodes=(
            node(
                "n10", (call, agent), "k0", writes=("newest", "joined", "messages"), routers=(Router(("n20",), "<R>"),)
            ),
            node("n20", (gather,), "newest", "joined", writes=("newest",)),
            node("n30", (), "newest", writes=("k0",), removes=None, after=("n20",)),
            node("n40", (Item("call", ("<L>",)),), "k0", "messages", after=("n30",)),
        ),
        entry_routers=(Router(("n10",), "<S>"),),
    )
    inside = {("<C>", "<A1>", "data", False), ("<A1>", "<A2>", "data", True), ("<A1>", "<A2>", "trigger", True)}
    routes = {("<S>", "<C>", "trigger", True), ("<A2>", "<R>", "trigger", True), ("<A2>", "<R>", "data", False)}
    routed = {("<R>", g, "trigger", True) for g in ("<G1>", "<G2>")}
    read = {("<A2>", g, "data", False) for g in ("<G1>", "<G2>")}  # in threads that n20 made: a bound
    # n30 asks nobody: what it wrote is made of what made it run, and of what it read.
    last = {(g, "<L>", kind, True) for g in ("<G1>", "<G2>") for kind in ("trigger", "data")}
    assert drawn_to_edges(drawing) == inside | routes | routed | read | last | {("<A2>", "<L>", "data", True)}
