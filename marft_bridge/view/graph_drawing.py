"""A trajectory -> its dependency function D as a layered graph: an inline SVG.

Nodes are actions, labelled node@version, later ones further down and parallel ones side by side. The tools that an
action called are a transition of the environment between it and whoever read their results. Each kind of edge has a
stroke of its own. A pair that follows from others (i -> k where i -> j -> k) is an arc at the side, and beyond a
number of them they are counted instead.

Pure: equal trajectories give equal text. Names are escaped and made visible. Colours come from CSS classes; the
drawing brings its own rules where `standalone` asks for them, so that a page of documentation can hold it. It does not
know where trajectories come from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from markupsafe import Markup

from marft_bridge.comparison.wording import visible
from marft_bridge.view.layers import Placed, place_layers
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
_LETTER = 7.0  # estimated px of a letter of 12 px
_LONGEST = 24  # letters of a label
_HALF = 22.0  # half the height of an action
_ROW, _GAP, _EDGE = 92.0, 18.0, 12.0
_MOST_ARCS = 24
_PORT = 20.0  # px between the lines of two neighbours at one end
_LEGEND_ROW = 18.0


class _Pair(NamedTuple):
    """Two vertices with the kinds of their edges, and whether each is exact."""

    src: int
    dst: int
    kinds: tuple[tuple[EdgeKind, bool], ...]


def trajectory_to_svg(
    trajectory: Trajectory,
    tools: Mapping[str, Sequence[str]] | None = None,
    *,
    name: str = "d",
    link: Callable[[Action], str] | None = None,
    shade: Mapping[str, str] | None = None,
    standalone: bool = False,
) -> Markup:
    """The drawing. Its letters keep their size: show it at its own width, and let the page scroll around it.

    Args:
        tools: action id -> names of the tools that it called, in order; those of a `tool` edge say "tools" without it.
        name: begins the ids inside the drawing; different for each drawing of one page.
        link: an action to the address that its node leads to.
        shade: action id -> a further CSS class of its node.
        standalone: whether the drawing brings its own colours.
    """
    board = _Board(trajectory, tools or {})
    placed = board.placed
    arcs = board.follows[:_MOST_ARCS]
    side = max((_bulge(placed, pair) for pair in arcs), default=0.0)
    kinds = [kind for kind in KINDS if any(edge.kind == kind for edge in trajectory.edges)]
    notes = list(_notes(board, len(arcs)))
    needed = max((_LETTER * len(text) + 46 for text in (*(KINDS[kind] for kind in kinds), *notes)), default=0.0)
    width = max(placed.width + side, needed, 120.0) + 2 * _EDGE
    shift = (width - placed.width - side) / 2
    legend = placed.height + 2 * _EDGE + 6
    height = legend + _LEGEND_ROW * (len(kinds) + len(notes)) + 4
    parts = [
        *(_tip(name, kind) for kind in kinds),
        Markup('<g transform="translate({:.1f} {:.1f})">').format(shift, _EDGE),
        *(_arc(board, name, pair) for pair in arcs),
        *(line for pair in board.direct for line in _lines(board, name, pair)),
        *_actions(board, link, shade or {}),
        *_environment(board),
        Markup("</g>"),
        *_legend(kinds, notes, legend),
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


class _Board:
    """Actions and transitions of the environment as one graph, numbered in a topological order, with places."""

    def __init__(self, trajectory: Trajectory, tools: Mapping[str, Sequence[str]]) -> None:
        self.tools = tools
        number = {action.action_id: i for i, action in enumerate(trajectory.actions)}
        pairs: dict[tuple[int, int], list[tuple[EdgeKind, bool]]] = {}
        for edge in trajectory.edges:
            pairs.setdefault((number[edge.src], number[edge.dst]), []).append((edge.kind, edge.exact))
        reduced = transitive_reduction(len(number), pairs)
        # A vertex is an action, or the environment right after the action whose tools it ran.
        calling = {src for (src, _), kinds in pairs.items() if any(kind == "tool" for kind, _ in kinds)}
        calling |= {number[action_id] for action_id in tools if action_id in number}
        self.vertices: list[tuple[Action, bool]] = []
        of_action, of_tools = {}, {}
        for i, action in enumerate(trajectory.actions):
            of_action[i] = len(self.vertices)
            self.vertices.append((action, False))
            if i in calling:
                of_tools[i] = len(self.vertices)
                self.vertices.append((action, True))
        self.direct, self.follows = [], []
        for i, at in of_tools.items():
            self.direct.append(_Pair(of_action[i], at, (("tool", True),)))
        for (src, dst), kinds in sorted(pairs.items()):
            pair = _Pair(
                of_action[src], of_action[dst], tuple(sorted(kinds, key=lambda kind: list(KINDS).index(kind[0])))
            )
            if dst not in reduced[src]:
                self.follows.append(pair)
                continue
            through = tuple(kind for kind in pair.kinds if kind[0] == "tool")
            others = tuple(kind for kind in pair.kinds if kind[0] != "tool")
            if through:
                self.direct.append(_Pair(of_tools[src], of_action[dst], through))
            if others:
                self.direct.append(_Pair(pair.src, pair.dst, others))
        self.widths = [_width(self.label(i)) for i in range(len(self.vertices))]
        links = [(pair.src, pair.dst) for pair in self.direct]
        self.placed = place_layers(self.widths, links, row=_ROW, gap=_GAP, half=_HALF)
        self.ports = self._ports(links)

    def _ports(self, links: Sequence[tuple[int, int]]) -> dict[tuple[int, int], tuple[float, float]]:
        """How far from the middle of its two ends each link begins and ends, so that arrows do not meet."""
        starts: dict[tuple[int, int], float] = {}
        ends: dict[tuple[int, int], float] = {}
        for at, found, near, otherwise in ((0, starts, 0, 1), (1, ends, -1, 0)):
            by_vertex: dict[int, list[tuple[float, tuple[int, int]]]] = {}
            for pair in links:
                through = self.placed.through[pair]
                x = through[near] if through else self.placed.centre[pair[otherwise]][0]
                by_vertex.setdefault(pair[at], []).append((x, pair))
            for vertex, meeting in by_vertex.items():
                apart = min(_PORT, 0.8 * self.widths[vertex] / len(meeting))
                for i, (_, pair) in enumerate(sorted(meeting)):
                    found[pair] = apart * (i - (len(meeting) - 1) / 2)
        return {pair: (starts[pair], ends[pair]) for pair in links}

    def label(self, vertex: int) -> str:
        """What is written on a vertex."""
        action, environment = self.vertices[vertex]
        if not environment:
            return _action_label(action)
        called = list(self.tools.get(action.action_id, ()))
        names = [f"{tool} ×{called.count(tool)}" if called.count(tool) > 1 else tool for tool in dict.fromkeys(called)]
        return _short(", ".join(names) or "tools")


def _action_label(action: Action) -> str:
    version = "" if action.adapter_version is None else f"@{action.adapter_version}"
    return _short(action.node or "outside any node", _LONGEST - len(version)) + version


def _short(text: str, most: int = _LONGEST) -> str:
    return visible(text if len(text) <= most else text[: most - 1] + "…")


def _width(label: str) -> float:
    return max(96.0, _LETTER * len(label) + 22)


def _actions(board: _Board, link: Callable[[Action], str] | None, shade: Mapping[str, str]) -> Iterator[Markup]:
    for i, (action, environment) in enumerate(board.vertices):
        if environment:
            continue
        x, y = board.placed.centre[i]
        tokens = action.sampled_tokens if action.sampled_ids is None else len(action.sampled_ids)
        small = f"#{action.index}" + ("" if tokens is None else f" · {tokens} token{'' if tokens == 1 else 's'}")
        title = f"#{action.index} {visible(action.node)}, {visible(action.adapter or action.model or 'unknown model')}"
        drawn = Markup(
            '<g class="d-action{kind}"><title>{title}</title><rect x="{left:.1f}" y="{top:.1f}" width="{w:.1f}" '
            'height="{h:.1f}" rx="7"/><text x="{x:.1f}" y="{up:.1f}" text-anchor="middle">{label}</text>'
            '<text class="d-small" x="{x:.1f}" y="{down:.1f}" text-anchor="middle">{small}</text></g>'
        ).format(
            kind=("" if action.trainable else " d-frozen")
            + (f" {own}" if (own := shade.get(action.action_id)) else ""),
            title=title if action.trainable else f"{title}; not trainable: {visible(action.untrainable_reason or '')}",
            left=x - board.widths[i] / 2,
            top=y - _HALF,
            w=board.widths[i],
            h=2 * _HALF,
            x=x,
            up=y - 3,
            down=y + 13,
            label=board.label(i),
            small=small,
        )
        yield drawn if link is None else Markup('<a href="{}">{}</a>').format(link(action), drawn)


def _environment(board: _Board) -> Iterator[Markup]:
    for i, (action, environment) in enumerate(board.vertices):
        if not environment:
            continue
        x, y = board.placed.centre[i]
        called = ", ".join(board.tools.get(action.action_id, ())) or "tools whose names are not recorded"
        yield Markup(
            '<g class="d-environment"><title>environment: {title}</title><rect x="{left:.1f}" y="{top:.1f}" '
            'width="{w:.1f}" height="{h:.1f}" rx="22"/>'
            '<text x="{x:.1f}" y="{base:.1f}" text-anchor="middle">{label}</text></g>'
        ).format(
            title=visible(called[:500]),
            left=x - board.widths[i] / 2,
            top=y - _HALF,
            w=board.widths[i],
            h=2 * _HALF,
            x=x,
            base=y + 4,
            label=board.label(i),
        )


def _lines(board: _Board, name: str, pair: _Pair) -> Iterator[Markup]:
    """One line per kind, side by side."""
    placed, ports = board.placed, board.ports[pair.src, pair.dst]
    (x0, y0), (x1, y1) = placed.centre[pair.src], placed.centre[pair.dst]
    for i, (kind, exact) in enumerate(pair.kinds):
        aside = 9.0 * (i - (len(pair.kinds) - 1) / 2)
        x, y = x0 + ports[0] + aside, y0 + _HALF
        path = f"M{x:.1f} {y:.1f}"
        for step, passed in enumerate(placed.through[pair.src, pair.dst], start=1):
            over, top = passed + aside, y0 + step * placed.row - _HALF
            path += _bend((x, y), (over, top)) + f"V{top + 2 * _HALF:.1f}"
            x, y = over, top + 2 * _HALF
        path += _bend((x, y), (x1 + ports[1] + aside, y1 - _HALF - 1))
        yield _path(path, name, kind, "" if exact else " d-bound", _about(kind, exact))


def _bend(start: tuple[float, float], end: tuple[float, float]) -> str:
    middle = (start[1] + end[1]) / 2
    return f"C{start[0]:.1f} {middle:.1f} {end[0]:.1f} {middle:.1f} {end[0]:.1f} {end[1]:.1f}"


def _arc(board: _Board, name: str, pair: _Pair) -> Markup:
    """A pair that follows from others, past everything between its ends on the right."""
    (x0, y0), (x1, y1) = board.placed.centre[pair.src], board.placed.centre[pair.dst]
    x0, x1 = x0 + board.widths[pair.src] / 2, x1 + board.widths[pair.dst] / 2
    out = board.placed.width + _bulge(board.placed, pair)
    path = f"M{x0:.1f} {y0 + 5:.1f}C{out:.1f} {y0 + 5:.1f} {out:.1f} {y1 - 5:.1f} {x1 + 1:.1f} {y1 - 5:.1f}"
    about = ", ".join(_about(*kind) for kind in pair.kinds)
    return _path(path, name, pair.kinds[0][0], " d-follows", f"{about}; it follows from the others")


def _bulge(placed: Placed, pair: _Pair) -> float:
    return min(160.0, 24.0 + 12.0 * (placed.layer[pair.dst] - placed.layer[pair.src]))


def _about(kind: EdgeKind, exact: bool) -> str:
    return kind if exact else f"{kind}, an upper bound: it may have"


def _path(path: str, name: str, kind: EdgeKind, further: str, about: str) -> Markup:
    return Markup(
        '<path class="d-edge d-{kind}{further}" d="{path}" marker-end="url(#{name}-{kind})"><title>{about}</title>'
        "</path>"
    ).format(kind=kind, further=further, path=path, name=name, about=about)


def _tip(name: str, kind: EdgeKind) -> Markup:
    return Markup(
        '<marker id="{name}-{kind}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="9" markerHeight="9" '
        'markerUnits="userSpaceOnUse" orient="auto"><path class="d-tip-{kind}" d="M0 1L10 5L0 9z"/></marker>'
    ).format(name=name, kind=kind)


def _notes(board: _Board, arcs: int) -> Iterator[str]:
    if arcs:
        yield "arcs at the side follow from the other lines"
    if len(board.follows) > arcs:
        yield f"{len(board.follows) - arcs} more pairs that follow are left out"


def _legend(kinds: Sequence[EdgeKind], notes: Sequence[str], top: float) -> Iterator[Markup]:
    for i, kind in enumerate(kinds):
        y = top + _LEGEND_ROW * (i + 0.5)
        yield Markup(
            '<path class="d-edge d-{kind}" d="M{left:.1f} {y:.1f}h32"/>'
            '<text class="d-small" x="{x:.1f}" y="{base:.1f}">{text}</text>'
        ).format(kind=kind, left=_EDGE, y=y, x=_EDGE + 40, base=y + 4, text=KINDS[kind])
    for i, note in enumerate(notes, start=len(kinds)):
        yield Markup('<text class="d-small" x="{:.1f}" y="{:.1f}">{}</text>').format(
            _EDGE, top + _LEGEND_ROW * (i + 0.5) + 4, note
        )
