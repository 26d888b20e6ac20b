"""A received span -> the same span without secrets, before any of it reaches the disk, the spool included.

Client settings are removed by name; texts pass the same redaction as recorded ones. Invariant: an LLM call whose texts
were redacted carries the attribute `UNTRAINABLE`, so that no later step passes on its log-probs.
"""

from __future__ import annotations

import threading
from dataclasses import replace

from marft_bridge.config.record import RecordOptions
from marft_bridge.ingest.client_settings import OWN_SCOPE, remove_client_secrets
from marft_bridge.ingest.conventions import span_to_reading
from marft_bridge.ingest.otlp import WireSpan
from marft_bridge.recording.span_processor import options_to_privacy
from trace_store import conventions as c
from trace_store.records import SpanRow


class SpanCleaner:
    """Removes secrets from spans and counts them. Safe to use from several threads."""

    def __init__(self, options: RecordOptions) -> None:
        """Raises GraphError when the redaction function that `options` name cannot be used."""
        # Content is needed to map a span to a row; with `content = false` it is removed from the finished row.
        self.privacy = options_to_privacy(options.model_copy(update={"content": True}))
        self._structure_privacy = None if options.content else options_to_privacy(options)
        self._lock = threading.Lock()
        self.removed_settings = 0  # credentials and headers of clients

    def clean_span(self, span: WireSpan) -> WireSpan:
        """The span without client settings, its texts redacted."""
        if span.scope != OWN_SCOPE:  # our recorder never writes client settings
            span, removed_count = remove_client_secrets(span)
            with self._lock:
                self.removed_settings += removed_count
        row = self.privacy.row_to_clean(_span_to_row(span))
        return replace(span, name=row.name, status_message=row.status_message, attributes=row.attributes)

    def clean_row(self, row: SpanRow) -> SpanRow:
        """A finished row, without content where the options say so."""
        return row if self._structure_privacy is None else self._structure_privacy.row_to_clean(row)


def _span_to_row(span: WireSpan) -> SpanRow:
    return SpanRow(
        trace_id=span.trace_id,
        span_id=span.span_id,
        parent_span_id=span.parent_span_id,
        name=span.name,
        operation=c.CHAT if _may_be_call(span) else "",
        start_ns=span.start_ns,
        end_ns=span.end_ns,
        status="error" if span.failed else "ok",
        status_message=span.status_message,
        convention="",
        attributes=span.attributes,
    )


def _may_be_call(span: WireSpan) -> bool:
    """Whether it is an LLM call, or cannot be read at all: its trace is then refused, and no other waits for it."""
    try:
        reading = span_to_reading(span)
    except MemoryError:
        raise  # not for what the span holds
    except Exception:  # noqa: BLE001 - whatever a sender put there
        return True
    return reading is not None and reading.kind == "llm"
