"""OTLP/HTTP requests on loopback -> spans passed to a callback, and the answers that OTLP asks for.

`http.server` is enough here: the senders are a few exporters on this machine, each with one request at a time, and a
web framework would be a dependency whose limits we would have to set just the same. Invariants: 200 is answered only
after the spans were saved; no body is read without the token; requests take bounded memory and time, whatever is sent;
a connection that waits gives way to a newer one; a page in a browser, under any host name, is refused.
"""

from __future__ import annotations

import hmac
import io
import json
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceResponse,
)

from marft_bridge.ingest.errors import IngestError, TooLarge
from marft_bridge.ingest.otlp import (
    WireSpan,
    inflate,
    json_to_spans,
    message_to_json,
    protobuf_to_spans,
)
from marft_bridge.ingest.request_cost import RequestBounds
from marft_bridge.ingest.trace_spool import SpoolFull
from trace_store.errors import StoreError

ADDRESS = "127.0.0.1"
PATH = "/v1/traces"
MAX_BODY_BYTES = 16 << 20  # bytes of a body as it is sent
MAX_INFLATED_BYTES = 64 << 20  # bytes of a body after decompression
BOUNDS = RequestBounds(spans=20_000, memory_bytes=256 << 20)  # of one request; they are built one at a time
MAX_CONCURRENT_BODIES = 2  # bodies that are in memory as they were sent
MAX_HEAD_BYTES = 64 << 10  # bytes of a request line and its headers
MAX_CONNECTIONS = 128  # open at a time; the one that has waited longest gives way to the next
HEAD_TIMEOUT_S = 30.0  # for a request's head to arrive, from the end of the one before it
BODY_TIMEOUT_S = 30.0  # for a body to arrive, and for a turn to build it
ANSWER_TIMEOUT_S = 30.0  # for an answer to be read
RETRY_AFTER_S = 10
_PROTOBUF, _JSON = "application/x-protobuf", "application/json"

SaveSpans = Callable[[Sequence[WireSpan], float], None]


