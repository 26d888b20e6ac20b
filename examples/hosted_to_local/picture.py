"""What `marft-bridge plan --json` says -> an SVG: each node in the plan's order, before and after its probe.

    marft-bridge plan hosted.duckdb --model smollm2-135m --prices prices.toml --json > plan.json
    python -m examples.hosted_to_local.picture plan.json plan.svg

Invariant: nothing is drawn that the plan does not say; a node that was not probed has a row without dots.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup

from marft_bridge.common.printable import text_to_line
from marft_bridge.comparison.drawing import Scale, axis_ticks, scale_over, tick_text
from marft_bridge.move_plan.proposal import LIKELY_NATS

Point = tuple[float, float]  # px

_WIDTH, _ROW, _TOP, _BOTTOM = 860, 44, 46, 46  # px
_NATS, _COST = (210.0, 600.0), (660.0, 760.0)  # where the two columns begin and end
_STYLE = (
    "text{font:13px sans-serif;fill:#333}.quiet{fill:#667}.name{font-weight:bold}.grid{stroke:#ddd}"
    ".limit{stroke:#a52;stroke-dasharray:4 3}.gain{stroke:#8ab;stroke-width:2}"
    ".whisker{stroke:#258;opacity:.5;stroke-width:5}"
    ".before{fill:#fff;stroke:#258;stroke-width:2}.after{fill:#258}.cost{fill:#b9c6d6}"
)


def plan_to_svg(plan: Mapping[str, Any]) -> str:
    """The value of `plan --json` as one drawing that stands alone."""
    nodes = {node["node"]: node for node in plan["nodes"]}
    rows = [(proposed, nodes[proposed["node"]]) for proposed in plan["proposal"]]
    probes = [probe for _, node in rows if (probe := (node["local"] or {}).get("probe"))]
    bounds = [value for probe in probes for key in ("before", "after") for value in _bounds(probe[key])]
    drawing = _Drawing(scale_over([0.0, LIKELY_NATS, *bounds]), sum(map(_cost, nodes.values())))
    height = _TOP + _ROW * len(rows) + _BOTTOM
    parts = [*drawing.axes(height)]
    for position, (proposed, node) in enumerate(rows):
        parts += drawing.row(proposed, node, _TOP + _ROW * (position + 0.5))
    return str(
        Markup(
            '<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {w} {h}" width="{w}" height="{h}">\n'
            "<title>The plan: each node, how likely the local model finds its answers before and after the probe, and "
            'its share of the cost</title>\n<style>{style}</style>\n<rect width="{w}" height="{h}" fill="#fff"/>\n'
            "{parts}</svg>\n"
        ).format(w=_WIDTH, h=height, style=Markup(_STYLE), parts=Markup("\n").join(parts))  # noqa: S704 - a constant
    )


def plan_to_lines(plan: Mapping[str, Any]) -> list[str]:
    """The proposal for the terminal: "1. router: first, likely after the probe, weight 0.42"."""
    return [
        text_to_line(f"{_to_name(proposed)}: {proposed['move']}" + "".join(f", {why}" for why in proposed["reasons"]))
        for proposed in plan["proposal"]
    ]


def _to_name(proposed: Mapping[str, Any]) -> str:
    return proposed["node"] if proposed["place"] is None else f"{proposed['place']}. {proposed['node']}"


class _Drawing:
    """Two columns over all rows: nats a token, and the share of what all nodes cost."""

    def __init__(self, nats: Scale, cost: float) -> None:
        self._nats, self._all_costs = nats, cost

    def x(self, nats: float) -> float:
        return _NATS[0] + self._nats.position(nats) / 100 * (_NATS[1] - _NATS[0])

    def axes(self, height: int) -> Iterator[Markup]:
        """Grid, ticks, and what the columns are."""
        bottom = height - _BOTTOM
        ticks = axis_ticks(self._nats.low, self._nats.high, 6)
        for tick in (tick for tick in ticks if tick >= 0):
            yield _line("grid", (self.x(tick), _TOP), (self.x(tick), bottom))
            yield _text("quiet", (self.x(tick), bottom + 18), tick_text(tick, ticks), anchor="middle")
        yield _line("limit", (self.x(LIKELY_NATS), _TOP), (self.x(LIKELY_NATS), bottom))
        yield _text("quiet", (self.x(LIKELY_NATS), bottom + 36), "likelier than not", anchor="middle")
        yield _text("quiet", (12, 22), "the plan's order")
        yield _text("quiet", (_NATS[0], 22), "nats a token, held out: bare (hollow), after the probe (filled, 95%)")
        yield _text("quiet", (_COST[0], 22), "share of the cost")

    def row(self, proposed: Mapping[str, Any], node: Mapping[str, Any], y: float) -> Iterator[Markup]:
        """One node."""
        yield _text("name", (12, y - 2), _to_name(proposed))
        yield _text("quiet", (12, y + 14), proposed["move"])
        if probe := (node["local"] or {}).get("probe"):
            before, after = probe["before"]["mean"], probe["after"]["mean"]
            after_bounds = _bounds(probe["after"])
            yield _line("gain", (self.x(before), y), (self.x(after), y))
            yield _line("whisker", (self.x(min(after_bounds)), y), (self.x(max(after_bounds)), y))
            yield _dot("before", (self.x(before), y))
            yield _dot("after", (self.x(after), y))
            yield _text("quiet", (self.x(max(before, *after_bounds)) + 10, y + 5), f"{before:.2f} to {after:.2f}")
        if self._all_costs:
            share = _cost(node) / self._all_costs
            width = share * (_COST[1] - _COST[0])
            bar = Markup('<rect class="cost" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="14"/>')
            yield bar.format(_COST[0], y - 7, width)
            yield _text("quiet", (_COST[0] + width + 8, y + 5), f"{share:.0%}")


def _cost(node: Mapping[str, Any]) -> float:
    """What a node's calls cost; 0 where no price is known, and of several currencies, which do not add up."""
    costs = list(node["usage"]["costs"].values())
    return float(costs[0]) if len(costs) == 1 else 0.0


def _bounds(interval: Mapping[str, float | None]) -> list[float]:
    return [value for value in (interval["low"], interval["mean"], interval["high"]) if value is not None]


def _line(kind: str, start: Point, end: Point) -> Markup:
    return Markup('<line class="{}" x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}"/>').format(kind, *start, *end)


def _text(kind: str, start: Point, text: str, *, anchor: str = "start") -> Markup:
    return Markup('<text class="{}" x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(
        kind, *start, anchor, text
    )


def _dot(kind: str, centre: Point) -> Markup:
    return Markup('<circle class="{}" cx="{:.1f}" cy="{:.1f}" r="5"/>').format(kind, *centre)


def main() -> None:
    """Draws a plan."""
    parser = argparse.ArgumentParser(prog="python -m examples.hosted_to_local.picture", description=__doc__)
    parser.add_argument("plan", type=Path, help="what `marft-bridge plan --json` printed")
    parser.add_argument("svg", type=Path, help="the file to write")
    given = parser.parse_args()
    plan = json.loads(given.plan.read_text(encoding="utf-8"))
    given.svg.write_text(plan_to_svg(plan), encoding="utf-8")
    for line in plan_to_lines(plan):
        print(line)


if __name__ == "__main__":
    main()
