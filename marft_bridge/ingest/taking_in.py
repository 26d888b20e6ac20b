"""Whole traces -> rows in the store's journal, and from there into the store.

Invariant: a trace is journaled whole or not at all as far as the disk allows, and what a killed ingest left half
written is completed by the next one, because rows are stored once per (trace, span). Where spans come from is not
known here.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from marft_bridge.ingest.door import Door
from marft_bridge.ingest.otlp import WireSpan
from marft_bridge.ingest.report import IngestReport
from marft_bridge.ingest.spans_to_rows import spans_to_rows
from marft_bridge.ingest.trace_tree import NotAnEpisode
from marft_bridge.progress import Reporter
from marft_bridge.run_folder import bridge_version
from trace_store.journal import Journal
from trace_store.records import RunRow
from trace_store.store import TraceStore

WAIT_S = 10.0  # for who else has the store open: the other commands hold it for moments only


class TraceWriter:
    """Writes traces into one journal under one run id; the run is written with the first of them."""

    def __init__(self, journal: Journal, door: Door, config: Mapping[str, Any], report: IngestReport) -> None:
        self._journal, self._door, self._config, self._report = journal, door, dict(config), report
        self.run_id = f"ingest-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        self._began = False

    def write(self, trace_id: str, spans: Sequence[WireSpan]) -> None:
        """Journals the rows of one trace, not synced yet; or notes in the report why it makes no episode."""
        try:
            mapped = spans_to_rows(spans, self.run_id)
        except NotAnEpisode as reason:
            self._report.refuse(trace_id, str(reason))
            return
        if not self._began:
            self._journal.append(RunRow(self.run_id, "ingest", time.time_ns(), self._config, bridge_version()))
            self._began = True
        self._journal.append_all([self._door.row_to_written(row) for row in mapped.rows])
        self._report.add_rows(trace_id, mapped)


def spans_to_traces(spans: Iterable[WireSpan]) -> dict[str, list[WireSpan]]:
    """Spans by trace id."""
    traces: dict[str, list[WireSpan]] = {}
    for span in spans:
        traces.setdefault(span.trace_id, []).append(span)
    return traces


def decided_traces(store: TraceStore, trace_ids: Iterable[str]) -> set[str]:
    """Those of the traces that are episodes already, or were refused for good."""
    asked = list(trace_ids)
    rows = store.sql(
        "SELECT episode_id FROM episodes WHERE episode_id = ANY($1)"
        " UNION SELECT trace_id FROM refusals WHERE trace_id = ANY($1)",
        [asked],
    )
    return {trace_id for (trace_id,) in rows}


def report_stored(store: TraceStore, report: IngestReport) -> None:
    """Notes what became of the traces that were written: episodes, actions, and refusals with their reason."""
    written = list(report.written)
    (report.episodes,) = store.sql("SELECT count(*) FROM episodes WHERE episode_id = ANY(?)", [written])[0]
    (report.actions,) = store.sql("SELECT count(*) FROM actions WHERE episode_id = ANY(?)", [written])[0]
    for trace_id, reason in store.sql("SELECT trace_id, reason FROM refusals WHERE trace_id = ANY(?)", [written]):
        report.refuse(trace_id, reason)


def open_store(path: Path, reporter: Reporter) -> TraceStore:
    """The store at `path`, made private to its owner when it is new. Says for whom it waits.

    Raises StoreBusyError when another process has it open for longer than that.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    return TraceStore.open(path, wait_s=WAIT_S, say=reporter.say)
