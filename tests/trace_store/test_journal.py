"""Owns: what was acknowledged survives a kill and a full disk; a damaged line is dropped, counted and hurts no other;
a sync that nobody waits for stalls nobody, and its failure is kept.

The writer that is killed, and the one whose disk is full, are real processes.
"""

from __future__ import annotations

import io
import math
import os
import random
import signal
import stat
import subprocess
import sys
import threading
import time
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.sample_spans import chain

import trace_store.journal as journal_module
from trace_store.errors import StoreError
from trace_store.journal import (
    ForeignLine,
    Journal,
    RewardGroup,
    finished_lines,
    journal_of,
    line_of,
    lines_from,
    lock_if_abandoned,
    read_segment,
    record_of,
)
from trace_store.records import AdapterRow, Reward, RunRow, SpanRow
from trace_store.store import TraceStore

WRITER = """
import sys
from pathlib import Path
from trace_store.journal import Journal
from trace_store.records import Reward
journal, number = Journal(Path(sys.argv[1])), 0
while True:
    for _ in range(3):
        journal.append(Reward("e", "reward", float(number), "x" * 200, number))
        number += 1
    journal.sync()
    sys.stdout.write(f"{number}\\n")
    sys.stdout.flush()
"""

FULL_DISK = """
import resource, sys
from pathlib import Path
import trace_store.journal as journal_module
from trace_store.errors import StoreError
from trace_store.journal import Journal
from trace_store.records import Reward
journal = Journal(Path(sys.argv[1]))
journal.append(Reward("e", "first", 0.0, "s", 0))
resource.setrlimit(resource.RLIMIT_FSIZE, (300, resource.RLIM_INFINITY))
try:
    journal.append(Reward("e", "large", 1.0, "s" * 1000, 1))
except StoreError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
journal.append(Reward("e", "last", 2.0, "s", 2))
journal.close()
"""


def reward(number: int) -> Reward:
    return Reward("e", "reward", float(number), "test", number)


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.segment"))


def is_abandoned(path: Path) -> bool:
    with path.open("rb") as file:
        return lock_if_abandoned(file)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_every_kind_of_record_comes_back_equal(tmp_path: Path) -> None:
    records = [
        RunRow("r", "collect", 1, {"lr": 0.1, "nested": {"list": [1, None]}}, "0.1"),
        *chain().spans(),
        Reward("e", "reward", 1 / 3, "f", 2, "agent", None, "solver"),
        Reward("e", "reward", math.inf, "f", 3),
        RewardGroup((Reward("e", "reward", -math.inf, "f", 3), Reward("e", "correct", 1.0, "f", 3, "step", "x"))),
        AdapterRow("solver", 1, None, "adapters/1", "aa", "bb", 4, {"loss": 0.25}),
    ]
    journal = Journal(tmp_path / "j")
    for record in records:
        journal.append(record)
    journal.close()
    (segment,) = segments(tmp_path / "j")
    assert read_segment(segment) == (records, 0)


