"""Owns: `marft-bridge ingest --listen` from the first request to the store, with real exporters and real kills.

- What the real OTLP exporter sends while an app runs is in the store after Ctrl-C, as files would be.
- What was answered with 200 survives SIGKILL: the next receiver makes the episodes of it, each once.
- A trace may come in any order and in any pieces; it is done when it is whole and quiet; late and repeated spans are
  counted; what is never whole is reported, and kept for the next receiver.
- What our own recorder exports arrives unchanged, every attribute.
- One receiver at a time uses a store; the spool holds no more than what waits.
- Whatever a span holds, the other traces are written. A disk that is full for a while ends nothing.
"""

from __future__ import annotations

import _thread
import io
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from langgraph.graph import END, START, StateGraph
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from rich.console import Console
from support.ingest_rig import (
    ROOT,
    TOKEN,
    TRACE,
    ReceiverProcess,
    foreign_requests,
    hand_made,
    openinference,
    receiver_process,
    request,
    small_trace,
)

from marft_bridge.common.progress import Reporter
from marft_bridge.config.record import RecordOptions
from marft_bridge.ingest import listen, trace_spool, writer
from marft_bridge.ingest.errors import IngestError
from marft_bridge.ingest.listen import _ReceiverSession
from marft_bridge.ingest.otlp import WireSpan, protobuf_to_spans
from marft_bridge.ingest.spans_to_rows import TraceRows, spans_to_rows
from marft_bridge.ingest.trace_spool import SpoolFull, TraceSpool
from marft_bridge.model_calls.scripted_model import ScriptedPolicy
from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.wrap import wrap
from trace_store import conventions as c
from trace_store.errors import StoreError
from trace_store.journal import Journal, line_of
from trace_store.records import SpanRow
from trace_store.store import TraceStore


def send(receiver: ReceiverProcess, *spans: Span) -> int:
    return send_bytes(receiver, request(*spans).SerializeToString())


def send_bytes(receiver: ReceiverProcess, body: bytes) -> int:
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/x-protobuf"}
    return httpx.post(receiver.url, content=body, headers=headers, timeout=30).status_code


