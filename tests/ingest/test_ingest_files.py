"""Owns: what counts as OTLP trace data, and what a file of it becomes.

- Protobuf and JSON of the same spans come out the same; ids are hex, 64-bit integers may be text, every kind of
  attribute value arrives as JSON has it.
- A file is recognised by its content: one message, several after their length, one JSON object, JSON lines, gzip.
- A file that is wrong anywhere is one line for the user, and nothing of the run is taken in.
- Decompression stops at its limit, whatever the data claims to hold.
- Arbitrary bytes are spans or an IngestError, never anything else.
"""

from __future__ import annotations

import base64
import gzip
import json
import shlex
import tracemalloc
from pathlib import Path

import pytest
from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue, KeyValueList
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from support.ingest_rig import START, TRACE, foreign_requests, framed, hand_made, request, small_trace
from support.paths import ROOT

from marft_bridge import cli
from marft_bridge.config.record import RecordOptions
from marft_bridge.ingest.command import choice_to_target
from marft_bridge.ingest.errors import IngestError, TooLarge
from marft_bridge.ingest.files import file_to_content
from marft_bridge.ingest.otlp import inflate, json_to_spans, protobuf_to_spans
from marft_bridge.runs.run_choice import RunChoice
from trace_store.store import TraceStore

# As in the specification's own example, with one attribute of each kind.
SPECIFIED = """
{"resourceSpans": [{"resource": {"attributes": [{"key": "service.name", "value": {"stringValue": "my.service"}}]},
 "scopeSpans": [{"scope": {"name": "my.library", "version": "1.0.0"}, "spans": [{
  "traceId": "5B8EFFF798038103D269B633813FC60C", "spanId": "EEE19B7EC3C1B174", "parentSpanId": "EEE19B7EC3C1B173",
  "name": "I'm a server span", "startTimeUnixNano": "1544712660000000000", "endTimeUnixNano": "1544712661000000000",
  "kind": 2, "flags": 768, "unknownField": [1],
  "status": {"code": 2},
  "links": [{"traceId": "5B8EFFF798038103D269B633813FC60C", "spanId": "EEE19B7EC3C1B175"}],
  "events": [{"name": "other"}, {"name": "exception", "attributes": [
     {"key": "exception.type", "value": {"stringValue": "KeyError"}},
     {"key": "exception.message", "value": {"stringValue": "'x'"}}]}],
  "droppedAttributesCount": 4,
  "attributes": [
   {"key": "text", "value": {"stringValue": "some value"}},
   {"key": "big", "value": {"intValue": "9007199254740993"}},
   {"key": "small", "value": {"intValue": 7}},
   {"key": "number", "value": {"doubleValue": 0.5}},
   {"key": "nan", "value": {"doubleValue": "NaN"}},
   {"key": "flag", "value": {"boolValue": false}},
   {"key": "bytes", "value": {"bytesValue": "AAEC"}},
   {"key": "list", "value": {"arrayValue": {"values": [{"intValue": "1"}, {"stringValue": "two"}]}}},
   {"key": "map", "value": {"kvlistValue": {"values": [{"key": "inner", "value": {"intValue": "3"}}]}}},
   {"key": "empty", "value": {}}]
 }]}]}]}
"""


def test_the_specifications_json_example_comes_out_as_it_reads() -> None:
    (span,) = json_to_spans(SPECIFIED.encode()).spans
    assert (span.trace_id, span.span_id) == ("5b8efff798038103d269b633813fc60c", "eee19b7ec3c1b174")
    assert (span.parent_span_id, span.parent_is_remote) == ("eee19b7ec3c1b173", True)
    assert (span.start_ns, span.end_ns) == (1544712660000000000, 1544712661000000000)
    assert (span.name, span.scope, span.scope_version) == ("I'm a server span", "my.library", "1.0.0")
    assert span.service == "my.service"
    assert (span.failed, span.status_message, span.exception_type) == (True, "'x'", "KeyError")
    assert (span.other_events, span.links, span.lost_attributes) == (1, 1, 4)
    assert span.attributes == {
        "text": "some value",
        "big": 9007199254740993,  # 2**53 + 1: it did not pass through a float
        "small": 7,
        "number": 0.5,
        "nan": "NaN",
        "flag": False,
        "bytes": "AAEC",
        "list": [1, "two"],
        "map": {"inner": 3},
    }


