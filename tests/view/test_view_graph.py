"""Owns: the drawing of D.

- an action lies below everything that it depends on, and parallel ones lie side by side, none over another
- every edge is drawn: by its kind, through the environment where it is about tools, as an arc where it follows
- what there are too many of is counted, and the drawing stays bounded
- names are text, whatever they hold; equal trajectories give equal drawings
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from markupsafe import Markup
from support.sample_spans import SampleTrace

from marft_bridge.view.graph_drawing import trajectory_to_svg
from marft_bridge.view.graph_layout import graph_to_layout
from trace_store.assemble import spans_to_trajectory
from trace_store.records import Edge, Trajectory

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = '</text><script>alert(1)</script>"\u202egnp\x1b'


def fan(middle: tuple[str, ...] = ("left", "right")) -> Trajectory:
    """One action, some beside each other, one that joins them and may have read the first."""
    t = SampleTrace("f" * 32)
    t.call("first", t.node("first:1", 1, 5, step=0), 2, 4)
    for i, node in enumerate(middle):
        t.call(f"m{i}", t.node(f"{node}:m{i}", 10, 20, step=1, after=("first:1",)), 11, 19)
    after = tuple(f"{node}:m{i}" for i, node in enumerate(middle))
    t.call("last", t.node("last:1", 30, 40, step=2, after=after), 31, 39, READS_FROM=[], MAY_READ_FROM=["first:1"])
    return spans_to_trajectory(t.spans())


def with_edges(trajectory: Trajectory, *edges: tuple[str, str, str]) -> Trajectory:
    made = [Edge(trajectory.episode.episode_id, src, dst, kind) for src, dst, kind in edges]  # type: ignore[arg-type]
    return replace(trajectory, edges=(*trajectory.edges, *made))


def parsed(drawing: Markup) -> ElementTree.Element:
    return ElementTree.fromstring(str(drawing))  # noqa: S314 - our own


def boxes(drawing: Markup, kind: str = "d-action") -> dict[str, tuple[float, float, float, float]]:
    """First line of each node -> left, top, right, bottom."""
    found = {}
    for group in parsed(drawing).iter(f"{SVG}g"):
        if kind in group.get("class", "").split():
            rect, text = group.find(f"{SVG}rect"), group.find(f"{SVG}text")
            assert rect is not None
            assert text is not None
            x, y, w, h = (float(rect.get(key, "nan")) for key in ("x", "y", "width", "height"))
            found[text.text or ""] = (x, y, x + w, y + h)
    return found


def lines(drawing: Markup, further: str = "") -> list[str]:
    """The kind of every line between nodes, arcs apart."""
    paths = parsed(drawing).iter(f"{SVG}path")
    classes = [path.get("class", "").split() for path in paths if path.get("marker-end")]
    chosen = [names for names in classes if ("d-follows" in names) == (further == "d-follows")]
    return sorted(name.removeprefix("d-") for names in chosen for name in names if name[2:] in KINDS)


KINDS = ("trigger", "send", "data", "tool")


def test_an_action_lies_below_what_it_depends_on_and_parallel_ones_side_by_side() -> None:
    found = boxes(trajectory_to_svg(fan()))
    assert set(found) == {"first", "left", "right", "last"}
    assert found["first"][3] < found["left"][1] == found["right"][1] < found["left"][3] < found["last"][1]
    assert found["left"][2] < found["right"][0] or found["right"][2] < found["left"][0]


def test_every_edge_is_drawn_and_one_that_follows_from_others_as_an_arc() -> None:
    drawing = trajectory_to_svg(fan())
    assert lines(drawing) == ["trigger"] * 4
    assert lines(drawing, "d-follows") == ["data"]
    assert "data, an upper bound: it may have; it follows from the others" in drawing


def test_kinds_of_one_pair_are_lines_of_their_own() -> None:
    drawing = trajectory_to_svg(with_edges(fan(), ("first", "m0", "data"), ("first", "m0", "send")))
    assert lines(drawing) == ["data", "send", *["trigger"] * 4]


def test_tools_are_a_transition_of_the_environment_between_caller_and_reader() -> None:
    drawing = trajectory_to_svg(with_edges(fan(), ("m0", "last", "tool")), {"m0": ["find", "find", "read"]})
    environment, actions = boxes(drawing, "d-environment"), boxes(drawing)
    assert set(environment) == {"find ×2, read"}
    left, last, (tools,) = actions["left"], actions["last"], environment.values()
    assert left[3] < tools[1]
    assert tools[3] < last[1]
    assert lines(drawing).count("tool") == 2
    assert set(boxes(trajectory_to_svg(with_edges(fan(), ("m0", "last", "tool"))), "d-environment")) == {"tools"}


def test_labels_say_node_version_and_number() -> None:
    t = SampleTrace("f" * 32)
    t.call("x", t.node("actor:1", 1, 5, step=0), 2, 4, ADAPTER="actor@7", ADAPTER_VERSION=7)
    drawing = trajectory_to_svg(spans_to_trajectory(t.spans()), link=lambda action: f"#{action.action_id}")
    assert set(boxes(drawing)) == {"actor@7"}
    assert "#0 · 2 tokens" in drawing
    assert '<a href="#x">' in drawing


def test_a_hostile_name_is_text() -> None:
    trajectory = fan((HOSTILE, "b"))
    drawing = trajectory_to_svg(trajectory, {"m0": [HOSTILE]}, name="d", standalone=True)
    assert {element.tag for element in parsed(drawing).iter()} == {
        f"{SVG}{tag}" for tag in ("svg", "title", "style", "marker", "path", "g", "rect", "text")
    }
    assert "\u202e" not in drawing
    assert "\x1b" not in drawing
    assert "\\u202egnp\\x1b" in drawing


def test_a_dense_graph_stays_bounded_and_counts_what_it_leaves_out() -> None:
    t = SampleTrace("e" * 32)
    for i in range(40):  # each reads all before it: 780 pairs, of which 39 do not follow from others
        after = (f"n:{i - 1}",) if i else ()
        reads = tuple(f"n:{j}" for j in range(i))
        t.call(
            f"c{i:02}",
            t.node(f"n:{i}", 10 * i + 10, 10 * i + 18, step=i, after=after, reads=reads),
            10 * i + 11,
            10 * i + 17,
        )
    drawing = trajectory_to_svg(spans_to_trajectory(t.spans()))
    arcs = len(lines(drawing, "d-follows"))
    left_out = re.search(r"(\d+) more pairs that follow are left out", drawing)
    assert left_out is not None
    assert arcs + int(left_out[1]) == 780 - 39
    assert len(lines(drawing)) == 2 * 39  # trigger and data
    assert len(drawing) < 60_000


def test_an_episode_without_actions_and_one_alone_are_drawn() -> None:
    whole = fan()
    assert boxes(trajectory_to_svg(replace(whole, actions=(), edges=()))) == {}
    assert set(boxes(trajectory_to_svg(replace(whole, actions=whole.actions[:1], edges=())))) == {"first"}


def test_equal_trajectories_give_equal_drawings() -> None:
    assert trajectory_to_svg(fan()) == trajectory_to_svg(fan())


def test_a_link_over_several_layers_passes_between_the_nodes() -> None:
    # 0 -> 1 -> 3 -> 4 and 0 -> 2 -> 4: the link 2 -> 4 passes the layer of 3.
    layout = graph_to_layout(
        [100.0] * 5, [(0, 1), (0, 2), (1, 3), (3, 4), (2, 4)], row_height=90.0, gap=20.0, half_height=20.0
    )
    assert layout.layers == (0, 1, 1, 2, 3)
    (passing,) = layout.waypoints_x[2, 4]
    x, y = layout.centres[3]
    assert y == 20 + 2 * 90
    assert abs(passing - x) >= 50 + 20


@pytest.mark.parametrize("count", [1, 2, 7])
def test_no_two_nodes_of_a_layer_overlap(count: int) -> None:
    widths = [60.0 + 10 * i for i in range(count)]
    layout = graph_to_layout(widths, [], row_height=90.0, gap=20.0, half_height=20.0)
    spans = sorted((x - w / 2, x + w / 2) for (x, _), w in zip(layout.centres, widths, strict=True))
    assert all(right + 20 <= left + 1e-9 for (_, right), (left, _) in pairwise(spans))
    assert spans[0][0] >= 0
    assert spans[-1][1] <= layout.width
