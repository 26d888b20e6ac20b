"""`marft-bridge ingest FILE...`: OTLP files -> episodes of a store.

Invariant: every file is read and checked before anything is written; a trace may be spread over several of them.
Taking the same files in twice adds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from marft_bridge.ingest.door import Door
from marft_bridge.ingest.files import file_to_spans
from marft_bridge.ingest.report import IngestReport
from marft_bridge.ingest.taking_in import TraceWriter, decided_traces, open_store, report_stored, spans_to_traces
from marft_bridge.progress import Reporter
from marft_bridge.record_options import RecordOptions
from trace_store.journal import Journal


def ingest_files(paths: Sequence[Path], store_path: Path, options: RecordOptions, reporter: Reporter) -> IngestReport:
    """Takes the traces in the files into the store, cleaned as `options` say, and prints a report.

    Raises IngestError for a file that is no OTLP trace data, and StoreError when the store cannot be written; then
    nothing was taken in.
    """
    report = IngestReport()
    door = Door(options)
    spans = [door.span_to_clean(span) for path in paths for span in file_to_spans(path)]
    report.spans = len(spans)
    report.note_cleaning(door)
    traces = spans_to_traces(spans)
    report.traces = len(traces)
    with open_store(store_path, reporter) as store:
        store.take_in()
        known = decided_traces(store, traces)
        report.stored_before = len(known)
        journal = Journal(store.journal_folder)
        try:
            writer = TraceWriter(journal, door, {"files": [path.name for path in paths]}, report)
            for trace_id, members in traces.items():
                if trace_id not in known:
                    writer.write(trace_id, members)
        finally:
            journal.close()
        store.take_in()
        report_stored(store, report)
    report.show(reporter)
    return report
