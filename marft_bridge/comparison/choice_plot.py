"""The choices of a comparison -> an inline SVG: score against the cost of a run, the efficient ones filled and joined.

Pure functions from numbers to escaped markup, as in `curve`: colours are the page's, a drawing is made for one width.
Invariant: each choice has a number, which the table beside the drawing repeats, so that no name is drawn over another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from markupsafe import Markup

from marft_bridge.comparison.drawing import Scale, axis_ticks, drawing, scale_over, tick_text
from marft_bridge.comparison.numbers import number
from marft_bridge.comparison.records import Choice, Estimate
from marft_bridge.comparison.wording import visible

_LEFT, _RIGHT, _TOP, _BOTTOM, _HEIGHT = 52.0, 18.0, 16.0, 246.0, 292  # px


def choice_plot(choices: Sequence[Choice], *, width: int, name: str, currency: str, metric: str) -> Markup:
    """Choices into dots with the intervals of both means. `width` in CSS pixels; `name` begins the ids of the texts."""
    plot = _Plot(choices, width)
    parts = [*plot.axes(currency, metric), *plot.frontier(choices)]
    for position, choice in enumerate(choices, start=1):
        parts += plot.marks(choice, position)
    efficient = ", ".join(visible(choice.team) for choice in choices if choice.efficient)
    return drawing(
        parts,
        width,
        _HEIGHT,
        name=name,
        title=f"Mean {visible(metric)} against the mean cost of a run, with their 95% intervals",
        description=f"{len(choices)} teams; efficient by their means: {efficient}.",
    )


class _Plot:
    """The plot area: maps cost and score to px."""

    def __init__(self, choices: Sequence[Choice], width: int) -> None:
        self._width = width
        self._costs = scale_over([0.0, *(bound for choice in choices for bound in _bounds(choice.cost))])
        self._scores = scale_over(bound for choice in choices for bound in _bounds(choice.score))

    def x(self, cost: float) -> float:
        return _LEFT + self._costs.position(cost) / 100 * (self._width - _LEFT - _RIGHT)

    def y(self, score: float) -> float:
        return _BOTTOM - self._scores.position(score) / 100 * (_BOTTOM - _TOP)

    def axes(self, currency: str, metric: str) -> Iterator[Markup]:
        """Grid, ticks and what the axes are."""
        text = Markup('<text class="{}" x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>')
        line = Markup('<line class="grid" x1="{:.1f}" x2="{:.1f}" y1="{:.1f}" y2="{:.1f}"/>')
        for score, label in _ticks(self._scores, 6):
            yield line.format(_LEFT, self._width - _RIGHT, self.y(score), self.y(score))
            yield text.format("tick", _LEFT - 8, self.y(score) + 4, "end", label)
        for cost, label in _ticks(self._costs, 3 if self._width < 500 else 6):
            if cost >= 0:
                yield line.format(self.x(cost), self.x(cost), _TOP, _BOTTOM)
                yield text.format("tick", self.x(cost), _BOTTOM + 18, "middle", label)
        yield text.format("label", _LEFT, _TOP - 5, "start", f"mean {visible(metric)}")
        yield text.format("label", (_LEFT + self._width) / 2, _HEIGHT - 6, "middle", f"{visible(currency)} a run")

    def frontier(self, choices: Sequence[Choice]) -> Iterator[Markup]:
        """The line through the efficient choices, from the cheapest on."""
        efficient = sorted((c.cost.mean, c.score.mean) for c in choices if c.efficient)
        points = " ".join(f"{self.x(cost):.1f},{self.y(score):.1f}" for cost, score in efficient)
        yield Markup('<polyline class="curve" points="{}"/>').format(points)

    def marks(self, choice: Choice, position: int) -> Iterator[Markup]:
        """Both intervals, the dot and its number."""
        x, y = self.x(choice.cost.mean), self.y(choice.score.mean)
        line = Markup('<line class="whisker" x1="{:.1f}" x2="{:.1f}" y1="{:.1f}" y2="{:.1f}"/>')
        costs, scores = _bounds(choice.cost), _bounds(choice.score)
        yield line.format(self.x(costs[0]), self.x(costs[-1]), y, y)
        yield line.format(x, x, self.y(scores[0]), self.y(scores[-1]))
        tooltip = f"{visible(choice.team)}: {number(choice.score.mean)} for {number(choice.cost.mean)}"
        yield Markup('<circle class="{}" cx="{:.1f}" cy="{:.1f}" r="4.5"><title>{}</title></circle>').format(
            "marker" if choice.efficient else "marker hollow", x, y, tooltip
        )
        yield Markup('<text class="label" x="{:.1f}" y="{:.1f}">{}</text>').format(x + 8, y - 7, position)


def _ticks(scale: Scale, most: int) -> list[tuple[float, str]]:
    """Round values of a scale with their texts."""
    ticks = axis_ticks(scale.low, scale.high, most)
    return [(tick, tick_text(tick, ticks)) for tick in ticks]


def _bounds(estimate: Estimate) -> tuple[float, ...]:
    """From the lowest of an estimate to the highest; its mean alone where it has no interval."""
    known = [value for value in (estimate.low, estimate.mean, estimate.high) if value is not None]
    return tuple(known)
