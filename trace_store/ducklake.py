"""A store -> a DuckLake catalog: tables with the store's names, to which an export adds the rows that they lack.

Needs DuckDB's extension `ducklake`, which is never downloaded. Invariant: a row is added once, so an export can be
repeated; all of it is one snapshot of the catalog. `readers` reads a catalog.
"""

from __future__ import annotations

from pathlib import Path

import duckdb

from trace_store.connection import connect_memory, one_line_errors, private_files
from trace_store.parquet import EXPORTED_TABLES, quoted, rows_without
from trace_store.readers import load_ducklake
from trace_store.relations import absent_columns


def store_to_catalog(store: Path, catalog: Path) -> dict[str, int]:
    """Add the rows that the catalog does not have yet, and return their numbers by table.

    The store must not be open in this process; it is at the current schema version. The catalog is made when it is
    missing, its data beside it in `<catalog>.files`.
    Raises StoreError when the extension is not installed, or one of the two cannot be opened.
    """
    con = connect_memory()
    try:
        load_ducklake(con)
        with one_line_errors(catalog), private_files():
            con.execute(f"ATTACH {quoted(store)} AS store (READ_ONLY)")
            con.execute(f"ATTACH {quoted(Path(f'ducklake:{catalog}'))} AS lake")
            return add_rows(con, "store", "lake")
    finally:
        con.close()


def add_rows(con: duckdb.DuckDBPyConnection, store: str, lake: str) -> dict[str, int]:
    """Add the rows of the attached database `store` that `lake` lacks, and return their numbers by table."""
    added_rows: dict[str, int] = {}
    con.execute("BEGIN")
    try:
        for table in EXPORTED_TABLES:
            # DuckLake has no primary keys, so rows that are there already are left out here.
            column_definitions = ", ".join(f'"{column.name}" {column.sql_type}' for column in table.columns)
            columns = ", ".join(f'"{column.name}"' for column in table.columns)
            con.execute(f"CREATE TABLE IF NOT EXISTS {lake}.{table.name} ({column_definitions})")
            for column in absent_columns(con, table, f"{lake}.{table.name}"):
                con.execute(f'ALTER TABLE {lake}.{table.name} ADD COLUMN "{column.name}" {column.sql_type}')
            new_rows_query = rows_without(table, f"{store}.{table.name}", f"{lake}.{table.name}")
            count_row = con.execute(f"INSERT INTO {lake}.{table.name} ({columns}) {new_rows_query}").fetchone()
            added_rows[table.name] = int(count_row[0]) if count_row else 0
        con.execute("COMMIT")
    except BaseException:
        con.execute("ROLLBACK")
        raise
    return added_rows
