"""Bombs -> the memory that the OTLP receiver takes for each, above what it takes while it waits; as a program.

    python receiver_memory.py SCALE [NAME ...]        prints JSON: {bomb: [[status, peak bytes above idle], ...]}

SCALE divides the receiver's limits, and the bombs with them. Each bomb comes twice, each time to a fresh process with a
fresh spool: as large as a body may be, and as large as the receiver's counting lets through.
"""

from __future__ import annotations

import gzip
import http.client
import json
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from marft_bridge.ingest import receiver
from marft_bridge.ingest.errors import IngestError, TooLarge
from marft_bridge.ingest.request_cost import RequestBounds, check_json_cost, check_protobuf_cost
from marft_bridge.ingest.trace_spool import TraceSpool

TOKEN = "a-token-for-the-tests-0123"
IDS = b"\x0a\x10" + b"\x11" * 16 + b"\x12\x08" + b"\x22" * 8 + b"\x39" + (5).to_bytes(8, "little") + b"\x41"
IDS += (6).to_bytes(8, "little")  # trace, span, start and end: all that a span needs
TRACE_ID, SPAN_ID = "1" * 32, "2" * 16
JSON_IDS = f'"traceId":"{TRACE_ID}","spanId":"{SPAN_ID}","startTimeUnixNano":"5","endTimeUnixNano":"6"'


def varint(number: int) -> bytes:
    first, rest = number & 127, number >> 7
    return bytes([first | 128]) + varint(rest) if rest else bytes([first])


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def in_span(content: bytes) -> bytes:
    """One request with one span that also has this content."""
    return field(1, field(2, field(2, IDS + content)))


def attribute(value: bytes, key: bytes = b"k") -> bytes:
    return field(9, field(1, key) + field(2, value))


def array(items: bytes) -> bytes:
    return attribute(field(5, items))


def json_span(attributes: str) -> bytes:
    return b'{"resourceSpans":[{"scopeSpans":[{"spans":[{%b,"attributes":[%b]}]}]}]}' % (
        JSON_IDS.encode(),
        attributes.encode(),
    )


def json_text(text: str) -> bytes:
    return json_span('{"key":"k","value":{"stringValue":"' + text + '"}}')