def in_pieces(sent: bytes, seed: int) -> list[bytes]:
    """The spans of one request, shuffled, as several requests."""
    message = ExportTraceServiceRequest.FromString(sent)
    found = [
        (resource.resource, scope.scope, span)
        for resource in message.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    random.Random(seed).shuffle(found)
    pieces = []
    for start in range(0, len(found), 4):
        piece = ExportTraceServiceRequest()
        for resource, scope, span in found[start : start + 4]:
            resource_spans = piece.resource_spans.add(resource=resource)
            resource_spans.scope_spans.add(scope=scope).spans.append(span)
        pieces.append(piece.SerializeToString())
    return pieces


def counts(store: Path) -> dict[str, int]:
    with TraceStore.open(store) as opened:
        opened.take_in()
        return opened.counts()


@pytest.mark.slow
@pytest.mark.parametrize("instrumentor", ["openinference", "traceloop", "langsmith"])
def test_what_a_real_exporter_sends_is_in_the_store_after_ctrl_c(instrumentor: str, tmp_path: Path) -> None:
    store = tmp_path / "store.duckdb"
    with receiver_process(store) as receiver:
        environment = {
            **os.environ,
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": receiver.url,
            "OTEL_EXPORTER_OTLP_TRACES_HEADERS": f"Authorization=Bearer%20{TOKEN}",
            "OTEL_EXPORTER_OTLP_TRACES_COMPRESSION": "gzip",
        }
        script = [sys.executable, str(ROOT / "tests/support/foreign_app.py"), instrumentor, "sync", "2"]
        run = subprocess.run(
            script, cwd=ROOT, env=environment, check=False, capture_output=True, text=True, timeout=120
        )
        assert run.returncode == 0, run.stderr
        assert receiver.end(signal.SIGINT) == 0
        assert f"2 new episodes with 8 actions ({instrumentor} 2)" in receiver.said()
        assert TOKEN not in receiver.said()
    with TraceStore.open(store) as opened:
        nodes = {action.node for trajectory in opened.trajectories() for action in trajectory.actions}
    assert nodes == {"plan", "left", "right", "outer/polish"}


@pytest.mark.slow
def test_what_was_answered_survives_a_kill_and_becomes_one_episode_each(tmp_path: Path) -> None:
    store = tmp_path / "store.duckdb"
    pieces = [piece for sent in foreign_requests("openinference") for piece in in_pieces(sent, 1)]
    half = len(pieces) // 2
    # A long quiet time: nothing is made of the spans before the kill.
    with receiver_process(store, quiet_s=600) as receiver:
        assert {send_bytes(receiver, piece) for piece in pieces[:half]} == {200}
        receiver.end(signal.SIGKILL)
    with receiver_process(store, quiet_s=600) as receiver:
        assert "are left from an earlier receiver" in receiver.said()
        assert {send_bytes(receiver, piece) for piece in pieces[half:]} == {200}
        receiver.end(signal.SIGKILL)
    assert counts(store)["episodes"] == 0
    with receiver_process(store) as receiver:
        receiver.end(signal.SIGINT)
        assert "2 new episodes with 8 actions" in receiver.said()
    found = counts(store)
    assert (found["episodes"], found["actions"], found["spans"], found["refusals"]) == (2, 8, 26, 0)


@pytest.mark.slow
def test_a_kill_after_the_rows_were_written_makes_no_second_episode(tmp_path: Path) -> None:
    store = tmp_path / "store.duckdb"
    with receiver_process(store, quiet_s=0) as receiver:
        assert send(receiver, *small_trace()) == 200
        deadline = time.monotonic() + 30
        # The spool is emptied after the rows were written and synced.
        while not list(tmp_path.glob("*.journal/*.segment")) or list(tmp_path.glob("*.spool/*.segment")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        receiver.end(signal.SIGKILL)
    # As if it had been killed before the spool was emptied: the same spans are there once more.
    with receiver_process(store, quiet_s=600) as receiver:
        assert send(receiver, *small_trace()) == 200
        receiver.end(signal.SIGKILL)
    with receiver_process(store) as receiver:
        receiver.end(signal.SIGINT)
        assert "1 traces were in the store already" in receiver.said()
    assert (counts(store)["episodes"], counts(store)["spans"]) == (1, 2)


@pytest.mark.slow
def test_a_trace_that_is_never_whole_is_reported_and_kept_for_the_next_receiver(tmp_path: Path) -> None:
    store = tmp_path / "store.duckdb"
    root, call = small_trace()
    with receiver_process(store, quiet_s=0) as receiver:
        assert send(receiver, call) == 200
        assert receiver.end(signal.SIGTERM) == 0
        assert f"1  its root span never came; kept for the next receiver  {TRACE}" in receiver.said()
    assert counts(store)["spans"] == 0
    with receiver_process(store) as receiver:
        assert send(receiver, root) == 200
        receiver.end(signal.SIGINT)
        assert "1 new episodes with 1 actions" in receiver.said()
    assert list((tmp_path / "store.duckdb.spool").glob("*.segment")) == []


def test_late_and_repeated_spans_are_counted_and_change_nothing(tmp_path: Path) -> None:
    store = tmp_path / "store.duckdb"
    with receiver_process(store, quiet_s=0) as receiver:
        assert send(receiver, *small_trace()) == 200
        deadline = time.monotonic() + 30
        while list(tmp_path.glob("store.duckdb.spool/*.segment")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        late = hand_made("7", "1", "late", attributes=openinference("LLM"))
        assert send(receiver, late, *small_trace()) == 200
        receiver.end(signal.SIGINT)
        assert "3 spans came after their trace was done, or again; not taken in" in receiver.said()
    assert (counts(store)["episodes"], counts(store)["spans"]) == (1, 2)


@pytest.mark.slow
def test_the_store_is_free_for_others_while_the_receiver_runs(tmp_path: Path) -> None:
    store = tmp_path / "store.duckdb"
    with receiver_process(store, quiet_s=0) as receiver:
        assert send(receiver, *small_trace()) == 200
        deadline = time.monotonic() + 30
        while counts(store)["episodes"] == 0:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        with TraceStore.open(store):
            receiver.end(signal.SIGINT)
        assert receiver.process.returncode == 0
        assert "whoever opens the store next takes it in" in receiver.said()
    assert counts(store)["episodes"] == 1


def test_a_second_receiver_on_the_same_store_is_refused(tmp_path: Path) -> None:
    store = tmp_path / "store.duckdb"
    with receiver_process(store):
        command = [sys.executable, "-m", "marft_bridge", "ingest", "--listen", "--port", "0", "--store", str(store)]
        run = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=60)
    assert run.returncode == 2
    assert "another receiver is using" in run.stderr
    assert run.stderr.count("\n") == 1


@pytest.mark.slow
def test_without_a_token_of_ones_own_one_is_made_and_shown_with_the_lines_to_paste(tmp_path: Path) -> None:
    script = [sys.executable, "-m", "marft_bridge", "ingest", "--listen", "--port", "0", "--store", "s.duckdb"]
    process = subprocess.Popen(
        script, cwd=tmp_path, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline().strip() for _ in range(4)]
        pasted = dict(line.removeprefix("export ").split("=", 1) for line in lines[1:])
        assert set(pasted) == {f"OTEL_EXPORTER_OTLP_TRACES_{name}" for name in ("ENDPOINT", "HEADERS", "PROTOCOL")}
        app = [sys.executable, str(ROOT / "tests/support/foreign_app.py"), "openinference", "sync", "1"]
        environment = {**os.environ, **{key: value.strip('"') for key, value in pasted.items()}}
        run = subprocess.run(app, cwd=ROOT, env=environment, check=False, capture_output=True, text=True, timeout=120)
        assert run.returncode == 0, run.stderr
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=60)
        assert "1 new episodes with 4 actions" in rest
    finally:
        process.kill()
        process.wait()


def test_what_our_own_recorder_exports_arrives_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded, received = tmp_path / "recorded.duckdb", tmp_path / "received.duckdb"
    model = ScriptedPolicy(script=lambda node, _prompt, _random: f"{node} says ä 1")

    def node(state: dict[str, str]) -> dict[str, str]:
        return {"said": str(model.invoke(f"after {state.get('said')}").content)}

    graph = StateGraph(dict)
    graph.add_node("first", node)
    graph.add_node("second", node)
    graph.add_edge(START, "first")
    graph.add_edge("first", "second")
    graph.add_edge("second", END)
    monkeypatch.setenv("TEST_HEADERS", f"Authorization=Bearer%20{TOKEN}")
    with receiver_process(received) as receiver:
        journal = Journal(recorded.with_name("recorded.duckdb.journal"))
        recorder = Recorder(journal, RecordOptions(otlp_endpoint=receiver.url, otlp_headers_env="TEST_HEADERS"))
        app = wrap(graph.compile(), recorder)
        for number in range(3):
            app.invoke({"said": str(number)})
        recorder._processor.shutdown()  # sends what is queued, as the end of the app would
        journal.close()
        receiver.end(signal.SIGINT)
        assert "3 new episodes with 6 actions (marft 3)" in receiver.said()
    with TraceStore.open(recorded) as ours, TraceStore.open(received) as theirs:
        ours.take_in()
        assert list(theirs.trajectories()) == list(ours.trajectories())
        for episode in ours.episodes():
            assert theirs.spans(episode.episode_id) == ours.spans(episode.episode_id)
        trained = [action for trajectory in theirs.trajectories() for action in trajectory.actions]
    assert len(trained) == 6
    assert all(action.trainable and action.logprobs for action in trained)


# -- what goes wrong meanwhile --------------------------------------------------------------------------------------

OTHER_TRACE = "b" * 32
ODD_VALUES: list[object] = [1.5, True, -(2**62), [1, None], {"a": [{}]}, "[" * 900 + "]" * 900, "\x00"]


def with_odd_values(number: int, value: object) -> list[WireSpan]:
    """A small trace of which every attribute that somebody reads has this value, but for those that make it one."""
    names = {name for name in vars(c).values() if isinstance(name, str) and "." in name}
    names |= {"user.id", "session.id", "metadata", "input.value", "output.value", "llm.invocation_parameters"}
    return [
        replace(span, attributes=dict.fromkeys(sorted(names - {c.SPAN_COUNT}), value) | span.attributes)
        for span in wire(*small_trace(f"{number + 1:032x}"))
    ]


def quiet_reporter() -> Reporter:
    return Reporter(Console(file=io.StringIO()))


def kill(session: _ReceiverSession) -> None:
    """What a kill leaves of a receiver: its locks are free."""
    session.spool._journal.close()
    session._writer.close()
    os.close(session.spool._lock_file)


@pytest.mark.parametrize("breaks", [False, True])
def test_whatever_values_a_span_has_the_other_traces_are_written_and_the_next_receiver_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, breaks: bool
) -> None:
    store = tmp_path / "store.duckdb"
    odd_ids = [f"{number + 1:032x}" for number in range(len(ODD_VALUES))]
    if breaks:  # as for a value that nobody has thought of

        def read_or_break(spans: Sequence[WireSpan], run_id: str) -> TraceRows:
            if spans[0].trace_id in odd_ids:
                raise ZeroDivisionError
            return spans_to_rows(spans, run_id)

        monkeypatch.setattr(writer, "spans_to_rows", read_or_break)
    for receiver in range(2):
        session = _ReceiverSession(store, 0.0, RecordOptions(), reporter=quiet_reporter())
        if not receiver:
            for number, value in enumerate(ODD_VALUES):
                session.save_spans(with_odd_values(number, value), 0.0)
        session.save_spans(wire(*small_trace(OTHER_TRACE if receiver else TRACE)), 0.0)
        session.write_complete_traces(time.monotonic())
        assert not session.spool.waiting_traces()
        assert set(session.report.row_counts) >= {OTHER_TRACE if receiver else TRACE}
        if breaks:
            assert session.report.refused == ({} if receiver else {"cannot be read: ZeroDivisionError": odd_ids})
        kill(session)
    with TraceStore.open(store) as opened:
        opened.take_in()
        stored = {episode.episode_id for episode in opened.episodes()}
    assert stored >= {TRACE, OTHER_TRACE} | (set() if breaks else set(odd_ids))


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_a_disk_that_is_full_for_a_while_ends_nothing_and_every_trace_is_an_episode_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    store, output = tmp_path / "store.duckdb", io.StringIO()
    real, is_full, failures, problems = getattr(os, call), threading.Event(), list[int](), list[BaseException]()
    sessions: queue.Queue[_ReceiverSession] = queue.Queue()

    def fill(fd: int, *arguments: object) -> object:
        if is_full.is_set() and ".duckdb.journal" in str(Path(f"/proc/self/fd/{fd}").readlink()):
            failures.append(fd)
            raise OSError(28, "No space left on device")
        return real(fd, *arguments)

    class Session(_ReceiverSession):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            sessions.put(self)

    def wait_until(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def use() -> None:
        try:
            session = sessions.get(timeout=60)
            is_full.set()
            no_episode = wire(hand_made("1", None, "GET /health", trace="c" * 32))
            session.save_spans([*wire(*small_trace()), *no_episode], 0.0)
            wait_until(lambda: len(failures) >= 3)
            session.save_spans(wire(*small_trace(OTHER_TRACE)), 0.0)
            is_full.clear()
            wait_until(lambda: not list(tmp_path.glob("*.spool/*.segment")))
        except BaseException as problem:  # noqa: BLE001 - raised in the test
            problems.append(problem)
        finally:
            _thread.interrupt_main()

    monkeypatch.setattr(os, call, fill)
    monkeypatch.setattr(listen, "_ReceiverSession", Session)
    monkeypatch.setattr(listen, "POLL_S", 0.02)
    user = threading.Thread(target=use)
    user.start()
    report = listen.listen(store, 0, None, 0.0, RecordOptions(), Reporter(Console(file=output, width=500)))
    user.join()
    assert problems == []
    assert output.getvalue().count("No space left on device") == 1
    assert (report.traces, report.episodes, report.conventions) == (3, 2, {"openinference": 2})
    assert report.refused == {"no LLM call, no agent and no graph node in it": ["c" * 32]}
    assert set(report.missing.values()) == {2}  # of each of the two episodes, once
    assert (counts(store)["episodes"], counts(store)["actions"], counts(store)["spans"]) == (2, 2, 4)


def test_a_disk_that_is_full_at_the_end_leaves_the_traces_to_the_next_receiver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store.duckdb"
    session = _ReceiverSession(store, 0.0, RecordOptions(), reporter=quiet_reporter())
    session.save_spans(wire(*small_trace()), 0.0)

    def refuse(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", refuse)
        report = session.finish()
    assert report.refused == {"the disk did not take it; kept for the next receiver": [TRACE]}
    session = _ReceiverSession(store, 0.0, RecordOptions(), reporter=quiet_reporter())
    assert session.finish().episodes == 1


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_a_spool_whose_disk_was_full_takes_spans_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    root, model_call = wire(*small_trace())
    spool = TraceSpool(tmp_path / "spool", now=0.0)
    spool.add([root], now=0.0)

    def refuse(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, call, refuse)
        with pytest.raises(StoreError, match="No space left on device"):
            spool.add([model_call], now=0.0)
        with pytest.raises(StoreError, match="No space left on device"):
            spool._rewrite(spool._segments())
    spool.add([model_call], now=0.0)
    assert spool.take_complete(0.0) == {TRACE: [root, model_call]}
    spool.close()
    spool = TraceSpool(tmp_path / "spool", now=0.0)
    assert spool.waiting_traces() == {TRACE: [root, model_call]}
    spool.close()


# -- the spool itself -----------------------------------------------------------------------------------------------


def wire(*spans: Span) -> list[WireSpan]:
    return list(protobuf_to_spans(request(*spans).SerializeToString()).spans)


def test_a_trace_is_handed_out_when_it_is_whole_and_quiet(tmp_path: Path) -> None:
    root, call = wire(*small_trace())
    spool = TraceSpool(tmp_path / "spool", now=0.0)
    spool.add([call], now=10.0)
    assert spool.take_complete(quiet_since=99.0) == {}  # no root
    spool.add([root], now=20.0)
    assert spool.take_complete(quiet_since=19.9) == {}  # not quiet
    assert spool.take_complete(quiet_since=20.0) == {TRACE: [call, root]}
    assert spool.take_complete(quiet_since=0.0) == {TRACE: [call, root]}  # until someone says that it is safe
    spool.acknowledge()
    assert spool.take_complete(quiet_since=99.0) == {}
    spool.close()


@pytest.mark.slow
def test_every_kind_of_span_survives_the_spool(tmp_path: Path) -> None:
    spans = [span for name in ("openinference", "traceloop", "langsmith") for span in wire_of(name)]
    spool = TraceSpool(tmp_path / "spool", now=0.0)
    spool.add(spans, now=1.0)
    spool.close()
    found = TraceSpool(tmp_path / "spool", now=0.0).waiting_traces()
    key = lambda span: (span.trace_id, span.span_id)  # noqa: E731
    assert sorted((span for trace in found.values() for span in trace), key=key) == sorted(spans, key=key)


def wire_of(instrumentor: str) -> list[WireSpan]:
    return [span for sent in foreign_requests(instrumentor) for span in protobuf_to_spans(sent).spans]


def test_the_spool_holds_no_more_than_what_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_spool, "_MAX_SLACK_BYTES", 20_000)
    spool = TraceSpool(tmp_path / "spool", now=0.0)
    (orphan,) = wire(hand_made("5", "4", "orphan", trace="f" * 32))
    spool.add([orphan], now=0.0)
    largest = 0
    for number in range(1, 200):
        spool.add(wire(*small_trace(f"{number:032x}")), now=0.0)
        assert list(spool.take_complete(0.0)) == [f"{number:032x}"]
        spool.acknowledge()
        largest = max(largest, sum(path.stat().st_size for path in (tmp_path / "spool").iterdir()))
    assert largest < 25_000
    assert spool.waiting_traces() == {"f" * 32: [orphan]}
    spool.close()


def test_too_much_that_waits_is_refused_and_nothing_of_it_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_spool, "MAX_WAITING_BYTES", 1000)
    spool = TraceSpool(tmp_path / "spool", now=0.0)
    root, call = wire(*small_trace())
    spool.add([call], now=0.0)
    with pytest.raises(SpoolFull):
        spool.add(wire(hand_made("9", None, "x" * 1000)), now=0.0)
    assert spool.waiting_traces() == {TRACE: [call]}
    spool.add([root], now=0.0)
    assert list(spool.take_complete(0.0)) == [TRACE]
    spool.close()