def to_json(message: ExportTraceServiceRequest) -> dict:
    """The request as OTLP/JSON, made independently of the reader: protobuf's JSON with its ids put into hex."""
    body = json_format.MessageToDict(message)
    for resource in body["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                for key in {"traceId", "spanId", "parentSpanId"} & span.keys():
                    span[key] = base64.b64decode(span[key]).hex()
    return body


@pytest.mark.slow
@pytest.mark.parametrize("instrumentor", ["openinference", "traceloop", "langsmith"])
def test_protobuf_and_json_of_the_same_spans_come_out_the_same(instrumentor: str) -> None:
    for sent in foreign_requests(instrumentor):
        message = ExportTraceServiceRequest.FromString(sent)
        assert json_to_spans(json.dumps(to_json(message)).encode()) == protobuf_to_spans(sent)
        number = sum(len(scope.spans) for resource in message.resource_spans for scope in resource.scope_spans)
        assert len(protobuf_to_spans(sent).spans) == number > 10


def forms() -> dict[str, bytes]:
    one, two = (request(*small_trace(trace)) for trace in (TRACE, "1" * 32))
    both = ExportTraceServiceRequest()
    both.MergeFrom(one)
    both.MergeFrom(two)
    lines = [json.dumps(to_json(message)) for message in (one, two)]
    plain = {
        "one message": both.SerializeToString(),
        "several messages": framed(one.SerializeToString(), two.SerializeToString()),
        "one object": json.dumps(to_json(both), indent=1).encode(),
        "byte order mark": b"\xef\xbb\xbf\n" + json.dumps(to_json(both)).encode(),
        "lines": "\n".join(lines).encode(),
        "lines of a windows machine": "\r\n".join([*lines, ""]).encode(),
    }
    return plain | {f"{name}, gzip": gzip.compress(data) for name, data in plain.items()}


@pytest.mark.parametrize("form", forms())
def test_a_file_is_recognised_by_its_content(form: str, tmp_path: Path) -> None:
    path = tmp_path / "no-name-helps"
    path.write_bytes(forms()[form])
    expected = [*protobuf_to_spans(forms()["one message"]).spans]
    assert file_to_content(path).spans == expected
    assert [span.span_id[-1] for span in expected] == ["1", "2", "1", "2"]


def test_a_protobuf_message_that_begins_like_json_is_read_as_protobuf(tmp_path: Path) -> None:
    """The first field's tag is a line break; a length of 123 makes the next byte a brace."""
    by_length = (request(hand_made("1", None, "x" * n)).SerializeToString() for n in range(200))
    path = tmp_path / "braces"
    path.write_bytes(next(sent for sent in by_length if sent[:2] == b"\n{"))
    (span,) = file_to_content(path).spans
    assert set(span.name) == {"x"}


GOOD = request(*small_trace()).SerializeToString()
LINE = json.dumps(to_json(request(*small_trace()))).encode()
WRONG = {
    "empty": (b"", "the file is empty"),
    "text": (b"hello", "not a protobuf ExportTraceServiceRequest"),
    "other json": (b'{"spans": []}', "a JSON value without resourceSpans"),
    "logs": (b'{"resourceLogs": []}', "a JSON value without resourceSpans"),
    "torn json": (LINE[:-10], "not JSON"),
    "torn line": (LINE + b"\n" + LINE[:-10], "line 2: not JSON"),
    "line of another kind": (LINE + b"\n" + b'{"resourceLogs": []}\n', "line 2: a JSON value without resourceSpans"),
    "base64 ids": (LINE.replace(TRACE.encode(), base64.b64encode(bytes.fromhex(TRACE))), "traceId is not hex"),
    "torn protobuf": (GOOD[:-3], "not a protobuf ExportTraceServiceRequest"),
    "torn frame": (framed(GOOD) + framed(GOOD)[:-3], "leads past the end of the file"),
    "torn gzip": (gzip.compress(GOOD)[:-12], "gzip data that ends too early"),
    "damaged gzip": (gzip.compress(GOOD)[:20] + b"garbage!" + gzip.compress(GOOD)[28:], "gzip"),
    "no id": (request(hand_made("0", None, "nobody")).SerializeToString(), "its span id is not 8 bytes"),
    "no time": (request(hand_made("1", None, "never", begin=-START)).SerializeToString(), "no start or no end time"),
    "times past the store's": (
        request(hand_made("1", None, "late", end=2**63)).SerializeToString(),
        "no start or no end time that can be stored",
    ),
    "deep": (b'{"resourceSpans":' + b"[" * 100_000, "not JSON"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_is_one_line_and_nothing_is_taken_in(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, message = WRONG[case]
    good, wrong, store = tmp_path / "good", tmp_path / "wrong", tmp_path / "folder" / "store.duckdb"
    good.write_bytes(GOOD)
    wrong.write_bytes(data)
    assert cli.run(["ingest", str(good), str(wrong), "--store", str(store)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert str(wrong) in said
    assert message in said
    assert not store.parent.exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "name OTLP files, or --listen"),
        (["no-such-file"], "cannot read no-such-file"),
        (["some-file", "--listen"], "one of the two"),
        (["some-file", "--port", "5", "--quiet-seconds", "1"], "--port, --quiet-seconds without --listen"),
        (["some-file", "--run", "runs/x"], "and runs/x are two runs"),
        (["--listen", "--token-env", "NO_SUCH_TOKEN"], "NO_SUCH_TOKEN holds no token"),
    ],
)
def test_flags_that_do_not_fit_are_one_line(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["ingest", *flags, "--store", str(tmp_path / "store.duckdb")]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_command_takes_files_into_a_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two, store = tmp_path / "one", tmp_path / "two", tmp_path / "store.duckdb"
    one.write_bytes(LINE)
    two.write_bytes(gzip.compress(request(*small_trace("2" * 32)).SerializeToString()))
    assert cli.run(["ingest", str(one), str(two), "--store", str(store)]) == 0
    assert "2 traces of 4 spans: 2 new episodes with 2 actions (openinference 2)" in capsys.readouterr().out
    with TraceStore.open(store) as opened:
        (run,) = opened.runs()
        assert (run.command, run.config) == ("ingest", {"files": ["one", "two"]})
        assert {episode.run_id for episode in opened.episodes()} == {run.run_id}
    assert store.stat().st_mode & 0o777 == 0o600


def test_the_help_ends_with_an_example_that_parses(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["ingest", "--help"]) == 0
    example = shlex.split(" ".join(capsys.readouterr().out.split()).split("Example: ")[1])
    assert example[:2] == ["marft-bridge", "ingest"]
    assert cli.run([*example[1:], "--help"]) == 0


def test_a_trace_may_be_spread_over_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two, store = tmp_path / "one", tmp_path / "two", tmp_path / "store.duckdb"
    root, call = small_trace()
    one.write_bytes(request(call).SerializeToString())
    two.write_bytes(request(root).SerializeToString())
    assert cli.run(["ingest", str(one), "--store", str(store)]) == 0
    assert "its root span never came" in capsys.readouterr().out
    assert cli.run(["ingest", str(one), str(two), "--store", str(store)]) == 0
    assert "1 new episodes with 1 actions" in capsys.readouterr().out


def test_decompression_stops_at_its_limit() -> None:
    bomb = gzip.compress(bytes(200 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(TooLarge, match="more than 1048576 bytes"):
            inflate(bomb, 1 << 20)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20])
def test_what_fits_is_decompressed_whole(size: int) -> None:
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    half = len(data) // 2
    assert inflate(gzip.compress(data), 1 << 20) == data
    assert inflate(gzip.compress(data[:half]) + gzip.compress(data[half:]), 1 << 20) == data


def test_a_map_inside_a_list_inside_a_map_keeps_its_form() -> None:
    inner = AnyValue(kvlist_value=KeyValueList(values=[KeyValue(key="k", value=AnyValue(int_value=-1))]))
    span = hand_made("1", None, "nested")
    span.attributes.add(key="outer").value.array_value.values.extend([inner, AnyValue()])
    span.status.code = Status.STATUS_CODE_OK
    (found,) = protobuf_to_spans(request(span).SerializeToString()).spans
    assert found.attributes == {"outer": [{"k": -1}, None]}
    assert not found.failed


@given(st.binary(max_size=64) | st.binary(max_size=40).map(lambda data: GOOD[: len(data)] + data + GOOD[len(data) :]))
def test_arbitrary_bytes_are_spans_or_refused(data: bytes) -> None:
    for reader in (protobuf_to_spans, json_to_spans):
        try:
            decoded = reader(data)
        except IngestError:
            continue
        assert all(len(span.trace_id) == 32 and len(span.span_id) == 16 for span in decoded.spans)


def test_the_run_folder_or_the_store_stands_behind_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("spans.json").write_text('{"resourceSpans": []}')
    Path("runs/new").mkdir(parents=True, mode=0o700)
    assert cli.run(["ingest", "spans.json", "spans.json", "runs/new"]) == 0
    assert cli.run(["ingest", "spans.json", "own.duckdb"]) == 0
    assert Path("runs/new/store.duckdb").is_file()
    assert Path("own.duckdb").is_file()
    example = (ROOT / "examples/math_duo/bridge.toml").read_text()
    Path("bridge.toml").write_text(f'run = "runs/configured"\n{example}\n[record]\ncontent = false\n')
    configured, bare = RecordOptions(content=False), RecordOptions()
    new, own, config = Path("runs/new"), Path("own.duckdb"), Path("bridge.toml")
    for choice, options in (
        (RunChoice("ingest", Path("runs/configured")), configured),
        (RunChoice("ingest", run="runs/another"), configured),
        (RunChoice("ingest", new), bare),
        (RunChoice("ingest", own), bare),
        (RunChoice("ingest", own, config=config), configured),
    ):
        assert choice_to_target(choice).options == options, choice
