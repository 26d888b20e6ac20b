"""A folder of Parquet files or a DuckLake catalog -> a `TraceStore` to read from.

Nothing is imported: an empty database in memory gets views with the names and types of the store's tables, so the same
queries, views and trajectories come out of it. Invariants: nothing is written; DuckDB may open the files of the
manifest and no others, and its settings are locked; a DuckLake catalog needs DuckDB's extension, which is never
downloaded.
"""

# ruff: noqa: S608 - statements are put together from constants and quoted paths
from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import duckdb

from trace_store import schema
from trace_store.connection import connect_memory, first_line, one_line_errors
from trace_store.errors import StoreError
from trace_store.manifest import read_manifest
from trace_store.migrations import newest_version
from trace_store.parquet import EXPORTED_TABLES, parquet_relation, quoted
from trace_store.relations import attached_relation
from trace_store.store import TraceStore

CATALOG_SUFFIX = ".ducklake"


def path_to_reader(path: Path, settings: Sequence[str] = ()) -> TraceStore:
    """A folder that `traces export` wrote, or a DuckLake catalog (by its suffix), as a store to read from.

    `settings` of DuckDB, such as `threads = 1`, hold from the first query on and for good.
    """
    reader = catalog_to_reader if path.suffix == CATALOG_SUFFIX else folder_to_reader
    return reader(path, settings)


def folder_to_reader(folder: Path, settings: Sequence[str] = ()) -> TraceStore:
    """A folder of Parquet files as a store to read from. `settings`: see `path_to_reader`.

    The hashes of the files are not checked, which takes as long as reading them; an import does.
    Raises StoreError when the folder is no export, is damaged, or was written by a newer marft-bridge.
    """
    manifest = read_manifest(folder, newest_version())
    con = connect_memory()
    try:
        with one_line_errors(folder):
            _apply(con, settings)  # some need the access that is taken away next
            paths = ", ".join(quoted((folder / file.path).resolve()) for file in manifest.files)
            con.execute(f"SET allowed_paths = [{paths}]")
            con.execute("SET enable_external_access = false")
            _create_views(
                con, {t.name: parquet_relation(t, folder, manifest.table_files(t.name)) for t in EXPORTED_TABLES}
            )
            con.execute("SET lock_configuration = true")
    except BaseException:
        con.close()
        raise
    return TraceStore(folder, con, read_only=True)


def catalog_to_reader(catalog: Path, settings: Sequence[str] = ()) -> TraceStore:
    """A DuckLake catalog that `ducklake.store_to_catalog` filled, as a store to read from.

    Raises StoreError when DuckDB's extension is not installed, or the catalog is missing or no such catalog.
    """
    if not catalog.exists():
        raise StoreError(f"DuckLake catalog {catalog} does not exist; export into it first")
    con = connect_memory()
    try:
        load_ducklake(con)
        with one_line_errors(catalog):
            _apply(con, settings)
            con.execute(f"ATTACH {quoted(Path(f'ducklake:{catalog}'))} AS lake (READ_ONLY)")
            _create_views(con, {table.name: attached_relation(con, table, "lake") for table in EXPORTED_TABLES})
            con.execute("SET lock_configuration = true")
    except BaseException:
        con.close()
        raise
    return TraceStore(catalog, con, read_only=True)


def _apply(con: duckdb.DuckDBPyConnection, settings: Sequence[str]) -> None:
    for setting in settings:
        con.execute(f"SET {setting}")


def load_ducklake(con: duckdb.DuckDBPyConnection) -> None:
    """Load DuckDB's extension for DuckLake. Raises StoreError when it is not installed."""
    try:
        con.execute("LOAD ducklake")
    except duckdb.Error as error:
        raise StoreError(
            f"DuckDB's extension ducklake cannot be loaded ({first_line(str(error))});"
            " install it once with `INSTALL ducklake` in DuckDB, or export Parquet without a catalog"
        ) from None


def require_ducklake() -> None:
    """Raises StoreError when DuckDB's extension for DuckLake is not installed."""
    with connect_memory() as con:
        load_ducklake(con)


def _create_views(con: duckdb.DuckDBPyConnection, relations: Mapping[str, str]) -> None:
    """The store's tables as views of the relations; tables that are not exported are empty."""
    for table in schema.TABLES:
        columns = ", ".join(f'"{column.name}"' for column in table.columns)
        if table.name in relations:
            con.execute(f"CREATE VIEW {table.name} AS SELECT {columns} FROM {relations[table.name]}")
        else:
            column_definitions = ", ".join(f'"{column.name}" {column.sql_type}' for column in table.columns)
            con.execute(f"CREATE TABLE {table.name} ({column_definitions})")
    for statement in schema.views():
        con.execute(statement)