def keys(size: int) -> bytes:
    return b"".join(attribute(b"\x18\x01", b"%d" % number) for number in range(size // 16))


def nested(size: int) -> bytes:
    value = field(3, b"\x01")
    for _ in range(40):
        value = field(5, field(1, value))
    return attribute(value) * (size // len(value))


BOMBS: dict[str, Callable[[int], bytes]] = {
    # Nothing at all, again and again, at every level.
    "empty resources": lambda size: b"\x0a\x00" * (size // 2),
    "empty scopes": lambda size: field(1, b"\x12\x00" * (size // 2)),
    "empty spans": lambda size: field(1, field(2, b"\x12\x00" * (size // 2))),
    "empty attributes": lambda size: in_span(b"\x4a\x00" * (size // 2)),
    "empty events": lambda size: in_span(b"\x5a\x00" * (size // 2)),
    "empty links": lambda size: in_span(b"\x6a\x00" * (size // 2)),
    "attributes of an exception": lambda size: in_span(field(11, field(2, b"exception") + b"\x1a\x00" * (size // 2))),
    "attributes of a resource": lambda size: field(1, field(1, b"\x0a\x00" * (size // 2)) + field(2, b"")),
    "nulls of a list": lambda size: in_span(array(b"\x0a\x00" * (size // 2))),
    "lists of a list": lambda size: in_span(array(b"\x0a\x02\x2a\x00" * (size // 4))),
    "objects of a list": lambda size: in_span(array(b"\x0a\x02\x32\x00" * (size // 4))),
    "texts of a list": lambda size: in_span(array(b"\x0a\x03\x0a\x01x" * (size // 5))),
    "numbers of a list": lambda size: in_span(array((b"\x0a\x0a\x18" + b"\xff" * 8 + b"\x7f") * (size // 12))),
    "lists in lists": lambda size: in_span(nested(size)),
    "deep": lambda size: in_span(b"\x4a\x80\x80\x80\x20" * (size // 5)),
    "keys": lambda size: in_span(keys(size)),
    "one key again": lambda size: in_span(attribute(b"\x18\x01") * (size // 10)),
    "values of one attribute": lambda size: in_span(field(9, b"\x12\x02\x2a\x00\x12\x02\x32\x00" * (size // 8))),
    "unknown fields": lambda size: in_span(b"\x98\x06\x01" * (size // 3)),
    "unknown texts": lambda size: b"\x9a\x06\x00" * (size // 3) + in_span(b""),
    # Texts that grow.
    "one text": lambda size: in_span(attribute(field(1, b"x" * size))),
    "a wide text": lambda size: in_span(attribute(field(1, b"x" * size + "\U0001f600".encode()))),
    "a text of controls": lambda size: in_span(attribute(field(1, b"\x01" * size))),
    "a text of quotes": lambda size: in_span(attribute(field(1, b'"' * size))),
    "bytes": lambda size: in_span(attribute(field(7, b"\x01" * size))),
    "many texts": lambda size: in_span(attribute(field(1, b"x" * 1000)) * (size // 1012)),
    "a third of a text": lambda size: in_span(attribute(field(1, b"x" * (size // 3)))),
    # The same in JSON.
    "json lists": lambda size: b"[" + b"[]," * (size // 3) + b"1]",
    "json objects": lambda size: b"[" + b"{}," * (size // 3) + b"1]",
    "json numbers": lambda size: b"[" + b"1," * (size // 2) + b"1]",
    "json texts": lambda size: b"[" + b'"x",' * (size // 4) + b"1]",
    "json resources": lambda size: b'{"resourceSpans":[' + b"{}," * (size // 3) + b"{}]}",
    "json attributes": lambda size: json_span("{}," * (size // 3) + "{}"),
    "json keys": lambda size: json_span(",".join(f'{{"key":"{number}"}}' for number in range(size // 16))),
    "json text": lambda size: json_text("x" * size),
    "json wide text": lambda size: json_text("x" * size + "\U0001f600"),
    "json escaped text": lambda size: json_text("x" * size + "\\ud83d\\ude00"),
    "json escapes": lambda size: json_text("\\u0001" * (size // 6)),
    "json no end": lambda size: b'"' + b'\\"' * (size // 2),
    "json brackets": lambda size: b"[" * size,
    "json unknown": lambda size: json_text("x")[:-1] + b',"x":[' + b"0.1," * (size // 4) + b"1]}",
    "json third of a text": lambda size: json_text("x" * (size // 3)),
    # Gzip of nothing.
    "empty members": lambda size: gzip.compress(b"") * (size // 64),
}


def memory(name: str) -> int:
    """A figure of /proc/self/status in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) << 10


def is_counted_out(name: str, size: int) -> bool:
    """Whether the receiver would refuse a bomb of this size by counting alone."""
    check = check_json_cost if name.startswith("json") else check_protobuf_cost
    try:
        check(BOMBS[name](size), receiver.BOUNDS)
    except TooLarge:
        return True
    except IngestError:
        return False
    return False


def measure(name: str, size: int, *, whole: bool) -> tuple[int, int]:
    """(status of the answer, peak memory above that before the request)."""
    while not whole and is_counted_out(name, size):
        size = size * 4 // 5
    body = BOMBS[name](size)
    is_json = name.startswith("json")
    compressed = body if name == "empty members" else gzip.compress(body, 1)
    del body
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Encoding": "gzip"}
    headers["Content-Type"] = "application/json" if is_json else "application/x-protobuf"
    with TemporaryDirectory() as folder:
        spool = TraceSpool(Path(folder) / "spool", 0.0)
        with receiver.Receiver(0, TOKEN, spool.add, lambda _: None) as listening:
            threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
            connection = http.client.HTTPConnection("127.0.0.1", listening.port, timeout=300)
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            idle = memory("VmRSS")
            with suppress(BrokenPipeError):  # it may refuse, and close, before all was sent; its answer is there
                connection.request("POST", "/v1/traces", compressed, headers)
            status = connection.getresponse().status
            return status, memory("VmHWM") - idle


def measure_apart(name: str, size: int, *, whole: bool) -> tuple[int, int]:
    """The same in a process of its own, since memory that was freed is not always given back."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, json.dumps(measure(name, size, whole=whole)).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    assert text, f"{name}: the receiver died"
    status, peak = json.loads(text)
    return status, peak


def main() -> None:
    scale = int(sys.argv[1])
    receiver.MAX_BODY_BYTES //= scale
    receiver.MAX_INFLATED_BYTES //= scale
    receiver.BOUNDS = RequestBounds(receiver.BOUNDS.spans // scale, receiver.BOUNDS.memory_bytes // scale)
    size = receiver.MAX_INFLATED_BYTES - (64 << 10)
    names = sys.argv[2:] or list(BOMBS)
    peaks = {name: [measure_apart(name, size, whole=whole) for whole in (True, False)] for name in names}
    sys.stdout.write(json.dumps(peaks))


if __name__ == "__main__":
    main()