def test_nothing_is_created_before_the_first_record_and_then_only_for_the_owner(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    journal.sync()
    assert not (tmp_path / "j").exists()
    journal.append(reward(1))
    (segment,) = segments(tmp_path / "j")
    assert (mode(tmp_path / "j"), mode(segment)) == (0o700, 0o600)
    journal.close()


def test_text_that_no_file_can_hold_and_numbers_that_json_lacks_are_kept_readable(tmp_path: Path) -> None:
    attributes = {
        "text": "half \ud83d pair, line\nbreak, \u2028, nul \0",
        "numbers": [math.nan, math.inf, -math.inf, 1.5],
    }
    journal = Journal(tmp_path)
    journal.append(SpanRow("t", "s", None, "n", "chat", 1, 2, "ok", None, "c", attributes))
    journal.close()
    ((record,), torn) = read_segment(segments(tmp_path)[0])
    assert torn == 0
    assert isinstance(record, SpanRow)
    assert record.attributes == {
        "text": "half \ufffd pair, line\nbreak, \u2028, nul \0",
        "numbers": ["NaN", "Infinity", "-Infinity", 1.5],
    }


@pytest.mark.parametrize(
    ("attributes", "kept"),
    [
        ({"number": math.nan}, {"number": "NaN"}),
        ({"absent": None, "numbers": [-math.inf, 0.1]}, {"absent": None, "numbers": ["-Infinity", 0.1]}),
        ({"text": "null", "deep": {"null": [None, ("a", 1)]}}, {"text": "null", "deep": {"null": [None, ["a", 1]]}}),
        ({"large": 2**70, "key": {1: True}}, {"large": 2**70, "key": {"1": True}}),
        ({"half a pair": "\ud83d"}, {"half a pair": "\ufffd"}),
        ({"all": '\x00\x1f\x7f\u2028"\\/ü🙂'}, {"all": '\x00\x1f\x7f\u2028"\\/ü🙂'}),
    ],
)
@pytest.mark.parametrize("parent", [None, "p"])
def test_a_line_is_what_json_makes_of_the_record(
    attributes: dict[str, Any], kept: dict[str, Any], parent: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    span = SpanRow("t", "s", parent, "n", "chat", 1, 2, "ok", None, "c", attributes)
    line = line_of(span)
    assert record_of(line) == replace(span, attributes=kept)
    monkeypatch.setattr(journal_module.orjson, "dumps", refuse)  # as for a value that it does not take
    assert line_of(span) == line


def refuse(*_: Any, **__: Any) -> bytes:
    raise TypeError


def test_a_value_that_is_not_json_is_refused_and_the_rest_stays(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append(reward(1))
    with pytest.raises(StoreError, match="cannot store a value as JSON"):
        journal.append(RunRow("r", "collect", 1, {"object": object()}))
    journal.append(reward(2))
    journal.close()
    assert read_segment(segments(tmp_path)[0]) == ([reward(1), reward(2)], 0)


def test_a_torn_tail_is_dropped_and_counted_wherever_it_was_cut(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for number in range(3):
        journal.append(reward(number))
    journal.close()
    (segment,) = segments(tmp_path)
    content = segment.read_bytes()
    start_of_last = content.rindex(b"\n", 0, len(content) - 1) + 1
    for cut in range(start_of_last + 1, len(content)):
        segment.write_bytes(content[:cut])
        assert read_segment(segment) == ([reward(0), reward(1)], 1)


def test_a_damaged_line_costs_itself_only(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for number in range(3):
        journal.append(reward(number))
    journal.close()
    (segment,) = segments(tmp_path)
    damaged = bytearray(segment.read_bytes())
    middle = damaged.index(b"\n") + 30
    damaged[middle] ^= 1
    segment.write_bytes(damaged)
    assert read_segment(segment) == ([reward(0), reward(2)], 1)


class _GrowingFile(io.RawIOBase):
    """A file of which every read finds the next part, as one that a writer goes on with."""

    def __init__(self, *parts: bytes) -> None:
        self._parts = list(parts)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return offset + whence

    def readinto(self, buffer: Any, /) -> int:
        part = self._parts.pop(0) if self._parts else b""
        buffer[: len(part)] = part
        return len(part)


@pytest.mark.parametrize("cut", [1, 40])
def test_a_line_that_is_written_while_it_is_read_is_held_back_and_not_taken_for_two_torn_ones(cut: int) -> None:
    first, second, third = (line_of(reward(number)) for number in range(3))
    file = io.BufferedReader(_GrowingFile(first + second[:cut], b"", second[cut:] + third))
    assert list(lines_from(file, 0, growing=True)) == [(reward(0), len(first))]


def test_lines_that_are_written_in_one_go_are_read_when_all_of_them_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, write, states = Journal(tmp_path), os.pwrite, list[bytes]()

    def write_and_look(fd: int, data: Any, offset: int, /) -> int:
        written = write(fd, data, offset)
        states.append(segments(tmp_path)[0].read_bytes())
        return written

    monkeypatch.setattr(os, "pwrite", write_and_look)
    journal.append(reward(1))
    journal.append_all([reward(2), reward(3)])
    journal.close()
    ends = [len(line_of(reward(number))) * number for number in (1, 2, 3)]
    for content, count in ((states[0], 1), (states[-2], 1), (states[-1], 3)):
        assert finished_lines(content) == b"".join(line_of(reward(number)) for number in range(1, count + 1))
        growing = list(lines_from(io.BytesIO(content), 0, growing=True))
        assert growing == [(reward(number + 1), ends[number]) for number in range(count)]
    # Nobody writes any more: what was not finished was never acknowledged.
    left = list(lines_from(io.BytesIO(states[-2]), 0, growing=False))
    assert left == [(reward(1), ends[0]), (None, ends[1]), (None, ends[2])]


def test_a_line_of_a_newer_version_is_not_taken_for_damage(tmp_path: Path) -> None:
    body = b'{"kind":"dream"}'
    (tmp_path / "x.segment").write_bytes(b"%08x %s\n" % (zlib.crc32(body), body))
    with pytest.raises(StoreError, match="a line that this version does not know"):
        read_segment(tmp_path / "x.segment")


def test_a_segment_that_a_sync_finds_full_is_let_go_and_the_next_one_is_later_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line_bytes = len(line_of(reward(10)))
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 3 * line_bytes)
    journal = Journal(tmp_path)
    for number in range(10, 20):
        journal.append(reward(number))
        journal.sync()
    # Full after every third record: 10-12, 13-15, 16-18 and 19.
    assert [read_segment(path)[0] for path in segments(tmp_path)] == [
        [reward(number) for number in range(begin, min(begin + 3, 20))] for begin in (10, 13, 16, 19)
    ]
    assert [is_abandoned(path) for path in segments(tmp_path)] == [True, True, True, False]
    journal.close()
    assert [is_abandoned(path) for path in segments(tmp_path)] == [True] * 4


def test_records_that_nobody_syncs_stay_in_one_segment_until_somebody_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 100)
    journal = Journal(tmp_path)
    for number in range(10):
        journal.append(reward(number))
    assert len(segments(tmp_path)) == 1
    journal.sync()
    journal.append(reward(10))
    assert len(segments(tmp_path)) == 2
    journal.close()


def test_a_record_that_comes_while_a_full_segment_is_synced_does_not_wait_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 1)
    disk, reached = threading.Event(), threading.Event()

    def stuck(fd: int) -> None:
        reached.set()
        disk.wait(10)

    journal = Journal(tmp_path)
    journal.append(reward(1))
    with monkeypatch.context() as slow:
        slow.setattr(os, "fsync", stuck)
        syncing = threading.Thread(target=journal.sync)
        syncing.start()
        assert reached.wait(10)
        journal.append(reward(2))  # with the disk still stuck
        assert [is_abandoned(path) for path in segments(tmp_path)] == [False, False]
        disk.set()
        syncing.join()
    assert [is_abandoned(path) for path in segments(tmp_path)] == [True, False]
    journal.close()
    assert [read_segment(path)[0] for path in segments(tmp_path)] == [[reward(1)], [reward(2)]]


def test_a_sync_that_is_interrupted_at_a_full_segment_is_made_up_for_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 1)
    journal, synced = Journal(tmp_path), []

    def interrupted(fd: int) -> None:
        raise KeyboardInterrupt

    journal.append(reward(1))
    inode = segments(tmp_path)[0].stat().st_ino
    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            journal.sync()
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_ino))
    journal.append(reward(2))
    journal.sync()
    assert inode in synced
    journal.close()


