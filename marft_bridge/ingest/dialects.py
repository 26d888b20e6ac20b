"""A span of unknown origin -> what it says, by the dialect that it is written in.

Decided span by span: one app may be traced by several instrumentors at once. A span of none of them (an HTTP
request, a database query) is no reading; it stays in its trace as it is.
"""

from __future__ import annotations

from typing import Protocol

from marft_bridge.ingest import genai, langsmith, openinference, traceloop
from marft_bridge.ingest.otlp import WireSpan
from marft_bridge.ingest.reading import Reading


class _Dialect(Protocol):
    def speaks(self, span: WireSpan) -> bool: ...

    def span_to_reading(self, span: WireSpan) -> Reading: ...


# The plain conventions last: the others use their names too.
_DIALECTS: tuple[_Dialect, ...] = (openinference, traceloop, langsmith, genai)


def span_to_reading(span: WireSpan) -> Reading | None:
    """What a span says; None when it is in no dialect that is known."""
    for dialect in _DIALECTS:
        if dialect.speaks(span):
            return dialect.span_to_reading(span)
    return None