class _Refused(Exception):  # noqa: N818 - an answer, not an error
    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Receiver(ThreadingHTTPServer):
    """Listens on loopback as soon as it is made; `serve_forever` answers.

    `save_spans` is given the spans of a request and the monotonic time in seconds, and returns once they are on disk;
    `count_rejection` is given the reason for each request or span that was not taken. Raises OSError when the
    port is taken; port 0 takes a free one.
    """

    daemon_threads = True  # an exporter that keeps its connection open does not hold up the end
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, port: int, token: str, save_spans: SaveSpans, count_rejection: Callable[[str], None]) -> None:
        self.token, self.save_spans, self.count_rejection = token.encode(), save_spans, count_rejection
        self.body_slots = threading.BoundedSemaphore(MAX_CONCURRENT_BODIES)
        self.build_lock = threading.Lock()  # who holds it has a request decompressed and built in memory
        self._connections_lock = threading.Lock()
        self._busy_connections: set[socket.socket] = set()  # a request's head has come, and it has no answer yet
        self._waiting_connections: dict[socket.socket, None] = {}  # the one that has waited longest first
        super().__init__((ADDRESS, port), _Handler)
        self.hosts = {f"{name}:{self.port}" for name in (ADDRESS, "localhost")}

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serves a new connection in a thread of its own; one that waits is closed for it where too many are open."""
        with self._connections_lock:
            is_full = len(self._busy_connections) + len(self._waiting_connections) >= MAX_CONNECTIONS
            oldest = next(iter(self._waiting_connections), None) if is_full else None
            has_room = not is_full or oldest is not None
            if oldest is not None:
                del self._waiting_connections[oldest]
                with suppress(OSError):  # it has gone by itself
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread reads the end, and closes it
            if has_room:
                self._waiting_connections[request] = None
        if has_room:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def note_request(self, connection: socket.socket) -> bool:
        """The head of a request has come on this connection; False where it was closed for another."""
        with self._connections_lock:
            if connection not in self._waiting_connections:
                return False
            del self._waiting_connections[connection]
            self._busy_connections.add(connection)
            return True

    def note_answer(self, connection: socket.socket) -> None:
        """The request of this connection is answered, so that it waits for the next."""
        with self._connections_lock:
            self._busy_connections.discard(connection)
            self._waiting_connections[connection] = None

    def shutdown_request(self, request: Any) -> None:
        """Closes a connection."""
        with self._connections_lock:
            self._busy_connections.discard(request)
            self._waiting_connections.pop(request, None)
        super().shutdown_request(request)

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that broke is the sender's to repeat; anything else is a bug and shows a traceback."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _TimedReader(io.RawIOBase):
    """What a connection sends, until a time and up to a number of bytes; then it raises OSError."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._deadline = self._bytes_left = 0.0

    def allow(self, seconds: float, byte_count: float) -> None:
        """So much more may come, and so long from now."""
        self._deadline, self._bytes_left = time.monotonic() + seconds, byte_count

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: Any) -> int:
        """As `RawIOBase.readinto`. Raises TimeoutError when it has taken too long, OSError for too many bytes."""
        remaining_s = self._deadline - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError("it took too long to arrive")
        if self._bytes_left <= 0:
            raise OSError("a request's head of too many bytes")
        self._connection.settimeout(remaining_s)
        byte_count = self._connection.recv_into(buffer)
        self._bytes_left -= byte_count
        return byte_count


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: Receiver
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "marft-bridge", ""

    def setup(self) -> None:
        """Reads through a `_TimedReader`."""
        super().setup()
        self.rfile.close()
        self._reader = _TimedReader(self.connection)
        self.rfile = io.BufferedReader(self._reader)

    def handle_one_request(self) -> None:
        """Waits for a request and answers it."""
        self._reader.allow(HEAD_TIMEOUT_S, MAX_HEAD_BYTES)
        super().handle_one_request()

    def do_POST(self) -> None:
        """Takes one request."""
        if not self.server.note_request(self.connection):
            self.close_connection = True
            return
        self._reader.allow(BODY_TIMEOUT_S, 2 * MAX_BODY_BYTES)  # chunks have sizes beside their bytes
        as_json = self._content_type() == _JSON
        try:
            self._refuse_by_headers()
            answer = self._take_request(as_json)
        except _Refused as refused:
            self._refuse(refused, as_json)
        except TimeoutError:
            self._refuse(_Refused(408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s"), as_json)
        else:
            self._answer(200, message_to_json(answer) if as_json else answer.SerializeToString(), as_json)
        self.server.note_answer(self.connection)

    def do_GET(self) -> None:
        """Nothing can be read here."""
        self._refuse(_Refused(405, f"POST to {PATH}"), self._content_type() == _JSON)

    do_PUT = do_DELETE = do_HEAD = do_OPTIONS = do_PATCH = do_GET  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - fixed by http.server
        """Request lines are not logged; what was refused is counted by reason."""

    def _refuse_by_headers(self) -> None:
        """Refuses what the headers alone rule out, before the body is read."""
        if self.headers.get("Host", "").lower() not in self.server.hosts:
            raise _Refused(403, "the Host header names another server")  # DNS rebinding
        if self.headers.get("Origin") is not None:
            raise _Refused(403, "requests from web pages are not taken")
        if not hmac.compare_digest(self._token(), self.server.token):
            raise _Refused(401, "the bearer token is missing or wrong")
        if self.path.partition("?")[0] != PATH:
            raise _Refused(404, f"traces go to {PATH}; logs and metrics are not taken")
        if self._content_type() not in (_PROTOBUF, _JSON):
            raise _Refused(415, f"send {_PROTOBUF} or {_JSON}")

    def _token(self) -> bytes:
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        return token.strip().encode("utf-8", "replace") if scheme.lower() == "bearer" else b""

    def _content_type(self) -> str:
        return str(self.headers.get("Content-Type", "")).partition(";")[0].strip().lower()

    def _take_request(self, as_json: bool) -> ExportTraceServiceResponse:
        rejected = self._save_body(as_json)
        response = ExportTraceServiceResponse()
        if rejected:
            for reason in rejected:
                self.server.count_rejection(reason.rpartition(": ")[2])
            response.partial_success.rejected_spans = len(rejected)
            response.partial_success.error_message = rejected[0]
        return response

    def _save_body(self, as_json: bool) -> tuple[str, ...]:
        """Reads the body and saves its spans; returns why others in it were rejected."""
        if not self.server.body_slots.acquire(timeout=BODY_TIMEOUT_S):
            raise _Refused(503, "busy with other requests")
        try:
            return self._save_spans([self._read_body()], as_json)
        except TooLarge as error:
            raise _Refused(413, str(error)) from None
        except IngestError as error:
            raise _Refused(400, str(error)) from None
        except SpoolFull:
            raise _Refused(503, "too many spans wait for the rest of their trace") from None
        except StoreError as error:
            raise _Refused(503, str(error)) from None
        except (_Refused, OSError):  # answered by `do_POST`, or nobody is there to be answered
            raise
        except MemoryError:
            raise _Refused(503, "out of memory") from None
        except Exception as error:  # noqa: BLE001 - a sender without an answer sends the same for ever
            raise _Refused(400, f"cannot be read: {type(error).__name__}") from None
        finally:
            self.server.body_slots.release()

    def _save_spans(self, bodies: list[bytes], as_json: bool) -> tuple[str, ...]:
        """Saves the spans of the one body in the list, which is emptied: nobody holds it while they are built."""
        decode = json_to_spans if as_json else protobuf_to_spans
        if not self.server.build_lock.acquire(timeout=BODY_TIMEOUT_S):
            raise _Refused(503, "busy with other requests")
        try:
            if self._is_gzip():
                bodies[0] = inflate(bodies[0], MAX_INFLATED_BYTES)
            decoded = decode(bodies.pop(), BOUNDS)  # which frees the bytes before it makes spans of them
            if decoded.spans:
                self.server.save_spans(decoded.spans, time.monotonic())
            return decoded.rejected
        finally:
            self.server.build_lock.release()

    def _is_gzip(self) -> bool:
        return self._content_encoding() == "gzip"

    def _content_encoding(self) -> str:
        return str(self.headers.get("Content-Encoding", "identity")).strip().lower()

    def _read_body(self) -> bytes:
        """The body as it was sent."""
        if self._content_encoding() not in ("gzip", "identity"):
            raise _Refused(415, "send gzip or no Content-Encoding")
        if self.headers.get("Transfer-Encoding", "").strip().lower() == "chunked":
            return self._read_chunks()
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()) or "Transfer-Encoding" in self.headers:
            raise _Refused(411, "send Content-Length, or chunks")
        return self._read(_check_body_size(int(length) if len(length) < 20 else sys.maxsize))

    def _read_chunks(self) -> bytes:
        body = bytearray()
        while size := self._read_chunk_size():
            body += self._read(_check_body_size(len(body) + size) - len(body))
            if self._read(2) != b"\r\n":
                raise _Refused(400, "a chunk that does not end where it says")
        while (trailer := self.rfile.readline(1024)) not in (b"\r\n", b""):
            if not trailer.endswith(b"\n"):
                raise _Refused(400, "a trailer that is too long")
        return bytes(body)

    def _read_chunk_size(self) -> int:
        size = self.rfile.readline(1024).partition(b";")[0].strip()
        if not re.fullmatch(rb"[0-9a-fA-F]{1,8}", size):
            raise _Refused(400, "a chunk without a size")
        return int(size, 16)

    def _read(self, size: int) -> bytes:
        data = self.rfile.read(size)
        if len(data) < size:
            raise _Refused(400, "the body is shorter than it says")
        return data

    def _refuse(self, refused: _Refused, as_json: bool) -> None:
        self.close_connection = True  # its body was not read
        self.server.count_rejection(f"{refused.status}: {refused}")
        # OTLP asks for a google.rpc.Status, whose message has the number and the type of this one's on the wire.
        status = ExportTracePartialSuccess(error_message=str(refused)).SerializeToString()
        body = json.dumps({"message": str(refused)}).encode() if as_json else status
        headers = {"Connection": "close"}
        if refused.status == 503:
            headers["Retry-After"] = str(RETRY_AFTER_S)
        if refused.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if refused.status == 405:
            headers["Allow"] = "POST"
        self._answer(refused.status, body, as_json, headers=headers)

    def _answer(self, status: int, body: bytes, as_json: bool, headers: dict[str, str] | None = None) -> None:
        self.connection.settimeout(ANSWER_TIMEOUT_S)
        self.send_response(status)
        for key, value in {"Content-Type": _JSON if as_json else _PROTOBUF, **(headers or {})}.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _check_body_size(size: int) -> int:
    if size > MAX_BODY_BYTES:
        raise _Refused(413, f"a body of more than {MAX_BODY_BYTES} bytes")
    return size
