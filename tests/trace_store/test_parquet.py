"""Owns: a store as Parquet.

- What is exported and imported again is equal to the bit, in every table that travels; every table travels, or is
  about a store's own file.
- Files lie by run and UTC day, are compressed, and only their owner can read them.
- Repeating an export or an import adds nothing; an export adds what is new, and keeps what the store no longer has.
- An export that is killed leaves the folder as it was before; the next one completes it.
- A folder that is newer, damaged, changed, or leads elsewhere is refused in one line; files of others are not touched.
- A folder that is read in place gives the same episodes, trajectories, views and answers, and opens no other file.
"""

# ruff: noqa: S608 - statements are put together from constants and paths
from __future__ import annotations

import json
import random
from dataclasses import asdict, replace
from pathlib import Path
from urllib.parse import quote

import duckdb
import pytest
from support.growth_rig import DAY_NS, NASTY, dump, files_under, fill, fill_variously, kill_after, trace_id
from support.sample_spans import START, chain

from trace_store import schema
from trace_store.errors import StoreError
from trace_store.journal import Journal
from trace_store.manifest import MANIFEST, Manifest, read_manifest, write_manifest
from trace_store.migrations import newest_version
from trace_store.parquet import EXPORTED_TABLES, FILE_TABLES, parquet_to_store, store_to_parquet
from trace_store.readers import folder_to_reader
from trace_store.records import Reward, RunRow
from trace_store.store import TraceStore


@pytest.fixture
def store_path(tmp_path: Path) -> Path:
    fill_variously(tmp_path / "store.duckdb")
    return tmp_path / "store.duckdb"


@pytest.fixture
def exported(store_path: Path, tmp_path: Path) -> Path:
    with TraceStore.open(store_path) as store:
        store_to_parquet(store, tmp_path / "out")
    return tmp_path / "out"


def whole_dump(path: Path) -> dict[str, list[object]]:
    with TraceStore.open(path) as store:
        return dump(store, EXPORTED_TABLES)


def rounded(rows: list[tuple[object, ...]]) -> list[list[str]]:
    """Rows as text, numbers to nine digits: the order in which a view adds them up is DuckDB's."""
    return [[f"{value:.9g}" if isinstance(value, float) else repr(value) for value in row] for row in rows]


def test_every_table_travels_or_is_about_the_file_itself() -> None:
    assert {table.name for table in EXPORTED_TABLES} | set(FILE_TABLES) == {table.name for table in schema.TABLES}
    assert set(FILE_TABLES) == {"schema_version", "taken_in"}


def test_what_is_exported_and_imported_is_equal_to_the_bit(store_path: Path, exported: Path, tmp_path: Path) -> None:
    rows = whole_dump(store_path)
    with TraceStore.open(tmp_path / "other.duckdb") as second_store:
        added = parquet_to_store(exported, second_store)
        assert dump(second_store, EXPORTED_TABLES) == rows
    empty = {name for name, table_rows in rows.items() if not table_rows}
    assert empty == {"prices"}, "the sample has rows in all others, or this shows nothing"
    assert {name: count for name, count in added.items() if count} == {n: len(r) for n, r in rows.items() if r}
    with TraceStore.open(tmp_path / "other.duckdb") as second_store:
        odd_action = next(a for a in second_store.trajectory(trace_id("c")).actions if a.action_id == "x")  # type: ignore[union-attr]
        assert str(odd_action.logprobs) == str(tuple(NASTY))  # as text, NaN equals itself and -0.0 is not 0.0


def test_files_lie_by_run_and_utc_day(exported: Path) -> None:
    # START is 2023-11-14 22:13:20 UTC; in most of Asia it was the 15th already.
    folders = {path.parent.relative_to(exported).as_posix() for path in exported.glob("episodes/*/*/*.parquet")}
    assert folders == {
        f"episodes/run={quote('r/1 é..', safe='')}/day=2023-11-14".replace("%20", " ").replace(" ", "%20"),
        "episodes/run=run/day=2023-11-14",
        "episodes/run=run/day=2023-11-15",
    }
    unassembled = {path.parent.relative_to(exported / "spans").parts[0] for path in exported.glob("spans/*/*/*")}
    assert "run=__HIVE_DEFAULT_PARTITION__" in unassembled  # which readers of such folders take for NULL


