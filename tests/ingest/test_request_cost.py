"""Owns: an OTLP request is counted before it is built, so that no bomb takes more than twice what a request may.

- Each bomb is sent to a receiver with a real spool, in a process whose peak of memory is read afterwards; as large as a
  body may be, and as large as the counting lets through.
- What is counted are upper bounds, and honest requests are far from them.
- Gzip is decompressed in linear time.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.ingest_rig import hand_made, request
from support.paths import ROOT
from support.receiver_memory import BOMBS

from marft_bridge.common.json_memory import is_json_within
from marft_bridge.ingest.errors import IngestError, TooLarge
from marft_bridge.ingest.otlp import inflate, json_to_spans, protobuf_to_spans
from marft_bridge.ingest.receiver import BOUNDS
from marft_bridge.ingest.request_cost import RequestBounds, check_protobuf_cost

TINY = RequestBounds(spans=100, memory_bytes=1 << 20)


@pytest.mark.slow
def test_no_bomb_takes_twice_what_a_request_may() -> None:
    """At a sixteenth of the limits, so that it takes seconds: memory grows with them, and noise does not."""
    scale = 16
    command = [sys.executable, str(ROOT / "tests/support/receiver_memory.py"), str(scale)]
    run = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stderr
    peaks = json.loads(run.stdout)
    assert len(peaks) == len(BOMBS) > 40
    limit = 2 * BOUNDS.memory_bytes // scale
    assert {name: pair for name, pair in peaks.items() if max(peak for _, peak in pair) >= limit} == {}
    assert {status for pair in peaks.values() for status, _ in pair} == {200, 400, 413}


@pytest.mark.parametrize("name", sorted(BOMBS))
def test_a_bomb_is_refused_by_counting(name: str) -> None:
    """Nothing of it is built: the errors of building are others."""
    if name == "empty members":
        return
    decode = json_to_spans if name.startswith("json") else protobuf_to_spans
    with pytest.raises(IngestError) as refused:
        decode(BOMBS[name](4 << 20), TINY)
    assert isinstance(refused.value, TooLarge) or name == "deep"  # which is no protobuf


def test_counting_ends_where_a_bound_is_passed() -> None:
    """What follows is not looked at: a request that ends in garbage is too large before it is damaged."""
    with pytest.raises(TooLarge, match="more than 100 spans"):
        check_protobuf_cost(BOMBS["empty spans"](400) + b"\xff\xff", TINY)
    assert not is_json_within(b"[" * (1 << 20), 1 << 20)


def test_an_honest_request_is_far_from_the_bounds() -> None:
    """10,000 spans of 20 attributes with a page of text each: what a collector sends at once, and more."""
    attributes = {f"key.{number}": "x" * 100 for number in range(20)}
    spans = [hand_made(f"{number + 1:x}", None, "span", attributes=attributes) for number in range(10)]
    body = request(*spans).SerializeToString()
    check_protobuf_cost(body, RequestBounds(10, BOUNDS.memory_bytes // 1_000))


@given(st.binary(max_size=200))
def test_bytes_of_any_kind_are_an_ingest_error_or_spans(body: bytes) -> None:
    for decode in (protobuf_to_spans, json_to_spans):
        try:
            decode(body, TINY)
            message = "spans"
        except IngestError as error:
            message = str(error)
        assert message.isprintable()


@given(st.data())
def test_a_request_that_was_cut_or_changed_is_an_ingest_error_or_spans(data: st.DataObject) -> None:
    body = bytearray(request(*[hand_made("1", "2", "a", attributes={"k": ["x", 1, 2.5, True]})]).SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        protobuf_to_spans(bytes(body[: data.draw(st.integers(0, len(body)))]), TINY)
    except IngestError:
        return


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
SPAN_KEYS = (
    "traceId",
    "spanId",
    "name",
    "kind",
    "startTimeUnixNano",
    "attributes",
    "events",
    "links",
    "status",
    "flags",
)


@given(st.data())
def test_json_with_wrong_types_at_every_key_is_an_ingest_error_or_spans(data: st.DataObject) -> None:
    span = {key: data.draw(JSON_VALUES) for key in data.draw(st.sets(st.sampled_from(SPAN_KEYS), min_size=1))}
    level = data.draw(st.integers(0, 3))
    inner = data.draw(JSON_VALUES)
    spans = span if level == 3 else inner
    scopes = inner if level == 2 else [{"spans": [spans], "scope": data.draw(JSON_VALUES)}]
    resources = inner if level == 1 else [{"scopeSpans": scopes, "resource": data.draw(JSON_VALUES)}]
    try:
        json_to_spans(json.dumps({"resourceSpans": resources}).encode(), TINY)
        message = "spans"
    except IngestError as error:
        message = str(error)
    assert message.isprintable()


def test_gzip_of_empty_members_is_decompressed_in_linear_time() -> None:
    """Four times the members took sixteen times as long. Processor time, the best of three, of 6 and of 24 thousand."""
    member = gzip.compress(b"", mtime=0)
    seconds = []
    for count in (6_000, 24_000):
        runs = []
        for _ in range(3):
            began = time.process_time()
            assert inflate(member * count, 1) == b""
            runs.append(time.process_time() - began)
        seconds.append(min(runs))
    assert seconds[1] < 8 * seconds[0]


@pytest.mark.parametrize(
    ("compressed", "inflated"),
    [
        (gzip.compress(b"ab", mtime=0) + gzip.compress(b"c", mtime=0), b"abc"),
        (gzip.compress(b"abcd", mtime=0), "more than 3 bytes"),
        (gzip.compress(b"ab", mtime=0)[:-3], "ends too early"),
        (gzip.compress(b"ab", mtime=0)[:-5] + b"xxxxx", "damaged"),
        (gzip.compress(b"ab", mtime=0) + b"xx", "damaged"),
        (b"no gzip", "damaged"),
    ],
)
def test_gzip_gives_its_bytes_or_what_is_wrong_with_it(compressed: bytes, inflated: bytes | str) -> None:
    if isinstance(inflated, bytes):
        assert inflate(compressed, 3) == inflated
    else:
        with pytest.raises(IngestError, match=inflated):
            inflate(compressed, 3)
