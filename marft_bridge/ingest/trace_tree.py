"""The spans of one trace, in any order -> a tree, or the reason why they are none (yet).

Invariant: `fault` is None only when there is exactly one root and every span is a descendant of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

from marft_bridge.ingest.otlp import WireSpan


class NotAnEpisode(Exception):  # noqa: N818 - says what the trace is
    """The trace is no episode; the message is the reason."""


class TraceTree:
    """Spans by id, in the order of their start. A span that came twice counts once."""

    def __init__(self, spans: Sequence[WireSpan]) -> None:
        self.spans: dict[str, WireSpan] = {}
        self._contradiction: str | None = None
        for span in sorted(spans, key=lambda span: (span.start_ns, span.span_id)):
            if self.spans.setdefault(span.span_id, span) != span:
                self._contradiction = f"two different spans have the id {span.span_id}"
        self._children: dict[str | None, list[WireSpan]] = {}
        for span in self.spans.values():
            self._children.setdefault(span.parent_span_id, []).append(span)

    @cached_property
    def roots(self) -> list[WireSpan]:
        """Spans without a parent, or else those whose parent is in another process that sent nothing."""
        return self._children.get(None) or [
            span for span in self.spans.values() if span.parent_is_remote and span.parent_span_id not in self.spans
        ]

    @property
    def root(self) -> WireSpan:
        """The one root of a tree without a fault."""
        return self.roots[0]

    def fault(self) -> str | None:
        """Why the tree is not complete; None when it is."""
        if self._contradiction is not None:
            return self._contradiction
        if not self.roots:
            return "its root span never came"
        if len(self.roots) > 1:
            return f"{len(self.roots)} spans have no parent: {', '.join(span.span_id for span in self.roots[:5])}"
        reached = {self.root.span_id}
        frontier = [self.root.span_id]
        while frontier:
            for child in self.children(frontier.pop()):
                if child.span_id not in reached:
                    reached.add(child.span_id)
                    frontier.append(child.span_id)
        unreached = [span for span_id, span in self.spans.items() if span_id not in reached]
        orphans = [span for span in unreached if span.parent_span_id not in self.spans]
        if orphans:
            first = orphans[0]
            return f"the parents of {len(orphans)} spans never came, first {first.parent_span_id} of {first.name!r:.60}"
        return f"span {unreached[0].span_id} is its own ancestor" if unreached else None

    def refuse_if_broken(self) -> None:
        """Raises NotAnEpisode when there is a fault."""
        if (fault := self.fault()) is not None:
            raise NotAnEpisode(fault)

    def children(self, span_id: str | None) -> list[WireSpan]:
        """The children of a span, in the order of their start."""
        return self._children.get(span_id, [])

    def ancestors(self, span_id: str) -> Iterator[WireSpan]:
        """The enclosing spans of a span, innermost first. Only for a tree without a fault."""
        span = self.spans[span_id]
        while span is not self.root and span.parent_span_id is not None:
            span = self.spans[span.parent_span_id]
            yield span
