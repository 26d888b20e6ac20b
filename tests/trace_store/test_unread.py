"""Owns: a store opened for reading shows what its journal has and no writer took in, once and whole.

- Whatever part of the records a writer took in before, a reader shows what a writer would, and writes nothing.
- A writer that records, and one that takes in, may work at the same time.
- Opened again, only what is new in the journal is read, and nothing is shown of one that was deleted.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from support.paths import TESTS
from support.sample_spans import START, chain

from trace_store import schema
from trace_store.checkup import store_to_faults
from trace_store.errors import StoreError
from trace_store.journal import Journal, JournalRecord, RewardGroup, journal_of, line_of
from trace_store.records import AdapterRow, Reward, RunRow
from trace_store.store import TraceStore
from trace_store.unread import UnreadJournal

PATHS = f"import sys; sys.path[:0] = [{str(TESTS)!r}, {str(TESTS.parent)!r}]\n"

# Arguments: store, episodes. It records and takes in, in turns, and deletes the segments that are done.
WRITER = """
from pathlib import Path
from support.sample_spans import START, chain
from trace_store.journal import Journal
from trace_store.store import TraceStore
path = Path(sys.argv[1])
for number in range(int(sys.argv[2])):
    journal = Journal(path.with_name(path.name + ".journal"))
    spans = chain(f"{number:x}", START + number).spans()
    journal.append_all(spans[:3])
    journal.append_all(spans[3:])
    journal.close()
    print(number, flush=True)
    if number % 3 == 2:
        with TraceStore.open(path, wait_s=60) as store:
            store.take_in()
"""


def snapshot(store: TraceStore) -> dict[str, list[Any]]:
    """Every row of every table, in any order; not the journal's own accounts."""
    names = [table.name for table in schema.TABLES if table.name not in ("taken_in", "schema_version")]
    rows: dict[str, list[Any]] = {name: sorted(map(str, store.sql(f"FROM {name}"))) for name in names}
    rows["refusals"] = store.sql("SELECT trace_id, reason FROM refusals ORDER BY ALL")  # the time is that of the intake
    rows["trajectories"] = [str(trajectory) for trajectory in store.trajectories()]
    return rows


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def mixed_records() -> list[JournalRecord]:
    """Whole traces, torn ones, a malformed one, duplicates of all kinds, late rewards."""
    records: list[JournalRecord] = [RunRow("run", "collect", 1), AdapterRow("a", 1, 0, "p", "a" * 64, "b" * 64, 1)]
    for number in range(6):
        spans = chain(f"{number:x}", START + number).spans()
        records += [*spans, Reward(spans[0].trace_id, "reward", number / 8, "test", number)]
    records += chain("7", START + 7).spans()[:2]  # waits for ever
    records += chain("8", START + 8).spans(OUTCOME="sideways")  # refused
    records += [*chain("1", START + 1).spans(), Reward(chain("1").trace_id, "reward", 1 / 8, "test", 1)]
    records += [Reward(chain("2").trace_id, "late", 1.0, "test", 9), RunRow("run", "collect", 1)]
    group = RewardGroup(tuple(Reward(chain("3").trace_id, name, 0.5, "test", 10) for name in ("correct", "reward")))
    records += [group, group]
    return records


@pytest.mark.parametrize("arrow", [True, False])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
def test_a_reader_shows_what_a_writer_would_whatever_was_taken_in_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, arrow: bool
) -> None:
    if not arrow:
        monkeypatch.setattr("trace_store.insertion.find_spec", lambda _: None)
    path, rng, records = tmp_path / "a store.duckdb", random.Random(seed), mixed_records()
    rng.shuffle(records)
    cuts = sorted(rng.sample(range(len(records) + 1), 3))
    monkeypatch.setattr("trace_store.intake.LINES_PER_TRANSACTION", 4)
    with UnreadJournal(path) as unread:
        for begin, end in zip((0, *cuts), (*cuts, len(records)), strict=True):
            journal = Journal(journal_of(path))
            journal.append_all(records[begin:end])
            journal.sync()
            before = files_of(tmp_path)
            for option in ({}, {"unread": unread}):
                if end:
                    with TraceStore.open(path, read_only=True, **option) as store:
                        shown = snapshot(store)
                    assert files_of(tmp_path) == before
            if rng.random() < 0.5:
                journal.close()
            with TraceStore.open(tmp_path / f"{end}.duckdb") as expected_store:
                all_records = Journal(expected_store.journal_folder)
                all_records.append_all(records[:end])
                all_records.close()
                expected_store.take_in()
                expected = snapshot(expected_store)
            (tmp_path / f"{end}.duckdb").unlink()
            if end:
                assert shown == expected
            if rng.random() < 0.6:
                with TraceStore.open(path) as store:
                    store.take_in()
                    assert snapshot(store) == expected
            journal.close()


