"""Owns: a store is always at a whole, known schema version; what is newer or foreign is refused in one line."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pytest

from trace_store import schema
from trace_store.errors import StoreError
from trace_store.migrations import MIGRATIONS, Migration, migrate, migration, version_of
from trace_store.store import TraceStore


@pytest.fixture
def con() -> duckdb.DuckDBPyConnection:
    return duckdb.connect()


def test_a_new_database_gets_every_declared_table_column_and_sentence(con: duckdb.DuckDBPyConnection) -> None:
    assert version_of(con) == 0
    assert migrate(con) == len(MIGRATIONS)
    found = con.execute(
        "SELECT table_name, column_name, comment FROM duckdb_columns() WHERE NOT internal"
        " AND table_name IN (SELECT table_name FROM duckdb_tables()) ORDER BY table_name, column_index"
    ).fetchall()
    declared = [(table.name, column.name, column.sentence) for table in schema.TABLES for column in table.columns]
    assert sorted(found) == sorted(declared)
    views = con.execute("SELECT view_name, comment FROM duckdb_views() WHERE NOT internal").fetchall()
    assert sorted(views) == sorted((view.name, view.sentence) for view in schema.VIEWS)
    assert con.execute("SELECT version FROM schema_version").fetchall() == [(len(MIGRATIONS),)]


def test_migrating_twice_changes_nothing(con: duckdb.DuckDBPyConnection) -> None:
    migrate(con)
    before = con.execute("SELECT * FROM schema_version").fetchall()
    migrate(con)
    assert con.execute("SELECT * FROM schema_version").fetchall() == before


def test_an_older_database_gets_only_what_it_lacks(con: duckdb.DuckDBPyConnection) -> None:
    migrate(con)
    steps = list(MIGRATIONS)

    @migration("a column for notes", steps)
    def _notes(con: duckdb.DuckDBPyConnection) -> None:
        con.execute("ALTER TABLE runs ADD COLUMN note VARCHAR")

    assert migrate(con, migrations=steps) == 2
    assert con.execute("SELECT version, sentence FROM schema_version ORDER BY version").fetchall() == [
        (1, MIGRATIONS[0].sentence),
        (2, "a column for notes"),
    ]
    assert con.execute("SELECT note FROM runs").fetchall() == []


def test_a_migration_that_fails_leaves_the_version_before_it(con: duckdb.DuckDBPyConnection) -> None:
    migrate(con)

    def half(con: duckdb.DuckDBPyConnection) -> None:
        con.execute("CREATE TABLE half (x INTEGER)")
        con.execute("SELECT * FROM nowhere")

    with pytest.raises(duckdb.Error, match="nowhere"):
        migrate(con, migrations=[*MIGRATIONS, Migration(2, "half", half)])
    assert version_of(con) == 1
    with pytest.raises(duckdb.Error, match="half"):
        con.execute("SELECT * FROM half")


def test_a_newer_store_is_refused_with_both_versions(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    TraceStore.open(path).close()
    with duckdb.connect(str(path)) as con:
        con.execute("INSERT INTO schema_version VALUES (9, 'from the future', 0)")
    expected = f"store {path} has schema version 9, this marft-bridge knows up to 1; upgrade marft-bridge"
    for read_only in (False, True):
        with pytest.raises(StoreError) as refused:
            TraceStore.open(path, read_only=read_only)
        assert str(refused.value) == expected


def test_an_older_store_is_not_changed_for_reading_only(con: duckdb.DuckDBPyConnection) -> None:
    with pytest.raises(StoreError, match="store old has schema version 0 and needs 1; open it once for writing"):
        migrate(con, "old", read_only=True)
    assert version_of(con) == 0


def test_a_foreign_database_is_refused_and_left_alone(con: duckdb.DuckDBPyConnection) -> None:
    con.execute("CREATE TABLE mine (x INTEGER)")
    with pytest.raises(StoreError, match="that marft-bridge did not make"):
        migrate(con, "mine")
    assert con.execute("SELECT table_name FROM duckdb_tables()").fetchall() == [("mine",)]
