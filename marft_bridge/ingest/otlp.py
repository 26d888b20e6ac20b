"""OTLP trace requests, protobuf or JSON -> spans as they were sent.

Invariants: a span either comes out whole, with every attribute, or is rejected with a reason; ids are lower-case hex
of the right length and never all zero; times fit the store; a request with bounds is counted before any of it is
built. Attributes are not interpreted here.
"""

from __future__ import annotations

import base64
import gzip
import io
import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from google.protobuf import json_format
from google.protobuf.message import DecodeError, Message
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope
from opentelemetry.proto.trace.v1.trace_pb2 import Span, SpanFlags, Status

from marft_bridge.ingest.errors import IngestError, TooLarge
from marft_bridge.ingest.request_cost import NOT_PROTOBUF, RequestBounds, check_json_cost, check_protobuf_cost

RESOURCE_SPANS = ("resourceSpans", "resource_spans")
_TIME_LIMIT_NS = 2**63  # the store keeps times as signed 64-bit integers
_PARENT_IS_REMOTE = SpanFlags.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK


@dataclass(frozen=True, slots=True)
class WireSpan:
    """One span of an OTLP request. Times in nanoseconds since 1970. The spool persists these field names."""

    trace_id: str  # 32 hex digits
    span_id: str  # 16 hex digits
    parent_span_id: str | None
    parent_is_remote: bool  # the sender says that another process made the parent
    name: str
    start_ns: int
    end_ns: int
    failed: bool  # status ERROR; OK and UNSET are both no failure
    status_message: str | None  # or else that of the last exception
    exception_type: str | None  # of the last exception that was recorded
    scope: str  # instrumentation scope, "" when the sender gave none
    scope_version: str
    service: str | None  # service.name of the resource
    attributes: dict[str, Any] = field(default_factory=dict)
    other_events: int = 0  # events that are not exceptions: the store has no column for them
    links: int = 0  # likewise
    lost_attributes: int = 0  # how many the sender says it dropped


@dataclass(frozen=True, slots=True)
class DecodedRequest:
    """The spans of one request, and the reasons why others in it were rejected."""

    spans: tuple[WireSpan, ...]
    rejected: tuple[str, ...] = ()


def protobuf_to_spans(body: bytes, bounds: RequestBounds | None = None) -> DecodedRequest:
    """One `ExportTraceServiceRequest`. Raises IngestError when it is none, TooLarge beyond the bounds."""
    if bounds is not None:
        check_protobuf_cost(body, bounds)
    request = ExportTraceServiceRequest()
    try:
        request.ParseFromString(body)
    except DecodeError:
        raise IngestError(NOT_PROTOBUF) from None
    if body and not request.resource_spans:
        raise IngestError("a protobuf message without resource_spans: no OTLP traces")
    del body  # the request has copies of its texts
    return _request_to_spans(request)


def json_to_spans(text: bytes, bounds: RequestBounds | None = None) -> DecodedRequest:
    """One OTLP/JSON object with `resourceSpans`. Raises IngestError when it is none, TooLarge beyond the bounds."""
    if bounds is not None:
        check_json_cost(text, bounds)
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        raise IngestError("not JSON") from None
    del text  # as above
    if not isinstance(body, dict) or not any(key in body for key in RESOURCE_SPANS):
        raise IngestError("a JSON value without resourceSpans: no OTLP traces")
    try:
        if bounds is not None and sum(1 for _ in _json_spans(body)) > bounds.spans:
            raise TooLarge(f"more than {bounds.spans} spans in one request")
        _hex_ids_to_base64(body)
        request = json_format.ParseDict(body, ExportTraceServiceRequest(), ignore_unknown_fields=True)
    except (json_format.ParseError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
        raise IngestError(f"not OTLP/JSON: {_one_line(error)}") from None
    del body
    return _request_to_spans(request)


def inflate(compressed: bytes, limit: int) -> bytes:
    """Gzip, of one or more members -> at most `limit` bytes, never more in memory; in time linear in both.

    Raises TooLarge beyond the limit, IngestError for damaged data.
    """
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(compressed)) as file:
            inflated = file.read(limit + 1)
    except EOFError:
        raise IngestError("gzip data that ends too early") from None
    except (OSError, zlib.error):
        raise IngestError("damaged gzip data") from None
    if len(inflated) > limit:
        raise TooLarge(f"more than {limit} bytes when decompressed")
    return inflated