def test_a_full_segment_is_let_go_also_where_a_forked_child_has_it_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 1)
    journal = Journal(tmp_path)
    journal.append(reward(1))
    hold, release = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(release)
        os.read(hold, 1)  # holds what it inherited, and never records
        os._exit(0)
    os.close(hold)
    try:
        journal.sync()
        assert is_abandoned(segments(tmp_path)[0])
    finally:
        os.close(release)
        assert os.waitpid(child, 0)[1] == 0
    journal.close()


@pytest.mark.parametrize("kill", [RuntimeError, MemoryError, SystemExit])
def test_a_thread_that_syncs_and_dies_is_started_again_and_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kill: type[BaseException],
) -> None:
    journal = Journal(tmp_path)
    journal.append(reward(1))
    synced = threading.Event()

    def dying(fd: int) -> None:
        raise kill

    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", dying)
        journal.sync_soon()
        dead_thread = journal._sync_thread
        assert dead_thread is not None
        dead_thread.join(10)
        assert not dead_thread.is_alive()
    assert f"the thread that syncs the journal {tmp_path} ended ({kill.__name__})" in caplog.text
    assert journal.failure is None  # nothing is lost: the disk refused nothing
    monkeypatch.setattr(os, "fsync", lambda fd: synced.set())
    journal.append(reward(2))
    journal.sync_soon()
    assert synced.wait(10)
    journal.close()


