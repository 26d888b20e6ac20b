"""`marft-bridge ingest FILE...`: OTLP files and Langfuse's exports -> episodes of a store, with their scores.

Invariant: every file is read and checked before anything is written; a trace may be spread over several of them.
Ingesting the same files twice adds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from marft_bridge.common.progress import Reporter
from marft_bridge.config.record import RecordOptions
from marft_bridge.ingest.cleaning import SpanCleaner
from marft_bridge.ingest.files import file_to_content
from marft_bridge.ingest.langfuse_export import LangfuseRecords, records_to_spans, traces_without_observations
from marft_bridge.ingest.langfuse_scores import put_scores
from marft_bridge.ingest.otlp import WireSpan
from marft_bridge.ingest.report import IngestReport
from marft_bridge.ingest.writer import TraceWriter, open_store, read_decided_ids, report_stored, spans_to_traces

TRACES_AT_A_TIME = 64  # in one write, which holds their rows until they are on the disk


def ingest_files(paths: Sequence[Path], store_path: Path, options: RecordOptions, reporter: Reporter) -> IngestReport:
    """Takes the traces in the files into the store, cleaned as `options` say, and prints a report.

    Raises IngestError for a file that is neither OTLP trace data nor an export of Langfuse, and StoreError when the
    store cannot be written; then nothing was taken in.
    """
    report = IngestReport()
    cleaner = SpanCleaner(options)
    spans, records = _read_files(paths)
    spans = [cleaner.clean_span(span) for span in (*spans, *records_to_spans(records))]
    report.spans = len(spans)
    report.note_cleaning(cleaner)
    traces = spans_to_traces(spans)
    report.traces = len(traces)
    for trace_id in traces_without_observations(records):
        report.refuse(trace_id, "a trace of Langfuse whose observations are in none of the files")
    with open_store(store_path, reporter) as store:
        store.take_in()
        decided_ids = read_decided_ids(store, traces)
        report.stored_before = len(decided_ids)
        config = {"files": [path.name for path in paths]}
        writer = TraceWriter(store.journal_folder, cleaner, config, report=report)
        try:
            undecided_ids = [trace_id for trace_id in traces if trace_id not in decided_ids]
            for begin in range(0, len(undecided_ids), TRACES_AT_A_TIME):
                writer.write({i: traces[i] for i in undecided_ids[begin : begin + TRACES_AT_A_TIME]})
        finally:
            writer.close()
        store.take_in()
        report_stored(store, report)
        put_scores(store, records, report)
    report.show(reporter)
    return report


def _read_files(paths: Sequence[Path]) -> tuple[list[WireSpan], LangfuseRecords]:
    spans: list[WireSpan] = []
    records = LangfuseRecords()
    for path in paths:
        content = file_to_content(path)
        spans.extend(content.spans)
        records.merge(content.langfuse)
    return spans, records
