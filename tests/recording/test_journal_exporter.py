"""Owns: every span that ends is in the journal, whole and clean, whatever the app's own tracing is told to do.

- No environment variable of OpenTelemetry thins the record, and the app's own tracer provider and ours do not mix.
- A span that the disk refuses is counted, and the app's result is what it was.
- No secret of a chat model's settings, headers or request is recorded, with redaction off.
- Options and a redaction function reach the record from `wrap` and from `bridge.toml`; what cannot work is refused.
- Spans sent to an OTLP endpoint are those of the journal, as clean; an endpoint that is down, wrong or slow holds
  nobody up; it gets the headers that were named for it and no others.
"""

from __future__ import annotations

import json
import operator
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as ProtoSpan
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import StatusCode
from pydantic import SecretStr
from support.fake_vllm import FakeVllm, running
from support.fake_vllm import _Handler as VllmHandler
from support.paths import ROOT

from marft_bridge.common.errors import ConfigError, GraphError
from marft_bridge.config.bridge import toml_to_config
from marft_bridge.config.record import RecordOptions
from marft_bridge.model_calls.scripted_model import ScriptedPolicy
from marft_bridge.recording import otlp_export
from marft_bridge.recording.journal_exporter import JournalProcessor
from marft_bridge.recording.open_span import open_span, span_to_row
from marft_bridge.recording.otlp_export import OtlpExport
from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.redaction import Redactor
from marft_bridge.recording.span_privacy import SpanPrivacy
from marft_bridge.recording.span_processor import options_to_processor
from marft_bridge.recording.wrap import wrap
from trace_store import conventions as c
from trace_store.assemble import spans_to_trajectory
from trace_store.journal import Journal, read_segment
from trace_store.records import SpanRow, Trajectory

KEY = "sk-" + "Ab1" * 16
MAIL = "ada@mail.example"


class Log(TypedDict):
    log: Annotated[list[str], operator.add]


def graph_of(model: Any) -> Any:
    """Two nodes in a row that ask the model about the log so far and add the answer to it."""

    def node(state: Log) -> dict[str, Any]:
        return {"log": [model.invoke("; ".join(state["log"])).text]}

    graph = StateGraph(Log)
    graph.add_sequence([("a", node), ("b", node)])
    graph.add_edge(START, "a")
    graph.add_edge("b", END)
    return graph.compile()


def echo(text: str = "fine") -> ScriptedPolicy:
    return ScriptedPolicy(script=lambda _node, _prompt, _random: text)


def spans_in(journal: Path) -> list[SpanRow]:
    records = [record for segment in sorted(journal.glob("*.segment")) for record in read_segment(segment)[0]]
    return [record for record in records if isinstance(record, SpanRow)]


def trajectory_in(journal: Path) -> Trajectory:
    return spans_to_trajectory(spans_in(journal))


# -- the app's own tracing ------------------------------------------------------------------------------------

APP = """
import json, operator, sys
from pathlib import Path
from typing import Annotated, TypedDict
from langgraph.graph import END, START, StateGraph
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from marft_bridge import ScriptedPolicy, wrap

exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
tracer = trace.get_tracer("the app")
model = ScriptedPolicy(script=lambda node, prompt, random: f"{node} " * 300)

class Log(TypedDict):
    log: Annotated[list[str], operator.add]

def node(state):
    with tracer.start_as_current_span("work") as span:
        span.set_attribute("size", len(state["log"]))
        return {"log": [model.invoke(str(state["log"])).text]}

graph = StateGraph(Log)
graph.add_sequence([("a", node), ("b", node)])
graph.add_edge(START, "a")
graph.add_edge("b", END)
app = graph.compile()
if len(sys.argv) > 1:
    app = wrap(app, Path(sys.argv[1]))
with tracer.start_as_current_span("outer"):
    app.invoke({"log": ["start"]})
names = {span.context.span_id: span.name for span in exporter.get_finished_spans()}
print(json.dumps([
    (span.name, names.get(span.parent.span_id) if span.parent else None, dict(span.attributes), len(span.links))
    for span in exporter.get_finished_spans()
]))
"""

