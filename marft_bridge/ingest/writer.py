"""Whole traces -> rows in the store's journal, and from there into the store.

Invariant: a trace is journaled in one append, and what a killed ingest left half written is completed by the next one,
because rows are stored once per (trace, span).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from marft_bridge.common.progress import Reporter
from marft_bridge.ingest.cleaning import SpanCleaner
from marft_bridge.ingest.otlp import WireSpan
from marft_bridge.ingest.report import IngestReport
from marft_bridge.ingest.spans_to_rows import TraceRows, spans_to_rows
from marft_bridge.ingest.trace_tree import NotAnEpisode
from marft_bridge.runs.run_folder import bridge_version
from trace_store.errors import NotJsonError, StoreError
from trace_store.journal import Journal
from trace_store.records import RunRow
from trace_store.store import TraceStore

STORE_WAIT_S = 10.0  # for another process that has the store open: commands hold it for moments only


class TraceWriter:
    """Writes traces into one journal under one run id; the run is written with the first of them.

    Invariant: the report counts a trace once, when it is on the disk, however often writing it was tried before.
    """

    def __init__(
        self, journal_folder: Path, cleaner: SpanCleaner, config: Mapping[str, Any], report: IngestReport
    ) -> None:
        self._journal = Journal(journal_folder)
        self._cleaner, self._config, self._report = cleaner, dict(config), report
        self.run_id = f"ingest-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        self._run: RunRow | None = None
        self._has_run_row = False  # in this journal
        self._unsynced: dict[str, TraceRows | str] = {}  # trace id -> the rows that were journaled, or why none were

    def write(self, traces: Mapping[str, Sequence[WireSpan]]) -> None:
        """Journals the rows of traces, by trace id, or notes in the report why a trace makes no episode.

        When it returns they are on the disk. Raises StoreError when the disk refuses; then none of them is counted,
        and all are to be written again.
        """
        for trace_id, spans in traces.items():
            if trace_id not in self._unsynced:  # else the disk took this one, and not a later one
                self._unsynced[trace_id] = self._journal_rows(spans)
        try:
            self._journal.sync()
        except StoreError:
            self._has_run_row = False
            self._unsynced.clear()
            self._journal = self._journal.renewed()
            raise
        for trace_id in traces:
            outcome = self._unsynced.pop(trace_id)
            if isinstance(outcome, str):
                self._report.refuse(trace_id, outcome)
            else:
                self._report.add_rows(trace_id, outcome)

    def close(self) -> None:
        """Lets the journal go. Raises StoreError when what a failed `write` left cannot be synced."""
        self._journal.close()

    def _journal_rows(self, spans: Sequence[WireSpan]) -> TraceRows | str:
        """The rows of a trace, journaled and not synced yet, or the reason why there are none."""
        try:
            trace_rows = spans_to_rows(spans, self.run_id)
            rows = [self._cleaner.clean_row(row) for row in trace_rows.rows]
        except NotAnEpisode as reason:
            return str(reason)
        except (StoreError, MemoryError):
            raise  # not for what the trace holds
        except Exception as error:  # noqa: BLE001 - whatever a sender put into a trace, the others do not wait for it
            return f"cannot be read: {type(error).__name__}"
        if not self._has_run_row:
            self._run = self._run or RunRow(
                self.run_id, "ingest", time.time_ns(), config=self._config, version=bridge_version()
            )
            self._journal.append(self._run)
            self._has_run_row = True
        try:
            self._journal.append_all(rows)
        except NotJsonError as error:
            return f"cannot be written: {error}"
        return trace_rows


def spans_to_traces(spans: Iterable[WireSpan]) -> dict[str, list[WireSpan]]:
    """Groups spans by trace id."""
    traces: dict[str, list[WireSpan]] = {}
    for span in spans:
        traces.setdefault(span.trace_id, []).append(span)
    return traces


def read_decided_ids(store: TraceStore, trace_ids: Iterable[str]) -> set[str]:
    """Which of the traces the store already has as episodes or as refusals."""
    requested_ids = list(trace_ids)
    rows = store.sql(
        "SELECT episode_id FROM episodes WHERE episode_id = ANY($1)"
        " UNION SELECT trace_id FROM refusals WHERE trace_id = ANY($1)",
        [requested_ids],
    )
    return {trace_id for (trace_id,) in rows}


def report_stored(store: TraceStore, report: IngestReport) -> None:
    """Counts the episodes and actions that the written traces became, and notes the refused ones with their reason."""
    trace_ids = list(report.row_counts)
    (report.episodes,) = store.sql("SELECT count(*) FROM episodes WHERE episode_id = ANY(?)", [trace_ids])[0]
    (report.actions,) = store.sql("SELECT count(*) FROM actions WHERE episode_id = ANY(?)", [trace_ids])[0]
    for trace_id, reason in store.sql("SELECT trace_id, reason FROM refusals WHERE trace_id = ANY(?)", [trace_ids]):
        report.refuse(trace_id, reason)


def open_store(path: Path, reporter: Reporter) -> TraceStore:
    """The store at `path`, made private to its owner when it is new. Prints which process it waits for.

    Raises StoreBusyError when another process has it open for longer than that.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    return TraceStore.open(path, wait_s=STORE_WAIT_S, on_wait=reporter.say)