def test_the_name_of_a_run_cannot_be_too_long_for_a_folder_or_lead_out_of_it(tmp_path: Path) -> None:
    runs = ["../../up", "..", "x" * 1000, "ü" * 100, "a=b&c"]
    fill(tmp_path / "s.duckdb", [chain(f"{n}").spans(RUN_ID=run) for n, run in enumerate(runs, start=1)])
    with TraceStore.open(tmp_path / "s.duckdb") as store:
        store_to_parquet(store, tmp_path / "deep" / "out")
        expected = dump(store, EXPORTED_TABLES)
    with folder_to_reader(tmp_path / "deep" / "out") as reader:
        assert dump(reader, EXPORTED_TABLES) == expected
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"deep", "s.duckdb", "s.duckdb.journal"}


def test_files_are_compressed_and_private(exported: Path) -> None:
    parts = list(exported.rglob("*.parquet"))
    for path in parts:
        codecs = duckdb.sql(f"SELECT DISTINCT compression FROM parquet_metadata('{path}')").fetchall()
        assert codecs == [("ZSTD",)]
    modes = {path: path.stat().st_mode & 0o777 for path in exported.rglob("*")}
    assert parts
    assert all(mode == (0o600 if path.is_file() else 0o700) for path, mode in modes.items())


def test_the_manifest_says_rows_bytes_and_hashes(exported: Path, store_path: Path) -> None:
    manifest = read_manifest(exported, newest_version())
    assert manifest.schema_version == newest_version()
    assert {exported / file.path for file in manifest.files} == set(exported.rglob("*.parquet"))
    for file in manifest.files:
        ((rows,),) = duckdb.sql(f"SELECT count(*) FROM read_parquet('{exported / file.path}')").fetchall()
        assert (file.rows, file.bytes) == (rows, (exported / file.path).stat().st_size)
    assert sum(file.rows for file in manifest.table_files("episodes")) == len(whole_dump(store_path)["episodes"])


def test_an_export_adds_only_what_is_new(store_path: Path, exported: Path) -> None:
    files = set(files_under(exported))
    with TraceStore.open(store_path) as store:
        assert store_to_parquet(store, exported).rows == {}
        assert set(files_under(exported)) == files
        store.put_rewards([Reward(trace_id("b"), "late", 1.0, "s", START)])
        assert store_to_parquet(store, exported).rows == {"rewards": 1}
        assert len(set(files_under(exported)) - files) == 1
        with folder_to_reader(exported) as reader:
            assert dump(reader, EXPORTED_TABLES) == dump(store, EXPORTED_TABLES)


def test_an_import_adds_only_what_is_new(store_path: Path, exported: Path) -> None:
    rows = whole_dump(store_path)
    with TraceStore.open(store_path) as store:
        assert not any(parquet_to_store(exported, store).values())
    assert whole_dump(store_path) == rows


def test_an_archive_keeps_what_the_store_no_longer_has(store_path: Path, exported: Path) -> None:
    with TraceStore.open(store_path) as store:
        archived = dump(store, EXPORTED_TABLES)
        with store.transaction() as con:
            con.execute("DELETE FROM spans")
            con.execute("DELETE FROM episodes")
        store_to_parquet(store, exported)
    with folder_to_reader(exported) as reader:
        assert dump(reader, EXPORTED_TABLES) == archived


def test_several_stores_share_a_folder(tmp_path: Path) -> None:
    for name in ("one", "two"):
        fill(tmp_path / f"{name}.duckdb", [chain(name[0]).spans(RUN_ID=name)])
        with TraceStore.open(tmp_path / f"{name}.duckdb") as store:
            store_to_parquet(store, tmp_path / "out")
    with folder_to_reader(tmp_path / "out") as reader:
        assert {episode.run_id for episode in reader.episodes()} == {"one", "two"}


def test_another_run_of_the_same_name_is_refused_and_nothing_is_added(exported: Path, tmp_path: Path) -> None:
    with TraceStore.open(tmp_path / "other.duckdb") as second_store:
        second_store.put_run(RunRow("run", "train", 1))
        with pytest.raises(StoreError, match=r"another run run than .*out") as refused:
            parquet_to_store(exported, second_store)
        assert "\n" not in str(refused.value)
        assert [second_store.counts()[name] for name in ("runs", "spans", "episodes")] == [1, 0, 0]


EXPORT = """
import sys; from pathlib import Path
from trace_store.store import TraceStore; from trace_store.parquet import store_to_parquet
with TraceStore.open(Path(sys.argv[1])) as store:
    print("now", flush=True)
    store_to_parquet(store, Path(sys.argv[2]))
"""