def test_a_spool_with_foreign_lines_and_pipes_is_taken_over_and_they_stay(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    spool = TraceSpool(folder, now=0.0)
    spool.add(wire_of("openinference"), now=1.0)
    (segment,) = folder.glob("*.segment")
    whole_lines = segment.read_bytes()
    spool._journal.close()
    os.close(spool._lock_file)  # as a kill does
    body = b'{"kind":"dream"}'
    foreign = [b"%08x %s\n" % (zlib.crc32(body), body)]
    foreign += [line_of(SpanRow("t", "s", None, "n", "", 1, 2, "ok", None, "", {}))]  # not as a receiver writes them
    segment.write_bytes(foreign[0] + whole_lines + foreign[1])
    os.mkfifo(folder / "0.segment")
    spool = TraceSpool(folder, now=0.0)
    assert sum(map(len, spool.waiting_traces().values())) == len(wire_of("openinference"))
    assert [path.read_bytes() for path in folder.glob("*.foreign")] == [b"".join(foreign)]
    assert (folder / "0.segment").is_fifo()
    spool.close()


def test_a_spool_in_use_is_refused(tmp_path: Path) -> None:
    spool = TraceSpool(tmp_path / "spool", now=0.0)
    with pytest.raises(IngestError, match="another receiver is using"):
        TraceSpool(tmp_path / "spool", now=0.0)
    spool.close()
    TraceSpool(tmp_path / "spool", now=0.0).close()
