"""Owns: nothing that lies in a journal folder ends or delays the taking in of anything else.

- A whole line that is no record of this version, or whose values the store cannot hold, is set aside, once, and
  counted; a newer version takes it in. A reader passes it over.
- What is called a segment and is a pipe, a device, a link or a folder is neither opened nor removed, and said.
"""

from __future__ import annotations

import json
import os
import signal
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.sample_spans import START, chain

import trace_store.journal as journal_module
from trace_store.checkup import store_to_faults
from trace_store.erasure import SegmentTraces, count_in_segments, count_mentions, erase_from_segments
from trace_store.journal import Journal, journal_of, line_of
from trace_store.records import AdapterRow, Reward
from trace_store.store import TraceStore

DREAM = b'{"kind":"dream","text":"of subject 7"}'


def whole_line(body: bytes) -> bytes:
    return b"%08x %s\n" % (zlib.crc32(body), body)


def spans(number: int) -> bytes:
    return b"".join(map(line_of, chain(f"{number:x}", START + number).spans()))


def faulty_lines() -> list[bytes]:
    """Lines that are no record, and records that the store or its assembling cannot take."""
    root = next(span for span in chain("f").spans() if span.parent_span_id is None)
    nested: object = []
    for _ in range(400):
        nested = [nested]
    return [
        whole_line(DREAM),
        whole_line(b"[" * 5000),
        whole_line(b'{"kind":"reward","episode_id":"e","name":"n","value":1,"source":"s","created_ns":"soon"}'),
        line_of(AdapterRow("node", 2**40, None, "p", "a", "b", 1)),  # a version is of 32 bits
        line_of(replace(root, attributes=root.attributes | {"gen_ai.response.finish_reasons": nested})),
    ]


@pytest.fixture(autouse=True)
def _no_waiting() -> Iterator[None]:
    """A pipe that is opened after all ends the test, instead of stopping all of them."""
    signal.alarm(120)
    yield
    signal.alarm(0)


@pytest.mark.parametrize("growing", [False, True])
@pytest.mark.parametrize("number", range(len(faulty_lines())))
def test_a_line_that_cannot_be_taken_in_stops_no_other(tmp_path: Path, number: int, growing: bool) -> None:
    path = tmp_path / "s.duckdb"
    journal = Journal(journal_of(path))
    journal.append_lines(spans(1) + faulty_lines()[number] + spans(2))
    if growing:
        journal.sync()
    else:
        journal.close()
    with TraceStore.open(path, read_only=True) as store:  # before anything is taken in
        assert [episode.started_ns for episode in store.episodes()] == [START + 1, START + 2]
    for _ in range(2):
        with TraceStore.open(path) as store:
            store.take_in()
            assert [episode.started_ns for episode in store.episodes()] == [START + 1, START + 2]
    kept = [file.read_bytes() for file in journal_of(path).glob("*.foreign")]
    assert kept == ([] if number == 4 else [faulty_lines()[number]])  # a trace without a form is refused as one
    journal.close()


