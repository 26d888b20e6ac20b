"""Spans received in any order -> complete traces; until then they wait in memory and in a spool folder on disk.

The spool is a folder beside the store, of segments in the journal's format that hold spans as they were received.
Invariants: spans survive SIGKILL once `add` has returned; a span leaves the spool only after `acknowledge`, when its
trace is on disk elsewhere; a trace that was taken does not grow any more; one process at a time uses a spool.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from marft_bridge.ingest.conventions import span_to_reading
from marft_bridge.ingest.errors import IngestError
from marft_bridge.ingest.otlp import WireSpan
from marft_bridge.ingest.reading import as_mapping, as_text
from marft_bridge.ingest.trace_tree import TraceTree
from trace_store.errors import StoreError
from trace_store.files import make_folder, open_to_read, open_to_write
from trace_store.journal import ForeignLine, Journal, folder_to_segments, line_of, lines_from, set_aside
from trace_store.migrations import newest_version
from trace_store.records import SpanRow

log = logging.getLogger("marft_bridge")

SPOOL_SUFFIX = ".spool"  # of the folder, behind the store's name
LOCK_NAME = "receiver.lock"
MAX_WAITING_BYTES = 256 << 20  # bytes of journal lines
_MAX_SLACK_BYTES = 64 << 20  # bytes of acknowledged spans that stay in the spool until it is rewritten
_MAX_TAKEN_IDS = 100_000  # trace ids that are remembered, to tell late spans from new traces
_USER_KEYS = ("user.id", "user_id", "subject.id")  # how the names of attributes end that hold a user's id
_ROW_FIELDS = {field.name for field in fields(SpanRow)}


def spool_of(store: Path) -> Path:
    """The folder where a receiver keeps what waits, next to the store's file."""
    return store.with_name(store.name + SPOOL_SUFFIX)


class SpoolFull(Exception):  # noqa: N818 - a state to wait in, not an error
    """Too many bytes wait for the rest of their traces."""


@dataclass(slots=True)
class _PartialTrace:
    """The spans of one trace so far."""

    spans: dict[str, list[WireSpan]] = field(default_factory=dict)  # by span id: more than one is a contradiction
    byte_count: int = 0
    last_arrival: float = 0.0
    is_complete: bool | None = None  # None: not checked since a span arrived

    def all_spans(self) -> list[WireSpan]:
        return [span for same_id_spans in self.spans.values() for span in same_id_spans]


