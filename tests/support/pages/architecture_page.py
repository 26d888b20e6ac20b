"""docs/architecture.md: a picture of which folder imports which, and a table of the folders, from the source.

`make pages` writes docs/pictures/rooms.svg and trainers.svg, and fills in the tables. An arrow that follows from others
is left out (transitive reduction). Invariant: the same imports give the same bytes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence

from marft_bridge.view.graph_layout import graph_to_layout
from support.floors import FLOORS, arrows_between_rooms
from support.paths import ROOT

PAGE = ROOT / "docs/architecture.md"
PICTURES = ROOT / "docs/pictures"
BEGIN, END = "<!-- rendered: {} -->\n", "<!-- end -->\n"
DRAWN = {"rooms": "marft_bridge", "trainers": "trainers"}  # picture -> the package whose folders it shows

HALF_HEIGHT, ROW_HEIGHT, GAP, LETTER = 15.0, 58.0, 26.0, 7.4  # px
MARGIN = 24.0
INK, LINE, GROUND, BORDER = "#0f172a", "#64748b", "#f8fafc", "#cbd5e1"


def folders_of(package: str) -> list[str]:
    """The folders and root modules of a package from the top floor down; other packages as one box each."""
    own = [room for floor in FLOORS for room in floor.split() if room.startswith(f"{package}.")]
    return [*own, *(["trainers"] if package == "marft_bridge" else []), "trace_store"]


def links_of(package: str) -> set[tuple[str, str]]:
    """Which folder imports which, without the arrows that follow from others."""
    boxes = folders_of(package)

    def box_of(room: str) -> str:
        return room if room in boxes else room.partition(".")[0]

    links = {(box_of(room), box_of(target)) for _, room, target in arrows_between_rooms()}
    return reduced(
        {(source, target) for source, target in links if {source, target} <= set(boxes) and source != target}
    )


def reduced(links: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """The fewest links of an acyclic graph from which the others follow."""
    targets: dict[str, set[str]] = {}
    for source, target in links:
        targets.setdefault(source, set()).add(target)

    def reachable(node: str) -> set[str]:
        return set().union(*({near} | reachable(near) for near in targets.get(node, ())))

    return {
        (source, target)
        for source, target in links
        if not any(target in reachable(near) for near in targets[source] - {target})
    }


def picture(package: str) -> str:
    """The folders of a package as a drawing that stands on a ground of its own, light in any scheme."""
    boxes, links = folders_of(package), links_of(package)
    number = {name: index for index, name in enumerate(boxes)}
    labels = [label_of(name, package) for name in boxes]
    widths = [LETTER * len(label) + 26 for label in labels]
    pairs = sorted((number[source], number[target]) for source, target in links)
    layout = graph_to_layout(widths, pairs, row_height=ROW_HEIGHT, gap=GAP, half_height=HALF_HEIGHT)
    width, height = layout.width + 2 * MARGIN, layout.height + 2 * MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" font-family="ui-sans-serif, system-ui, sans-serif" font-size="13">',
        f"<title>Folders of {package}; an arrow means: imports</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 L8 4 L0 8 z" fill="{LINE}"/></marker></defs>',
        f'<rect width="{width:.0f}" height="{height:.0f}" rx="8" fill="{GROUND}" stroke="{BORDER}"/>',
        *(line(pair, layout.centres, layout.waypoints_x[pair], layout.layers) for pair in pairs),
        *(box(label, wide, centre) for label, wide, centre in zip(labels, widths, layout.centres, strict=True)),
        "</svg>\n",
    ]
    return "\n".join(parts)


def line(
    pair: tuple[int, int], centres: Sequence[tuple[float, float]], waypoints_x: Sequence[float], layers: Sequence[int]
) -> str:
    """A link from the lower edge of its source, through its waypoints, to the upper edge of its target."""
    source, target = pair
    (x, y), (end_x, end_y) = centres[source], centres[target]
    first_layer = layers[source] + 1
    inner = [(way_x, HALF_HEIGHT + ROW_HEIGHT * (first_layer + k)) for k, way_x in enumerate(waypoints_x)]
    points = [(x, y + HALF_HEIGHT), *inner, (end_x, end_y - HALF_HEIGHT)]
    path = " ".join(f"{px + MARGIN:.1f},{py + MARGIN:.1f}" for px, py in points)
    return f'<polyline points="{path}" fill="none" stroke="{LINE}" marker-end="url(#tip)"/>'


def box(label: str, width: float, centre: tuple[float, float]) -> str:
    """A folder."""
    x, y = centre[0] + MARGIN, centre[1] + MARGIN
    return (
        f'<g><rect x="{x - width / 2:.1f}" y="{y - HALF_HEIGHT:.1f}" width="{width:.1f}" '
        f'height="{2 * HALF_HEIGHT:.1f}" rx="6" fill="#ffffff" stroke="{BORDER}"/>'
        f'<text x="{x:.1f}" y="{y + 4.5:.1f}" text-anchor="middle" fill="{INK}">{label}</text></g>'
    )


def label_of(room: str, package: str) -> str:
    """`marft_bridge.rollouts.ray` -> rollouts/ray; a module ends in .py; a package that is not drawn in a slash."""
    name = room.removeprefix(f"{package}.").replace(".", "/")
    return f"{name}.py" if (ROOT / f"{room.replace('.', '/')}.py").is_file() else f"{name}/"


def table(package: str) -> Iterator[str]:
    """A row for each folder: what its `__init__` says it turns into what."""
    yield "\n| folder | |\n|---|---|\n"
    for room in folders_of(package):
        if room.startswith(f"{package}."):
            yield f"| `{label_of(room, package)}` | {sentence_of(room)} |\n"
    yield "\n"


def sentence_of(room: str) -> str:
    """The first sentence of a folder's or module's docstring."""
    path = ROOT / room.replace(".", "/")
    source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    opening = (ast.get_docstring(ast.parse(source)) or "").split("\n\n")[0]
    return " ".join(opening.split()).replace("|", "\\|")


def rendered() -> Mapping[str, str]:
    """The parts of the page by name."""
    return {name: "".join(table(package)) for name, package in DRAWN.items()}


def filled(page: str) -> str:
    """The page with the tables as the folders are now."""
    for name, text in rendered().items():
        start, begin, rest = page.partition(BEGIN.format(name))
        assert begin, f"docs/architecture.md has no place for {name}"
        _, end, tail = rest.partition(END)
        page = start + begin + text + end + tail
    return page


def pictures() -> dict[str, str]:
    """File name -> drawing."""
    return {f"{name}.svg": picture(package) for name, package in DRAWN.items()}


def write() -> None:
    """Fills in docs/architecture.md and draws its pictures."""
    PAGE.write_text(filled(PAGE.read_text()))
    for name, drawing in pictures().items():
        (PICTURES / name).write_text(drawing)
