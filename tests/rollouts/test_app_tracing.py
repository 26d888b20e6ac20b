"""Owns: what a command's episodes do reaches no tracer of the app or its environment, unless that is wanted.

- Nothing of LangSmith or OpenTelemetry leaves the process during a command's episodes; runs and spans exist all the
  same.
- With `record.keep_app_tracing`, and under `wrap`, every way of tracing sends what it sent before.
- What was recorded before the block is sent, and after it everything is again.
"""

from __future__ import annotations

import asyncio
import contextvars
import gzip
import json
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from langsmith import AsyncClient, Client
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support.compare_rig import save_model
from support.fake_vllm import FakeVllm
from support.fake_vllm import running as running_vllm
from support.paths import ROOT
from support.traced_app import COLLECTOR_VARIABLE, WORDS

from marft_bridge.rollouts.app_tracing import app_tracing


class Collector(ThreadingHTTPServer):
    """Takes what tracers send, LangSmith's and OTLP's, and keeps it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.arrived: list[tuple[str, bytes]] = []  # (path, body)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def log_message(self, *args: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        self._take()

    def do_POST(self) -> None:
        self._take()

    def do_PATCH(self) -> None:
        self._take()

    def _take(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        self.server.arrived.append((self.path, body))
        self.send_response(202)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")


@contextmanager
def collecting() -> Iterator[Collector]:
    server = Collector()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def arrived_words(collector: Collector) -> set[bytes]:
    bodies = b"".join(body for _, body in collector.arrived)
    return {word for words in WORDS.values() for word in words if word in bodies}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "engine", "kept", "arrives"),
    [
        ("collect", "local", False, False),
        ("collect", "local", True, True),
        ("collect", "ray", False, False),
        ("collect", "ray", True, True),
        ("wrap", "local", False, True),
    ],
)
def test_episodes_of_a_command_reach_no_tracer_unless_that_is_wanted(
    mode: str, engine: str, kept: bool, arrives: bool, tmp_path: Path
) -> None:
    save_model(tmp_path / "model")
    with collecting() as collector, running_vllm(FakeVllm()) as vllm:
        server = f'[serve]\nattach = "{vllm.url}"'
        if engine == "ray":
            server = f'[ray]\nworkers = 1\nendpoints = ["{vllm.url}"]'
        (tmp_path / "bridge.toml").write_text(
            f"""
            [graph]
            app = "traced_app:app"
            nodes = ["say"]
            tasks = "traced_app:tasks"
            reward = "traced_app:reward"
            [model]
            path = "model"
            {server}
            [collect]
            episodes = 2
            engine = "{engine}"
            [record]
            keep_app_tracing = {json.dumps(kept)}
            """
        )
        program = ROOT / "tests" / "support" / "traced_app.py"
        environment = os.environ | {
            "LANGSMITH_TRACING": "true",
            "LANGCHAIN_TRACING_V2": "true",
            "LANGSMITH_ENDPOINT": collector.url,
            "LANGSMITH_API_KEY": "not-a-key",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(program.parent)]),
            "NO_PROXY": "127.0.0.1",
        }
        if engine == "ray":  # on which the app is imported by a worker's process, with the tracers that it sets up
            environment[COLLECTOR_VARIABLE] = collector.url
        command = [sys.executable, str(program), mode, "bridge.toml", collector.url]
        ended = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    if arrives:
        # LangSmith's client sends from a thread, which ends with the worker that Ray ends.
        tracers = ("otlp",) if engine == "ray" else tuple(WORDS)
        assert arrived_words(collector) >= {word for tracer in tracers for word in WORDS[tracer]}
    else:
        # A client of LangSmith that starts asks for the server's version, once; that has nothing of the app in it.
        assert set(collector.arrived) <= {("/info", b"")}
        assert "2 terminated" in ended.stdout
        assert len(vllm.asked) == 6


# The block by itself


def run_fields(name: str) -> dict[str, Any]:
    return {"name": name, "inputs": {"text": name}, "run_type": "chain", "id": uuid.uuid4()}


def names_of(collector: Collector) -> list[str]:
    return [json.loads(body)["name"] for path, body in collector.arrived if path == "/runs"]


def test_runs_of_langsmith_are_sent_before_and_after_the_block_and_not_in_it() -> None:
    with collecting() as collector:
        client = Client(api_url=collector.url, api_key="k", auto_batch_tracing=False)
        client.create_run(**run_fields("before"))
        with app_tracing(kept=False):
            client.create_run(**run_fields("within"))
            thread = threading.Thread(target=lambda: client.create_run(**run_fields("within a thread")))
            thread.start()
            thread.join()
            left_over = contextvars.copy_context()
        left_over.run(lambda: client.create_run(**run_fields("in a thread that outlived the block")))
        client.create_run(**run_fields("after"))
        with app_tracing(kept=True):
            client.create_run(**run_fields("kept"))
        assert names_of(collector) == ["before", "after", "kept"]


def test_the_asynchronous_client_is_silent_too() -> None:
    async def send(url: str) -> None:
        async with AsyncClient(api_url=url, api_key="k") as client:
            with app_tracing(kept=False):
                await client.create_run(**run_fields("within"))
            await client.create_run(**run_fields("after"))

    with collecting() as collector:
        asyncio.run(send(collector.url))
        assert names_of(collector) == ["after"]


def test_spans_exist_within_the_block_and_are_exported_outside_of_it_only() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("app")
    with tracer.start_as_current_span("before"):
        pass
    with app_tracing(kept=False):
        ends_later = tracer.start_span("ends later")
        with tracer.start_as_current_span("within") as span:
            assert span.is_recording()
            assert span.get_span_context().is_valid
    ends_later.end()
    with tracer.start_as_current_span("after"):
        pass
    assert [span.name for span in exporter.get_finished_spans()] == ["before", "after"]


def test_events_are_dropped_within_the_block_and_log_lines_are_not() -> None:
    exporter, provider = InMemoryLogRecordExporter(), LoggerProvider(shutdown_on_exit=False)
    provider.add_log_record_processor(SimpleLogRecordProcessor(exporter))
    logger = provider.get_logger("app")
    with app_tracing(kept=False):
        logger.emit(body="a prompt", event_name="gen_ai.user.message")
        logger.emit(body="a line")
    logger.emit(body="after", event_name="gen_ai.user.message")
    assert [log.log_record.body for log in exporter.get_finished_logs()] == ["a line", "after"]
