"""For the tests of ingest: traces by real instrumentors, hand-made OTLP requests, and the receiver as a process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from support.paths import ROOT

TOKEN = "a-token-for-the-tests-0123"
TRACE = "0af7651916cd43dd8448eb211c80319c"
START = 1_700_000_000_000_000_000


@cache
def foreign_requests(instrumentor: str, mode: str = "sync", runs: int = 2) -> tuple[bytes, ...]:
    """The OTLP requests of `foreign_app.py`, one for each run of its graph."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "traces"
        script = [
            sys.executable,
            "-W",
            "error",
            str(ROOT / "tests/support/foreign_app.py"),
            instrumentor,
            mode,
            str(runs),
        ]
        run = subprocess.run([*script, str(path)], cwd=ROOT, check=False, capture_output=True, text=True, timeout=120)
        assert run.returncode == 0, run.stderr
        assert run.stdout.split() == ["two"] * runs
        return tuple(frames(path.read_bytes()))


def frames(data: bytes) -> Iterator[bytes]:
    """Messages after their length in four bytes -> the messages."""
    while data:
        length = int.from_bytes(data[:4], "big")
        yield data[4 : 4 + length]
        data = data[4 + length :]


def framed(*messages: bytes) -> bytes:
    return b"".join(len(message).to_bytes(4, "big") + message for message in messages)


def hand_made(
    span_id: str, parent: str | None, name: str, begin: int = 0, end: int = 100, *, trace: str = TRACE, **changed: Any
) -> Span:
    """One OTLP span. Ids are short hex, padded; times are nanoseconds after START; attributes in `attributes`."""
    attributes = changed.pop("attributes", {})
    return Span(
        trace_id=bytes.fromhex(trace),
        span_id=bytes.fromhex(span_id.rjust(16, "0")),
        parent_span_id=b"" if parent is None else bytes.fromhex(parent.rjust(16, "0")),
        name=name,
        start_time_unix_nano=START + begin,
        end_time_unix_nano=START + end,
        attributes=[KeyValue(key=key, value=any_value(value)) for key, value in attributes.items()],
        **changed,
    )


def any_value(value: Any) -> AnyValue:
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, list):
        return AnyValue(array_value=ArrayValue(values=[any_value(item) for item in value]))
    kind = {int: "int_value", float: "double_value", str: "string_value"}[type(value)]
    return AnyValue(**{kind: value})


def request(*spans: Span, scope: str = "") -> ExportTraceServiceRequest:
    """The request that carries these spans."""
    found = ExportTraceServiceRequest()
    scope_spans = found.resource_spans.add().scope_spans.add()
    scope_spans.scope.name = scope
    scope_spans.spans.extend(spans)
    return found


def openinference(kind: str, **attributes: Any) -> dict[str, Any]:
    return {"openinference.span.kind": kind, **attributes}


def small_trace(trace: str = TRACE) -> list[Span]:
    """A chain with one LLM call, as OpenInference writes it."""
    return [
        hand_made("1", None, "run", 0, 90, trace=trace, attributes=openinference("CHAIN")),
        hand_made("2", "1", "model", 10, 80, trace=trace, attributes=openinference("LLM")),
    ]


class ReceiverProcess:
    """`marft-bridge ingest --listen` as a user runs it."""

    def __init__(self, store: Path, output: Path, quiet_s: float) -> None:
        self.store, self._output = store, output
        command = [sys.executable, "-m", "marft_bridge", "ingest", "--listen", "--port", "0", "--store", str(store)]
        command += ["--token-env", "TEST_TOKEN", "--quiet-seconds", str(quiet_s)]
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, "TEST_TOKEN": TOKEN}
            )
        deadline = time.monotonic() + 60
        while (found := re.search(r"listening on http://127\.0\.0\.1:(\d+)/", self.said())) is None:
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.05)
        self.port = int(found[1])
        self.url = f"http://127.0.0.1:{self.port}/v1/traces"

    def said(self) -> str:
        return self._output.read_text()

    def end(self, how: signal.Signals) -> int:
        self.process.send_signal(how)
        return self.process.wait(timeout=60)


@contextmanager
def receiver_process(store: Path, *, quiet_s: float = 0.5) -> Iterator[ReceiverProcess]:
    running = ReceiverProcess(store, store.with_name(f"receiver-{time.monotonic_ns()}.txt"), quiet_s)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.wait()