def test_a_thread_that_syncs_and_died_without_a_word_is_started_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    dead_thread = threading.Thread(target=lambda: None)
    dead_thread.start()
    dead_thread.join()
    journal._sync_thread = dead_thread
    journal.append(reward(1))
    journal.sync_soon()
    assert journal._sync_thread is not dead_thread
    journal.close()


def test_with_no_delay_a_record_is_synced_when_the_request_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(os, "fsync", calls.append)
    journal = Journal(tmp_path)
    journal.append(reward(1))
    journal.sync_soon(0)
    assert calls
    assert journal._sync_thread is None
    journal.close()


@pytest.mark.parametrize(
    "body",
    [
        b"3",
        b"[]",
        b"not json",
        b"[" * 100_000,
        b'{"kind":"dream"}',
        b'{"kind":["span"]}',
        b'{"kind":"reward"}',
        b'{"kind":"reward","episode_id":"e","name":"n","value":{},"source":"s","created_ns":1}',
        b'{"kind":"reward","episode_id":"e","name":"n","value":1,"source":"s","created_ns":"1"}',
        b'{"kind":"reward","episode_id":"e","name":"n","value":1,"source":"s","created_ns":1.5}',
        b'{"kind":"reward","episode_id":"e","name":"n","value":1,"source":"s","created_ns":true}',
        b'{"kind":"reward","episode_id":"e","name":"n","value":1,"source":"s","created_ns":9223372036854775808}',
        b'{"kind":"reward","episode_id":null,"name":"n","value":1,"source":"s","created_ns":1}',
        b'{"kind":"reward","episode_id":"\\ud800","name":"n","value":1,"source":"s","created_ns":1}',
        b'{"kind":"reward","episode_id":"e","name":"n","value":1,"source":"s","created_ns":1,"colour":"red"}',
        b'{"kind":"rewards"}',
        b'{"kind":"rewards","rewards":[]}',
        b'{"kind":"rewards","rewards":{}}',
        b'{"kind":"rewards","rewards":[3]}',
        b'{"kind":"rewards","rewards":[{"episode_id":"e","name":"n","value":1,"source":"s","created_ns":"1"}]}',
        b'{"kind":"rewards","rewards":[{"episode_id":"\\ud800","name":"n","value":1,"source":"s","created_ns":1}]}',
        b'{"kind":"rewards","rewards":[{"episode_id":"e","name":"n","value":1,"source":"s","created_ns":1}],"of":"e"}',
        b'{"kind":"run","run_id":"r","command":"c","started_ns":1,"config":[]}',
        b'{"kind":"run","run_id":"r","command":"c","started_ns":1' + b"0" * 5000 + b"}",
    ],
)
def test_a_whole_line_that_holds_no_record_is_foreign_and_not_damaged(body: bytes) -> None:
    line = b"%08x %s\n" % (zlib.crc32(body), body)
    record = record_of(line)
    assert isinstance(record, ForeignLine)
    assert record.line == line


