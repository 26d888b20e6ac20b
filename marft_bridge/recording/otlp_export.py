"""Redacted spans -> an OTLP endpoint, in batches and in a thread of its own.

Invariants: the app never waits for the endpoint; spans that it does not accept in time are dropped, because the journal
is the record and this a copy; only the headers configured for the endpoint are sent. Needs the extra `otlp`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.util.re import parse_env_headers

from marft_bridge.common.errors import ConfigError
from marft_bridge.common.extras import install_command
from trace_store import conventions
from trace_store.records import SpanRow

_TIMEOUT_S = 5.0  # for one batch, its retries included
SHUTDOWN_S = 5.0  # seconds by which the end of the app may be delayed, at most
_STANDARD_HEADERS = ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS")
_FLAGS = TraceFlags(TraceFlags.SAMPLED | TraceFlags.RANDOM_TRACE_ID)
_RESOURCE = Resource({"service.name": "marft-bridge"}, schema_url=conventions.RESOURCE_SCHEMA_URL)
_SCOPE = InstrumentationScope("marft_bridge", conventions.CONVENTION_VERSION, conventions.SCHEMA_URL)


def row_to_span(row: SpanRow) -> ReadableSpan:
    """A row of the store as OpenTelemetry's span, under the same ids."""

    def context(span_id: str) -> SpanContext:
        return SpanContext(int(row.trace_id, 16), int(span_id, 16), is_remote=False, trace_flags=_FLAGS)

    return ReadableSpan(
        name=row.name,
        context=context(row.span_id),
        parent=None if row.parent_span_id is None else context(row.parent_span_id),
        resource=_RESOURCE,
        attributes=row.attributes,
        kind=SpanKind.CLIENT if row.operation == conventions.CHAT else SpanKind.INTERNAL,
        status=Status(StatusCode.ERROR, row.status_message) if row.status == "error" else Status(),
        start_time=row.start_ns,
        end_time=row.end_ns,
        instrumentation_scope=_SCOPE,
    )


class OtlpExport(BatchSpanProcessor):
    """Sends ended spans to one endpoint."""

    def __init__(self, endpoint: str, headers_env: str | None = None) -> None:
        """`endpoint`: full address; `headers_env`: variable with `name=value,...`, or None for no headers.

        Raises ConfigError when the exporter is not installed or the variable does not hold headers.
        """
        # Every number is given, because one that is left out is read from the app's OTEL_BSP_* variables.
        super().__init__(
            _make_exporter(endpoint, _env_to_headers(headers_env)),
            max_queue_size=2048,
            schedule_delay_millis=1000,
            max_export_batch_size=128,
            export_timeout_millis=_TIMEOUT_S * 1000,
        )

    def send(self, row: SpanRow) -> None:
        """Queues a clean span."""
        self.on_end(row_to_span(row))

    def shutdown(self) -> None:
        """Sends what is queued, for at most `SHUTDOWN_S`, and drops the rest."""
        self._batch_processor.shutdown(int(SHUTDOWN_S * 1000))  # the base class's own waits for half a minute


def _make_exporter(endpoint: str, headers: Mapping[str, str]) -> SpanExporter:
    try:
        import requests
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ModuleNotFoundError as error:
        raise ConfigError(f"record.otlp_endpoint: {error.name!r} is not installed: {install_command('otlp')}") from None

    # The exporter always adds the headers of these variables, which the app may have set for an endpoint of its own:
    # they are removed from each request, just before it is sent.
    foreign_headers = {
        name for variable in _STANDARD_HEADERS for name in parse_env_headers(os.environ.get(variable, ""), True)
    }

    def replace_headers(request: Any) -> Any:
        for name in foreign_headers - {"content-type"}:
            request.headers.pop(name, None)
        request.headers.update(headers)
        return request

    session = requests.Session()
    session.auth = replace_headers
    return OTLPSpanExporter(endpoint=endpoint, timeout=_TIMEOUT_S, session=session)


def _env_to_headers(variable: str | None) -> Mapping[str, str]:
    if variable is None:
        return {}
    headers = parse_env_headers(os.environ.get(variable, ""), True)
    if not headers:
        raise ConfigError(
            f"record.otlp_headers_env: the environment variable {variable} holds no headers; "
            "set it to name=value,name=value"
        )
    return headers
