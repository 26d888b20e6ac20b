"""`marft-bridge ingest --listen`: OTLP requests of apps on this machine, until Ctrl-C -> episodes of a store.

    request -> cleaned -> spool (on disk) -> 200      complete and quiet -> rows in the store's journal -> acknowledged

Invariant: a span that was answered with 200 is in the spool, in the journal, or in the store, whatever ends this
process. The store itself is opened only at the beginning and at the end, so that other commands can use it.
"""

from __future__ import annotations

import os
import re
import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from marft_bridge.common.errors import ConfigError
from marft_bridge.common.progress import Reporter
from marft_bridge.config.record import RecordOptions
from marft_bridge.ingest.cleaning import SpanCleaner
from marft_bridge.ingest.errors import IngestError
from marft_bridge.ingest.otlp import WireSpan
from marft_bridge.ingest.receiver import ADDRESS, PATH, Receiver
from marft_bridge.ingest.report import IngestReport
from marft_bridge.ingest.trace_spool import TraceSpool, spool_of
from marft_bridge.ingest.trace_tree import TraceTree
from marft_bridge.ingest.writer import TraceWriter, open_store, read_decided_ids, report_stored
from trace_store.errors import StoreError
from trace_store.journal import journal_of

POLL_S = 0.5
_TOKEN = re.compile(r"[A-Za-z0-9._~-]{16,}")  # what a header can carry in an OTEL_ variable as it is


def listen(
    store_path: Path, port: int, token_env: str | None, quiet_s: float, options: RecordOptions, reporter: Reporter
) -> IngestReport:
    """Receives until Ctrl-C, then reports.

    `quiet_s`: seconds without a new span after which a trace that looks whole is taken to be whole. `token_env` names
    the environment variable with the token; without one a token is made and printed.

    Raises IngestError when the port is taken or another receiver uses the store, ConfigError for a token that cannot
    be used or options that a receiver cannot keep to.
    """
    if not options.content:
        raise ConfigError("ingest: a receiver keeps requests on disk, so record.content = false rules out --listen")
    token = _read_or_make_token(token_env)
    session = _ReceiverSession(store_path, quiet_s, options, reporter=reporter)
    try:
        receiver = Receiver(port, token, session.save_spans, count_rejection=session.count_rejection)
    except OSError as error:
        session.spool.close()
        raise IngestError(
            f"ingest: cannot listen on {ADDRESS}:{port}: {error.strerror}; choose another --port"
        ) from None
    with receiver:
        threading.Thread(target=receiver.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()
        with suppress(KeyboardInterrupt):  # from the moment that it listens
            _print_how_to_send(receiver.port, token if token_env is None else None, reporter)
            failure = ""
            while True:
                time.sleep(POLL_S)
                try:
                    session.write_complete_traces(time.monotonic() - quiet_s)
                except StoreError as error:  # a full disk, which may have room again
                    if failure != str(error):
                        reporter.say(f"{error}; what waits is in the spool, and writing it is tried again and again")
                    failure = str(error)
                else:
                    failure = ""
        receiver.shutdown()
    return session.finish()


class _ReceiverSession:
    """The spool, the journal and the report behind one receiver; it knows no HTTP."""

    def __init__(self, store_path: Path, quiet_s: float, options: RecordOptions, reporter: Reporter) -> None:
        self._store_path, self._reporter = store_path, reporter
        self.report = IngestReport()
        self.cleaner = SpanCleaner(options)
        self.spool = TraceSpool(spool_of(store_path), time.monotonic())
        config = {"listen": True, "quiet_s": quiet_s}
        self._writer = TraceWriter(journal_of(store_path), self.cleaner, config, report=self.report)
        self._lock = threading.Lock()
        self._closed = False
        self._take_over_spool()

    def save_spans(self, spans: Sequence[WireSpan], now: float) -> None:
        """Cleans the spans and returns once they are on disk in the spool."""
        cleaned = [self.cleaner.clean_span(span) for span in spans]
        with self._lock:
            if self._closed:
                raise StoreError("the receiver is ending")
            self.spool.add(cleaned, now)
            self.report.spans += len(cleaned)

    def count_rejection(self, reason: str) -> None:
        """Counts a request or a span that was not taken, by reason."""
        with self._lock:
            self.report.rejected[reason] += 1

    def write_complete_traces(self, quiet_since: float) -> None:
        """Journals the rows of complete traces, or notes why a trace is no episode.

        Raises StoreError when the disk refuses; then the traces stay in the spool, and the next call writes them.
        """
        traces = self.spool.take_complete(quiet_since)
        if traces:
            self._writer.write(traces)  # synced before `acknowledge`: the spool is the only other copy
            self.report.traces += len(traces)
            self.spool.acknowledge()

    def finish(self) -> IngestReport:
        """Writes what is complete, leaves the rest in the spool, and reports."""
        with self._lock:
            self._closed = True
        try:
            self.write_complete_traces(time.monotonic())
        except StoreError as error:
            self._reporter.say(f"{error}; what waits is in the spool, for the next receiver")
        reasons = dict.fromkeys(self.spool.unacknowledged_ids(), "the disk did not take it")
        reasons |= {trace_id: f"{TraceTree(s).fault()}" for trace_id, s in self.spool.waiting_traces().items()}
        for trace_id, reason in reasons.items():
            self.report.traces += 1
            self.report.refuse(trace_id, f"{reason}; kept for the next receiver")
        self.spool.close()
        with suppress(StoreError):  # of traces that the spool has as well
            self._writer.close()
        self.report.late_spans += self.spool.late_spans
        self.report.note_cleaning(self.cleaner)
        try:
            with open_store(self._store_path, self._reporter) as store:
                store.take_in()
                report_stored(store, self.report)
        except StoreError as error:
            self._reporter.say(f"{error}; what came is in the journal, and whoever opens the store next takes it in")
        self.report.show(self._reporter)
        return self.report

    def _take_over_spool(self) -> None:
        """Drops from the spool of an earlier, killed receiver the traces that are in the store already."""
        left_traces = self.spool.waiting_traces()
        if not left_traces:
            return
        self._reporter.say(f"{len(left_traces)} traces are left from an earlier receiver")
        try:
            with open_store(self._store_path, self._reporter) as store:
                store.take_in()
                decided_ids = read_decided_ids(store, left_traces)
        except StoreError as error:
            self._reporter.say(f"{error}; going on without")  # what is stored twice is stored once
            return
        self.report.stored_before = len(decided_ids)
        self.spool.acknowledge(decided_ids)


def _read_or_make_token(variable: str | None) -> str:
    if variable is None:
        return secrets.token_urlsafe(32)
    token = os.environ.get(variable, "")
    if not _TOKEN.fullmatch(token):
        raise ConfigError(f"ingest: --token-env: {variable} holds no token of 16 or more of A-Z a-z 0-9 . _ ~ -")
    return token


def _print_how_to_send(port: int, token: str | None, reporter: Reporter) -> None:
    token_text = "<token>" if token is None else token
    reporter.say(f"listening on http://{ADDRESS}:{port}{PATH} until Ctrl-C; for the app that is to send its traces:")
    reporter.say(f"export OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=http://{ADDRESS}:{port}{PATH}")
    reporter.say(f'export OTEL_EXPORTER_OTLP_TRACES_HEADERS="Authorization=Bearer%20{token_text}"')
    reporter.say("export OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf")
