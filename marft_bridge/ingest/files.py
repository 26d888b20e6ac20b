"""OTLP files and Langfuse's exports -> what is in them. The content tells the format, never the file's name.

    {...}, [...]                     OTLP/JSON or Langfuse's export: one value, or one per line
    0A ...                           one protobuf ExportTraceServiceRequest (or TracesData, which has the same form)
    00 00 nn nn ... 00 00 nn nn ...  several, each after its length in four bytes, as the collector writes them
    1F 8B ...                        any of these, gzipped

Protobuf messages after a length in varint form are refused: their beginning can look like a message's own.
Invariant: a file is read as a whole; one bad span, line or byte refuses all of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from marft_bridge.ingest.errors import IngestError
from marft_bridge.ingest.langfuse_export import LangfuseRecords
from marft_bridge.ingest.otlp import RESOURCE_SPANS, DecodedRequest, WireSpan, inflate, json_to_spans, protobuf_to_spans

MAX_FILE_BYTES = 2 << 30  # bytes, after decompression: all of it is held in memory
_GZIP = b"\x1f\x8b"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(slots=True)
class FileContent:
    """What a file holds: spans, or records of Langfuse, which become spans once all files are read."""

    spans: list[WireSpan] = field(default_factory=list)
    langfuse: LangfuseRecords = field(default_factory=LangfuseRecords)


def file_to_content(path: Path) -> FileContent:
    """All of one file. Raises IngestError, naming the file and what is wrong with it."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise IngestError(f"ingest: cannot read {path}: {error.strerror or error}") from None
    content = FileContent()
    try:
        if data.startswith(_GZIP):
            data = inflate(data, MAX_FILE_BYTES)
        _add_data(data, content)
    except IngestError as error:
        raise IngestError(f"ingest: {path}: {error}; nothing of this run was taken in") from None
    return content


def _require_all_spans(decoded: DecodedRequest) -> tuple[WireSpan, ...]:
    if decoded.rejected:
        raise IngestError(decoded.rejected[0])
    return decoded.spans


def _add_data(data: bytes, content: FileContent) -> None:
    if not data:
        raise IngestError("the file is empty")
    text = data.removeprefix(_BYTE_ORDER_MARK)
    if data[0] < 0x08:  # no protobuf field has the number 0, so this is a length
        for decoded in _frames_to_requests(data):
            content.spans.extend(_require_all_spans(decoded))
    elif text.lstrip()[:1] in (b"{", b"[") and not _is_protobuf(data):
        _add_json(text, content)
    else:
        content.spans.extend(_require_all_spans(protobuf_to_spans(data)))


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


def _add_json(data: bytes, content: FileContent) -> None:
    try:
        _add_json_value(data, content)
    except IngestError as document_error:
        lines = [(number, line) for number, line in enumerate(data.splitlines(), 1) if line.strip()]
        if len(lines) == 1 or not _is_json(lines[0][1]):
            raise
        for number, line in lines:
            try:
                _add_json_value(line, content)
            except IngestError as line_error:
                raise IngestError(f"line {number}: {line_error}") from document_error


def _add_json_value(data: bytes, content: FileContent) -> None:
    """One JSON value: an OTLP request, or what Langfuse exports."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise IngestError("not JSON") from None
    if isinstance(value, dict) and any(key in value for key in RESOURCE_SPANS):
        del value
        content.spans.extend(_require_all_spans(json_to_spans(data)))
        return
    try:
        content.langfuse.add(value)
    except RecursionError:
        raise IngestError("lists in lists without end") from None


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True