HOSTILE = {
    "OTEL_SDK_DISABLED": "true",
    "OTEL_TRACES_SAMPLER": "always_off",
    "OTEL_TRACES_EXPORTER": "none",
    "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "1",
    "OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT": "1",
    "OTEL_ATTRIBUTE_COUNT_LIMIT": "1",
    "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT": "1",
    "OTEL_SPAN_EVENT_COUNT_LIMIT": "0",
    "OTEL_SPAN_LINK_COUNT_LIMIT": "0",
    "OTEL_EVENT_ATTRIBUTE_COUNT_LIMIT": "0",
    "OTEL_LINK_ATTRIBUTE_COUNT_LIMIT": "0",
    "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT": "NO_CONTENT",
    "OTEL_BSP_MAX_QUEUE_SIZE": "1",
}


def run_app(store: Path | None, **environment: str) -> list[Any]:
    """The app in a process of its own -> the spans of its own provider: name, parent's name, attributes, links."""
    plain = {key: value for key, value in os.environ.items() if not key.startswith("OTEL_")}
    run = subprocess.run(
        [sys.executable, "-c", APP, *([str(store)] if store else [])],
        cwd=ROOT,
        env=plain | environment,
        check=False,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    spans: list[Any] = json.loads(run.stdout)
    return spans


def shape(journal: Path) -> list[Any]:
    """What of a record must be the same for every run of the same app."""
    actions = trajectory_in(journal).actions
    names = [(span.name, sorted(span.attributes)) for span in spans_in(journal)]
    return [names, [(a.node, a.prompt_ids, a.sampled_ids, a.logprobs, a.completion, a.trainable) for a in actions]]


@pytest.mark.slow
def test_no_environment_variable_thins_the_record(tmp_path: Path) -> None:
    run_app(tmp_path / "plain")
    assert run_app(tmp_path / "hostile", **HOSTILE) == []  # the app's own tracing is off, as it was told to be
    plain, hostile = shape(tmp_path / "plain.journal"), shape(tmp_path / "hostile.journal")
    assert hostile == plain
    assert [name for name, _ in plain[0]] == [
        "chat",
        "invoke_agent a",
        "chat",
        "invoke_agent b",
        "invoke_workflow LangGraph",
    ]
    assert [(node, len(sampled), trainable) for node, _, sampled, _, _, trainable in plain[1]] == [
        ("a", 601, True),  # 300 times "a " and the end of the turn
        ("b", 601, True),
    ]


@pytest.mark.slow
def test_the_app_s_own_spans_are_what_they_were_and_ours_are_not_among_them(tmp_path: Path) -> None:
    alone = run_app(None)
    assert run_app(tmp_path / "store") == alone
    assert [(name, parent) for name, parent, _, _ in alone] == [("work", "outer"), ("work", "outer"), ("outer", None)]
    assert "work" not in {span.name for span in spans_in(tmp_path / "store.journal")}


def test_a_span_keeps_every_attribute_and_leaves_out_what_is_none() -> None:
    root = open_span("s", None, {f"k{number}": "x" * 10_000 for number in range(300)} | {"absent": None})
    root.set({"later": 1, "k0": "changed", "k1": None})
    attributes = span_to_row(root).attributes
    assert list(attributes) == [*(f"k{number}" for number in range(300)), "later"]
    assert (attributes["k0"], attributes["k1"], attributes["later"]) == ("changed", "x" * 10_000, 1)


def test_ids_are_hex_digits_of_their_size_and_a_child_is_in_its_parent_s_trace() -> None:
    root = open_span("root", None, {})
    child = open_span("child", root, {})
    assert (len(root.trace_id), len(root.span_id)) == (32, 16)
    assert {*root.trace_id, *root.span_id, *child.span_id} <= set("0123456789abcdef")
    assert (child.trace_id, child.parent_span_id, root.parent_span_id) == (root.trace_id, root.span_id, None)
    assert len({open_span("s", root, {}).span_id for _ in range(1000)}) == 1000


def test_a_forked_child_gives_its_spans_ids_of_its_own() -> None:
    open_span("draws ids for many spans", None, {})
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write_end, " ".join(open_span("s", None, {}).span_id for _ in range(100)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    child_ids = os.read(read_end, 100_000).decode().split()
    os.close(read_end)
    os.close(write_end)
    assert len(child_ids) == 100
    assert not {*child_ids} & {open_span("s", None, {}).span_id for _ in range(1000)}


# -- losses ---------------------------------------------------------------------------------------------------


def test_every_span_that_the_disk_refuses_is_counted_and_the_result_is_unharmed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder can be made below a file")
    recorder = Recorder(Journal(tmp_path / "file" / "journal"))
    plain = graph_of(echo())
    assert wrap(plain, recorder).invoke({"log": ["x"]}) == plain.invoke({"log": ["x"]})
    assert recorder._processor.lost_spans == 5  # two calls, two nodes, one run
    assert recorder.failure is not None
    assert [record for record in caplog.messages if "could not be written" in record] == [
        "a span could not be written (StoreError); its episode will not be used"
    ]


def test_a_span_that_cannot_be_made_a_row_is_counted_and_nothing_is_raised(tmp_path: Path) -> None:
    class Broken(SpanPrivacy):
        def row_to_clean(self, row: SpanRow) -> SpanRow:
            raise ZeroDivisionError

    processor = JournalProcessor(Journal(tmp_path), Broken(Redactor(), content=False))
    processor.end_span(open_span("s", None, {}))
    assert processor.lost_spans == 1
    assert processor.failure is None  # the disk refused nothing
    assert spans_in(tmp_path) == []


@pytest.mark.parametrize("delay_s", [0.0, 0.5])
def test_the_journal_is_asked_to_sync_a_run_when_its_root_is_written_and_no_sooner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, delay_s: float
) -> None:
    delays: list[float] = []
    journal = Journal(tmp_path)
    monkeypatch.setattr(journal, "sync_soon", delays.append)
    processor = options_to_processor(journal, RecordOptions(sync_delay_s=delay_s))
    root = open_span("root", None, {})
    processor.end_span(open_span("child", root, {}))
    assert delays == []
    processor.end_span(root)
    assert delays == [delay_s]


# -- what is written ------------------------------------------------------------------------------------------


def test_no_secret_of_a_client_s_settings_headers_or_body_is_recorded(tmp_path: Path) -> None:
    secrets = {
        "api_key": "key-of-the-client",
        "default_headers": "value-of-a-default-header",
        "organization": "name-of-the-organization",
        "extra_headers": "value-of-an-extra-header",
        "extra_body": "value-in-the-extra-body",
        "model_kwargs": "value-of-a-model-keyword",
        "user": "value-of-the-user-field",
    }
    with running(FakeVllm(secrets["api_key"])) as server:
        model = ChatOpenAI(
            model="base",
            base_url=f"{server.url}/v1",
            api_key=SecretStr(secrets["api_key"]),
            organization=secrets["organization"],
            default_headers={"x-secret": secrets["default_headers"]},
            extra_body={"note": secrets["extra_body"]},
            model_kwargs={"safety_identifier": secrets["model_kwargs"]},
            include_response_headers=True,
        ).bind(extra_headers={"x-extra": secrets["extra_headers"]}, user=secrets["user"])
        wrap(graph_of(model), tmp_path / "store", RecordOptions(redact=())).invoke({"log": ["hello"]})
        sent = json.dumps(server.asked[0])
        assert all(
            secrets[name] in sent for name in ("extra_body", "model_kwargs", "user")
        )  # they did go to the server
    written = b"".join(segment.read_bytes() for segment in (tmp_path / "store.journal").glob("*.segment"))
    assert b"hello" in written
    assert [name for name, secret in secrets.items() if secret.encode() in written] == []


def test_headers_that_an_answer_carries_into_the_next_prompt_are_not_recorded(tmp_path: Path) -> None:
    class WithCookie(VllmHandler):
        def end_headers(self) -> None:
            self.send_header("Set-Cookie", "session=cookie-of-the-server")
            super().end_headers()

    with running(FakeVllm("key")) as server:
        server.RequestHandlerClass = WithCookie
        model = ChatOpenAI(
            model="base", base_url=f"{server.url}/v1", api_key=SecretStr("key"), include_response_headers=True
        )
        graph = StateGraph(MessagesState)
        node = lambda state: {"messages": [model.invoke(state["messages"])]}  # noqa: E731
        graph.add_sequence([("a", node), ("b", node)])
        graph.add_edge(START, "a")
        recorded = wrap(graph.compile(), tmp_path / "store", RecordOptions(redact=()))
        answer = recorded.invoke({"messages": [("user", "hello")]})["messages"][-1]
    assert "cookie" in answer.response_metadata["headers"]["set-cookie"]  # the app has what it asked for
    calls = [span for span in spans_in(tmp_path / "store.journal") if span.operation == c.CHAT]
    second = json.loads(calls[1].attributes[c.INPUT_MESSAGES])
    assert [message["parts"] for message in second] == [
        [{"type": "text", "content": text}] for text in ("hello", "base speaks")
    ]
    assert "cookie" not in repr(calls)
    assert c.UNTRAINABLE not in calls[1].attributes  # headers are no part of the prompt


def test_by_default_secrets_are_taken_out_and_mail_addresses_are_not(tmp_path: Path) -> None:
    app = graph_of(echo(f"ask {MAIL}"))
    start = {"log": [f"use {KEY} and 4111 1111 1111 1111"]}
    assert wrap(app, tmp_path / "store").invoke(start) == app.invoke(start)
    written = b"".join(segment.read_bytes() for segment in (tmp_path / "store.journal").glob("*.segment")).decode()
    assert KEY not in written
    assert "4111 1111" not in written
    assert MAIL in written
    # Both calls saw the secrets in their prompts, so neither keeps its ids.
    assert {a.untrainable_reason for a in trajectory_in(tmp_path / "store.journal").actions} == {
        "redacted: card, openai_key"
    }


def test_an_action_that_saw_no_secret_stays_trainable_beside_one_that_did(tmp_path: Path) -> None:
    model = ScriptedPolicy(answers={"a": ["fine"], "b": [f"the key is {KEY}"]})
    wrap(graph_of(model), tmp_path / "store").invoke({"log": ["x"]})
    first, second = trajectory_in(tmp_path / "store.journal").actions
    assert (first.trainable, second.trainable) == (True, False)
    assert (second.prompt_ids, second.sampled_ids, second.logprobs) == (None, None, None)
    assert second.completion == "the key is [redacted:openai_key]"


def test_an_error_that_quotes_a_secret_is_cleaned_and_raised_as_it_was(tmp_path: Path) -> None:
    model = ScriptedPolicy(script=lambda *_: (_ for _ in ()).throw(PermissionError(f"bad key {KEY}")))
    with pytest.raises(PermissionError, match=KEY):
        wrap(graph_of(model), tmp_path / "store").invoke({"log": []})
    assert trajectory_in(tmp_path / "store.journal").episode.reason == "PermissionError: bad key [redacted:openai_key]"
    assert not any(KEY in repr(span) for span in spans_in(tmp_path / "store.journal"))


def test_without_content_nothing_that_anybody_said_is_written(tmp_path: Path) -> None:
    wrap(graph_of(echo("the answer")), tmp_path / "store", RecordOptions(content=False)).invoke({"log": ["question"]})
    spans = spans_in(tmp_path / "store.journal")
    assert not any(word in repr(spans) for word in ("the answer", "question"))
    trajectory = trajectory_in(tmp_path / "store.journal")
    assert [(a.node, a.sampled_ids, a.completion) for a in trajectory.actions] == [("a", None, None), ("b", None, None)]
    assert {a.untrainable_reason for a in trajectory.actions} == {"content is not captured"}
    assert [(e.kind, e.src, e.dst) for e in trajectory.edges if e.kind == "trigger"] == [
        ("trigger", trajectory.actions[0].action_id, trajectory.actions[1].action_id)
    ]
    usage = [span.attributes[c.USAGE_OUTPUT_TOKENS] for span in spans if span.operation == c.CHAT]
    assert usage == [11, 11]  # ten bytes and the end of the turn


def shout(key: str, text: str) -> str:
    return text.replace("quiet", "QUIET")


def test_a_redaction_function_can_be_passed_or_named(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def hide(key, text):\n    return text.replace('quiet', 'gone')\nnumber = 3\n")
    wrap(graph_of(echo()), tmp_path / "passed", redact=shout).invoke({"log": ["quiet"]})
    named = RecordOptions(redact_with=f"{tmp_path / 'mine.py'}:hide")
    wrap(graph_of(echo()), tmp_path / "named", named).invoke({"log": ["quiet"]})
    for store, word in (("passed", "QUIET"), ("named", "gone")):
        spans = spans_in(tmp_path / f"{store}.journal")
        assert "quiet" not in repr(spans)
        assert word in repr(spans)
    with pytest.raises(ConfigError, match="two redaction functions"):
        Recorder(Journal(tmp_path / "j"), named, shout)
    with pytest.raises(GraphError, match=r"record\.redact_with: .* is a int, not a function"):
        Recorder(Journal(tmp_path / "j"), RecordOptions(redact_with=f"{tmp_path / 'mine.py'}:number"))
    with pytest.raises(ConfigError, match="belong to the recorder"):
        wrap(graph_of(echo()), Recorder(Journal(tmp_path / "j")), redact=shout)


def test_bridge_toml_holds_the_options_and_refuses_what_cannot_work(tmp_path: Path) -> None:
    def read(record: str) -> RecordOptions:
        path = tmp_path / "bridge.toml"
        head = '[graph]\napp = "a:b"\nnodes = ["x"]\ntasks = "t.jsonl"\nreward = "a:r"\n[record]\n'
        path.write_text(head + record)
        return toml_to_config(path).record

    assert read("") == RecordOptions(content=True, redact=("secrets", "card"))
    assert read('redact = ["email"]\ncontent = false').redact == ("email",)
    for record, message in [
        ('redact = ["emial"]', "no pattern is called 'emial'; known: secrets, personal, private_key"),
        ('otlp_endpoint = "localhost:4318"', "record.otlp_endpoint: not a full address; give one such as http://"),
        ('otlp_endpoint = "http://localhost:4318"', "not a full address"),
        ('otlp_endpoint = "http://u:p@host/v1/traces"', "otlp_headers_env"),
        ('otlp_headers_env = "H"', "otlp_headers_env is set, but no otlp_endpoint to send them to"),
        ("contents = false", "unknown key 'record.contents'; did you mean 'content'?"),
    ]:
        with pytest.raises(ConfigError) as caught:
            read(record)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


# -- OTLP -----------------------------------------------------------------------------------------------------


class Collector(ThreadingHTTPServer):
    """Keeps what is sent to it; answers `status` once `gate` is open."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.status = 200
        self.gate = threading.Event()
        self.gate.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1/traces"

    def scopes(self) -> list[tuple[str, Any]]:
        """The schema of each resource, and the spans of each scope of it."""
        requests = [ExportTraceServiceRequest.FromString(body) for body in self.bodies]
        return [(r.schema_url, scope) for sent in requests for r in sent.resource_spans for scope in r.scope_spans]

    def spans(self) -> list[Any]:
        return [span for _, scope in self.scopes() for span in scope.spans]


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def log_message(self, *args: Any) -> None:
        """Quiet."""

    def do_POST(self) -> None:
        self.server.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.headers.append({name.lower(): value for name, value in self.headers.items()})
        self.server.gate.wait()
        self.send_response(self.server.status)
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.fixture
def collector() -> Iterator[Collector]:
    with _serving(Collector()) as server:
        yield server


@contextmanager
def _serving(server: Collector) -> Iterator[Collector]:
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.gate.set()
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_endpoint_gets_the_spans_of_the_journal_and_they_are_as_clean(
    tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADERS_OF_OURS", "x-team=blue,authorization=Bearer%20ours")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-vendor=key-of-the-vendor,authorization=theirs")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9/of-the-vendor")
    options = RecordOptions(otlp_endpoint=collector.url, otlp_headers_env="HEADERS_OF_OURS")
    recorder = Recorder(Journal(tmp_path / "journal"), options)
    wrap(graph_of(echo()), recorder).invoke({"log": [f"use {KEY}"]})
    recorder._processor.shutdown()
    written = {span.span_id: span for span in spans_in(tmp_path / "journal")}
    sent = {span.span_id.hex(): span for span in collector.spans()}
    assert {key: span.name for key, span in sent.items()} == {key: span.name for key, span in written.items()}
    assert {key: span.parent_span_id.hex() or None for key, span in sent.items()} == {
        key: span.parent_span_id for key, span in written.items()
    }
    for key, span in sent.items():
        assert {attribute.key for attribute in span.attributes} == set(written[key].attributes)
        assert (span.start_time_unix_nano, span.end_time_unix_nano) == (written[key].start_ns, written[key].end_ns)
    assert not any(KEY.encode() in body for body in collector.bodies)
    assert any(b"[redacted:openai_key]" in body for body in collector.bodies)
    for kind, scope_spans in collector.scopes():
        assert (kind, scope_spans.schema_url) == (c.RESOURCE_SCHEMA_URL, c.SCHEMA_URL)
        assert (scope_spans.scope.name, scope_spans.scope.version) == ("marft_bridge", c.CONVENTION_VERSION)
    assert {written[key].operation: span.kind for key, span in sent.items()} == {
        c.INVOKE_WORKFLOW: ProtoSpan.SPAN_KIND_INTERNAL,
        c.INVOKE_AGENT: ProtoSpan.SPAN_KIND_INTERNAL,
        c.CHAT: ProtoSpan.SPAN_KIND_CLIENT,
    }
    for headers in collector.headers:
        assert (headers["x-team"], headers["authorization"]) == ("blue", "Bearer ours")
        assert "x-vendor" not in headers
        assert headers["content-type"] == "application/x-protobuf"


def test_name_and_status_are_cleaned_before_they_are_exported(tmp_path: Path) -> None:
    class Keep:
        def __init__(self) -> None:
            self.rows: list[SpanRow] = []

        def send(self, row: SpanRow) -> None:
            self.rows.append(row)

        def shutdown(self) -> None:
            """Nothing is held."""

    def export(*, content: bool) -> ReadableSpan:
        export = Keep()
        processor = JournalProcessor(Journal(tmp_path), SpanPrivacy(Redactor(["secrets"]), content=content), export)
        span = open_span(f"s {KEY}", None, {c.NODE: "n"})
        span.error = f"ValueError: {KEY}"
        processor.end_span(span)
        return otlp_export.row_to_span(export.rows[0])

    whole, bare = export(content=True), export(content=False)
    for span in (whole, bare):
        assert KEY not in span.to_json()
        assert (span.name, dict(span.attributes or {})) == ("s [redacted:openai_key]", {c.NODE: "n"})
        assert span.status.status_code is StatusCode.ERROR
    assert whole.status.description == "ValueError: [redacted:openai_key]"
    assert bare.status.description == "ValueError"


def free_port() -> int:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port: int = unused.getsockname()[1]
        return port


@pytest.mark.parametrize("trouble", ["down", "wrong", "slow"])
def test_an_endpoint_in_trouble_holds_up_neither_the_app_nor_the_journal(
    tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    monkeypatch.setattr(otlp_export, "SHUTDOWN_S", 0.2)
    url = f"http://127.0.0.1:{free_port()}/v1/traces" if trouble == "down" else collector.url
    if trouble == "wrong":
        collector.status = 404
    if trouble == "slow":
        collector.gate.clear()  # no answer before this test is over
    recorder = Recorder(Journal(tmp_path / "journal"), RecordOptions(otlp_endpoint=url))
    recorded = wrap(graph_of(echo()), recorder)
    for _ in range(40):  # 200 spans: the first batch is on its way before the last run starts
        assert recorded.invoke({"log": ["x"]})["log"] == ["x", "fine", "fine"]
    assert len(spans_in(tmp_path / "journal")) == 200
    assert (recorder.failures, recorder._processor.lost_spans) == (0, 0)
    began = time.monotonic()
    recorder._processor.shutdown()
    assert time.monotonic() - began < 4  # 0.2 s, and not the 5 s that a request may take


@pytest.mark.slow
def test_the_end_of_the_process_sends_what_is_queued(tmp_path: Path, collector: Collector) -> None:
    code = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from marft_bridge.config.record import RecordOptions\n"
        "from marft_bridge import ScriptedPolicy, wrap\n"
        "from graphs import math_duo\n"
        "policy = ScriptedPolicy(answers={'reasoner': ['add'], 'actor': ['7']})\n"
        "app = wrap(math_duo.build(policy), Path(sys.argv[1]), RecordOptions(otlp_endpoint=sys.argv[2]))\n"
        "asyncio.run(app.ainvoke({'question': '3 + 4?'}))\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "store"), collector.url]
    run = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert len(collector.spans()) == len(spans_in(tmp_path / "store.journal")) == 5


def test_a_missing_exporter_and_missing_headers_are_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"record\.otlp_headers_env: the environment variable NOT_SET holds no headers"
    ):
        OtlpExport("http://127.0.0.1:9/v1/traces", "NOT_SET")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"is not installed: pip install 'marft-bridge\[otlp\]'"):
        OtlpExport("http://127.0.0.1:9/v1/traces")