def test_a_journal_without_a_store_is_read_and_checked_and_nothing_is_made(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    with pytest.raises(StoreError, match="does not exist"):
        TraceStore.open(path, read_only=True)
    journal = Journal(journal_of(path))
    journal.append_all(chain().spans())
    journal.sync()
    with TraceStore.open(path, read_only=True) as store:
        assert [len(trajectory.actions) for trajectory in store.trajectories()] == [2]
        assert [fault.level for fault in store_to_faults(store)] == ["warning", "warning"]  # not taken in; no run
        assert store.spans(chain().trace_id) == sorted(chain().spans(), key=lambda span: (span.start_ns, span.span_id))
    assert [file.name for file in tmp_path.iterdir()] == ["s.duckdb.journal"]
    journal.close()


@pytest.mark.parametrize("cut", [1, 20, 200])
def test_a_line_that_is_being_written_is_shown_when_it_is_whole(tmp_path: Path, cut: int) -> None:
    path, spans = tmp_path / "s.duckdb", chain().spans()
    segment = journal_of(path) / "1-a.segment"
    segment.parent.mkdir()
    lines = b"".join(map(line_of, spans))
    segment.write_bytes(lines[:-cut])
    with UnreadJournal(path) as unread:
        for size, episode_count in ((len(lines) - cut, 0), (len(lines) - cut, 0), (len(lines), 1), (len(lines), 1)):
            segment.write_bytes(lines[:size])
            with TraceStore.open(path, read_only=True, unread=unread) as store:
                assert store.counts()["episodes"] == episode_count


def test_opened_again_only_what_is_new_is_read_and_nothing_stays_behind(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    journal, total = Journal(journal_of(path)), 0
    folders = set(Path(tempfile.gettempdir()).glob("marft-unread-*"))
    with UnreadJournal(path) as unread:
        for number in range(4):
            lines = b"".join(map(line_of, chain(f"{number:x}", START + number).spans()))
            journal.append_lines(lines)
            total += len(lines)
            for _ in range(2):
                with TraceStore.open(path, read_only=True, unread=unread) as store:
                    assert store.counts()["episodes"] == number + 1
                assert unread.bytes_read == total
        with TraceStore.open(path) as writer:
            writer.take_in()
        with TraceStore.open(path, read_only=True, unread=unread) as store:
            assert store.counts()["episodes"] == 4
        assert set(Path(tempfile.gettempdir()).glob("marft-unread-*")) == folders  # let go, for it is in the store
        assert unread.bytes_read == total  # all of it is in the store now
    journal.close()
    assert set(Path(tempfile.gettempdir()).glob("marft-unread-*")) == folders


@pytest.mark.parametrize("has_same_names", [True, False])
def test_opened_again_nothing_is_shown_of_a_journal_that_was_deleted_since(
    tmp_path: Path, has_same_names: bool
) -> None:
    path = tmp_path / "s.duckdb"

    def record(name: str, number: int) -> None:
        journal_of(path).mkdir(exist_ok=True)
        (journal_of(path) / f"1-{name}.segment").write_bytes(b"".join(map(line_of, chain(f"{number:x}").spans())))

    record("a", 1)
    with UnreadJournal(path) as unread:
        with TraceStore.open(path, read_only=True, unread=unread) as store:
            (first,) = store.episodes()
        journal_of(path).rename(tmp_path / "deleted")  # whose inodes stay taken
        record("a" if has_same_names else "b", 2)
        for _ in range(2):
            with TraceStore.open(path, read_only=True, unread=unread) as store:
                (second,) = store.episodes()
                assert second.episode_id != first.episode_id


def test_an_older_store_with_a_journal_shows_both(tmp_path: Path) -> None:
    import duckdb

    path = tmp_path / "s.duckdb"
    with duckdb.connect(str(path)) as con:
        con.execute((Path(__file__).parent / "schemas/version_1.sql").read_text())
        con.execute("INSERT INTO schema_version VALUES (1, 'all tables and views', 1)")
        con.execute("INSERT INTO runs VALUES ('old', 'collect', 1, '{}', '0.1.0')")
    journal = Journal(journal_of(path))
    journal.append_all([RunRow("new", "collect", 2), *chain().spans()])
    journal.close()
    with TraceStore.open(path, read_only=True) as store:
        assert [run.run_id for run in store.runs()] == ["old", "new"]
        assert store.counts()["episodes"] == 1


@pytest.mark.slow
def test_a_reader_beside_writers_never_misses_an_acknowledged_episode_and_shows_none_twice(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    command = [sys.executable, "-c", PATHS + WRITER, str(path), "90"]
    views = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer, UnreadJournal(path) as unread:
        assert writer.stdout is not None
        for line in writer.stdout:
            if int(line) % 4:
                continue
            option = {"unread": unread} if int(line) % 8 else {}
            with TraceStore.open(path, read_only=True, wait_s=60, **option) as store:
                rows = store.sql(
                    "SELECT episode_id, (SELECT count(*) FROM spans s WHERE s.trace_id = e.episode_id),"
                    " (SELECT count(*) FROM actions a WHERE a.episode_id = e.episode_id) FROM episodes e"
                )
            assert {row[1:] for row in rows} == {(5, 2)}
            assert len({row[0] for row in rows}) == len(rows) >= int(line) + 1
            views += 1
    assert writer.returncode == 0
    assert views == 23


def test_attributes_come_back_as_they_were_recorded(tmp_path: Path) -> None:
    path, spans = tmp_path / "s.duckdb", chain().spans(TASK=json.dumps({"q": "\u202e'\"\\"}))
    journal = Journal(journal_of(path))
    journal.append_all(spans)
    journal.close()
    with TraceStore.open(path, read_only=True) as store:
        assert store.episodes()[0].task == {"q": "\u202e'\"\\"}