class TraceSpool:
    """Spans that wait for the rest of their trace. Safe to use from several threads."""

    def __init__(self, folder: Path, now: float) -> None:
        """Takes over what an earlier receiver left, as if it arrived now: senders may be about to repeat the rest.

        Raises IngestError when another receiver is using the folder.
        """
        self._folder = folder
        self._lock_file = _lock(folder)
        self._lock = threading.Lock()
        self._traces: dict[str, _PartialTrace] = {}
        self._unacknowledged: dict[str, _PartialTrace] = {}  # taken, but not on disk elsewhere yet
        self._taken_ids: dict[str, None] = {}  # of all taken traces, oldest first
        self._waiting_bytes = 0  # of traces that wait or are not acknowledged
        self._spooled_bytes = 0  # bytes in the spool
        self.late_spans = 0  # spans of traces that were taken before, or that came again
        self.torn_lines = 0  # lines that a crash left half written: never acknowledged
        old_segments = self._segments()
        for path in old_segments:
            self._take_over(path, now)
        self._journal = Journal(folder)
        self._rewrite(old_segments)

    def add(self, spans: Sequence[WireSpan], now: float) -> None:
        """Returns once the spans are on disk. `now` is a monotonic time in seconds.

        Raises SpoolFull when too much waits already, and StoreError when the disk refuses; then nothing was added.
        """
        sent_lines = [(span, line_of(span_to_row(span))) for span in spans]
        with self._lock:
            if self._waiting_bytes + sum(len(line) for _, line in sent_lines) > MAX_WAITING_BYTES:
                raise SpoolFull
            accepted = [entry for entry in sent_lines if entry[0].trace_id not in self._taken_ids]
            self.late_spans += len(sent_lines) - len(accepted)
            self._journal.append_lines(b"".join(line for _, line in accepted))
            self._spooled_bytes += sum(len(line) for _, line in accepted)
            try:
                self._journal.sync()
            except StoreError:
                self._journal = self._journal.renewed()  # the disk may keep what comes next
                raise
            for span, line in accepted:
                self._add(span, len(line), now)

    def take_complete(self, quiet_since: float) -> dict[str, list[WireSpan]]:
        """The traces that look complete (one root, no parent missing, no span after `quiet_since`), by trace id.

        Their later spans are counted as late. Until `acknowledge` they stay in the spool and are returned again.
        """
        with self._lock:
            for trace_id in [trace_id for trace_id, trace in self._traces.items() if trace.last_arrival <= quiet_since]:
                trace = self._traces[trace_id]
                if trace.is_complete is None:
                    trace.is_complete = TraceTree(trace.all_spans()).fault() is None
                if trace.is_complete:
                    self._mark_taken(trace_id)
            return {trace_id: trace.all_spans() for trace_id, trace in self._unacknowledged.items()}

    def unacknowledged_ids(self) -> list[str]:
        """The traces that were taken, and are not known to be on disk elsewhere."""
        with self._lock:
            return list(self._unacknowledged)

    def waiting_traces(self) -> dict[str, list[WireSpan]]:
        """The traces that still wait, complete or not."""
        with self._lock:
            return {trace_id: trace.all_spans() for trace_id, trace in self._traces.items()}

    def acknowledge(self, stored_ids: Iterable[str] = ()) -> None:
        """The traces that were taken are on disk elsewhere, and so are the waiting ones of `stored_ids`.

        Raises StoreError when the disk has no room to rewrite the spool; then it is larger than it need be until later.
        """
        with self._lock:
            for trace_id in stored_ids:
                self._mark_taken(trace_id)
            self._waiting_bytes -= sum(trace.byte_count for trace in self._unacknowledged.values())
            self._unacknowledged.clear()
            if self._spooled_bytes - self._waiting_bytes > _MAX_SLACK_BYTES or (
                self._spooled_bytes and not self._traces
            ):
                self._rewrite(self._segments())

    def close(self) -> None:
        """Leaves what still waits in the spool, for the next receiver."""
        with self._lock:
            try:
                with suppress(StoreError):  # the segments as they are have all of it; the store knows what it has
                    self._rewrite(self._segments())
                with suppress(StoreError):  # of spans that nobody was told are kept
                    self._journal.close()
            finally:
                os.close(self._lock_file)

    def _segments(self) -> list[Path]:
        return folder_to_segments(self._folder)

    def _take_over(self, segment: Path, now: float) -> None:
        """Adds the spans of an earlier receiver's segment; lines that hold none are set aside in a file beside it."""
        foreign_lines: list[ForeignLine] = []
        with open_to_read(segment) as file:
            for record, _ in lines_from(file, 0, growing=False):
                if record is None:
                    self.torn_lines += 1
                elif isinstance(record, ForeignLine):
                    foreign_lines.append(record)
                elif isinstance(record, SpanRow):
                    try:
                        span = row_to_span(record)
                    except TypeError as error:
                        foreign_lines.append(ForeignLine(line_of(record), str(error)))
                    else:
                        self._add(span, len(line_of(record)), now)
        if foreign_lines:
            path = set_aside(segment, 0, foreign_lines, version=newest_version())
            log.warning(
                "%d lines of %s hold no spans of this version; they are kept in %s", len(foreign_lines), segment, path
            )

    def _mark_taken(self, trace_id: str) -> None:
        self._unacknowledged[trace_id] = self._traces.pop(trace_id)
        self._taken_ids[trace_id] = None
        if len(self._taken_ids) > _MAX_TAKEN_IDS:
            del self._taken_ids[next(iter(self._taken_ids))]

    def _add(self, span: WireSpan, size: int, now: float) -> None:
        trace = self._traces.setdefault(span.trace_id, _PartialTrace())
        trace.last_arrival = max(trace.last_arrival, now)
        same_id_spans = trace.spans.setdefault(span.span_id, [])
        if span in same_id_spans:  # OTLP senders repeat what they are not sure of
            self.late_spans += 1
            return
        same_id_spans.append(span)
        trace.is_complete = None
        trace.byte_count += size
        self._waiting_bytes += size

    def _rewrite(self, old_segments: Sequence[Path]) -> None:
        """Writes what waits to a new segment, synced before the old ones are deleted.

        Raises StoreError when the disk refuses; then the old ones stay, and nothing of the new one.
        """
        new_journal, spooled_bytes = Journal(self._folder), 0
        try:
            for trace in (*self._unacknowledged.values(), *self._traces.values()):
                for span in trace.all_spans():
                    line = line_of(span_to_row(span))
                    new_journal.append_lines(line)
                    spooled_bytes += len(line)
            new_journal.sync()
        except StoreError:
            with suppress(StoreError):
                new_journal.close()
            for path in set(self._segments()) - set(old_segments):
                path.unlink()
            raise
        with suppress(StoreError):  # all that it has is in the new one
            self._journal.close()
        self._journal, self._spooled_bytes = new_journal, spooled_bytes
        for path in old_segments:
            path.unlink()


def span_to_row(span: WireSpan) -> SpanRow:
    """A received span -> a row that a journal segment can hold; fields that a row lacks go into its attributes."""
    values = asdict(span)
    return SpanRow(
        **{key: values[key] for key in ("trace_id", "span_id", "parent_span_id", "name", "start_ns", "end_ns")},
        operation="",
        status="error" if span.failed else "ok",
        status_message=span.status_message,
        convention="",
        attributes={key: value for key, value in values.items() if key not in _ROW_FIELDS - {"attributes"}},
    )


def row_to_span(row: SpanRow) -> WireSpan:
    """The inverse of `span_to_row`."""
    span_fields: dict[str, Any] = row.attributes
    return WireSpan(
        trace_id=row.trace_id,
        span_id=row.span_id,
        parent_span_id=row.parent_span_id,
        name=row.name,
        start_ns=row.start_ns,
        end_ns=row.end_ns,
        status_message=row.status_message,
        **span_fields,
    )


def row_names_subject(row: SpanRow, subject: str | None) -> bool:
    """Whether a row of the spool names this user, as its convention does or by an attribute of such a name."""
    attributes = as_mapping(row.attributes.get("attributes"))
    if subject is None:
        return False
    if any(key.endswith(_USER_KEYS) and as_text(value) == subject for key, value in attributes.items()):
        return True
    try:
        reading = span_to_reading(row_to_span(row))
    except (TypeError, ValueError, LookupError, AttributeError, RecursionError):  # of an earlier release, or unreadable
        return False
    return reading is not None and reading.subject == subject


def _lock(folder: Path) -> int:
    make_folder(folder)
    handle = open_to_write(folder / LOCK_NAME)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise IngestError(f"ingest: another receiver is using {folder}; stop it, or choose another store") from None
    return handle
