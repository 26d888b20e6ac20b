"""A few numbers in order -> an inline SVG of one line, as high as a line of text.

Invariant: it needs no script and no style of its own; a reader without eyes is told the first, the last, and the range.
"""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from marft_bridge.comparison.numbers import number

WIDTH, HEIGHT = 120, 28
_EDGE = 3  # px, for the dot at the end


def sparkline(values: Sequence[float]) -> Markup:
    """The line, from left to right; nothing for fewer than two numbers."""
    if len(values) < 2:
        return Markup()
    low, high = min(values), max(values)
    spread = high - low
    points = [
        (
            _EDGE + i * (WIDTH - 2 * _EDGE) / (len(values) - 1),
            HEIGHT / 2 if not spread else HEIGHT - _EDGE - (value - low) / spread * (HEIGHT - 2 * _EDGE),
        )
        for i, value in enumerate(values)
    ]
    last_x, last_y = points[-1]
    return Markup(
        '<svg class="spark" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img"'
        ' aria-label="from {first} to {last}, between {low} and {high}"><polyline points="{points}"/>'
        '<circle cx="{x}" cy="{y}" r="2.5"/></svg>'
    ).format(
        width=WIDTH,
        height=HEIGHT,
        first=number(values[0]),
        last=number(values[-1]),
        low=number(low),
        high=number(high),
        points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points),
        x=f"{last_x:.1f}",
        y=f"{last_y:.1f}",
    )
