"""Sampled tokens and what they were credited with -> spans of text, shaded from worse to better.

A shade is one of nine steps of a scale around 0, orange below and blue above: the two are told apart by people who
see no red or no green. The number itself is in each span's title. Invariants: what has no advantage is not shaded and
says why; a token of an action that has one number for all its tokens has that number. Colours are the style sheet's.
It does not know where texts and numbers come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from marft_bridge.comparison.numbers import number, signed
from marft_bridge.comparison.wording import visible
from marft_bridge.kept_advantages import KeptAdvantage
from trace_store.records import Action

STEPS = 4  # shades on each side of 0
MOST_TOKENS = 4000  # of one action on a page
_BREAK = {"\n": "⏎\n", "\t": "→\t"}


@dataclass(frozen=True, slots=True)
class Shades:
    """The scale of a round. `end`: the normalised advantage from which the strongest shade is taken, above 0."""

    end: float

    def of(self, value: float) -> str:
        """The CSS class of a value."""
        step = round(STEPS * max(-1.0, min(1.0, value / self.end)))
        return "a-0" if step == 0 else f"a-{'p' if step > 0 else 'n'}{abs(step)}"

    def legend(self) -> list[tuple[str, str]]:
        """Each shade from worst to best, as (CSS class, the value in its middle)."""
        values = [self.end * step / STEPS for step in range(-STEPS, STEPS + 1)]
        texts = [signed(value) if value else "0" for value in values]
        return [(self.of(value), text) for value, text in zip(values, texts, strict=True)]


def action_to_mean(kept: KeptAdvantage) -> float:
    """What stands for the whole action: the mean of its normalised advantages."""
    return sum(kept.normalised) / len(kept.normalised)


def action_to_spans(
    action: Action, pieces: Sequence[str] | None, kept: KeptAdvantage | None, shades: Shades | None
) -> Markup:
    """The first MOST_TOKENS sampled tokens as spans.

    Args:
        pieces: the text of each sampled id; None shows the ids.
        kept: what the action was credited with; None shades nothing.
    """
    ids = (action.sampled_ids or ())[:MOST_TOKENS]
    spans = []
    for i, token in enumerate(ids):
        text = str(token) if pieces is None else pieces[i]
        shade = shades.of(_unit(kept.normalised, i)) if kept is not None and shades is not None else ""
        spans.append(
            Markup('<span class="t {shade}" title="{title}">{text}</span>').format(
                shade=shade, title=_title(action, i, token, kept), text=_shown(text)
            )
        )
    return (Markup() if pieces is not None else Markup(" ")).join(spans)


def _shown(text: str) -> str:
    marked = "".join(_BREAK.get(letter, letter) for letter in text)
    return visible(marked) or "·"  # an id that only begins a letter


def _title(action: Action, i: int, token: int, kept: KeptAdvantage | None) -> str:
    parts = [f"token {i}, id {token}"]
    if action.logprobs is not None and i < len(action.logprobs):
        parts.append(f"log-prob {number(action.logprobs[i])}")
    if kept is not None:
        parts.append(f"advantage {signed(_unit(kept.advantage, i))}")
        parts.append(f"normalised {signed(_unit(kept.normalised, i))}")
        parts += [f"from {visible(name)} {signed(_unit(part, i))}" for name, part in kept.by_source.items()]
    return "; ".join(parts)


def _unit(values: Sequence[float], i: int) -> float:
    """The value of token `i`: its own, or that of the whole action."""
    return values[i] if len(values) > 1 else values[0]


def fits(action: Action, kept: KeptAdvantage) -> bool:
    """Whether there is a number for the whole action, or one for each of its tokens."""
    return len(kept.normalised) in (1, len(action.sampled_ids or ()))