@pytest.mark.slow
def test_a_killed_export_leaves_the_folder_as_it_was_and_the_next_one_completes_it(tmp_path: Path) -> None:
    path, folder = tmp_path / "s.duckdb", tmp_path / "out"
    fill(path, [chain("first").spans()])
    with TraceStore.open(path) as store:
        store_to_parquet(store, folder)
    rng, killed = random.Random(0), 0
    for number in range(12):
        fill(path, [chain(f"{number}-{k}", START + k * DAY_NS).spans() for k in range(5)])
        with folder_to_reader(folder) as reader:
            rows = dump(reader, EXPORTED_TABLES)
        killed += kill_after([EXPORT, str(path), str(folder)], 0.15 * rng.random())
        with folder_to_reader(folder) as reader, TraceStore.open(path, wait_s=5) as store:
            assert dump(reader, EXPORTED_TABLES) in (rows, dump(store, EXPORTED_TABLES))
    assert killed >= 2, "the kills came too late: this shows little"
    with TraceStore.open(path) as store:
        store_to_parquet(store, folder)
        with folder_to_reader(folder) as reader:
            assert dump(reader, EXPORTED_TABLES) == dump(store, EXPORTED_TABLES)
    listed_files = {folder / file.path for file in read_manifest(folder, newest_version()).files}
    assert set(files_under(folder)) == listed_files | {folder / MANIFEST}, "nothing that was half written is left"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("schema_version", newest_version() + 1, rf"schema version {newest_version() + 1}, .* knows up to"),
        ("format", "something", "not of marft-bridge traces"),
        ("files", "nonsense", "damaged"),
        ("files", [{"path": "x"}], "damaged"),
    ],
)
def test_a_manifest_that_is_newer_or_damaged_is_refused(exported: Path, name: str, value: object, message: str) -> None:
    raw = json.loads((exported / MANIFEST).read_text())
    (exported / MANIFEST).write_text(json.dumps(raw | {name: value}))
    with pytest.raises(StoreError, match=message) as refused:
        folder_to_reader(exported)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("path", ["../s.parquet", "/etc/passwd", "episodes/run=x/../../day=2023-11-14/a-0.parquet"])
def test_a_path_that_leads_out_of_the_folder_is_refused(exported: Path, path: str) -> None:
    manifest = read_manifest(exported, newest_version())
    bad_manifest = replace(manifest, files=(replace(manifest.table_files("episodes")[0], path=path),))
    with pytest.raises(StoreError, match="which no export writes"):
        write_manifest(exported, bad_manifest)
    assert read_manifest(exported, newest_version()) == manifest  # what nobody could read replaces nothing
    document = json.loads((exported / MANIFEST).read_text())
    document["files"] = [asdict(file) for file in bad_manifest.files]
    (exported / MANIFEST).write_text(json.dumps(document))
    with pytest.raises(StoreError, match="which no export writes"):
        folder_to_reader(exported)


@pytest.mark.parametrize(
    "run", ["", ".", "..", "a/b", "a\nb", "\x00", "%2F", "run=x", "*", "é" * 90, " ", "'", '"', "\\"]
)
def test_an_export_is_read_again_whatever_a_runs_id_is(exported: Path, tmp_path: Path, run: str) -> None:
    """An empty one makes no episode any more; stores of before may have it."""
    path = tmp_path / "odd.duckdb"
    with TraceStore.open(path) as store:
        journal = Journal(store.journal_folder)
        journal.append_all(chain("e1").spans())
        journal.close()
        store.take_in()
        store.sql("UPDATE episodes SET run_id = ?", [run])
        before = set(read_manifest(exported, newest_version()).files)
        store_to_parquet(store, exported)
        expected = store.sql("SELECT episode_id, run_id FROM episodes")
    assert before < set(read_manifest(exported, newest_version()).files)
    with folder_to_reader(exported) as reader:
        ((episode_id, _),) = expected
        assert reader.sql("SELECT episode_id, run_id FROM episodes WHERE episode_id = ?", [episode_id]) == expected


def test_a_link_that_leads_out_of_the_folder_is_refused(exported: Path, tmp_path: Path) -> None:
    part = exported / read_manifest(exported, newest_version()).table_files("episodes")[0].path
    part.rename(tmp_path / "elsewhere.parquet")
    part.symlink_to(tmp_path / "elsewhere.parquet")
    with pytest.raises(StoreError, match="leads out of the folder"):
        folder_to_reader(exported)


