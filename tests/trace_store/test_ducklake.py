"""Owns: a store in a DuckLake catalog.

- Rows are added once, however often they are exported, and are equal to the bit to those of the store.
- What reads a catalog gives the same episodes as the store; what an older version made is read and takes new rows.
- Where DuckDB's extension is not installed, nothing is downloaded or left behind, and one line says what to do.

The first two need the extension and are skipped without it, with DuckDB's reason; what needs only SQL of DuckDB is also
held over an ordinary DuckDB database in the catalog's place.
"""

from __future__ import annotations

import json
from pathlib import Path

import duckdb
import pytest
from support.growth_rig import LINEAGE, dump, fill, fill_variously
from support.sample_spans import START, chain

from marft_bridge.cli import run
from trace_store.connection import connect_memory
from trace_store.ducklake import add_rows, store_to_catalog
from trace_store.errors import StoreError
from trace_store.parquet import EXPORTED_TABLES
from trace_store.readers import catalog_to_reader, load_ducklake, require_ducklake
from trace_store.relations import attached_relation
from trace_store.store import TraceStore


def ducklake_obstacle() -> str | None:
    """DuckDB's reason why its extension cannot be loaded; None when it can."""
    try:
        require_ducklake()
    except StoreError as error:
        return str(error)
    return None


needs_ducklake = pytest.mark.skipif(ducklake_obstacle() is not None, reason=str(ducklake_obstacle()))
without_ducklake = pytest.mark.skipif(
    ducklake_obstacle() is None, reason="DuckDB's extension ducklake is installed here"
)


@needs_ducklake
def test_a_catalog_gives_what_the_store_has(tmp_path: Path) -> None:
    path, catalog = tmp_path / "s.duckdb", tmp_path / "lake.ducklake"
    fill_variously(path)
    store_to_catalog(path, catalog)
    assert not any(store_to_catalog(path, catalog).values())
    with TraceStore.open(path) as store, catalog_to_reader(catalog) as reader:
        assert dump(reader, EXPORTED_TABLES) == dump(store, EXPORTED_TABLES)
        assert [repr(t) for t in reader.trajectories()] == [repr(t) for t in store.trajectories()]


@needs_ducklake
def test_an_export_adds_only_what_is_new_to_a_catalog(tmp_path: Path) -> None:
    path, catalog = tmp_path / "s.duckdb", tmp_path / "lake.ducklake"
    for name in ("a", "b"):
        fill(path, [chain(name, START).spans()])
        assert store_to_catalog(path, catalog)["episodes"] == 1


def test_rows_are_added_once_and_equal_to_the_bit(tmp_path: Path) -> None:
    path, lake_path = tmp_path / "s.duckdb", tmp_path / "other.duckdb"
    fill_variously(path)
    for expected in (True, False):
        with connect_memory() as con:
            con.execute(f"ATTACH '{path}' AS store (READ_ONLY)")
            con.execute(f"ATTACH '{lake_path}' AS lake")
            assert any(add_rows(con, "store", "lake").values()) is expected
    with duckdb.connect(str(lake_path)) as con:
        reader = TraceStore(lake_path, con, read_only=True)
        with TraceStore.open(path) as store:
            assert dump(reader, EXPORTED_TABLES) == dump(store, EXPORTED_TABLES)


@pytest.mark.parametrize("version", [1, 2])
def test_what_an_older_version_made_is_read_and_takes_new_rows(tmp_path: Path, version: int) -> None:
    path, lake_path = tmp_path / "s.duckdb", tmp_path / "other.duckdb"
    fill(path, [chain("new", START).spans(LINEAGE=LINEAGE)])
    with duckdb.connect(str(lake_path)) as con:
        con.execute((Path(__file__).parent / f"schemas/version_{version}.sql").read_text())
        row = ["old", "r", "t", "live", 0, None, None, None, "{}", "terminated", None, 1, 2, 1, "{}", "{}", None, None]
        con.execute(f"INSERT INTO episodes VALUES ({', '.join('?' * len(row))})", row)  # noqa: S608

    def read() -> dict[str, object]:
        with connect_memory() as con:
            con.execute(f"ATTACH '{lake_path}' AS lake (READ_ONLY)")
            for table in EXPORTED_TABLES:
                columns = ", ".join(f'"{column.name}"' for column in table.columns)
                relation = attached_relation(con, table, "lake")
                con.execute(f"CREATE VIEW {table.name} AS SELECT {columns} FROM {relation}")  # noqa: S608
            assert con.execute("FROM prices").fetchall() == []
            return dict(con.execute("SELECT episode_id, lineage FROM episodes").fetchall())

    assert read() == {"old": None}
    with connect_memory() as con:
        con.execute(f"ATTACH '{path}' AS store (READ_ONLY)")
        con.execute(f"ATTACH '{lake_path}' AS lake")
        assert add_rows(con, "store", "lake")["actions"] == 2
    lineages = read()
    assert lineages.pop("old") is None
    assert [json.loads(str(lineage)) for lineage in lineages.values()] == [json.loads(LINEAGE)]


def test_a_database_that_fails_in_the_middle_has_none_of_the_rows(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    fill_variously(path)
    with connect_memory() as con:
        con.execute(f"ATTACH '{path}' AS store (READ_ONLY)")
        con.execute("ATTACH ':memory:' AS lake")
        con.execute("CREATE TABLE lake.rewards (nonsense INTEGER)")
        with pytest.raises(duckdb.Error):
            add_rows(con, "store", "lake")
        tables = con.execute("SELECT table_name FROM duckdb_tables() WHERE database_name = 'lake'").fetchall()
        assert tables == [("rewards",)]


@without_ducklake
def test_without_the_extension_one_line_says_what_to_do_and_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, catalog = tmp_path / "s.duckdb", tmp_path / "lake.ducklake"
    fill(path, [chain("a").spans()])
    names = sorted(path.name for path in tmp_path.iterdir())
    assert run(["traces", "export", str(catalog), "--store", str(path)]) == 2
    line = capsys.readouterr().err
    assert "extension ducklake cannot be loaded" in line
    assert "INSTALL ducklake" in line
    assert len(line.strip().splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    catalog.touch()
    with pytest.raises(StoreError, match="ducklake cannot be loaded"):
        catalog_to_reader(catalog)
    with connect_memory() as con, pytest.raises(StoreError):
        load_ducklake(con)  # and does not install it


def test_a_catalog_that_does_not_exist_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="does not exist"):
        catalog_to_reader(tmp_path / "lake.ducklake")
    assert list(tmp_path.iterdir()) == []
