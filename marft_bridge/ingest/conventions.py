"""A span of any tracer -> its reading, by the semantic convention that its attributes follow.

Decided span by span: one app may be traced by several instrumentors at once. A span of no known convention (an HTTP
request, a database query) has no reading and stays in its trace unchanged.
"""

from __future__ import annotations

from typing import Protocol

from marft_bridge.ingest import genai, langfuse, langsmith, openinference, traceloop
from marft_bridge.ingest.otlp import WireSpan
from marft_bridge.ingest.reading import Reading


class _Convention(Protocol):
    def matches(self, span: WireSpan) -> bool: ...

    def span_to_reading(self, span: WireSpan) -> Reading: ...


# First match wins. Plain GenAI last: the other conventions use its attribute names too.
_CONVENTIONS: tuple[_Convention, ...] = (langfuse, openinference, traceloop, langsmith, genai)


def span_to_reading(span: WireSpan) -> Reading | None:
    """The reading of a span; None when it follows no known convention."""
    for convention in _CONVENTIONS:
        if convention.matches(span):
            return convention.span_to_reading(span)
    return None