def test_a_file_that_was_changed_is_not_imported_and_one_that_was_cut_is_not_read(
    exported: Path, tmp_path: Path
) -> None:
    part = exported / read_manifest(exported, newest_version()).table_files("actions")[0].path
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    with TraceStore.open(tmp_path / "other.duckdb") as second_store:
        with pytest.raises(StoreError, match="changed after it was written"):
            parquet_to_store(exported, second_store)
        assert second_store.counts()["spans"] == 0
    part.write_bytes(content[:-1])
    with pytest.raises(StoreError, match="its manifest says"):
        folder_to_reader(exported)
    part.unlink()
    with pytest.raises(StoreError, match="cannot be read"):
        folder_to_reader(exported)


def test_files_of_others_are_not_touched(store_path: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with TraceStore.open(store_path) as store:
        with pytest.raises(StoreError, match="holds other files"):
            store_to_parquet(store, tmp_path / "mine")
        store_to_parquet(store, tmp_path / "out")
        (tmp_path / "out" / "notes.txt").write_text("x")
        store_to_parquet(store, tmp_path / "out")
    assert (tmp_path / "out" / "notes.txt").exists()
    with pytest.raises(StoreError, match=r"no manifest\.json"):
        folder_to_reader(tmp_path / "mine")


def test_a_folder_read_in_place_answers_as_the_store_does(store_path: Path, exported: Path) -> None:
    with TraceStore.open(store_path) as store, folder_to_reader(exported) as reader:
        assert [repr(t) for t in reader.trajectories()] == [repr(t) for t in store.trajectories()]
        assert [repr(t) for t in reader.trajectories(round=3, variant="after")] == [
            repr(t) for t in store.trajectories(round=3, variant="after")
        ]
        assert reader.episodes(run_id="run") == store.episodes(run_id="run")
        assert reader.spans(trace_id("a")) == store.spans(trace_id("a"))
        assert repr(reader.runs()) == repr(store.runs())
        assert reader.adapters() == store.adapters()
        assert reader.counts() == store.counts() | {"schema_version": 0, "taken_in": 0}
        assert store.episodes()
        for view in schema.VIEWS:
            query = f"SELECT * FROM {view.name} ORDER BY ALL"
            assert rounded(reader.sql(query)) == rounded(store.sql(query))
        with pytest.raises(StoreError, match="open for reading only"):
            reader.put_rewards([])


def test_a_reader_opens_no_other_file(exported: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.csv").write_text("a\n1\n")
    queries = [
        f"SELECT * FROM read_csv('{tmp_path / 'secret.csv'}')",
        f"SELECT * FROM read_text('{exported / MANIFEST}')",
        f"COPY (SELECT 1) TO '{exported / 'episodes' / 'new.parquet'}'",
        f"ATTACH '{tmp_path / 'new.duckdb'}'",
        "SET enable_external_access = true",
        "SET allowed_directories = ['/']",
        "INSTALL httpfs",
        "DELETE FROM episodes",
    ]
    with folder_to_reader(exported) as reader:
        for query in queries:
            with pytest.raises(StoreError):
                reader.sql(query)
    assert not (tmp_path / "new.duckdb").exists()


def test_a_file_of_an_older_schema_has_null_where_it_has_no_column(exported: Path, tmp_path: Path) -> None:
    manifest = read_manifest(exported, newest_version())
    changed_files = []
    for file in manifest.table_files("actions"):
        path = exported / file.path
        duckdb.sql(f"COPY (SELECT * EXCLUDE (prompt_tokens, sampled_tokens) FROM read_parquet('{path}')) TO '{path}'")
        changed_files.append(replace(file, bytes=path.stat().st_size))
    other_files = tuple(file for file in manifest.files if file.table != "actions")
    write_manifest(exported, Manifest(1, (*other_files, *changed_files)))
    with folder_to_reader(exported) as reader:
        assert reader.sql("SELECT DISTINCT prompt_tokens, sampled_tokens FROM actions") == [(None, None)]
        assert reader.sql("SELECT count(*) FROM actions WHERE prompt_ids IS NOT NULL") > [(0,)]


def test_an_empty_store_is_a_folder_that_can_be_read(tmp_path: Path) -> None:
    with TraceStore.open(tmp_path / "s.duckdb") as store:
        assert store_to_parquet(store, tmp_path / "out").rows == {}
    with folder_to_reader(tmp_path / "out") as reader:
        assert list(reader.trajectories()) == []
        assert set(reader.counts().values()) == {0}
