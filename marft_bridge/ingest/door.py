"""A span as it was sent -> the span as it may be kept: before anything of it is written, also only for a while.

Client settings go by name, texts through the same redaction as recorded ones. Invariant: what leaves here is cleaned;
an LLM call whose texts changed says so under our own name, so that no later step hands on its log-probs.
"""

from __future__ import annotations

import threading
from dataclasses import replace

from marft_bridge.ingest.client_settings import OWN_SCOPE, without_client_secrets
from marft_bridge.ingest.dialects import span_to_reading
from marft_bridge.ingest.otlp import WireSpan
from marft_bridge.record_options import RecordOptions
from marft_bridge.recording import options_to_privacy
from trace_store import conventions as c
from trace_store.records import SpanRow


class Door:
    """Cleans spans and counts what it left out. Safe to use from several threads."""

    def __init__(self, options: RecordOptions) -> None:
        """Raises GraphError when the redaction function that `options` name cannot be used."""
        # Content is needed to tell what a span is; where none may be kept, it goes once that is known.
        self.privacy = options_to_privacy(options.model_copy(update={"content": True}))
        self._structure = None if options.content else options_to_privacy(options)
        self._lock = threading.Lock()
        self.settings = 0  # entries left out because a client authenticates with them

    def span_to_clean(self, span: WireSpan) -> WireSpan:
        """The span as it may be kept."""
        if span.scope != OWN_SCOPE:  # our recorder never writes client settings
            span, left_out = without_client_secrets(span)
            with self._lock:
                self.settings += left_out
        row = self.privacy.row_to_clean(_to_row(span))
        return replace(span, name=row.name, status_message=row.status_message, attributes=row.attributes)

    def row_to_written(self, row: SpanRow) -> SpanRow:
        """A finished row as it may be written: without content where the options say so."""
        return row if self._structure is None else self._structure.row_to_clean(row)


def _to_row(span: WireSpan) -> SpanRow:
    reading = span_to_reading(span)
    return SpanRow(
        trace_id=span.trace_id,
        span_id=span.span_id,
        parent_span_id=span.parent_span_id,
        name=span.name,
        operation=c.CHAT if reading is not None and reading.kind == "llm" else "",
        start_ns=span.start_ns,
        end_ns=span.end_ns,
        status="error" if span.failed else "ok",
        status_message=span.status_message,
        convention="",
        attributes=span.attributes,
    )
