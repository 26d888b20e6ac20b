"""The pictures of docs/concepts.md, drawn from recorded trajectories.

A trajectory becomes an SVG: actions in layers by the longest way along D, one line for each edge and kind, dashes for
a bound. Between two markers in the page stands the same in words. Invariant: the same trajectory gives the same bytes.
`make pages` writes both.
"""

from __future__ import annotations

from collections.abc import Iterator

from support.concept_graphs import GRAPHS, trajectory_of
from support.edge_rig import actions_to_labels, edges_of
from support.paths import ROOT
from trace_store.records import Trajectory

PAGE = ROOT / "docs/concepts.md"
PICTURES = ROOT / "docs/pictures"
BEGIN, END = "<!-- recorded: {} -->\n", "<!-- end -->\n"

WIDE, HIGH = 108, 34  # of an action's box
ACROSS, DOWN = 186, 64  # from one box to the next
KINDS = {  # kind -> colour and dashes; told apart without colour, too
    "trigger": ("#334155", ""),
    "data": ("#1d6fb8", "7 4"),
    "send": ("#12805c", "2 4"),
    "tool": ("#b45309", "9 3 2 3"),
}


def picture(trajectory: Trajectory) -> str:
    """The trajectory as a drawing that stands on a ground of its own, light in any scheme."""
    layers = layers_of(trajectory)
    most = max(map(len, layers))
    shown = [kind for kind in KINDS if any(edge.kind == kind for edge in trajectory.edges)]
    arcs = any(far - near > 1 for near, far in _spans(trajectory, layers))
    top = 66 if arcs else 28
    width = 40 + ACROSS * (len(layers) - 1) + WIDE
    height = top + DOWN * (most - 1) + HIGH + 44
    places = {
        label: (20 + ACROSS * x, top + DOWN * y + DOWN * (most - len(layer)) // 2)
        for x, layer in enumerate(layers)
        for y, label in enumerate(layer)
    }
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="ui-sans-serif, system-ui, sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" rx="8" fill="#f8fafc" stroke="#cbd5e1"/>',
        *_markers(shown),
        *_lines(trajectory, places, layers),
        *(_box(label, *place) for label, place in sorted(places.items())),
        *_legend(shown, height - 18),
        "</svg>\n",
    ]
    return "\n".join(parts)


def layers_of(trajectory: Trajectory) -> list[list[str]]:
    """Labels of actions by the length of the longest way to them along D, each layer by name."""
    labels = actions_to_labels(trajectory)
    depth = dict.fromkeys(labels, 0)
    for action in trajectory.actions:  # in an order that D allows
        above = [depth[edge.src] + 1 for edge in trajectory.edges if edge.dst == action.action_id]
        depth[action.action_id] = max(above, default=0)
    layers: list[list[str]] = [[] for _ in range(max(depth.values()) + 1)]
    for action_id, layer in depth.items():
        layers[layer].append(labels[action_id])
    return [sorted(layer) for layer in layers]


def _spans(trajectory: Trajectory, layers: list[list[str]]) -> Iterator[tuple[int, int]]:
    labels = actions_to_labels(trajectory)
    at = {label: number for number, layer in enumerate(layers) for label in layer}
    for edge in trajectory.edges:
        yield at[labels[edge.src]], at[labels[edge.dst]]


def _markers(shown: list[str]) -> Iterator[str]:
    for kind in shown:
        yield (
            f'<marker id="{kind}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0L8 4L0 8z" fill="{KINDS[kind][0]}"/></marker>'
        )


def _lines(trajectory: Trajectory, places: dict[str, tuple[int, int]], layers: list[list[str]]) -> list[str]:
    """One line for each edge: straight to the next layer, an arc over the layers between."""
    labels = actions_to_labels(trajectory)
    at = {label: number for number, layer in enumerate(layers) for label in layer}
    lines = []
    for edge in trajectory.edges:
        src, dst = labels[edge.src], labels[edge.dst]
        colour, dashes = KINDS[edge.kind]
        aside = 8 * (list(KINDS).index(edge.kind) - 1)  # so that the kinds of one pair lie beside each other
        (x1, y1), (x2, y2) = places[src], places[dst]
        if at[dst] - at[src] == 1:
            way = f"M{x1 + WIDE} {y1 + HIGH // 2 + aside}L{x2} {y2 + HIGH // 2 + aside}"
        else:
            rise = 26 + 12 * (at[dst] - at[src]) + aside
            start, stop = x1 + WIDE // 2 + 14 + aside, x2 + WIDE // 2 - 14 + aside
            way = f"M{start} {y1}C{start + 40} {y1 - rise} {stop - 40} {y2 - rise} {stop} {y2}"
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        faint = "" if edge.exact else ' opacity="0.45"'
        title = f"{src} to {dst}: {edge.kind}{'' if edge.exact else ', at most'}"
        lines.append(
            f'<path d="{way}" fill="none" stroke="{colour}" stroke-width="1.7"{dashed}{faint} '
            f'marker-end="url(#{edge.kind})"><title>{title}</title></path>'
        )
    return sorted(lines)


def _box(label: str, x: int, y: int) -> str:
    return (
        f'<g><rect x="{x}" y="{y}" width="{WIDE}" height="{HIGH}" rx="6" fill="#fff" stroke="#334155"/>'
        f'<text x="{x + WIDE // 2}" y="{y + HIGH // 2 + 5}" text-anchor="middle" fill="#0f172a">{label}</text></g>'
    )


def _legend(shown: list[str], y: int) -> Iterator[str]:
    for number, kind in enumerate(shown):
        colour, dashes = KINDS[kind]
        x = 20 + 88 * number
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        yield f'<path d="M{x} {y}h26" stroke="{colour}" stroke-width="1.7"{dashed}/>'
        yield f'<text x="{x + 32}" y="{y + 4}" font-size="12" fill="#334155">{kind}</text>'


def in_words(name: str, trajectory: Trajectory) -> str:
    """The picture and, for those who do not see it, its edges."""
    edges = edges_of(trajectory)
    rows = "".join(f"| `{kind}` | {_pairs(edges[kind])} |\n" for kind in KINDS if kind in edges)
    said = f"{len(trajectory.actions)} actions, {len(trajectory.edges)} edges"
    return f"\n![D of the recorded run: {said}](pictures/{name}.svg)\n\n| kind | edges |\n|---|---|\n{rows}\n"


def _pairs(edges: str) -> str:
    said = [edge.replace(">", " → ").replace("?", " → at most ") for edge in edges.split()]
    return ", ".join(said)


def filled(page: str, trajectories: dict[str, Trajectory]) -> str:
    """The page with each part as it was recorded now."""
    for name, trajectory in trajectories.items():
        before, begin, rest = page.partition(BEGIN.format(name))
        assert begin, f"docs/concepts.md has no place for {name}"
        _, end, after = rest.partition(END)
        page = before + begin + in_words(name, trajectory) + end + after
    return page


def write() -> None:
    """Fills in docs/concepts.md and draws its pictures."""
    recorded = {name: trajectory_of(name) for name in GRAPHS}
    PICTURES.mkdir(exist_ok=True)
    for name, trajectory in recorded.items():
        (PICTURES / f"{name}.svg").write_text(picture(trajectory))
    PAGE.write_text(filled(PAGE.read_text(), recorded))
