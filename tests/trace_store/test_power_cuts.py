"""Owns: a power cut takes away nothing that was acknowledged, and leaves nothing that cannot be opened.

Every state in which a disk may be left that keeps, of what was not synced, this or that or nothing
(`support.power_cuts`): the journal, its roll-over, intake, a store that is made and rewritten, exports and erasures.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.power_cuts import PowerCuts, Tree, recorded, restore
from support.sample_spans import START, chain

import trace_store.journal as journal_module
from trace_store.compaction import vacuum
from trace_store.erasure import erase_from_export
from trace_store.journal import Journal, journal_of, line_of, record_of
from trace_store.parquet import store_to_parquet
from trace_store.readers import folder_to_reader
from trace_store.records import Reward, RunRow
from trace_store.store import TraceStore

IDS = [chain(str(number)).trace_id for number in (1, 2)]


def reward(number: int) -> Reward:
    return Reward("e", "reward", float(number), "test", number)


def numbers_in(tree: Tree) -> list[int]:
    """The numbers of the rewards in the segments that a power cut left; a damaged line has none."""
    contents = [content for path, content in tree.items() if path.endswith(".segment") and content is not None]
    records = [record_of(line) for content in contents for line in content.splitlines(keepends=True)]
    return sorted(record.created_ns for record in records if isinstance(record, Reward))


def left_folders(tmp_path: Path, cuts: PowerCuts) -> Iterator[tuple[Path, set[object]]]:
    """A folder for each state, and what was acknowledged by then."""
    for number, (tree, acknowledged) in enumerate(cuts.crashes()):
        folder = tmp_path / f"left {number}"
        restore(tree, folder)
        yield folder, set(acknowledged)


def write_episodes(path: Path) -> None:
    journal = Journal(journal_of(path))
    journal.append(RunRow("run", "collect", START))
    for number in (1, 2):
        journal.append_all(chain(str(number), START + number).spans())
    journal.close()


def assert_whole(store: TraceStore, ids: list[str] = IDS) -> None:
    assert [trajectory.episode.episode_id for trajectory in store.trajectories()] == ids
    assert {len(trajectory.actions) for trajectory in store.trajectories()} == {2}
    assert store.counts()["spans"] == 5 * len(ids)


def test_a_power_cut_takes_no_record_that_a_sync_covered_whatever_segment_it_is_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 2 * len(line_of(reward(1))))
    disk = tmp_path / "disk"
    disk.mkdir()
    with recorded(disk) as cuts:
        journal = Journal(disk / "runs" / "try" / "s.duckdb.journal")  # whose folders are new too
        for number in range(1, 8):
            journal.append(reward(number))
            if number % 3 != 1:  # so that some syncs cover two records, in one segment
                journal.sync()
                cuts.acknowledge(number)
        journal.close()
        cuts.acknowledge(7)
    segments = states = 0
    for tree, acknowledged in cuts.crashes():
        numbers = numbers_in(tree)
        assert numbers[: max(acknowledged, default=0)] == list(range(1, max(acknowledged, default=0) + 1))
        assert len(set(numbers)) == len(numbers)
        segments = max(segments, sum(path.endswith(".segment") for path in tree))
        states += 1
    assert segments >= 3
    assert states > 30


def test_a_power_cut_during_an_intake_loses_no_episode_and_leaves_a_store_that_opens(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    write_episodes(disk / "s.duckdb")
    with recorded(disk) as cuts, TraceStore.open(disk / "s.duckdb") as store:
        store.take_in()
        cuts.acknowledge("taken in")
        assert not list(store.journal_folder.iterdir())
    for folder, _ in left_folders(tmp_path, cuts):
        with TraceStore.open(folder / "s.duckdb") as store:
            store.take_in()
            assert_whole(store)


def test_a_power_cut_does_not_bring_back_what_an_intake_deleted_twice(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    with TraceStore.open(disk / "s.duckdb"):
        pass
    write_episodes(disk / "s.duckdb")
    with recorded(disk) as cuts:
        for _ in range(2):
            with TraceStore.open(disk / "s.duckdb") as store:
                store.take_in()
    for folder, _ in left_folders(tmp_path, cuts):
        with TraceStore.open(folder / "s.duckdb") as store:
            store.take_in()
            assert_whole(store)


def test_a_power_cut_keeps_a_line_that_was_set_aside(tmp_path: Path) -> None:
    import zlib

    disk = tmp_path / "disk"
    disk.mkdir()
    path = disk / "s.duckdb"
    write_episodes(path)
    body = b'{"kind":"dream"}'
    foreign = b"%08x %s\n" % (zlib.crc32(body), body)
    (journal_of(path) / "9-a.segment").write_bytes(foreign)
    with recorded(disk) as cuts, TraceStore.open(path) as store:
        assert store.take_in().foreign == 1
    for tree, _ in cuts.crashes():
        assert foreign in [content for name, content in tree.items() if name.endswith((".segment", ".foreign"))]


def test_a_power_cut_during_a_rewriting_leaves_the_whole_store(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    path = disk / "s.duckdb"
    write_episodes(path)
    with TraceStore.open(path) as store:
        store.take_in()
    with recorded(disk) as cuts:
        with TraceStore.open(path) as store:
            store.put_rewards([Reward(IDS[0], "late", 1.0, "test", START)])
            cuts.acknowledge("late")
        vacuum(path)
    for folder, acknowledged in left_folders(tmp_path, cuts):
        with TraceStore.open(folder / "s.duckdb") as store:
            assert_whole(store)
            assert store.counts()["rewards"] == 1 or "late" not in acknowledged


@pytest.mark.slow
def test_a_power_cut_during_an_export_or_an_erasure_leaves_a_folder_that_reads_as_a_whole(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    path = tmp_path / "s.duckdb"
    write_episodes(path)
    with TraceStore.open(path) as store:
        store.take_in()
        with recorded(disk) as cuts:
            store_to_parquet(store, disk / "archive")
            cuts.acknowledge("exported")
            erase_from_export(disk / "archive", [IDS[0]])
            cuts.acknowledge("erased")
    shown = set()
    for folder, acknowledged in left_folders(tmp_path, cuts):
        if "exported" not in acknowledged and not (folder / "archive" / "manifest.json").exists():
            continue
        with folder_to_reader(folder / "archive") as reader:
            ids = [episode.episode_id for episode in reader.episodes()]
        assert ids in ([], IDS, IDS[1:])
        assert ids or "exported" not in acknowledged
        assert ids == IDS[1:] or "erased" not in acknowledged
        shown.add(json.dumps(ids))
    assert len(shown) == 3
