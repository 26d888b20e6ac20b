"""OTLP files -> the spans in them. The format is recognised by the content, never by the file's name.

    {...}                            OTLP/JSON: one object, or one per line as the collector's file exporter writes
    0A ...                           one protobuf ExportTraceServiceRequest (or TracesData, which has the same form)
    00 00 nn nn ... 00 00 nn nn ...  several, each after its length in four bytes, as the collector writes them
    1F 8B ...                        any of these, gzipped

Protobuf messages after a length in varint form are refused: their beginning can look like a message's own.
Invariant: a file is read as a whole; one bad span, line or byte refuses all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from marft_bridge.ingest.errors import IngestError
from marft_bridge.ingest.otlp import DecodedRequest, WireSpan, inflate, json_to_spans, protobuf_to_spans

MAX_FILE_BYTES = 2 << 30  # bytes, after decompression: all of it is held in memory
_GZIP = b"\x1f\x8b"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def file_to_spans(path: Path) -> list[WireSpan]:
    """All spans of one file. Raises IngestError, naming the file and what is wrong with it."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise IngestError(f"ingest: cannot read {path}: {error.strerror or error}") from None
    try:
        if data.startswith(_GZIP):
            data = inflate(data, MAX_FILE_BYTES)
        return [span for decoded in _content_to_requests(data) for span in _require_all_spans(decoded)]
    except IngestError as error:
        raise IngestError(f"ingest: {path}: {error}; nothing of this run was taken in") from None


def _require_all_spans(decoded: DecodedRequest) -> tuple[WireSpan, ...]:
    if decoded.rejected:
        raise IngestError(decoded.rejected[0])
    return decoded.spans


def _content_to_requests(data: bytes) -> Iterator[DecodedRequest]:
    if not data:
        raise IngestError("the file is empty")
    if data[0] < 0x08:  # no protobuf field has the number 0, so this is a length
        yield from _frames_to_requests(data)
    elif data.removeprefix(_BYTE_ORDER_MARK).lstrip()[:1] == b"{" and not _is_protobuf(data):
        yield from _json_to_requests(data.removeprefix(_BYTE_ORDER_MARK))
    else:
        yield protobuf_to_spans(data)


def _is_protobuf(data: bytes) -> bool:
    """0A 7B, a line break and a brace, also begins a protobuf field of 123 bytes: such data is parsed to decide."""
    if data[:1] != b"\n":
        return False
    try:
        protobuf_to_spans(data)
    except IngestError:
        return False
    return True


def _frames_to_requests(data: bytes) -> Iterator[DecodedRequest]:
    offset = 0
    while offset < len(data):
        end = offset + 4 + int.from_bytes(data[offset : offset + 4], "big")
        if end > len(data) or end == offset + 4:
            raise IngestError(f"the length at byte {offset} leads past the end of the file, or nowhere")
        yield protobuf_to_spans(data[offset + 4 : end])
        offset = end


def _json_to_requests(data: bytes) -> Iterator[DecodedRequest]:
    try:
        yield json_to_spans(data)
    except IngestError as document_error:
        lines = [(number, line) for number, line in enumerate(data.splitlines(), 1) if line.strip()]
        if len(lines) == 1 or not _is_json_lines(lines[0][1]):
            raise
        for number, line in lines:
            try:
                yield json_to_spans(line)
            except IngestError as line_error:
                raise IngestError(f"line {number}: {line_error}") from document_error


def _is_json_lines(first_line: bytes) -> bool:
    try:
        json_to_spans(first_line)
    except IngestError:
        return False
    return True
