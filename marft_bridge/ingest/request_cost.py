"""An OTLP request, still in bytes -> its spans and the memory that it would take, counted before anything is built.

Fifteen kilobytes of gzip can hold eight million empty messages, each of which becomes an object. Invariants: one pass
over the bytes, which ends where a bound is passed, and nothing is kept beside them. The estimates are upper bounds of
what `ingest.otlp` and the spool hold of a request at one time, as tests/ingest/test_request_cost.py measures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from marft_bridge.common.json_memory import character_bytes, is_json_within, line_bytes
from marft_bridge.ingest.errors import IngestError, TooLarge

# Bytes of memory beside the texts.
_FIELD_BYTES = 32  # a number, or a text's own object
_MESSAGE_BYTES = 128  # an attribute, an event, a link, an item of a list
_GROUP_BYTES = 1024  # the spans of one resource or scope
_SPAN_BYTES = 2048  # a span without its attributes

_MAX_DEPTH = 100  # of messages in messages, as protobuf's own readers have it
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5  # wire types; the others are groups, which OTLP has none of
_MAX_VARINT_BYTES = 10
_CONTROLS = bytes(range(32))  # each takes six bytes in JSON

NOT_PROTOBUF = "not a protobuf ExportTraceServiceRequest"
_Table = dict[int, tuple[int, "_Table | None"]]
"""Number of a field -> the memory of one such message and its own fields; no entry for numbers and texts."""


@dataclass(frozen=True, slots=True)
class RequestBounds:
    """The most that one request may be."""

    spans: int
    memory_bytes: int


class _Tally:
    """What was counted so far; raises TooLarge where a bound is passed."""

    def __init__(self, bounds: RequestBounds) -> None:
        self._bounds = bounds
        self._spans = self._memory_bytes = 0

    def add_span(self) -> None:
        self._spans += 1
        if self._spans > self._bounds.spans:
            raise TooLarge(f"more than {self._bounds.spans} spans in one request")

    def add_memory(self, byte_count: int) -> None:
        self._memory_bytes += byte_count
        if self._memory_bytes > self._bounds.memory_bytes:
            raise _memory_error(self._bounds)


def _memory_error(bounds: RequestBounds) -> TooLarge:
    return TooLarge(f"a request that would take more than {bounds.memory_bytes >> 20} MiB of memory")


def check_protobuf_cost(body: bytes, bounds: RequestBounds) -> None:
    """Counts an `ExportTraceServiceRequest`. Raises TooLarge beyond the bounds, IngestError for no protobuf."""
    tally = _Tally(bounds)
    open_messages: list[tuple[int, _Table]] = [(len(body), _REQUEST_TABLE)]  # (where it ends, its fields)
    position = 0
    while open_messages:
        end, table = open_messages[-1]
        if position >= end:
            if position > end:
                raise IngestError(NOT_PROTOBUF)
            open_messages.pop()
            continue
        tag, position = _read_varint(body, position)
        wire_type = tag & 7
        if wire_type == _LENGTH:
            length, position = _read_varint(body, position)
            field_end = position + length
            if field_end > end:
                raise IngestError(NOT_PROTOBUF)
            message_bytes, fields = table.get(tag >> 3, (0, None))
            if fields is None:
                tally.add_memory(_FIELD_BYTES + _text_bytes(body[position:field_end]))
                position = field_end
                continue
            tally.add_memory(message_bytes)
            if message_bytes == _SPAN_BYTES:
                tally.add_span()
            if len(open_messages) == _MAX_DEPTH:
                raise IngestError(NOT_PROTOBUF)
            open_messages.append((field_end, fields))
            continue
        tally.add_memory(_FIELD_BYTES)
        if wire_type == _VARINT:
            _, position = _read_varint(body, position)
        elif wire_type == _FIXED64:
            position += 8
        elif wire_type == _FIXED32:
            position += 4
        else:
            raise IngestError(NOT_PROTOBUF)


def check_json_cost(text: bytes, bounds: RequestBounds) -> None:
    """Counts OTLP/JSON, but for its spans, which stand out only when it is read. Raises TooLarge beyond the bounds."""
    if not is_json_within(text, bounds.memory_bytes, keeps_lines=True):
        raise _memory_error(bounds)


def _text_bytes(text: bytes) -> int:
    """Memory of a text as Python holds it, and of its journal line while that is made."""
    escaped_bytes = 5 * (len(text) - len(text.translate(None, _CONTROLS))) + text.count(b'"') + text.count(b"\\")
    width = character_bytes(text)
    return len(text) * width + (len(text) + escaped_bytes) * line_bytes(width)


def _read_varint(body: bytes, position: int) -> tuple[int, int]:
    """(the number, the position after it)."""
    value = shift = 0
    for byte in body[position : position + _MAX_VARINT_BYTES]:
        value |= (byte & 127) << shift
        position += 1
        if byte < 128:
            return value, position
        shift += 7
    raise IngestError(NOT_PROTOBUF)


def _message_to_table(message: Descriptor, tables: dict[str, _Table]) -> _Table:
    """The fields of a message that are messages themselves. A message may hold itself, so tables are made once each."""
    if message.full_name in tables:
        return tables[message.full_name]
    table = tables[message.full_name] = {}
    message_fields: Any = message.fields
    for field in message_fields:
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            fields = _message_to_table(field.message_type, tables)
            table[field.number] = (_MEMORY_BYTES.get(field.message_type.full_name, _MESSAGE_BYTES), fields)
    return table


_MEMORY_BYTES = {
    ResourceSpans.DESCRIPTOR.full_name: _GROUP_BYTES,
    ScopeSpans.DESCRIPTOR.full_name: _GROUP_BYTES,
    Span.DESCRIPTOR.full_name: _SPAN_BYTES,
}
_REQUEST_TABLE = _message_to_table(ExportTraceServiceRequest.DESCRIPTOR, {})
