"""Owns: the OTLP receiver's answers, over real HTTP on loopback.

- 200 means kept; the answer is in the request's own form; bad spans are a partial success; what a sender should
  repeat is 503, what it should not is 4xx with a reason.
- Nobody without the token, from a web page or under another host name is heard; their bodies are not read.
- Bodies are bounded as sent, as decompressed and in spans; gzip, chunks and kept-alive connections work.
- Nobody keeps others out by holding connections open, or by sending slowly.
"""

from __future__ import annotations

import gzip
import http.client
import io
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from rich.console import Console
from support.idle_sockets import open_idle_sockets
from support.ingest_rig import TOKEN, framed, hand_made, request, small_trace

from marft_bridge.common.progress import Reporter
from marft_bridge.config.record import RecordOptions
from marft_bridge.ingest import receiver as receiver_module
from marft_bridge.ingest.listen import _ReceiverSession
from marft_bridge.ingest.otlp import WireSpan
from marft_bridge.ingest.receiver import Receiver
from marft_bridge.ingest.request_cost import RequestBounds
from marft_bridge.ingest.trace_spool import SpoolFull
from trace_store.errors import StoreError

BODY = request(*small_trace()).SerializeToString()
PROTOBUF, JSON = "application/x-protobuf", "application/json"


class Kept:
    """Stands in for the spool."""

    def __init__(self) -> None:
        self.spans: list[WireSpan] = []
        self.notes: list[str] = []
        self.refuse: Exception | None = None

    def keep(self, spans: Sequence[WireSpan], now: float) -> None:
        assert now > 0
        if self.refuse is not None:
            raise self.refuse
        self.spans += spans


@pytest.fixture
def kept() -> Kept:
    return Kept()


@pytest.fixture
def receiver(kept: Kept) -> Iterator[Receiver]:
    with Receiver(0, TOKEN, kept.keep, kept.notes.append) as listening:
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield listening
        listening.shutdown()
        thread.join()


def post(
    receiver: Receiver, body: bytes = BODY, path: str = "/v1/traces", method: str = "POST", **changed: str | None
) -> tuple[int, bytes, dict[str, str]]:
    """Status, body and headers of one request; `changed` replaces headers, None leaves one out."""
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": PROTOBUF}
    headers |= {key.replace("_", "-"): value for key, value in changed.items()}
    connection = http.client.HTTPConnection("127.0.0.1", receiver.port, timeout=20)
    try:
        connection.request(method, path, body, {key: value for key, value in headers.items() if value is not None})
        answer = connection.getresponse()
        return answer.status, answer.read(), dict(answer.getheaders())
    finally:
        connection.close()


def as_json() -> bytes:
    span = {"traceId": "1" * 32, "spanId": "2" * 16, "name": "x", "startTimeUnixNano": "5", "endTimeUnixNano": "6"}
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}).encode()


def test_a_request_is_kept_and_answered_in_its_own_form(receiver: Receiver, kept: Kept) -> None:
    status, body, headers = post(receiver)
    assert (status, headers["Content-Type"]) == (200, PROTOBUF)
    assert ExportTraceServiceResponse.FromString(body) == ExportTraceServiceResponse()
    status, body, headers = post(receiver, as_json(), Content_Type="application/json; charset=utf-8")
    assert (status, headers["Content-Type"], json.loads(body)) == (200, JSON, {})
    assert post(receiver, gzip.compress(BODY), Content_Encoding="gzip")[0] == 200
    assert post(receiver, b"")[0] == 200  # an empty request is a valid one
    assert [span.span_id[-1] for span in kept.spans] == ["1", "2", "2", "1", "2"]
    assert kept.notes == []


def test_bad_spans_are_a_partial_success(receiver: Receiver, kept: Kept) -> None:
    body = request(hand_made("0", None, "nobody"), *small_trace(), hand_made("0", None, "no one")).SerializeToString()
    status, answer, _ = post(receiver, body)
    said = ExportTraceServiceResponse.FromString(answer).partial_success
    assert (status, said.rejected_spans) == (200, 2)
    assert said.error_message == "span 'nobody': its span id is not 8 bytes with one that is not 0"
    assert len(kept.spans) == 2
    assert kept.notes == ["its span id is not 8 bytes with one that is not 0"] * 2


@pytest.mark.parametrize(
    ("changed", "status", "why"),
    [
        ({"Authorization": None}, 401, "token"),
        ({"Authorization": "Bearer wrong"}, 401, "token"),
        ({"Authorization": f"Basic {TOKEN}"}, 401, "token"),
        ({"Authorization": f"Bearer {TOKEN}x"}, 401, "token"),
        ({"Host": "evil.example"}, 403, "Host"),
        ({"Host": "evil.example:4318"}, 403, "Host"),
        ({"Origin": "http://127.0.0.1"}, 403, "web pages"),
        ({"path": "/v1/logs"}, 404, "/v1/traces"),
        ({"method": "GET"}, 405, "POST"),
        ({"method": "OPTIONS"}, 405, "POST"),
        ({"Content_Type": "text/plain"}, 415, "x-protobuf"),
        ({"Content_Encoding": "zstd"}, 415, "gzip"),
    ],
)
def test_what_is_not_taken_is_answered_with_the_reason(
    changed: dict[str, str | None], status: int, why: str, receiver: Receiver, kept: Kept
) -> None:
    answered, body, headers = post(receiver, **changed)  # type: ignore[arg-type]
    assert answered == status
    assert why.encode() in body
    assert headers["Connection"] == "close"
    assert kept.spans == []
    assert [note.partition(":")[0] for note in kept.notes] == [str(status)]


