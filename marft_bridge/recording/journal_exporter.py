"""Ended spans -> `SpanRow` lines in the journal, when their run ends, in the thread that ended it.

A queue that drops its oldest spans when it is full would lose what training needs, and all of it when the process is
killed. Invariants: after `Journal.sync()` every run that ended before is on disk; nothing goes to the journal or to an
exporter that `SpanPrivacy` has not passed; every span that could not be written is counted, and so is every value that
was left out. A failure never reaches the app.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeGuard

from marft_bridge.recording.open_span import OpenSpan, span_to_row
from marft_bridge.recording.span_privacy import SpanPrivacy
from trace_store.call_attributes import check_call_attributes
from trace_store.errors import NotJsonError, StoreError
from trace_store.journal import BATCH_S, Journal
from trace_store.records import SpanRow

log = logging.getLogger("marft_bridge")

BATCH = 64  # spans of one run that wait at most


class Export(Protocol):
    """Where clean spans go besides the journal."""

    def send(self, row: SpanRow) -> None:
        """Takes a span. Must not raise, nor wait for anything."""

    def shutdown(self) -> None:
        """Sends what it still holds, for a limited time."""


class JournalProcessor:
    """Appends every ended span to a journal, and hands it on to an exporter where there is one.

    Spans of a run are written together, when it ends: a run that has not ended is of no use yet, and one pass over
    many spans costs a third of as many passes over one. When the run has ended, the journal is asked to sync it, which
    a thread does `sync_delay_s` later: this may be the thread of the app's event loop. With 0 it is done at once.
    """

    def __init__(
        self, journal: Journal, privacy: SpanPrivacy, export: Export | None = None, *, sync_delay_s: float = BATCH_S
    ) -> None:
        self._journal = journal
        self._sync_delay_s = sync_delay_s
        self._export = export
        self._lock = threading.Lock()
        self.privacy = privacy
        self.failure: StoreError | None = None  # the first write that the disk refused
        self.lost_spans = 0  # spans that ended and are not in the journal
        self.unreadable: Counter[str] = Counter()  # attribute -> its values that were left out: no column holds them
        self.on_episode: Callable[[], None] = lambda: None  # called for each run whose root is in the journal
        self._pending: dict[str, list[OpenSpan]] = {}  # trace id -> ended, not yet written
        self._row_copies: dict[str, list[SpanRow]] = {}  # trace id -> list that its rows are copied to, until it ends

    def copy_rows_to(self, root: OpenSpan, rows: list[SpanRow]) -> None:
        """Appends the spans of a run to `rows` too, once they are in the journal."""
        self._row_copies[root.trace_id] = rows

    def check_call(self, attributes: Mapping[str, Any]) -> dict[str, Any]:
        """Attributes of a call or a tool, as an app or a model gave them -> those that the store can hold, each of its
        type; one that it cannot is left out and counted. Never raises."""
        checked, unreadable = check_call_attributes(attributes)
        if unreadable:
            with self._lock:
                is_first = not self.unreadable
                self.unreadable.update(unreadable)
            if is_first:
                log.warning("a value of %s is not what the store expects; it is left out", unreadable[0])
        return checked

    def end_span(self, span: OpenSpan, end_ns: int | None = None) -> None:
        """Ends a span, now or at this time, and writes all pending ones of its run when the run has ended or many wait.
        Never raises."""
        span.end_ns = time.time_ns() if end_ns is None else end_ns
        with self._lock:
            pending = self._pending.setdefault(span.trace_id, [])
            pending.append(span)
            if span.parent_span_id is not None and len(pending) < BATCH:
                return
            del self._pending[span.trace_id]
        self._write(pending)

    def _write(self, ended_spans: Sequence[OpenSpan]) -> None:
        """Writes spans to the journal in one write, then hands them to the exporter. Counts what fails."""
        rows = self._rows_to_clean([span_to_row(span) for span in ended_spans])
        written_rows = self._append(rows)
        if self._row_copies:
            self._copy_rows(written_rows)
        episodes = sum(row.parent_span_id is None for row in written_rows)
        for _ in range(episodes):
            self.on_episode()
        if episodes:
            self._journal.sync_soon(self._sync_delay_s)
        if self._export is not None:
            for row in rows:
                self._export.send(row)

    def _append(self, rows: Sequence[SpanRow]) -> Sequence[SpanRow]:
        """Writes rows to the journal: in one write, or each by itself where one of them cannot be written at all.
        Returns those that were written; never raises."""
        try:
            self._journal.append_all(rows)
        except Exception as error:  # noqa: BLE001 - raised here, it would end up in the app
            if len(rows) == 1 or _is_of_the_disk(error):
                self._note_loss(error, len(rows))
                return ()
            return [written_row for row in rows for written_row in self._append([row])]
        return rows

    def _rows_to_clean(self, rows: Sequence[SpanRow]) -> Sequence[SpanRow]:
        """The rows as they may be written, without those that cannot be told to be clean."""
        if self.privacy.passes(rows):
            return rows
        clean_rows: list[SpanRow] = []
        for row in rows:
            try:
                clean_rows.append(self.privacy.row_to_clean(row))
            except Exception as error:  # noqa: BLE001 - as above
                self._note_loss(error, 1)
        return clean_rows

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
            if _is_of_the_disk(error):
                self.failure = self.failure or error
        if is_first:
            log.warning("a span could not be written (%s); its episode will not be used", type(error).__name__)

    def shutdown(self) -> None:
        """Shuts the exporter down, which sends what it still holds. The journal is closed by its opener."""
        if self._export is not None:
            self._export.shutdown()


def _is_of_the_disk(error: Exception) -> TypeGuard[StoreError]:
    """Whether the journal refused to write, rather than a row to be written: the next write is then refused too."""
    return isinstance(error, StoreError) and not isinstance(error, NotJsonError)
