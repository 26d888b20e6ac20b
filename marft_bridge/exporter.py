"""Ended OpenTelemetry spans -> `SpanRow` lines in the journal, at once and in the thread that ended them.

Why not a BatchSpanProcessor: it drops the oldest spans when its queue is full and everything when the process is
killed. Invariants: after `Journal.sync()` every span that ended before is on disk; nothing leaves here, to the journal
or to an exporter, that `SpanPrivacy` has not passed; every span that could not be written is counted. A failure
never reaches the app.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, Span, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Link, Status, StatusCode, format_span_id, format_trace_id

from marft_bridge.span_ids import SystemIds
from marft_bridge.span_privacy import SPAN_NAME, SpanPrivacy
from trace_store import conventions
from trace_store.errors import StoreError
from trace_store.journal import Journal
from trace_store.records import SpanRow

log = logging.getLogger("marft_bridge")


def span_to_row(span: ReadableSpan, beside: Mapping[str, Any]) -> SpanRow:
    """One ended span, with the attributes that were kept beside it, as the store keeps it."""
    context = span.get_span_context()
    assert context is not None  # a span that ended had one
    attributes = {key: _to_json(value) for key, value in (span.attributes or {}).items()} | dict(beside)
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


def row_to_exported(span: ReadableSpan, row: SpanRow, privacy: SpanPrivacy) -> ReadableSpan:
    """The span once more, with the texts of `row` in place of its own, and its events and links cleaned likewise."""
    events = [
        Event(str(cleaned.pop(SPAN_NAME, "event")), cleaned, event.timestamp)
        for event in span.events
        for cleaned in [privacy.attributes_to_clean({**(event.attributes or {}), SPAN_NAME: event.name})]
    ]
    return ReadableSpan(
        name=row.name,
        context=span.get_span_context(),
        parent=span.parent,
        resource=span.resource,
        attributes=row.attributes,
        events=events,
        links=[Link(link.context, privacy.attributes_to_clean(link.attributes or {})) for link in span.links],
        kind=span.kind,
        status=Status(span.status.status_code, row.status_message),
        start_time=span.start_time,
        end_time=span.end_time,
        instrumentation_scope=span.instrumentation_scope,
    )


class JournalProcessor(SpanProcessor):
    """Appends every ended span to a journal, and hands it on to an exporter where there is one."""

    def __init__(self, journal: Journal, privacy: SpanPrivacy, export: SpanProcessor | None = None) -> None:
        self._journal = journal
        self._export = export
        self._lock = threading.Lock()
        self.privacy = privacy
        self.failure: StoreError | None = None  # the first write that the disk refused
        self.lost = 0  # spans that ended and are not in the journal
        self._beside: dict[int, Mapping[str, Any]] = {}  # span id -> attributes that it gets when it ends

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Nothing is written before a span ends."""

    def keep_beside(self, span: Span, attributes: Mapping[str, Any]) -> None:
        """Attributes, JSON values, that the span gets when it ends.

        The SDK checks each element of a list; for the token ids of a call that takes longer than all the rest.
        """
        self._beside[span.get_span_context().span_id] = attributes

    def on_end(self, span: ReadableSpan) -> None:
        """Writes the span, then hands it on. What goes wrong is remembered and counted, never raised."""
        row = None
        try:
            context = span.get_span_context()
            beside = self._beside.pop(context.span_id, {}) if context is not None else {}
            row = self.privacy.row_to_clean(span_to_row(span, beside))
            self._journal.append(row)
        except Exception as error:  # noqa: BLE001 - raised here, it would end up in the app
            self._note_loss(error)
        if row is not None and self._export is not None:
            self._export.on_end(row_to_exported(span, row, self.privacy))

    def _note_loss(self, error: Exception) -> None:
        with self._lock:
            self.lost += 1
            first = self.lost == 1
            if isinstance(error, StoreError):
                self.failure = self.failure or error
        if first:
            log.warning("a span could not be written (%s); its episode will not be used", type(error).__name__)

    def shutdown(self) -> None:
        """The journal belongs to whoever opened it; the exporter sends what it still holds."""
        if self._export is not None:
            self._export.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Spans are written as they end; there is nothing to wait for."""
        return self.lost == 0


def private_provider(processor: SpanProcessor) -> TracerProvider:
    """A tracer provider apart from the app's own, so that nothing in the app or its environment thins the record.

    Every limit is lifted by hand, because one that is left out is read from the environment.
    """
    unlimited = SpanLimits.UNSET  # the SDK's default of 128 attributes drops the oldest ones, which are the ids
    provider = TracerProvider(
        sampler=ALWAYS_ON,
        id_generator=SystemIds(),
        resource=Resource({"service.name": "marft-bridge"}),
        shutdown_on_exit=False,
        span_limits=SpanLimits(
            max_attributes=unlimited,
            max_events=unlimited,
            max_links=unlimited,
            max_span_attributes=unlimited,
            max_event_attributes=unlimited,
            max_link_attributes=unlimited,
            max_attribute_length=unlimited,
            max_span_attribute_length=unlimited,
        ),
    )
    # OTEL_SDK_DISABLED turns the app's own tracing off. The SDK has no argument against it, only this field.
    provider._disabled = False
    provider.add_span_processor(processor)
    return provider
