"""Ended OpenTelemetry spans -> `SpanRow` lines in the journal, at once and in the thread that ended them.

Why not a BatchSpanProcessor: it drops the oldest spans when its queue is full and everything when the process is
killed. Invariant: after `Journal.sync()` every span that ended before is on disk. A failure here is kept
for the recorder to report; it never reaches the app.
"""

from __future__ import annotations

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import StatusCode, format_span_id, format_trace_id

from trace_store import conventions
from trace_store.errors import StoreError
from trace_store.journal import Journal
from trace_store.records import SpanRow

_UNLIMITED = 1 << 30  # the SDK's default of 128 attributes drops the oldest ones, which are the ids


def span_to_row(span: ReadableSpan) -> SpanRow:
    """One ended span as the store keeps it."""
    context = span.get_span_context()
    assert context is not None  # a span that ended had one
    attributes = {key: _to_json(value) for key, value in (span.attributes or {}).items()}
    return SpanRow(
        trace_id=format_trace_id(context.trace_id),
        span_id=format_span_id(context.span_id),
        parent_span_id=format_span_id(span.parent.span_id) if span.parent is not None else None,
        name=span.name,
        operation=str(attributes.get(conventions.OPERATION, "")),
        start_ns=span.start_time or 0,
        end_ns=span.end_time or 0,
        status="error" if span.status.status_code is StatusCode.ERROR else "ok",
        status_message=span.status.description,
        convention=conventions.CONVENTION_VERSION,
        attributes=attributes,
    )


def _to_json(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


class JournalProcessor(SpanProcessor):
    """Appends every ended span to a journal."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.failure: StoreError | None = None  # the first write that the disk refused

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Nothing is written before a span ends."""

    def on_end(self, span: ReadableSpan) -> None:
        """Writes the span; a disk that refuses is remembered, not raised."""
        try:
            self._journal.append(span_to_row(span))
        except StoreError as error:
            self.failure = self.failure or error

    def shutdown(self) -> None:
        """The journal belongs to whoever opened it."""

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Spans are written as they end; there is nothing to wait for."""
        return self.failure is None


def private_provider(processor: SpanProcessor) -> TracerProvider:
    """A tracer provider apart from the app's own, so that no sampling or limit of the app thins the record."""
    provider = TracerProvider(
        sampler=ALWAYS_ON,
        resource=Resource({"service.name": "marft-bridge"}),
        shutdown_on_exit=False,
        span_limits=SpanLimits(
            max_attributes=_UNLIMITED,
            max_span_attributes=_UNLIMITED,
            max_attribute_length=SpanLimits.UNSET,
            max_span_attribute_length=SpanLimits.UNSET,
        ),
    )
    provider.add_span_processor(processor)
    return provider
