"""Sampled tokens and their normalised advantages -> HTML spans with the CSS class of a colour.

The colour is one of nine steps of a scale around 0, orange below and blue above: the two are told apart by people who
see no red or no green. The number itself is in each span's title. Invariants: a token without an advantage has no
colour, and a forced token has no advantage; where an action has one, all its other tokens have that. The colours of the
classes are in style.css.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from marft_bridge.comparison.numbers import number, signed
from marft_bridge.comparison.wording import visible
from marft_bridge.training.advantage_log import StoredAdvantage
from trace_store.records import Action
from trainers.batch import forced_tokens

STEPS = 4  # colours on each side of 0
MAX_SHOWN_TOKENS = 4000  # of one action on a page
_MARKED_BREAKS = {"\n": "⏎\n", "\t": "→\t"}


@dataclass(frozen=True, slots=True)
class ColourScale:
    """The scale of a round. `limit`: the normalised advantage, above 0, from which on the colour is the strongest."""

    limit: float

    def css_class(self, value: float) -> str:
        """The CSS class of a normalised advantage."""
        step = round(STEPS * max(-1.0, min(1.0, value / self.limit)))
        return "a-0" if step == 0 else f"a-{'p' if step > 0 else 'n'}{abs(step)}"

    def legend(self) -> list[tuple[str, str]]:
        """Each colour from worst to best, as (CSS class, the value in its middle)."""
        values = [self.limit * step / STEPS for step in range(-STEPS, STEPS + 1)]
        texts = [signed(value) if value else "0" for value in values]
        return [(self.css_class(value), text) for value, text in zip(values, texts, strict=True)]


def action_to_mean(credit: StoredAdvantage) -> float:
    """One number for the whole action: the mean of its normalised advantages."""
    return sum(credit.normalised) / len(credit.normalised)


def action_to_spans(
    action: Action, pieces: Sequence[str] | None, credit: StoredAdvantage | None, scale: ColourScale | None
) -> Markup:
    """The first MAX_SHOWN_TOKENS sampled tokens as spans.

    Args:
        pieces: the text of each sampled id; None shows the ids.
        credit: the advantages of the action's tokens; without them, or without a scale, nothing is coloured.
    """
    ids = (action.sampled_ids or ())[:MAX_SHOWN_TOKENS]
    unit_of_token = {} if credit is None else _tokens_to_units(action, credit)
    spans = []
    for i, token in enumerate(ids):
        text = str(token) if pieces is None else pieces[i]
        unit = None if credit is None else unit_of_token.get(i)
        css_class = "" if credit is None or unit is None or scale is None else scale.css_class(credit.normalised[unit])
        spans.append(
            Markup('<span class="t {css_class}" title="{title}">{text}</span>').format(
                css_class=css_class, title=_title(action, i, token, credit=credit, unit=unit), text=_visible_token(text)
            )
        )
    return (Markup() if pieces is not None else Markup(" ")).join(spans)


def _visible_token(text: str) -> str:
    text_with_breaks = "".join(_MARKED_BREAKS.get(letter, letter) for letter in text)
    return visible(text_with_breaks) or "·"  # an id that only begins a letter


def _title(action: Action, i: int, token: int, credit: StoredAdvantage | None, unit: int | None) -> str:
    parts = [f"token {i}, id {token}"]
    if action.logprobs is not None and i < len(action.logprobs):
        parts.append(f"log-prob {number(action.logprobs[i])}")
    if credit is not None and unit is not None:
        parts.append(f"advantage {signed(credit.advantage[unit])}")
        parts.append(f"normalised {signed(credit.normalised[unit])}")
        parts += [f"from {visible(name)} {signed(part[unit])}" for name, part in credit.by_source.items()]
    elif credit is not None:
        parts.append("forced")
    return "; ".join(parts)


def _decided_tokens(action: Action) -> list[int]:
    """Positions of the sampled tokens that were a decision."""
    forced = set(forced_tokens(action))
    return [i for i in range(len(action.sampled_ids or ())) if i not in forced]


def _tokens_to_units(action: Action, credit: StoredAdvantage) -> dict[int, int]:
    """Where in `credit` the number of each decided token is: its own, or the only one, that of the whole action."""
    if len(credit.tokens) == 1:
        return dict.fromkeys(_decided_tokens(action), 0)
    units = {token: unit for unit, token in enumerate(credit.tokens)}
    return {token: units[token] for token in _decided_tokens(action)}


def fits(action: Action, credit: StoredAdvantage) -> bool:
    """Whether there is a number for the whole action, or one for each of its decided tokens."""
    return len(credit.tokens) == 1 or list(credit.tokens) == _decided_tokens(action)
