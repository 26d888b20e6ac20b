"""`marft-bridge ingest --listen`: what apps on this machine send, until Ctrl-C -> episodes of a store.

    request -> cleaned -> waiting room (on disk) -> 200      whole and quiet -> rows in the store's journal -> forgotten

Invariant: a span that was answered with 200 is in the waiting room's spool, in the journal, or in the store, whatever
ends this process. The store itself is opened only at the beginning and at the end, so that others can use it.
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

from marft_bridge.errors import ConfigError
from marft_bridge.ingest.door import Door
from marft_bridge.ingest.errors import IngestError
from marft_bridge.ingest.otlp import WireSpan
from marft_bridge.ingest.receiver import ADDRESS, PATH, Receiver
from marft_bridge.ingest.report import IngestReport
from marft_bridge.ingest.taking_in import TraceWriter, decided_traces, open_store, report_stored
from marft_bridge.ingest.trace_tree import TraceTree
from marft_bridge.ingest.waiting_room import WaitingRoom
from marft_bridge.progress import Reporter
from marft_bridge.record_options import RecordOptions
from trace_store.errors import StoreError
from trace_store.journal import Journal

LOOK_EVERY_S = 0.5
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
    token = _token(token_env)
    session = _Session(store_path, quiet_s, options, reporter)
    try:
        receiver = Receiver(port, token, session.keep, session.note)
    except OSError as error:
        session.room.close()
        raise IngestError(
            f"ingest: cannot listen on {ADDRESS}:{port}: {error.strerror}; choose another --port"
        ) from None
    with receiver:
        threading.Thread(target=receiver.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()
        with suppress(KeyboardInterrupt):  # from the moment that it listens
            _say_how_to_send(receiver.port, token if token_env is None else None, reporter)
            while True:
                time.sleep(LOOK_EVERY_S)
                session.settle(time.monotonic() - quiet_s)
        receiver.shutdown()
    return session.finish()


class _Session:
    """One receiver's life, apart from HTTP."""

    def __init__(self, store_path: Path, quiet_s: float, options: RecordOptions, reporter: Reporter) -> None:
        self._store_path, self._reporter = store_path, reporter
        self.report = IngestReport()
        self.door = Door(options)
        self.room = WaitingRoom(store_path.with_name(store_path.name + ".spool"), time.monotonic())
        self._journal = Journal(store_path.with_name(store_path.name + ".journal"))
        self._writer = TraceWriter(self._journal, self.door, {"listen": True, "quiet_s": quiet_s}, self.report)
        self._lock = threading.Lock()
        self._closed = False
        self._take_over()

    def keep(self, spans: Sequence[WireSpan], now: float) -> None:
        """Returns once the spans are safe."""
        cleaned = [self.door.span_to_clean(span) for span in spans]
        with self._lock:
            if self._closed:
                raise StoreError("the receiver is ending")
            self.room.keep(cleaned, now)
            self.report.spans += len(cleaned)

    def note(self, why: str) -> None:
        """Counts what was not taken."""
        with self._lock:
            self.report.rejected[why] += 1

    def settle(self, quiet_since: float) -> None:
        """Makes rows of the traces that are whole, or notes why they make none."""
        traces = self.room.hand_out(quiet_since)
        for trace_id, spans in traces.items():
            self._writer.write(trace_id, spans)
        if traces:
            self._journal.sync()
            self.report.traces += len(traces)
            self.room.forget()

    def finish(self) -> IngestReport:
        """Takes what is whole, leaves the rest in the spool, and reports."""
        with self._lock:
            self._closed = True
        self.settle(time.monotonic())
        for trace_id, spans in self.room.waiting_traces().items():
            self.report.traces += 1
            self.report.refuse(trace_id, f"{TraceTree(spans).fault()}; kept for the next receiver")
        self.room.close()
        self._journal.close()
        self.report.late += self.room.late
        self.report.note_cleaning(self.door)
        try:
            with open_store(self._store_path, self._reporter) as store:
                store.take_in()
                report_stored(store, self.report)
        except StoreError as error:
            self._reporter.say(f"{error}; what came is in the journal, and whoever opens the store next takes it in")
        self.report.show(self._reporter)
        return self.report

    def _take_over(self) -> None:
        """What an earlier receiver was killed over: some of it may be in the store already."""
        left = self.room.waiting_traces()
        if not left:
            return
        self._reporter.say(f"{len(left)} traces are left from an earlier receiver")
        try:
            with open_store(self._store_path, self._reporter) as store:
                store.take_in()
                known = decided_traces(store, left)
        except StoreError as error:
            self._reporter.say(f"{error}; going on without")  # what is stored twice is stored once
            return
        self.report.stored_before = len(known)
        self.room.forget(known)


def _token(variable: str | None) -> str:
    if variable is None:
        return secrets.token_urlsafe(32)
    token = os.environ.get(variable, "")
    if not _TOKEN.fullmatch(token):
        raise ConfigError(f"ingest: --token-env: {variable} holds no token of 16 or more of A-Z a-z 0-9 . _ ~ -")
    return token


def _say_how_to_send(port: int, token: str | None, reporter: Reporter) -> None:
    shown = "<token>" if token is None else token
    reporter.say(f"listening on http://{ADDRESS}:{port}{PATH} until Ctrl-C; for the app that is to send its traces:")
    reporter.say(f"export OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=http://{ADDRESS}:{port}{PATH}")
    reporter.say(f'export OTEL_EXPORTER_OTLP_TRACES_HEADERS="Authorization=Bearer%20{shown}"')
    reporter.say("export OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf")
