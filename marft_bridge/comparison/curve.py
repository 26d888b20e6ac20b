"""Rounds of training -> an inline SVG: the mean reward of each, with the band of its interval.

Pure functions from numbers to escaped markup. Colours come from the page through CSS classes; a drawing is made for
one width in CSS pixels, so that its letters keep their size on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from markupsafe import Markup

from marft_bridge.comparison.drawing import axis_ticks, drawing, tick_text
from marft_bridge.comparison.wording import visible
from marft_bridge.runs.learning_curve import LearningPoint

_LETTER_PX = 6.6  # estimated width of one letter of 12 px, in px


def learning_curve(rounds: Sequence[LearningPoint], *, width: int, name: str) -> Markup:
    """Rounds in their order into a curve of the mean reward, a marker per round and a band where intervals are known.

    A round without a reward leaves a gap. Markers are hollow in the first phase and filled in the later ones, with a
    legend when there is more than one phase. `width` is in CSS pixels; `name` begins the ids of title and description.
    """
    rewards = [v for r in rounds for v in (r.reward_mean, r.reward_low, r.reward_high) if v is not None] or [0.0]
    margin = 0.08 * (max(rewards) - min(rewards)) or 0.5
    frame = _Frame(width, len(rounds), min(rewards) - margin, high=max(rewards) + margin)
    means = {i: r.reward_mean for i, r in enumerate(rounds) if r.reward_mean is not None}
    parts = [*_grid(frame), *_band(frame, rounds)]
    for stretch in _split_at_gaps(list(means)):
        points = " ".join(f"{frame.x(i):.1f},{frame.y(means[i]):.1f}" for i in stretch)
        parts.append(Markup('<polyline class="curve" points="{}"/>').format(points))
    phases = list(dict.fromkeys(r.phase for r in rounds))
    parts += [*_markers(frame, rounds, means, phases=phases), *_round_labels(frame, rounds), *_legend(phases)]
    description = f"{len(rounds)} rounds, none with a reward."
    if means:
        first, *_, last = (*means.values(), *means.values())
        description = f"Mean reward over {len(rounds)} rounds, from {first:.3g} in the first to {last:.3g} in the last."
    return drawing(
        parts,
        width,
        _Frame.HEIGHT,
        name=name,
        title="Mean reward per training round with its 95% interval",
        description=description,
    )


@dataclass(frozen=True, slots=True)
class _Frame:
    """The plot area: maps round `i` and reward `v` to px."""

    width: int
    rounds: int
    low: float
    high: float

    LEFT: ClassVar = 46.0
    TOP: ClassVar = 34.0
    BOTTOM: ClassVar = 226.0
    HEIGHT: ClassVar = 270

    @property
    def right(self) -> float:
        return self.width - 14.0

    @property
    def spacing(self) -> float:
        return (self.right - self.LEFT - 24) / max(1, self.rounds - 1)

    def x(self, i: int) -> float:
        return self.LEFT + 12 + i * self.spacing if self.rounds > 1 else (self.LEFT + self.right) / 2

    def y(self, v: float) -> float:
        return self.BOTTOM - (v - self.low) / (self.high - self.low) * (self.BOTTOM - self.TOP)


def _grid(frame: _Frame) -> Iterator[Markup]:
    ticks = axis_ticks(frame.low, frame.high, 6)
    for tick in ticks:
        yield Markup(
            '<line class="grid" x1="{:.1f}" x2="{:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
            '<text class="tick" x="{:.1f}" y="{:.1f}" text-anchor="end">{}</text>'
        ).format(frame.LEFT, frame.right, frame.LEFT - 8, frame.y(tick) + 4, tick_text(tick, ticks), y=frame.y(tick))


def _band(frame: _Frame, rounds: Sequence[LearningPoint]) -> Iterator[Markup]:
    bounds = {
        i: (frame.x(i), frame.y(r.reward_low), frame.y(r.reward_high))
        for i, r in enumerate(rounds)
        if r.reward_low is not None and r.reward_high is not None
    }
    for stretch in _split_at_gaps(list(bounds)):
        upper_edge = [f"{x:.1f},{high:.1f}" for x, _, high in (bounds[i] for i in stretch)]
        lower_edge = [f"{x:.1f},{low:.1f}" for x, low, _ in (bounds[i] for i in reversed(stretch))]
        yield Markup('<polygon class="band" points="{}"/>').format(" ".join(upper_edge + lower_edge))
    for x, low, high in bounds.values():
        yield Markup('<line class="whisker" x1="{0:.1f}" x2="{0:.1f}" y1="{1:.1f}" y2="{2:.1f}"/>').format(x, low, high)


def _markers(
    frame: _Frame, rounds: Sequence[LearningPoint], means: dict[int, float], phases: Sequence[str]
) -> Iterator[Markup]:
    radius = 4.5 if frame.spacing >= 14 else 2.5
    for i, mean in means.items():
        r = rounds[i]
        band = "" if r.reward_low is None or r.reward_high is None else f", {r.reward_low:.3g} to {r.reward_high:.3g}"
        tooltip = f"round {r.round} ({visible(r.phase)}): {mean:.3g}{band}, {r.episodes} episodes"
        yield _marker(frame.x(i), frame.y(mean), radius, hollow=_is_hollow(phases, r.phase), tooltip=tooltip)


def _round_labels(frame: _Frame, rounds: Sequence[LearningPoint]) -> Iterator[Markup]:
    label = Markup('<text class="{}" x="{:.1f}" y="{:.1f}" text-anchor="middle">{}</text>')
    label_stride = max(1, math.ceil(26 / frame.spacing))  # a label needs some 26 px
    for i in range(0, len(rounds), label_stride):
        yield label.format("tick", frame.x(i), frame.BOTTOM + 18, rounds[i].round)
    yield label.format("label", (frame.LEFT + frame.right) / 2, frame.HEIGHT - 6, "round")


def _legend(phases: Sequence[str]) -> Iterator[Markup]:
    x = _Frame.LEFT + 12
    for phase in phases if len(phases) > 1 else ():
        yield _marker(x, 12, 4.5, hollow=_is_hollow(phases, phase), tooltip=visible(phase))
        yield Markup('<text class="label" x="{:.1f}" y="16">{}</text>').format(x + 11, visible(phase))
        x += 34 + _LETTER_PX * len(phase)


def _is_hollow(phases: Sequence[str], phase: str) -> bool:
    return len(phases) > 1 and phase == phases[0]


def _marker(x: float, y: float, radius: float, *, hollow: bool, tooltip: str) -> Markup:
    return Markup('<circle class="{}" cx="{:.1f}" cy="{:.1f}" r="{}"><title>{}</title></circle>').format(
        "marker hollow" if hollow else "marker", x, y, radius, tooltip
    )


def _split_at_gaps(indices: Sequence[int]) -> list[list[int]]:
    """Ascending indices into stretches of neighbours."""
    stretches: list[list[int]] = []
    for i in indices:
        if stretches and stretches[-1][-1] == i - 1:
            stretches[-1].append(i)
        else:
            stretches.append([i])
    return stretches
