"""Numbers into places on an axis: ticks, scales, and the strip that shows an interval beside a line of reference.

Pure functions from numbers to escaped markup. Colours come from the page through CSS classes. A strip takes any
width: it is stretched, its strokes are not, and its labels are the page's own text. It does not know the report.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

Interval = tuple[float, float]

_STROKED = 'vector-effect="non-scaling-stroke"'


def axis_ticks(low: float, high: float, most: int) -> list[float]:
    """A range into at most `most` round values (1, 2 or 5 times a power of ten apart) inside it."""
    power = 10.0 ** math.floor(math.log10(((high - low) or 1.0) / most))

    def ends(step: float) -> tuple[int, int]:
        return math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)

    fitting = (step for step in (power * m for m in (1, 2, 5, 10)) if ends(step)[1] - ends(step)[0] < most)
    step = next(fitting, power * 20)
    first, last = ends(step)
    return [i * step for i in range(first, last + 1)]


def tick_text(tick: float, ticks: Sequence[float]) -> str:
    """One tick with as many decimals as their distance needs."""
    step = ticks[1] - ticks[0] if len(ticks) > 1 else abs(tick) or 1.0
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    text = f"{tick:,.{decimals}f}"
    return text.removeprefix("-") if float(text.replace(",", "")) == 0 else text.replace("-", "\N{MINUS SIGN}")


@dataclass(frozen=True, slots=True)
class Scale:
    """A range of values over the width of a strip."""

    low: float
    high: float

    def at(self, value: float) -> float:
        """Where a value lies, in percent of the width."""
        return 100.0 * (value - self.low) / (self.high - self.low)

    def ticks(self, most: int = 5) -> list[tuple[float, str]]:
        """Round values as (percent of the width, text)."""
        ticks = axis_ticks(self.low, self.high, most)
        return [(self.at(tick), tick_text(tick, ticks)) for tick in ticks]


def scale_over(values: Iterable[float]) -> Scale:
    """All values into the range that shows them with room at both ends."""
    seen = list(values)
    low, high = min(seen), max(seen)
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
    """An estimate as a dot, its own interval as a bar, a wider one as a thin line, over a line of reference.

    It is hidden from screen readers: the page gives the same numbers as text beside it.
    """
    parts = [
        Markup('<line class="reference" {stroked} x1="{x:.2f}" x2="{x:.2f}" y1="0" y2="28"/>').format(
            stroked=Markup(_STROKED),  # noqa: S704 - a constant
            x=scale.at(reference),
        )
    ]
    shapes = [("whisker", outer), ("interval", inner), ("estimate", (estimate, estimate))]
    for name, ends in shapes:
        if ends is not None:
            start, stop = scale.at(ends[0]), scale.at(ends[1])
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