def test_a_refusal_is_a_status_message_in_the_requests_form(receiver: Receiver) -> None:
    _, body, _ = post(receiver, as_json(), Content_Type=JSON, Authorization=None)
    assert json.loads(body) == {"message": "the bearer token is missing or wrong"}
    _, body, headers = post(receiver, Authorization=None)
    # google.rpc.Status: field 2, a text of 36 bytes.
    assert body == b"\x12\x24the bearer token is missing or wrong"
    assert headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize(
    ("body", "content_type"),
    [(b"\xff\xff", PROTOBUF), (framed(BODY), PROTOBUF), (b"{", JSON), (b'{"resourceLogs": []}', JSON), (BODY, JSON)],
)
def test_what_is_no_trace_data_is_not_to_be_repeated(
    body: bytes, content_type: str, receiver: Receiver, kept: Kept
) -> None:
    assert post(receiver, body, Content_Type=content_type)[0] == 400
    assert kept.spans == []


@pytest.mark.parametrize("reason", [SpoolFull(), StoreError("the disk is full")])
def test_what_may_work_later_is_to_be_repeated(reason: Exception, receiver: Receiver, kept: Kept) -> None:
    kept.refuse = reason
    status, _, headers = post(receiver)
    assert (status, headers["Retry-After"]) == (503, "10")
    kept.refuse = None
    assert post(receiver)[0] == 200


def test_a_body_is_bounded_as_sent_as_decompressed_and_in_spans(
    receiver: Receiver, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver_module, "MAX_BODY_BYTES", len(BODY))
    monkeypatch.setattr(receiver_module, "MAX_INFLATED_BYTES", 3 * len(BODY))
    monkeypatch.setattr(receiver_module, "BOUNDS", RequestBounds(4, 1 << 20))
    assert post(receiver, BODY)[0] == 200
    assert post(receiver, BODY + b"x")[0] == 413
    bomb = gzip.compress(bytes(4 * len(BODY)))
    assert len(bomb) < len(BODY)
    status, why, _ = post(receiver, bomb, Content_Encoding="gzip")
    assert (status, b"when decompressed" in why) == (413, True)
    many = gzip.compress(request(*[hand_made(str(n), None, "x") for n in range(1, 6)]).SerializeToString())
    status, why, _ = post(receiver, many, Content_Encoding="gzip")
    assert (status, b"more than 4 spans in one request" in why) == (413, True)
    assert len(kept.spans) == 2


def raw(receiver: Receiver, sent: bytes) -> bytes:
    """All that comes back for these bytes until the receiver closes the connection."""
    with socket.create_connection(("127.0.0.1", receiver.port), timeout=20) as connection:
        connection.sendall(sent)
        try:
            connection.shutdown(socket.SHUT_WR)
        except OSError as error:  # of ENOTCONN Python makes no ConnectionError
            raise ConnectionError("closed by the receiver") from error
        return b"".join(iter(lambda: connection.recv(65536), b""))


def head(receiver: Receiver, *lines: str, token: str = TOKEN) -> bytes:
    fixed = ["POST /v1/traces HTTP/1.1", f"Host: localhost:{receiver.port}", f"Authorization: Bearer {token}"]
    return "\r\n".join([*fixed, f"Content-Type: {PROTOBUF}", *lines, "", ""]).encode()


def test_a_strangers_body_is_not_waited_for(receiver: Receiver) -> None:
    """No byte of the body is sent; with the token, the receiver would wait for it."""
    with socket.create_connection(("127.0.0.1", receiver.port), timeout=20) as connection:
        connection.sendall(head(receiver, "Content-Length: 1000000", token="wrong"))
        assert connection.recv(65536).startswith(b"HTTP/1.1 401 ")


def test_chunks_are_put_together(receiver: Receiver, kept: Kept) -> None:
    chunks = b"".join(b"%x;note=1\r\n%b\r\n" % (len(part), part) for part in (BODY[:7], BODY[7:]))
    chunked = head(receiver, "Transfer-Encoding: chunked") + chunks + b"0\r\nTrailer: x\r\n\r\n"
    assert raw(receiver, chunked + head(receiver, "Content-Length: 0")).count(b"HTTP/1.1 200 ") == 2
    assert len(kept.spans) == 2


