"""Spans that came in by request, in any order -> whole traces; until then they wait here and on disk.

The disk side is a spool folder beside the store: segments as the store's journal writes them, but of spans as they
came. Invariants: what `keep` has returned for survives SIGKILL; a span leaves the spool only after `forget` said
that its trace is safe elsewhere; a trace that was handed out does not grow any more; one process at a time uses a
spool. What spans mean is not known here.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from marft_bridge.ingest.errors import IngestError
from marft_bridge.ingest.otlp import WireSpan
from marft_bridge.ingest.trace_tree import TraceTree
from trace_store.journal import SUFFIX, Journal, line_of, read_segment
from trace_store.records import SpanRow

MOST_WAITING = 256 << 20  # bytes of journal lines
_SLACK = 64 << 20  # bytes of spans that are done but still in the spool before it is rewritten
_MOST_DONE = 100_000  # trace ids that are remembered, to tell late spans from new traces
_ROW_FIELDS = {field.name for field in fields(SpanRow)}


class NoRoom(Exception):  # noqa: N818 - a state to wait in, not an error
    """Too much is waiting for the rest of its trace."""


@dataclass(slots=True)
class _Waiting:
    """One trace so far."""

    spans: dict[str, list[WireSpan]] = field(default_factory=dict)  # by span id: more than one is a contradiction
    size: int = 0
    last_came: float = 0.0
    whole: bool | None = None  # None: not looked at since a span came

    def all_spans(self) -> list[WireSpan]:
        return [span for same_id in self.spans.values() for span in same_id]


class WaitingRoom:
    """Where spans wait for the rest of their trace. Safe to use from several threads."""

    def __init__(self, folder: Path, now: float) -> None:
        """Takes over what an earlier receiver left, as if it came now: senders may be about to repeat the rest.

        Raises IngestError when another receiver is using the folder.
        """
        self._folder = folder
        self._lock_file = _lock(folder)
        self._lock = threading.Lock()
        self._traces: dict[str, _Waiting] = {}
        self._handed_out: dict[str, _Waiting] = {}  # not safe elsewhere yet
        self._done: dict[str, None] = {}  # ids of all that were handed out, oldest first
        self._size = 0  # of what waits
        self._spooled = 0  # bytes in the spool
        self.late = 0  # spans of traces that were done, or that came again
        self.torn = 0  # lines that a crash left half written: never acknowledged
        left = self._segments()
        for path in left:
            records, torn = read_segment(path)
            self.torn += torn
            for record in records:
                if isinstance(record, SpanRow):
                    self._add(row_to_span(record), len(line_of(record)), now)
        self._journal = Journal(folder)
        self._rewrite(left)

    def keep(self, spans: Sequence[WireSpan], now: float) -> None:
        """Returns once the spans are on disk. `now` is a monotonic time in seconds.

        Raises NoRoom when too much waits already, and StoreError when the disk refuses; then nothing was kept.
        """
        sized = [(span, row, len(line_of(row))) for span in spans for row in [span_to_row(span)]]
        with self._lock:
            if self._size + sum(size for _, _, size in sized) > MOST_WAITING:
                raise NoRoom
            fresh = [item for item in sized if item[0].trace_id not in self._done]
            self.late += len(sized) - len(fresh)
            self._journal.append_all([row for _, row, _ in fresh])
            self._spooled += sum(size for _, _, size in fresh)
            self._journal.sync()
            for span, _, size in fresh:
                self._add(span, size, now)

    def hand_out(self, quiet_since: float) -> dict[str, list[WireSpan]]:
        """Traces that are whole as far as one can know: a root, no parent missing, nothing new since that time.

        Spans of theirs that come later are too late. Until `forget`, they stay in the spool.
        """
        with self._lock:
            for trace_id in [key for key, found in self._traces.items() if found.last_came <= quiet_since]:
                found = self._traces[trace_id]
                if found.whole is None:
                    found.whole = TraceTree(found.all_spans()).fault() is None
                if found.whole:
                    self._take_out(trace_id)
            return {key: found.all_spans() for key, found in self._handed_out.items()}

    def waiting_traces(self) -> dict[str, list[WireSpan]]:
        """All that still waits, whole or not."""
        with self._lock:
            return {key: found.all_spans() for key, found in self._traces.items()}

    def forget(self, known: Iterable[str] = ()) -> None:
        """What was handed out is safe elsewhere, and so are the `known` ones among what waits."""
        with self._lock:
            for trace_id in known:
                self._take_out(trace_id)
            self._size -= sum(found.size for found in self._handed_out.values())
            self._handed_out.clear()
            if self._spooled - self._size > _SLACK or (self._spooled and not self._traces):
                self._rewrite(self._segments())

    def close(self) -> None:
        """Leave what still waits in the spool, for the next receiver."""
        with self._lock:
            self._rewrite(self._segments())
            self._journal.close()
            os.close(self._lock_file)

    def _segments(self) -> list[Path]:
        return sorted(self._folder.glob(f"*{SUFFIX}"))

    def _take_out(self, trace_id: str) -> None:
        self._handed_out[trace_id] = self._traces.pop(trace_id)
        self._done[trace_id] = None
        if len(self._done) > _MOST_DONE:
            del self._done[next(iter(self._done))]

    def _add(self, span: WireSpan, size: int, now: float) -> None:
        found = self._traces.setdefault(span.trace_id, _Waiting())
        found.last_came = max(found.last_came, now)
        same_id = found.spans.setdefault(span.span_id, [])
        if span in same_id:  # OTLP senders repeat what they are not sure of
            self.late += 1
            return
        same_id.append(span)
        found.whole = None
        found.size += size
        self._size += size

    def _rewrite(self, old: Sequence[Path]) -> None:
        """What waits, in a segment of its own; only then the old ones go."""
        fresh = Journal(self._folder)
        self._spooled = 0
        for found in (*self._handed_out.values(), *self._traces.values()):
            for span in found.all_spans():
                row = span_to_row(span)
                fresh.append(row)
                self._spooled += len(line_of(row))
        fresh.sync()
        self._journal.close()
        self._journal = fresh
        for path in old:
            path.unlink()


def span_to_row(span: WireSpan) -> SpanRow:
    """A span as it came -> a row that a journal segment can hold."""
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
    """The span that `span_to_row` made the row of."""
    rest: dict[str, Any] = row.attributes
    return WireSpan(
        trace_id=row.trace_id,
        span_id=row.span_id,
        parent_span_id=row.parent_span_id,
        name=row.name,
        start_ns=row.start_ns,
        end_ns=row.end_ns,
        status_message=row.status_message,
        **rest,
    )


def _lock(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle = os.open(folder / "receiver.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise IngestError(f"ingest: another receiver is using {folder}; stop it, or choose another store") from None
    return handle