def _hex_ids_to_base64(body: dict[str, Any]) -> None:
    """OTLP/JSON writes ids in hex, where protobuf's own JSON form, which `json_format` reads, has base64."""
    for span in _json_spans(body):
        for json_object in (span, *(link for link in span.get("links") or () if isinstance(link, dict))):
            for key in ("traceId", "spanId", "parentSpanId", "trace_id", "span_id", "parent_span_id"):
                if key in json_object:
                    try:
                        json_object[key] = base64.b64encode(bytes.fromhex(json_object[key])).decode()
                    except (ValueError, TypeError):
                        raise ValueError(f"{key} is not hex: {json_object[key]!r:.60}") from None


def _json_spans(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for resource in _objects(body, *RESOURCE_SPANS):
        for scope in _objects(resource, "scopeSpans", "scope_spans"):
            yield from _objects(scope, "spans")


def _objects(parent: dict[str, Any], *keys: str) -> Iterator[dict[str, Any]]:
    for key in keys:
        yield from (item for item in parent.get(key) or () if isinstance(item, dict))


def _request_to_spans(request: Any) -> DecodedRequest:
    spans: list[WireSpan] = []
    rejected: list[str] = []
    for resource_spans in request.resource_spans:
        service = _message_to_attributes(resource_spans.resource).get("service.name")
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                reason = _rejection_reason(span)
                if reason is not None:
                    rejected.append(f"span {span.name!r:.60}: {reason}")
                else:
                    service_name = service if isinstance(service, str) else None
                    spans.append(_to_wire_span(span, scope_spans.scope, service_name))
    return DecodedRequest(tuple(spans), tuple(rejected))


def _rejection_reason(span: Span) -> str | None:
    """Why a span cannot be stored; None when it can."""
    for name, value, length in (("trace id", span.trace_id, 16), ("span id", span.span_id, 8)):
        if len(value) != length or not any(value):
            return f"its {name} is not {length} bytes with one that is not 0"
    if span.parent_span_id and len(span.parent_span_id) != 8:
        return "its parent span id is not 8 bytes"
    if not 0 < span.start_time_unix_nano < _TIME_LIMIT_NS or not 0 < span.end_time_unix_nano < _TIME_LIMIT_NS:
        return "it has no start or no end time that can be stored"
    return None


def _to_wire_span(span: Span, scope: InstrumentationScope, service: str | None) -> WireSpan:
    exceptions = [_message_to_attributes(event) for event in span.events if event.name == "exception"]
    last_exception = exceptions[-1] if exceptions else {}
    return WireSpan(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_span_id=span.parent_span_id.hex() if any(span.parent_span_id) else None,
        parent_is_remote=bool(span.flags & _PARENT_IS_REMOTE),
        name=span.name,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        failed=span.status.code == Status.STATUS_CODE_ERROR,
        status_message=span.status.message or _text_or_none(last_exception.get("exception.message")),
        exception_type=_text_or_none(last_exception.get("exception.type")),
        scope=scope.name,
        scope_version=scope.version,
        service=service,
        attributes=_message_to_attributes(span),
        other_events=len(span.events) - len(exceptions),
        links=len(span.links),
        lost_attributes=span.dropped_attributes_count,
    )


def _message_to_attributes(message: Any) -> dict[str, Any]:
    values = {pair.key: _any_value_to_json(pair.value) for pair in message.attributes}
    return {key: value for key, value in values.items() if value is not None}


def _text_or_none(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _any_value_to_json(value: AnyValue) -> Any:
    """One attribute value as JSON has it. Bytes become base64 text, as in OTLP/JSON; an empty value is absent."""
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    if kind == "array_value":
        return [_any_value_to_json(item) for item in value.array_value.values]
    if kind == "kvlist_value":
        return {pair.key: _any_value_to_json(pair.value) for pair in value.kvlist_value.values}
    if kind == "bytes_value":
        return base64.b64encode(value.bytes_value).decode()
    if kind == "double_value" and not math.isfinite(value.double_value):  # spelled as the journal does
        return "NaN" if math.isnan(value.double_value) else "Infinity" if value.double_value > 0 else "-Infinity"
    return getattr(value, kind)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def message_to_json(message: Message) -> bytes:
    """A protobuf answer -> its OTLP/JSON form."""
    text: str = json_format.MessageToJson(message, indent=None)
    return text.encode()
