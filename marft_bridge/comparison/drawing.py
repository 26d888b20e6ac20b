"""Numbers -> positions on an axis, its ticks, and the SVG strip that shows an interval beside a reference line.

Pure functions from numbers to escaped markup. Colours come from the page through CSS classes. A strip takes any
width: it is stretched, its strokes are not, and its labels are the page's own text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

Interval = tuple[float, float]

_STROKED = 'vector-effect="non-scaling-stroke"'


def axis_ticks(low: float, high: float, max_ticks: int) -> list[float]:
    """A range into at most `max_ticks` round values (1, 2 or 5 times a power of ten apart) inside it."""
    power = 10.0 ** math.floor(math.log10(((high - low) or 1.0) / max_ticks))

    def first_and_last(step: float) -> tuple[int, int]:
        return math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)  # in steps

    steps = (power * factor for factor in (1, 2, 5, 10))
    fitting_steps = (s for s in steps if first_and_last(s)[1] - first_and_last(s)[0] < max_ticks)
    step = next(fitting_steps, power * 20)
    first, last = first_and_last(step)
    return [i * step for i in range(first, last + 1)]


def tick_text(tick: float, ticks: Sequence[float]) -> str:
    """One of the ticks as text, with as many decimals as the distance between ticks needs."""
    step = ticks[1] - ticks[0] if len(ticks) > 1 else abs(tick) or 1.0
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    text = f"{tick:,.{decimals}f}"
    return text.removeprefix("-") if float(text.replace(",", "")) == 0 else text.replace("-", "\N{MINUS SIGN}")


@dataclass(frozen=True, slots=True)
class Scale:
    """A range of values over the width of a strip."""

    low: float
    high: float

    def position(self, value: float) -> float:
        """The position of a value, in percent of the width."""
        return 100.0 * (value - self.low) / (self.high - self.low)

    def ticks(self, max_ticks: int = 5) -> list[tuple[float, str]]:
        """Round values as (percent of the width, text)."""
        ticks = axis_ticks(self.low, self.high, max_ticks)
        return [(self.position(tick), tick_text(tick, ticks)) for tick in ticks]


def scale_over(values: Iterable[float]) -> Scale:
    """At least one value into the scale that shows all of them with room at both ends."""
    numbers = list(values)
    low, high = min(numbers), max(numbers)
    pad = 0.08 * (high - low) or 0.5
    return Scale(low - pad, high + pad)


def strip(
    scale: Scale,
    estimate: float,
    *,
    reference: float,
    inner: Interval | None = None,
    outer: Interval | None = None,
) -> Markup:
    """An SVG: the estimate as a dot, `inner` as a bar, the wider `outer` as a thin line, over a reference line.

    It is hidden from screen readers: the page gives the same numbers as text beside it.
    """
    parts = [
        Markup('<line class="reference" {stroked} x1="{x:.2f}" x2="{x:.2f}" y1="0" y2="28"/>').format(
            stroked=Markup(_STROKED),  # noqa: S704 - a constant
            x=scale.position(reference),
        )
    ]
    shapes = [("whisker", outer), ("interval", inner), ("estimate", (estimate, estimate))]
    for name, bounds in shapes:
        if bounds is not None:
            start, stop = scale.position(bounds[0]), scale.position(bounds[1])
            parts.append(
                Markup('<path class="{name}" {stroked} d="M{start:.2f} 14H{stop:.2f}"/>').format(
                    name=name,
                    stroked=Markup(_STROKED),  # noqa: S704 - a constant
                    start=start,
                    stop=max(stop, start + 0.01),  # a line without length is not drawn by all browsers
                )
            )
    return Markup(
        '<svg xmlns="http://www.w3.org/2000/svg" class="strip" viewBox="0 0 100 28" preserveAspectRatio="none" '
        'aria-hidden="true">{}</svg>'
    ).format(Markup("").join(parts))


def drawing(parts: Sequence[Markup], width: int, height: int, name: str, title: str, description: str) -> Markup:
    """A picture with a title and a description for screen readers; `name` begins their ids. Sizes in CSS pixels."""
    return Markup(
        '<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {w} {h}" width="{w}" height="{h}" '
        'aria-labelledby="{n}-title {n}-desc"><title id="{n}-title">{title}</title>'
        '<desc id="{n}-desc">{description}</desc>{parts}</svg>'
    ).format(w=width, h=height, n=name, title=title, description=description, parts=Markup("").join(parts))