def test_foreign_lines_are_counted_once_and_said_until_somebody_sees_to_them(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    journal = Journal(journal_of(path))
    journal.append_lines(whole_line(DREAM) + spans(1) + whole_line(DREAM))
    journal.close()
    with TraceStore.open(path) as store:
        assert (store.take_in().foreign, store.take_in().foreign) == (2, 0)
        assert store.sql("SELECT records, torn FROM taken_in") == [(5, 0)]
        (aside,) = journal_of(path).iterdir()
        assert aside.read_bytes() == 2 * whole_line(DREAM)
        assert aside.stat().st_mode & 0o777 == 0o600
        (warning,) = [fault for fault in store_to_faults(store) if str(aside) in fault.message]
        assert warning.level == "warning"


def test_lines_set_aside_are_erased_by_trace_or_subject_and_a_mere_mention_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    folder = journal_of(path)
    journal = Journal(folder)
    named = whole_line(b'{"kind":"dream","attributes":{"marft.subject.id":"ann"}}')
    journal.append_lines(whole_line(DREAM) + named + spans(1))
    journal.sync()
    with TraceStore.open(path) as store:
        store.take_in()
        (segment,), (aside,) = folder.glob("*.segment"), folder.glob("*.foreign")
        (folder / "killed.new").write_bytes(named)  # an intake that was killed before it gave the name
        ann, bob = (SegmentTraces(frozenset(), subject) for subject in ("ann", "subject 7"))
        assert count_in_segments(folder, bob) == count_mentions(folder, bob) == {}  # a text is all of a value
        of_text = SegmentTraces(frozenset(), "of subject 7")  # may be a name of something else
        assert (count_in_segments(folder, of_text), count_mentions(folder, of_text)) == ({}, {segment: 1, aside: 1})
        assert erase_from_segments(folder, ann) == {segment: 1, aside: 1, folder / "killed.new": 1}
        assert count_in_segments(folder, ann) == count_mentions(folder, ann) == {}
        assert aside.read_bytes() == whole_line(DREAM) + b" " * (len(named) - 1) + b"\n"
        assert erase_from_segments(folder, SegmentTraces(frozenset({"of subject 7"}))) == {segment: 1, aside: 1}
        assert not aside.exists()  # nothing is left in it
        assert not any(b"ann" in file.read_bytes() for file in folder.iterdir())
        journal.append_lines(spans(2))
        journal.close()
        assert store.take_in().episodes == 1


def test_a_newer_version_takes_in_what_an_older_one_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s.duckdb"
    journal = Journal(journal_of(path))
    reward = line_of(Reward("e", "reward", 1.0, "test", 1))
    journal.append_lines(reward + spans(1) + whole_line(DREAM))
    journal.close()
    with monkeypatch.context() as older:
        known = {kind: record for kind, record in journal_module._KINDS.items() if kind != "reward"}
        older.setattr(journal_module, "_KINDS", known)
        older.setattr("trace_store.intake.newest_version", lambda: 1)
        with TraceStore.open(path) as store:
            counts = store.take_in()
        assert (counts.foreign, counts.rewards, counts.episodes) == (2, 0, 1)
    with TraceStore.open(path) as store:
        counts = store.take_in()
        assert (counts.foreign, counts.rewards) == (1, 1)
        assert store.take_in() == type(counts)()
    (aside,) = journal_of(path).iterdir()
    assert aside.read_bytes() == whole_line(DREAM)


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_folder(path: Path) -> None:
    (path / "below").mkdir(parents=True)


def make_link(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_link_to_file(path: Path) -> None:
    (path.parent.parent / "precious").write_bytes(spans(3))
    path.symlink_to(path.parent.parent / "precious")


@pytest.mark.parametrize("make", [make_pipe, make_folder, make_link, make_link_to_file])
def test_what_is_called_a_segment_and_is_no_plain_file_is_passed_over_and_said(tmp_path: Path, make: object) -> None:
    path = tmp_path / "s.duckdb"
    journal = Journal(journal_of(path))
    journal.append_lines(spans(1))
    journal.close()
    odd = journal_of(path) / "0-a.segment"
    make(odd)  # type: ignore[operator]
    with TraceStore.open(path, read_only=True) as store:
        assert len(store.episodes()) == 1
    with TraceStore.open(path) as store:
        counts = store.take_in()
        assert (counts.episodes, counts.odd) == (1, 1)
        assert any(str(odd) in fault.message and "no plain file" in fault.message for fault in store_to_faults(store))
    assert erase_from_segments(journal_of(path), SegmentTraces(frozenset({"u"}), "u")) == {}
    assert list(journal_of(path).iterdir()) == [odd]


def test_a_full_disk_is_no_reason_to_set_a_line_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import duckdb

    from trace_store.errors import StoreError

    path = tmp_path / "s.duckdb"
    journal = Journal(journal_of(path))
    journal.append_lines(spans(1))
    journal.close()

    def refusing(*_: object) -> None:
        raise duckdb.IOException("Could not write file: No space left on device")

    with TraceStore.open(path) as store:
        with monkeypatch.context() as full:
            full.setattr("trace_store.intake.records_to_rows", refusing)
            with pytest.raises(StoreError, match="No space left"):
                store.take_in()
        assert not list(journal_of(path).glob("*.foreign"))
        assert store.take_in().episodes == 1


def test_attributes_of_any_form_end_in_an_episode_a_refusal_or_a_file_beside_the_journal(tmp_path: Path) -> None:
    """Each attribute of each span of a trace, exchanged for values of other types."""
    path = tmp_path / "s.duckdb"
    values: list[object] = [None, True, -1, 2**70, 1e300, "", "[", '["\\ud800"]', "i4:x", "[" * 2000]
    values += [[], [[]], {}, {"a": None}]
    lines, number = b"", 0
    for position, span in enumerate(chain().spans()):
        for key in span.attributes:
            for value in values:
                number += 1
                trace = chain(f"{number:x}", START + number).spans()
                trace[position] = replace(trace[position], attributes=trace[position].attributes | {key: value})
                lines += b"".join(map(line_of, trace))
    journal = Journal(journal_of(path))
    journal.append_lines(lines)
    journal.close()
    with TraceStore.open(path) as store:
        store.take_in()
        counts = store.counts()
        set_aside = [line for file in journal_of(path).glob("*.foreign") for line in file.read_bytes().splitlines()]
        decided = counts["episodes"] + counts["refusals"] + counts["waiting"]
        assert number - len(set_aside) <= decided <= number
        assert counts["episodes"] > 50  # the other attributes decide what the trace is, and it is refused
    assert not list(journal_of(path).glob("*.segment"))
    assert all(json.loads(line[9:]) for line in set_aside)
