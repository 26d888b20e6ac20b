"""A trajectory -> its dependency function D as a layered graph: an inline SVG.

Vertices are actions, labelled node@version, later ones further down and parallel ones side by side. The tools that an
action called are a transition of the environment between it and the actions that read their results. Each kind of edge
has a stroke of its own. A pair that follows from others (i -> k where i -> j -> k) is an arc at the side; only the
first _MAX_ARCS of them are drawn, and the rest is counted.

Invariants: equal trajectories give equal text; names are escaped and made visible. Colours come from CSS classes; with
`standalone` the drawing carries its own style sheet, so that a page of documentation can hold it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from markupsafe import Markup

from marft_bridge.comparison.wording import visible
from marft_bridge.view.graph_layout import GraphLayout, graph_to_layout
from trace_store.records import Action, EdgeKind, Trajectory
from trainers.dependencies import transitive_reduction

KINDS: dict[EdgeKind, str] = {
    "trigger": "trigger: its write made the other run",
    "send": "send: the other ran on what it sent",
    "data": "data: the other read what it wrote",
    "tool": "tool: the other read what its tools gave",
}
STYLE = """\
.d-graph text { font: 12px system-ui, "Liberation Sans", sans-serif; fill: #1d2126; }
.d-graph .d-small { font-size: 11px; fill: #5b636d; }
.d-graph .d-action rect { fill: #ffffff; stroke: #5b636d; stroke-width: 1.3; }
.d-graph .d-frozen rect { fill: #f2f3f1; }
.d-graph .d-environment rect { fill: #f2f3f1; stroke: #7a4b9c; stroke-width: 1.2; stroke-dasharray: 4 3; }
.d-graph .d-edge { fill: none; stroke-width: 1.6; }
.d-graph .d-follows { stroke-width: 1; opacity: .45; }
.d-graph .d-bound { opacity: .6; }
.d-graph .d-trigger { stroke: #1d2126; } .d-graph .d-tip-trigger { fill: #1d2126; }
.d-graph .d-data { stroke: #1b6a9c; stroke-dasharray: 7 4; } .d-graph .d-tip-data { fill: #1b6a9c; }
.d-graph .d-send { stroke: #a8501a; stroke-dasharray: 2 3; stroke-width: 2; } .d-graph .d-tip-send { fill: #a8501a; }
.d-graph .d-tool { stroke: #7a4b9c; stroke-dasharray: 10 3 2 3; } .d-graph .d-tip-tool { fill: #7a4b9c; }
.d-graph a:focus rect, .d-graph a:hover rect { stroke-width: 2.4; }
@media (prefers-color-scheme: dark) {
  .d-graph text { fill: #e7e9eb; } .d-graph .d-small { fill: #a0a8b1; }
  .d-graph .d-action rect { fill: #1c2024; stroke: #a0a8b1; } .d-graph .d-frozen rect { fill: #24292e; }
  .d-graph .d-environment rect { fill: #24292e; stroke: #c39be0; }
  .d-graph .d-trigger { stroke: #e7e9eb; } .d-graph .d-tip-trigger { fill: #e7e9eb; }
  .d-graph .d-data { stroke: #74b9e6; } .d-graph .d-tip-data { fill: #74b9e6; }
  .d-graph .d-send { stroke: #eba06c; } .d-graph .d-tip-send { fill: #eba06c; }
  .d-graph .d-tool { stroke: #c39be0; } .d-graph .d-tip-tool { fill: #c39be0; }
}
"""
_LETTER_WIDTH = 7.0  # estimated px of a letter of 12 px
_LABEL_LETTERS = 24  # at most, in a label
_HALF_HEIGHT = 22.0  # px, half the height of an action
_ROW_HEIGHT, _GAP, _MARGIN = 92.0, 18.0, 12.0  # px
_MAX_ARCS = 24
_PORT_SPACING = 20.0  # px, at most, between neighbouring lines at one end
_LEGEND_ROW = 18.0


class _Pair(NamedTuple):
    """Two vertices with the kinds of the edges between them, and whether each is exact."""

    src: int
    dst: int
    kinds: tuple[tuple[EdgeKind, bool], ...]


def trajectory_to_svg(
    trajectory: Trajectory,
    tools: Mapping[str, Sequence[str]] | None = None,
    *,
    name: str = "d",
    link: Callable[[Action], str] | None = None,
    css_classes: Mapping[str, str] | None = None,
    standalone: bool = False,
) -> Markup:
    """The drawing. It is not scaled, so that its letters stay readable: let a wide one scroll inside the page.

    Args:
        tools: action id -> names of the tools that it called, in order; those of a `tool` edge say "tools" without it.
        name: prefix of the ids inside the drawing; different for each drawing of one page.
        link: action -> the address that its vertex links to.
        css_classes: action id -> a further CSS class of its vertex.
        standalone: whether the drawing carries its own style sheet.
    """
    graph = _LayeredGraph(trajectory, tools or {})
    layout = graph.layout
    arcs = graph.implied_pairs[:_MAX_ARCS]
    arc_width = max((_bulge(layout, pair) for pair in arcs), default=0.0)
    kinds = [kind for kind in KINDS if any(edge.kind == kind for edge in trajectory.edges)]
    notes = list(_legend_notes(graph, len(arcs)))
    legend_texts = [*(KINDS[kind] for kind in kinds), *notes]
    legend_width = max((_LETTER_WIDTH * len(text) + 46 for text in legend_texts), default=0.0)
    width = max(layout.width + arc_width, legend_width, 120.0) + 2 * _MARGIN
    shift = (width - layout.width - arc_width) / 2
    legend_top = layout.height + 2 * _MARGIN + 6
    height = legend_top + _LEGEND_ROW * (len(kinds) + len(notes)) + 4
    parts = [
        *(_draw_arrowhead(name, kind) for kind in kinds),
        Markup('<g transform="translate({:.1f} {:.1f})">').format(shift, _MARGIN),
        *(_draw_arc(graph, name, pair) for pair in arcs),
        *(line for pair in graph.direct_pairs for line in _draw_pair(graph, name, pair)),
        *_draw_actions(graph, link, css_classes or {}),
        *_draw_environments(graph),
        Markup("</g>"),
        *_draw_legend(kinds, notes, legend_top),
    ]
    actions = len(trajectory.actions)
    return Markup(
        '<svg xmlns="http://www.w3.org/2000/svg" class="d-graph" role="img" viewBox="0 0 {w:.0f} {h:.0f}" '
        'width="{w:.0f}" height="{h:.0f}" aria-labelledby="{n}-title"><title id="{n}-title">{title}</title>{style}'
        "{parts}</svg>"
    ).format(
        w=width,
        h=height,
        n=name,
        title=f"Dependencies of {actions} action{'' if actions == 1 else 's'}, {len(trajectory.edges)} edges",
        style=Markup("<style>{}</style>").format(Markup(STYLE)) if standalone else "",  # noqa: S704 - a constant
        parts=Markup("").join(parts),
    )


class _LayeredGraph:
    """Actions and transitions of the environment as one graph, numbered in a topological order, with its layout."""

    def __init__(self, trajectory: Trajectory, tools: Mapping[str, Sequence[str]]) -> None:
        self.tools = tools
        number = {action.action_id: i for i, action in enumerate(trajectory.actions)}
        pairs: dict[tuple[int, int], list[tuple[EdgeKind, bool]]] = {}
        for edge in trajectory.edges:
            pairs.setdefault((number[edge.src], number[edge.dst]), []).append((edge.kind, edge.exact))
        reduced = transitive_reduction(len(number), pairs)
        # A vertex is an action, or the environment right after the action whose tools it ran.
        callers = {src for (src, _), kinds in pairs.items() if any(kind == "tool" for kind, _ in kinds)}
        callers |= {number[action_id] for action_id in tools if action_id in number}
        self.vertices: list[tuple[Action, bool]] = []
        vertex_of_action, vertex_of_tools = {}, {}
        for i, action in enumerate(trajectory.actions):
            vertex_of_action[i] = len(self.vertices)
            self.vertices.append((action, False))
            if i in callers:
                vertex_of_tools[i] = len(self.vertices)
                self.vertices.append((action, True))
        self.direct_pairs, self.implied_pairs = [], []  # those of the transitive reduction, and all others
        for i, vertex in vertex_of_tools.items():
            self.direct_pairs.append(_Pair(vertex_of_action[i], vertex, (("tool", True),)))
        for (src, dst), kinds in sorted(pairs.items()):
            pair = _Pair(
                vertex_of_action[src],
                vertex_of_action[dst],
                tuple(sorted(kinds, key=lambda kind: list(KINDS).index(kind[0]))),
            )
            if dst not in reduced[src]:
                self.implied_pairs.append(pair)
                continue
            tool_kinds = tuple(kind for kind in pair.kinds if kind[0] == "tool")
            other_kinds = tuple(kind for kind in pair.kinds if kind[0] != "tool")
            if tool_kinds:
                self.direct_pairs.append(_Pair(vertex_of_tools[src], vertex_of_action[dst], tool_kinds))
            if other_kinds:
                self.direct_pairs.append(_Pair(pair.src, pair.dst, other_kinds))
        self.widths = [_width(self.label(i)) for i in range(len(self.vertices))]
        links = [(pair.src, pair.dst) for pair in self.direct_pairs]
        self.layout = graph_to_layout(self.widths, links, row_height=_ROW_HEIGHT, gap=_GAP, half_height=_HALF_HEIGHT)
        self.ports = self._ports(links)

    def _ports(self, links: Sequence[tuple[int, int]]) -> dict[tuple[int, int], tuple[float, float]]:
        """Link -> px from the middle of its source and of its target, so that arrows at one vertex do not meet."""
        starts: dict[tuple[int, int], float] = {}
        ends: dict[tuple[int, int], float] = {}
        for end, offsets, nearest_waypoint, opposite in ((0, starts, 0, 1), (1, ends, -1, 0)):
            by_vertex: dict[int, list[tuple[float, tuple[int, int]]]] = {}
            for pair in links:
                waypoints = self.layout.waypoints_x[pair]
                x = waypoints[nearest_waypoint] if waypoints else self.layout.centres[pair[opposite]][0]
                by_vertex.setdefault(pair[end], []).append((x, pair))
            for vertex, meeting_links in by_vertex.items():
                spacing = min(_PORT_SPACING, 0.8 * self.widths[vertex] / len(meeting_links))
                for i, (_, pair) in enumerate(sorted(meeting_links)):
                    offsets[pair] = spacing * (i - (len(meeting_links) - 1) / 2)
        return {pair: (starts[pair], ends[pair]) for pair in links}

    def label(self, vertex: int) -> str:
        """The text on a vertex: node@version of an action, the names of the tools of an environment."""
        action, environment = self.vertices[vertex]
        if not environment:
            return _action_label(action)
        tool_names = list(self.tools.get(action.action_id, ()))
        names = [
            f"{tool} ×{tool_names.count(tool)}" if tool_names.count(tool) > 1 else tool
            for tool in dict.fromkeys(tool_names)
        ]
        return _truncate(", ".join(names) or "tools")


def _action_label(action: Action) -> str:
    version = "" if action.adapter_version is None else f"@{action.adapter_version}"
    return _truncate(action.node or "outside any node", _LABEL_LETTERS - len(version)) + version


def _truncate(text: str, limit: int = _LABEL_LETTERS) -> str:
    return visible(text if len(text) <= limit else text[: limit - 1] + "…")


def _width(label: str) -> float:
    return max(96.0, _LETTER_WIDTH * len(label) + 22)


def _draw_actions(
    graph: _LayeredGraph, link: Callable[[Action], str] | None, css_classes: Mapping[str, str]
) -> Iterator[Markup]:
    for i, (action, environment) in enumerate(graph.vertices):
        if environment:
            continue
        x, y = graph.layout.centres[i]
        tokens = action.sampled_tokens if action.sampled_ids is None else len(action.sampled_ids)
        details = f"#{action.index}" + ("" if tokens is None else f" · {tokens} token{'' if tokens == 1 else 's'}")
        title = f"#{action.index} {visible(action.node)}, {visible(action.adapter or action.model or 'unknown model')}"
        box = Markup(
            '<g class="d-action{kind}"><title>{title}</title><rect x="{left:.1f}" y="{top:.1f}" width="{w:.1f}" '
            'height="{h:.1f}" rx="7"/><text x="{x:.1f}" y="{up:.1f}" text-anchor="middle">{label}</text>'
            '<text class="d-small" x="{x:.1f}" y="{down:.1f}" text-anchor="middle">{details}</text></g>'
        ).format(
            kind=("" if action.trainable else " d-frozen")
            + (f" {css_class}" if (css_class := css_classes.get(action.action_id)) else ""),
            title=title if action.trainable else f"{title}; not trainable: {visible(action.untrainable_reason or '')}",
            left=x - graph.widths[i] / 2,
            top=y - _HALF_HEIGHT,
            w=graph.widths[i],
            h=2 * _HALF_HEIGHT,
            x=x,
            up=y - 3,
            down=y + 13,
            label=graph.label(i),
            details=details,
        )
        yield box if link is None else Markup('<a href="{}">{}</a>').format(link(action), box)


def _draw_environments(graph: _LayeredGraph) -> Iterator[Markup]:
    for i, (action, environment) in enumerate(graph.vertices):
        if not environment:
            continue
        x, y = graph.layout.centres[i]
        tool_names = ", ".join(graph.tools.get(action.action_id, ())) or "tools whose names are not recorded"
        yield Markup(
            '<g class="d-environment"><title>environment: {title}</title><rect x="{left:.1f}" y="{top:.1f}" '
            'width="{w:.1f}" height="{h:.1f}" rx="22"/>'
            '<text x="{x:.1f}" y="{base:.1f}" text-anchor="middle">{label}</text></g>'
        ).format(
            title=visible(tool_names[:500]),
            left=x - graph.widths[i] / 2,
            top=y - _HALF_HEIGHT,
            w=graph.widths[i],
            h=2 * _HALF_HEIGHT,
            x=x,
            base=y + 4,
            label=graph.label(i),
        )


def _draw_pair(graph: _LayeredGraph, name: str, pair: _Pair) -> Iterator[Markup]:
    """One line per kind of edge, side by side, through the waypoints of the pair."""
    layout, ports = graph.layout, graph.ports[pair.src, pair.dst]
    (x0, y0), (x1, y1) = layout.centres[pair.src], layout.centres[pair.dst]
    for i, (kind, exact) in enumerate(pair.kinds):
        offset = 9.0 * (i - (len(pair.kinds) - 1) / 2)
        x, y = x0 + ports[0] + offset, y0 + _HALF_HEIGHT
        path = f"M{x:.1f} {y:.1f}"
        for step, waypoint_x in enumerate(layout.waypoints_x[pair.src, pair.dst], start=1):
            end_x, end_top = waypoint_x + offset, y0 + step * layout.row_height - _HALF_HEIGHT
            path += _curve((x, y), (end_x, end_top)) + f"V{end_top + 2 * _HALF_HEIGHT:.1f}"
            x, y = end_x, end_top + 2 * _HALF_HEIGHT
        path += _curve((x, y), (x1 + ports[1] + offset, y1 - _HALF_HEIGHT - 1))
        yield _draw_path(path, name, kind, css_class="" if exact else " d-bound", title=_kind_to_text(kind, exact))


def _curve(start: tuple[float, float], end: tuple[float, float]) -> str:
    """A cubic Bézier curve as path data; both of its ends are vertical."""
    middle = (start[1] + end[1]) / 2
    return f"C{start[0]:.1f} {middle:.1f} {end[0]:.1f} {middle:.1f} {end[0]:.1f} {end[1]:.1f}"


def _draw_arc(graph: _LayeredGraph, name: str, pair: _Pair) -> Markup:
    """A pair that follows from others, as an arc to the right of all vertices between its ends."""
    (x0, y0), (x1, y1) = graph.layout.centres[pair.src], graph.layout.centres[pair.dst]
    x0, x1 = x0 + graph.widths[pair.src] / 2, x1 + graph.widths[pair.dst] / 2
    arc_x = graph.layout.width + _bulge(graph.layout, pair)
    path = f"M{x0:.1f} {y0 + 5:.1f}C{arc_x:.1f} {y0 + 5:.1f} {arc_x:.1f} {y1 - 5:.1f} {x1 + 1:.1f} {y1 - 5:.1f}"
    title = ", ".join(_kind_to_text(*kind) for kind in pair.kinds)
    return _draw_path(
        path, name, pair.kinds[0][0], css_class=" d-follows", title=f"{title}; it follows from the others"
    )


def _bulge(layout: GraphLayout, pair: _Pair) -> float:
    """Px that the arc of a pair reaches beyond the right edge: more, the more layers it spans."""
    return min(160.0, 24.0 + 12.0 * (layout.layers[pair.dst] - layout.layers[pair.src]))


def _kind_to_text(kind: EdgeKind, exact: bool) -> str:
    return kind if exact else f"{kind}, an upper bound: it may have"


def _draw_path(path: str, name: str, kind: EdgeKind, css_class: str, title: str) -> Markup:
    return Markup(
        '<path class="d-edge d-{kind}{css_class}" d="{path}" marker-end="url(#{name}-{kind})"><title>{title}</title>'
        "</path>"
    ).format(kind=kind, css_class=css_class, path=path, name=name, title=title)


def _draw_arrowhead(name: str, kind: EdgeKind) -> Markup:
    return Markup(
        '<marker id="{name}-{kind}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="9" markerHeight="9" '
        'markerUnits="userSpaceOnUse" orient="auto"><path class="d-tip-{kind}" d="M0 1L10 5L0 9z"/></marker>'
    ).format(name=name, kind=kind)


def _legend_notes(graph: _LayeredGraph, arcs: int) -> Iterator[str]:
    if arcs:
        yield "arcs at the side follow from the other lines"
    if len(graph.implied_pairs) > arcs:
        yield f"{len(graph.implied_pairs) - arcs} more pairs that follow are left out"


def _draw_legend(kinds: Sequence[EdgeKind], notes: Sequence[str], top: float) -> Iterator[Markup]:
    for i, kind in enumerate(kinds):
        y = top + _LEGEND_ROW * (i + 0.5)
        yield Markup(
            '<path class="d-edge d-{kind}" d="M{left:.1f} {y:.1f}h32"/>'
            '<text class="d-small" x="{x:.1f}" y="{base:.1f}">{text}</text>'
        ).format(kind=kind, left=_MARGIN, y=y, x=_MARGIN + 40, base=y + 4, text=KINDS[kind])
    for i, note in enumerate(notes, start=len(kinds)):
        yield Markup('<text class="d-small" x="{:.1f}" y="{:.1f}">{}</text>').format(
            _MARGIN, top + _LEGEND_ROW * (i + 0.5) + 4, note
        )
