"""Spans of an assembled trace <-> their stored rows: token ids and log-probs are stored once, with the action.

A call's three lists are most of its bytes. They come in the span's attributes, and from them the action got its own;
once both are stored, they leave the attributes of the row, and come back when the span is read.
Invariant: the spans read equal the spans written. A list that stood in the span in any other form than the packed one
stays there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from trace_store import conventions as c
from trace_store.packed import floats_to_text, ints_to_text
from trace_store.records import Action, SpanRow

# Attribute, field and column of the action, how the recorder packs it.
_LISTS = (
    (c.PROMPT_IDS, "prompt_ids", ints_to_text),
    (c.SAMPLED_IDS, "sampled_ids", ints_to_text),
    (c.LOGPROBS, "logprobs", floats_to_text),
)
COLUMNS = tuple(name for _, name, _ in _LISTS)
"""The columns of an action that `span_with_lists` needs, in its order."""


def span_without_lists(span: SpanRow, action: Action) -> SpanRow:
    """The span as it is stored beside the action that it became."""
    attributes = dict(span.attributes)
    for key, name, pack in _LISTS:
        values = getattr(action, name)
        if values is not None and attributes.get(key) == pack(values):
            del attributes[key]
    return replace(span, attributes=attributes)


def span_with_lists(span: SpanRow, lists: Sequence[Sequence[Any] | None]) -> SpanRow:
    """The span as it was written: `lists` are those of its action, by COLUMNS."""
    attributes = dict(span.attributes)
    for (key, _, pack), values in zip(_LISTS, lists, strict=True):
        if values is not None:
            attributes.setdefault(key, pack(values))
    return replace(span, attributes=attributes)


def spans_with_lists(spans: Sequence[SpanRow], lists: Mapping[str, Sequence[Sequence[Any] | None]]) -> list[SpanRow]:
    """Spans of one trace as they were written; `lists` by action id."""
    return [span_with_lists(span, lists[span.span_id]) if span.span_id in lists else span for span in spans]
