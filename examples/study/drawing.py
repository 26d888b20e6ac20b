"""Learning curves of a study -> one SVG: a panel for each condition, in front of the one they are held against.

Pure functions from numbers to escaped markup. The drawing brings its own colours, since it stands alone beside a
Markdown page. It knows nothing of runs or files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

from marft_bridge.comparison.drawing import axis_ticks

_COLUMNS, _WIDTH, _HEIGHT = 4, 240, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 34.0, 12.0, 30.0, 34.0

_STYLE = (
    "text{font:12px sans-serif;fill:#333}.name{font-weight:bold}.grid{stroke:#ddd}"
    ".seed{fill:none;stroke:#8ab;opacity:.7}.band{fill:#258;opacity:.15}.mean{fill:none;stroke:#258;stroke-width:2.5}.other{fill:none;stroke:#999;"
    "stroke-width:1.5;stroke-dasharray:4 3}"
)


@dataclass(frozen=True, slots=True)
class Panel:
    """One condition: its mean curve, its interval where there is one, and a curve for each seed, all over x."""

    name: str
    x: Sequence[float]
    mean: Sequence[float]
    bounds: Sequence[tuple[float, float] | None] = ()
    seeds: Mapping[int, Sequence[float]] = field(default_factory=dict)


def panels_to_svg(panels: Sequence[Panel], reference: str) -> str:
    """Panels in their order, four in a row; `reference` names the one that is drawn dashed behind the others.

    Rewards are shown from 0 to 1; an interval that leaves this range is cut at its edge.
    """
    rows = -(-len(panels) // _COLUMNS)
    width, height = _COLUMNS * _WIDTH, rows * _HEIGHT
    most = max((max(panel.x) for panel in panels), default=1.0) or 1.0
    behind = next((panel for panel in panels if panel.name == reference), None)
    parts = [
        Markup('<g transform="translate({},{})">{}</g>\n').format(
            number % _COLUMNS * _WIDTH, number // _COLUMNS * _HEIGHT, _panel(panel, behind, most)
        )
        for number, panel in enumerate(panels)
    ]
    return str(
        Markup(
            '<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {w} {h}" width="{w}" height="{h}">\n'
            "<title>Mean reward of a round over fresh rollouts, for each condition</title>\n<style>{style}</style>\n"
            '<rect width="{w}" height="{h}" fill="#fff"/>\n{parts}</svg>\n'
        ).format(w=width, h=height, style=Markup(_STYLE), parts=Markup("").join(parts))  # noqa: S704 - a constant
    )


def _panel(panel: Panel, behind: Panel | None, most: float) -> Markup:
    def at(x: float, y: float) -> str:
        across = _LEFT + x / most * (_WIDTH - _LEFT - _RIGHT)
        return f"{across:.1f},{_HEIGHT - _BOTTOM - min(1.0, max(0.0, y)) * (_HEIGHT - _TOP - _BOTTOM):.1f}"

    def line(kind: str, x: Sequence[float], y: Sequence[float]) -> Markup:
        return Markup('<polyline class="{}" points="{}"/>').format(kind, " ".join(map(at, x, y)))

    parts = [Markup('<text class="name" x="{}" y="18">{}</text>').format(_LEFT, panel.name)]
    for tick in (0.0, 0.5, 1.0):
        (left, y), right = at(0, tick).split(","), _WIDTH - _RIGHT
        parts.append(
            Markup(
                '<line class="grid" x1="{}" x2="{}" y1="{y}" y2="{y}"/><text x="{}" y="{y}" dy="4" text-anchor="end">'
                "{}</text>"
            ).format(left, right, _LEFT - 5, f"{tick:g}", y=y)
        )
    label = Markup('<text x="{}" y="{}" text-anchor="middle">{}</text>')
    parts += [
        label.format(at(tick, 0).split(",")[0], _HEIGHT - _BOTTOM + 16, f"{tick:g}")
        for tick in axis_ticks(0.0, most, 4)
    ]
    bounds = [(x, *bound) for x, bound in zip(panel.x, panel.bounds, strict=False) if bound is not None]
    if bounds:
        there, back = [at(x, high) for x, _, high in bounds], [at(x, low) for x, low, _ in reversed(bounds)]
        parts.append(Markup('<polygon class="band" points="{}"/>').format(" ".join([*there, *back])))
    if behind is not None and behind is not panel:
        parts.append(line("other", behind.x, behind.mean))
    parts += [line("seed", panel.x, values) for _, values in sorted(panel.seeds.items())]
    parts.append(line("mean", panel.x, panel.mean))
    return Markup("").join(parts)
