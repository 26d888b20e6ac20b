"""What is recorded while a run, a node or a call lasts -> one `SpanRow` when it has ended.

The SDK's own spans check and copy every attribute, each token id by itself, read limits from the app's environment and
draw ids from the module `random`, so that a seeded app would get other numbers when it is recorded. Invariants: an
attribute is kept as it was set, and one that was set to None is absent; ids are random bits of the operating system,
and no two processes share any.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trace_store import conventions
from trace_store.records import SpanRow


@dataclass(slots=True, eq=False)
class OpenSpan:
    """One span, from its start on."""

    name: str
    trace_id: str  # 32 hex digits
    span_id: str  # 16 hex digits
    parent_span_id: str | None
    start_ns: int  # unix time
    attributes: dict[str, Any]  # JSON values
    error: str | None = None  # what made it fail
    end_ns: int = 0  # 0 until it ends

    def set(self, attributes: Mapping[str, Any]) -> None:
        """Sets attributes to JSON values; a value of None is left out."""
        self.attributes.update(_without_none(attributes))


def open_span(name: str, parent: OpenSpan | None, attributes: Mapping[str, Any]) -> OpenSpan:
    """A span that starts now: in its parent's trace, or in a new one."""
    if parent is None:
        trace_id, parent_span_id = _random_id() + _random_id(), None
    else:
        trace_id, parent_span_id = parent.trace_id, parent.span_id
    return OpenSpan(
        name,
        trace_id,
        span_id=_random_id(),
        parent_span_id=parent_span_id,
        start_ns=time.time_ns(),
        attributes=_without_none(attributes),
    )


def _without_none(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in attributes.items() if value is not None}


def span_to_row(span: OpenSpan) -> SpanRow:
    """A span that has ended, as a row of the store."""
    return SpanRow(
        trace_id=span.trace_id,
        span_id=span.span_id,
        parent_span_id=span.parent_span_id,
        name=span.name,
        operation=str(span.attributes.get(conventions.OPERATION, "")),
        start_ns=span.start_ns,
        end_ns=span.end_ns,
        status="ok" if span.error is None else "error",
        status_message=span.error,
        convention=conventions.CONVENTION_VERSION,
        attributes=span.attributes,
    )


_DRAWN_IDS = 128  # at a time: a call of the operating system takes long beside the rest of a span
_spare_ids: list[str] = []  # drawn, not yet given out
os.register_at_fork(after_in_child=_spare_ids.clear)


def _random_id() -> str:
    """64 random bits as 16 hex digits; never zero, which is no valid id."""
    while True:
        try:
            return _spare_ids.pop()
        except IndexError:
            digits = os.urandom(8 * _DRAWN_IDS).hex()
            drawn_ids = [digits[start : start + 16] for start in range(0, len(digits), 16)]
            _spare_ids.extend([drawn_id for drawn_id in drawn_ids if int(drawn_id, 16)])
