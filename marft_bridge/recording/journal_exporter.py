"""Ended OpenTelemetry spans -> `SpanRow` lines in the journal, when their run ends, in the thread that ended it.

A BatchSpanProcessor would drop the oldest spans when its queue is full, and all of them when the process is killed.
Invariants: after `Journal.sync()` every run that ended before is on disk; nothing goes to the journal or to an
exporter that `SpanPrivacy` has not passed; every span that could not be written is counted. A failure never reaches
the app.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, Span, SpanLimits, SpanProcessor, Tracer, TracerProvider, _Span
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    Link,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    format_span_id,
    format_trace_id,
)

from marft_bridge.recording.span_ids import SystemIds
from marft_bridge.recording.span_privacy import SPAN_NAME, SpanPrivacy
from trace_store import conventions
from trace_store.errors import StoreError
from trace_store.journal import Journal
from trace_store.records import SpanRow

log = logging.getLogger("marft_bridge")

_FLAGS = TraceFlags(TraceFlags.SAMPLED | TraceFlags.RANDOM_TRACE_ID)
BATCH = 64  # spans of one run that wait at most


def span_to_row(span: ReadableSpan, added_attributes: dict[str, Any]) -> SpanRow:
    """One ended span, with its own attributes and those added beside it, as a row of the store."""
    attributes = {**span.attributes, **added_attributes} if span.attributes else added_attributes
    context = span.get_span_context()
    assert context is not None  # a span that ended had one
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


def row_to_exported(span: ReadableSpan, row: SpanRow, privacy: SpanPrivacy) -> ReadableSpan:
    """A copy of the span with the redacted texts of `row`, and its events and links redacted likewise."""
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
    """Appends every ended span to a journal, and hands it on to an exporter where there is one.

    Spans of a run are written together, when it ends: a run that has not ended is of no use yet, and one pass over
    many spans costs a third of as many passes over one.
    """

    def __init__(self, journal: Journal, privacy: SpanPrivacy, export: SpanProcessor | None = None) -> None:
        self._journal = journal
        self._export = export
        self._lock = threading.Lock()
        self.privacy = privacy
        self.failure: StoreError | None = None  # the first write that the disk refused
        self.lost_spans = 0  # spans that ended and are not in the journal
        self.on_episode: Callable[[], None] = lambda: None  # called for each run whose root is in the journal
        self._added_attributes: dict[int, dict[str, Any]] = {}  # span id -> its attributes, until it ends
        self._pending: dict[int, list[tuple[ReadableSpan, dict[str, Any]]]] = {}  # trace id -> ended, not yet written
        self._row_copies: dict[str, list[SpanRow]] = {}  # trace id -> list that its rows are copied to, until it ends

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Nothing is written before a span ends."""

    def set_attributes(self, span: Span, attributes: Mapping[str, Any]) -> None:
        """Sets attributes of an open span to JSON values; a value of None is left out.

        They are kept beside the span until it ends: the SDK would check and copy every value, each token id by itself,
        which takes longer than all the rest.
        """
        added_attributes = self._added_attributes.setdefault(span.get_span_context().span_id, {})
        for key, value in attributes.items():
            if value is not None:
                added_attributes[key] = value

    def copy_rows_to(self, root: Span, rows: list[SpanRow]) -> None:
        """Appends the spans of a run to `rows` too, once they are in the journal."""
        self._row_copies[format_trace_id(root.get_span_context().trace_id)] = rows

    def on_end(self, span: ReadableSpan) -> None:
        """Takes the span, and writes all pending ones of its run when the run has ended or many wait. Never raises."""
        context = span.get_span_context()
        assert context is not None  # a span that ended had one
        with self._lock:
            pending = self._pending.setdefault(context.trace_id, [])
            pending.append((span, self._added_attributes.pop(context.span_id, {})))
            if span.parent is not None and len(pending) < BATCH:
                return
            del self._pending[context.trace_id]
        self._write(pending)

    def _write(self, ended_spans: Sequence[tuple[ReadableSpan, dict[str, Any]]]) -> None:
        """Writes spans to the journal in one write, then hands them to the exporter. Counts what fails."""
        span_rows: list[tuple[ReadableSpan, SpanRow]] = []
        for span, added_attributes in ended_spans:
            try:
                span_rows.append((span, self.privacy.row_to_clean(span_to_row(span, added_attributes))))
            except Exception as error:  # noqa: BLE001 - raised here, it would end up in the app
                self._note_loss(error, 1)
        try:
            self._journal.append_all([row for _, row in span_rows])
        except Exception as error:  # noqa: BLE001 - as above
            self._note_loss(error, len(span_rows))
        else:
            self._copy_rows([row for _, row in span_rows])
            for _, row in span_rows:
                if row.parent_span_id is None:
                    self.on_episode()
        if self._export is not None:
            for span, row in span_rows:
                self._export.on_end(row_to_exported(span, row, self.privacy))

    def _copy_rows(self, rows: Sequence[SpanRow]) -> None:
        for row in rows:
            if (copies := self._row_copies.get(row.trace_id)) is not None:
                copies.append(row)
                if row.parent_span_id is None:
                    del self._row_copies[row.trace_id]

    def _note_loss(self, error: Exception, count: int) -> None:
        with self._lock:
            is_first = self.lost_spans == 0
            self.lost_spans += count
            if isinstance(error, StoreError):
                self.failure = self.failure or error
        if is_first:
            log.warning("a span could not be written (%s); its episode will not be used", type(error).__name__)

    def shutdown(self) -> None:
        """Shuts the exporter down, which sends what it still holds. The journal is closed by its opener."""
        if self._export is not None:
            self._export.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Whether no span was lost. Spans are written as their runs end, so there is nothing to wait for."""
        return self.lost_spans == 0


def open_span(tracer: Tracer, name: str, parent: Span | None, kind: SpanKind = SpanKind.INTERNAL) -> Span:
    """A started span, as `tracer.start_span` makes it.

    It skips what `start_span` looks up for each span and is the same for all of ours: sampler, ambient context, the
    SDK's metrics about itself. That is half of the time that a span costs.
    """
    parent_context = parent.get_span_context() if parent is not None else None
    context = SpanContext(
        tracer.id_generator.generate_trace_id() if parent_context is None else parent_context.trace_id,
        tracer.id_generator.generate_span_id(),
        is_remote=False,
        trace_flags=_FLAGS,
    )
    span = _Span(
        name=name,
        context=context,
        parent=parent_context,
        resource=tracer.resource,
        span_processor=tracer.span_processor,
        kind=kind,
        limits=tracer._span_limits,
        instrumentation_scope=tracer._instrumentation_scope,
    )
    span.start()
    return span


def private_tracer(processor: SpanProcessor) -> Tracer:
    """A tracer of a provider of its own (see `private_provider`), which says which conventions its spans follow."""
    tracer = private_provider(processor).get_tracer(
        "marft_bridge", conventions.CONVENTION_VERSION, schema_url=conventions.SCHEMA_URL
    )
    return cast(Tracer, tracer)


def private_provider(processor: SpanProcessor) -> TracerProvider:
    """A tracer provider apart from the app's own, so that nothing in the app or its environment thins the record.

    Every limit is lifted by hand, because one that is left out is read from the environment.
    """
    unlimited = SpanLimits.UNSET  # the SDK's default of 128 attributes drops the oldest ones, which are the ids
    provider = TracerProvider(
        sampler=ALWAYS_ON,
        id_generator=SystemIds(),
        resource=Resource({"service.name": "marft-bridge"}, schema_url=conventions.RESOURCE_SCHEMA_URL),
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