def test_nothing_acknowledged_is_lost_when_the_writer_is_killed(tmp_path: Path) -> None:
    rng = random.Random(5)
    acknowledged_in_all = 0
    for trial in range(20):
        folder = tmp_path / str(trial)
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        first_line = writer.stdout.readline()
        time.sleep(rng.random() * 0.02)
        writer.send_signal(signal.SIGKILL)
        later_output = writer.stdout.read()
        writer.stdout.close()
        writer.wait()
        # A last line without its newline may have lost digits: it acknowledges nothing.
        acknowledged = [int(line) for line in (first_line + later_output).split(b"\n")[:-1]][-1]
        records, torn = read_segment(segments(folder)[0])
        numbers = [record.created_ns for record in records if isinstance(record, Reward)]
        assert numbers == list(range(len(numbers)))
        assert len(numbers) >= acknowledged
        assert torn <= 1
        acknowledged_in_all += acknowledged
    assert acknowledged_in_all >= 20 * 3


def test_a_full_disk_is_one_clear_line_and_harms_no_other_record(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path / "j")], capture_output=True, text=True, check=True
    )
    assert result.stdout == (
        f"cannot write the journal {tmp_path / 'j'}: File too large; free space or fix its permissions\n"
    )
    assert result.stderr == ""
    # What was written after the failure is in a segment of its own.
    assert [read_segment(path) for path in segments(tmp_path / "j")] == [
        ([Reward("e", "first", 0.0, "s", 0)], 0),
        ([Reward("e", "last", 2.0, "s", 2)], 0),
    ]


class _FullDisk:
    """Stands in for `os.pwrite`: takes so many bytes of the first write, and fails from then on."""

    def __init__(self, taken_bytes: int, error: BaseException | None = None) -> None:
        self._left_bytes, self._error = taken_bytes, error or OSError(28, "No space left on device")
        self._write = os.pwrite

    def __call__(self, fd: int, data: Any, offset: int, /) -> int:
        self.look()
        if not self._left_bytes:
            raise self._error
        taken_bytes, self._left_bytes = self._left_bytes, 0
        return self._write(fd, data[:taken_bytes], offset)

    def look(self) -> None:
        """Called in the middle of the append."""


class _ReadWhileFull(_FullDisk):
    """A disk whose store is taken in before each write."""

    def __init__(self, taken_bytes: int, store: Path) -> None:
        super().__init__(taken_bytes)
        self._store = store

    def look(self) -> None:
        take_in(self._store)


def take_in(path: Path) -> list[int]:
    """Takes the journal of a store in; the numbers of all its rewards."""
    with TraceStore.open(path) as store:
        store.take_in()
        return [number for (number,) in store.sql("SELECT created_ns FROM rewards ORDER BY ALL")]


def refuse_to_cut(fd: int, size: int) -> None:
    raise OSError(5, "Input/output error")