@pytest.mark.parametrize(
    ("lines", "body", "status"),
    [
        (["Transfer-Encoding: chunked"], b"zz\r\n", 400),
        (["Transfer-Encoding: chunked"], b"-5\r\n", 400),
        (["Transfer-Encoding: chunked"], b"ffffffff\r\n", 413),
        (["Transfer-Encoding: chunked"], b"2\r\nabXX0\r\n\r\n", 400),
        (["Transfer-Encoding: gzip, chunked", "Content-Length: 3"], b"abc", 411),
        (["Content-Length: -1"], b"", 411),
        (["Content-Length: 999999999999"], b"", 413),
        (["Content-Length: 50"], b"too short", 400),
        ([], b"", 411),
    ],
)
def test_a_body_that_is_not_what_it_says_is_refused(
    lines: list[str], body: bytes, status: int, receiver: Receiver, kept: Kept
) -> None:
    answer = raw(receiver, head(receiver, *lines) + body)
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert answer.count(b"HTTP/1.1") == 1  # what is left of it is not taken for the next request
    assert kept.spans == []


def test_many_senders_at_once_lose_nothing(receiver: Receiver, kept: Kept) -> None:
    def send(sender: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", receiver.port, timeout=20)
        for number in range(20):
            body = request(*small_trace(f"{sender * 100 + number + 1:032x}")).SerializeToString()
            headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": PROTOBUF}
            connection.request("POST", "/v1/traces", body, headers)
            answer = connection.getresponse()
            assert (answer.status, answer.read()) == (200, b"")
        connection.close()

    threads = [threading.Thread(target=send, args=[sender]) for sender in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(kept.spans) == 8 * 20 * 2
    assert len({(span.trace_id, span.span_id) for span in kept.spans}) == 320


@pytest.mark.slow
def test_two_thousand_idle_sockets_do_not_keep_out_a_sender(receiver: Receiver, kept: Kept) -> None:
    with open_idle_sockets(receiver.port, 2_000):
        assert [post(receiver)[0] for _ in range(3)] == [200] * 3
        assert threading.active_count() < 2 * receiver_module.MAX_CONNECTIONS


@pytest.mark.parametrize(
    ("first", "status"),
    [(b"", b""), (b"POST /v1/traces HTTP/1.1\r\nX: ", b""), (None, b"HTTP/1.1 408 ")],
    ids=["nothing", "a head", "a body"],
)
def test_what_does_not_arrive_in_time_ends_the_connection(
    first: bytes | None, status: bytes, receiver: Receiver, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However it is dripped: a minute of it would be taken."""
    monkeypatch.setattr(receiver_module, "HEAD_TIMEOUT_S", 0.5)
    monkeypatch.setattr(receiver_module, "BODY_TIMEOUT_S", 0.5)
    began, answer = time.monotonic(), b""
    with socket.create_connection(("127.0.0.1", receiver.port), timeout=60) as connection:
        connection.sendall(head(receiver, "Content-Length: 100000") if first is None else first)
        connection.settimeout(0.02)
        while time.monotonic() - began < 50:
            try:
                if first != b"":
                    connection.sendall(b"y")
                if not (piece := connection.recv(65536)):
                    break
                answer += piece
            except TimeoutError:
                continue
            except OSError:
                break
    assert 0.4 < time.monotonic() - began < 50
    assert answer.startswith(status)
    assert kept.spans == []


def test_a_request_that_nobody_can_read_is_answered_and_the_next_one_is_taken(receiver: Receiver, kept: Kept) -> None:
    for error, status in ((RecursionError(), 400), (TypeError("a"), 400), (MemoryError(), 503)):
        kept.refuse = error
        assert post(receiver)[0] == status
    kept.refuse = None
    assert post(receiver)[0] == 200
    assert kept.notes == ["400: cannot be read: RecursionError", "400: cannot be read: TypeError", "503: out of memory"]


@pytest.mark.parametrize("depth", [10, 600, 900, 20_000])
def test_the_neighbours_of_a_deeply_nested_text_are_in_the_spool(tmp_path: Path, depth: int) -> None:
    session = _ReceiverSession(tmp_path / "s.duckdb", 0.0, RecordOptions(), Reporter(Console(file=io.StringIO())))
    text = '{"headers":1,"a":' + "[" * depth + "]" * depth + "}"
    spans = [hand_made("1", None, "run"), hand_made("2", "1", "model", attributes={"input.value": text})]
    with Receiver(0, TOKEN, session.save_spans, session.count_rejection) as listening:
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        assert post(listening, request(*spans).SerializeToString())[0] == 200
        listening.shutdown()
        thread.join()
    ((waiting),) = session.spool.waiting_traces().values()
    assert [span.name for span in waiting] == ["run", "model"]
    assert session.report.rejected == {}
    session.finish()


def test_a_head_has_a_bounded_size(receiver: Receiver) -> None:
    """A hundred headers of 64 KiB would be 6 MiB for every connection of a stranger's."""
    lines = [f"X-{number}: {'y' * 60_000}" for number in range(3)]
    with suppress(ConnectionError):  # it was closed while we sent
        assert raw(receiver, head(receiver, *lines)) == b""
    assert post(receiver)[0] == 200
