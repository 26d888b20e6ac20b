"""Owns: the pictures of docs/concepts.md.

- Each shows the run that is recorded today, and the page says the same edges in words.
- The recorded edges are those worked out by hand.
- A picture is well-formed, has a box for each action, a line for each edge, and nothing from elsewhere.
"""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from support.concept_graphs import GRAPHS, trajectory_of
from support.edge_rig import edges_of
from support.pages.architecture_page import pictures
from support.pages.concepts_page import PAGE, PICTURES, filled, layers_of, picture

from trace_store.records import Trajectory

SVG = "{http://www.w3.org/2000/svg}"
AGAIN = "run `make pages`"
BY_HAND = {
    "chain": {
        "trigger": "planner>writer writer>editor",
        "data": "planner>editor planner>writer writer>editor",
    },
    "join": dict.fromkeys(("trigger", "data"), "algebra>judge geometry>judge"),
    "loop": dict.fromkeys(("trigger", "data"), "coder1>reviewer1 coder2>reviewer2 reviewer1>coder2"),
    "send": {
        "send": "planner>worker1 planner>worker2 planner>worker3",
        "trigger": "worker1>reducer worker2>reducer worker3>reducer",
        "data": "worker1>reducer worker2>reducer worker3>reducer",
    },
    # Every prompt shows all messages so far; the tool's result is in that of solver2, and stays in that of boss2.
    "supervisor": {
        "trigger": "boss1>solver1 solver1>solver2 solver2>boss2",
        "data": "boss1>boss2 boss1>solver1 boss1>solver2 solver1>boss2 solver1>solver2 solver2>boss2",
        "tool": "solver1>boss2 solver1>solver2",
    },
}
LAYERS = {
    "chain": [["planner"], ["writer"], ["editor"]],
    "join": [["algebra", "geometry"], ["judge"]],
    "loop": [["coder1"], ["reviewer1"], ["coder2"], ["reviewer2"]],
    "send": [["planner"], ["worker1", "worker2", "worker3"], ["reducer"]],
    "supervisor": [["boss1"], ["solver1"], ["solver2"], ["boss2"]],
}


@pytest.fixture(scope="module")
def trajectories() -> dict[str, Trajectory]:
    return {name: trajectory_of(name) for name in GRAPHS}


def test_the_page_says_the_edges_that_are_recorded(trajectories: dict[str, Trajectory]) -> None:
    assert filled(PAGE.read_text(), trajectories) == PAGE.read_text(), AGAIN


@pytest.mark.parametrize("name", GRAPHS)
def test_a_picture_shows_the_run_that_is_recorded(name: str, trajectories: dict[str, Trajectory]) -> None:
    assert (PICTURES / f"{name}.svg").read_text() == picture(trajectories[name]), AGAIN


@pytest.mark.parametrize("name", GRAPHS)
def test_the_edges_and_layers_are_those_worked_out_by_hand(name: str, trajectories: dict[str, Trajectory]) -> None:
    assert edges_of(trajectories[name]) == BY_HAND[name]
    assert layers_of(trajectories[name]) == LAYERS[name]


@pytest.mark.parametrize("name", GRAPHS)
def test_a_picture_has_a_box_for_each_action_and_a_line_for_each_edge(name: str) -> None:
    drawing = ElementTree.parse(PICTURES / f"{name}.svg").getroot()  # noqa: S314 - our own file
    boxes = [text.text for group in drawing.iter(f"{SVG}g") for text in group.iter(f"{SVG}text")]
    assert sorted(filter(None, boxes)) == sorted(label for layer in LAYERS[name] for label in layer)
    lines = [title.text for title in drawing.iter(f"{SVG}title")]
    assert sorted(filter(None, lines)) == sorted(
        f"{edge.replace('>', ' to ')}: {kind}" for kind, edges in BY_HAND[name].items() for edge in edges.split()
    )
    assert {element.tag.removeprefix(SVG) for element in drawing.iter()} <= {
        *("svg", "rect", "marker", "path", "title", "g", "text")
    }


def test_no_drawing_is_left_over() -> None:
    assert {path.name for path in PICTURES.glob("*.svg")} == {f"{name}.svg" for name in GRAPHS} | set(pictures())