@pytest.mark.parametrize("truncates", [True, False])
@pytest.mark.parametrize("count", [1, 3])
def test_a_reader_at_any_moment_of_a_failing_append_keeps_every_acknowledged_record_once_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, truncates: bool
) -> None:
    refused = [reward(number) for number in range(100, 100 + count)]
    line_bytes = len(line_of(refused[0]))
    around_ends = [line_bytes * number + by for number in range(count + 1) for by in (-1, 0, 1)]
    for cut in [cut for cut in (*around_ends, line_bytes // 2) if 0 <= cut < line_bytes * count]:
        path = tmp_path / f"{cut}" / "s.duckdb"
        path.parent.mkdir()
        journal = Journal(journal_of(path))
        journal.append(reward(10))
        journal.sync()
        with monkeypatch.context() as full:
            full.setattr(os, "pwrite", _ReadWhileFull(cut, path))
            if not truncates:
                full.setattr(os, "ftruncate", refuse_to_cut)
            with pytest.raises(StoreError, match="No space left on device"):
                journal.append_all(refused)
        journal.append_all([reward(number) for number in range(11, 18)])
        journal.sync()
        take_in(path)
        journal.append(reward(18))
        journal.close()
        assert take_in(path) == list(range(10, 19)), cut
        assert not segments(journal_of(path))


@pytest.mark.parametrize("taken_bytes", [0, 5])
def test_a_disk_that_stays_full_costs_no_segment_for_each_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken_bytes: int
) -> None:
    journal = Journal(tmp_path)
    for number in range(20):
        with monkeypatch.context() as full:
            full.setattr(os, "pwrite", _FullDisk(taken_bytes))
            with pytest.raises(StoreError, match="No space left on device"):
                journal.append_all([reward(number), reward(number)])
        assert len(segments(tmp_path)) <= 1
    assert len(journal._open_fds()) <= 1
    journal.append(reward(1))
    journal.close()
    assert [read_segment(path) for path in segments(tmp_path)] == [([reward(1)], 0)]


def test_records_whose_segment_failed_are_synced_with_those_of_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, inodes = Journal(tmp_path / "j"), list[int]()
    journal.append(reward(1))
    with monkeypatch.context() as interrupted:
        interrupted.setattr(os, "pwrite", _FullDisk(9, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            journal.append(reward(2))
    journal.append(reward(3))
    monkeypatch.setattr(os, "fsync", lambda fd: inodes.append(os.fstat(fd).st_ino))
    journal.sync()
    assert {path.stat().st_ino for path in (*segments(tmp_path / "j"), tmp_path / "j", tmp_path)} == set(inodes)
    assert [is_abandoned(path) for path in segments(tmp_path / "j")] == [True, False]
    journal.close()
    assert [read_segment(path) for path in segments(tmp_path / "j")] == [([reward(1)], 0), ([reward(3)], 0)]


def test_an_append_that_fails_while_a_sync_runs_leaves_the_next_segment_to_the_next_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, inodes = Journal(tmp_path), list[int]()
    journal.append(reward(1))

    def fail_meanwhile(fd: int) -> None:
        inodes.append(os.fstat(fd).st_ino)
        if len(inodes) == 1:
            with monkeypatch.context() as full:
                full.setattr(os, "pwrite", _FullDisk(9))
                with pytest.raises(StoreError, match="No space left on device"):
                    journal.append(reward(2))
            journal.append(reward(3))  # as many bytes as the sync covers of the segment before

    monkeypatch.setattr(os, "fsync", fail_meanwhile)
    journal.sync()
    assert segments(tmp_path)[1].stat().st_ino not in inodes
    journal.sync()
    assert segments(tmp_path)[1].stat().st_ino in inodes
    journal.close()


def test_a_failed_fsync_is_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path)
    journal.append(reward(1))

    def failing(fd: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", failing)
        with pytest.raises(StoreError, match="Input/output error"):
            journal.sync()
    with pytest.raises(StoreError, match="lost records when the disk failed"):
        journal.sync()
    with pytest.raises(StoreError, match="lost records when the disk failed"):
        journal.close()


def test_a_sync_with_nothing_new_costs_no_fsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    journal = Journal(tmp_path)
    journal.append(reward(0))
    journal.sync()  # the first one syncs the names of the segment and of its folder too
    journal.append(reward(1))
    with monkeypatch.context() as counted:
        counted.setattr(os, "fsync", calls.append)
        journal.sync()
        journal.sync()
    assert len(calls) == 1
    journal.close()


def test_syncs_that_nobody_waits_for_are_one_fsync_and_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = threading.Event()
    calls: list[int] = []

    def slow(fd: int) -> None:
        calls.append(fd)
        synced.set()

    journal = Journal(tmp_path)
    journal.append(reward(0))
    journal.sync()
    with monkeypatch.context() as watched:
        watched.setattr(os, "fsync", slow)
        for number in range(1, 50):
            journal.append(reward(number))
            journal.sync_soon()
        assert synced.wait(10)
        journal.sync()  # all of it is covered, or this covers the rest
        assert len(calls) <= 2
    journal.close()


def test_a_sync_that_nobody_waits_for_does_not_wait_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = threading.Event()
    reached = threading.Event()

    def stuck(fd: int) -> None:
        reached.set()
        disk.wait(10)

    journal = Journal(tmp_path)
    journal.append(reward(1))
    with monkeypatch.context() as slow:
        slow.setattr(os, "fsync", stuck)
        journal.sync_soon()
        assert reached.wait(10)
        journal.append(reward(2))  # with the disk still stuck
        journal.sync_soon()
        disk.set()
        journal.close()
    assert read_segment(segments(tmp_path)[0]) == ([reward(1), reward(2)], 0)


def test_a_loss_that_nobody_waited_for_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path)
    journal.append(reward(1))
    failed = threading.Event()

    def failing(fd: int) -> None:
        failed.set()
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", failing)
        journal.sync_soon()
        assert failed.wait(10)
        with pytest.raises(StoreError, match="lost records when the disk failed"):
            journal.sync()
    assert "Input/output error" in str(journal.failure)
    with pytest.raises(StoreError, match="lost records when the disk failed"):
        journal.append(reward(2))


def test_the_thread_that_syncs_ends_when_nobody_asks_and_comes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "IDLE_S", 0.05)
    journal = Journal(tmp_path)
    for number in range(2):
        journal.append(reward(number))
        journal.sync_soon()
        sync_thread = journal._sync_thread
        assert sync_thread is not None
        sync_thread.join(10)
        assert not sync_thread.is_alive()
    assert journal.failure is None


def test_a_segment_that_is_deleted_under_its_writer_is_said_and_followed_by_another(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append(reward(1))
    journal.sync()
    segments(tmp_path)[0].unlink()
    journal.append(reward(2))
    with pytest.raises(StoreError, match="was deleted while it was written; its records are lost"):
        journal.sync()
    journal.append(reward(3))
    journal.close()
    assert [read_segment(path)[0] for path in segments(tmp_path)] == [[reward(3)]]


def test_a_folder_that_cannot_be_made_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    journal = Journal(tmp_path / "file" / "j")
    with pytest.raises(StoreError, match=f"cannot write the journal {tmp_path / 'file' / 'j'}: Not a directory"):
        journal.append(reward(1))


def test_a_closed_journal_takes_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append(reward(1))
    journal.close()
    journal.close()
    with pytest.raises(StoreError, match="is closed"):
        journal.append(reward(2))


def test_threads_that_write_and_sync_together_lose_and_mix_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path)

    def write(first: int) -> None:
        for number in range(first, first + 50):
            journal.append(reward(number))
            if number % 10 == 0:
                journal.sync()

    threads = [threading.Thread(target=write, args=(first,)) for first in (0, 1000, 2000, 3000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    journal.close()
    records, torn = read_segment(segments(tmp_path)[0])
    numbers = [record.created_ns for record in records if isinstance(record, Reward)]
    assert sorted(numbers) == [first + k for first in (0, 1000, 2000, 3000) for k in range(50)]
    assert torn == 0


def test_a_forked_child_writes_to_its_own_segment(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append(reward(1))
    child = os.fork()
    if child == 0:
        journal.append(reward(2))
        journal.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    journal.append(reward(3))
    journal.close()
    read = [read_segment(path)[0] for path in segments(tmp_path)]
    assert sorted(read, key=len) == [[reward(2)], [reward(1), reward(3)]]
