"""A store -> a DuckLake catalog: tables with the store's names, to which an export adds the rows that they lack.

Needs DuckDB's extension `ducklake`, which is never downloaded from here. Invariant: a row is added once, so an export
can be repeated; all of it is one snapshot of the catalog. Reading one is in `readers`.
"""

from __future__ import annotations

from pathlib import Path

import duckdb

from trace_store.connection import connect_memory, one_line_errors, private_files
from trace_store.parquet import TRAVELLING, quoted, rows_without
from trace_store.readers import absent_columns, load_ducklake


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
    """Rows of one attached database -> those of another that lacks them; their numbers by table."""
    added: dict[str, int] = {}
    con.execute("BEGIN")
    try:
        for table in TRAVELLING:
            # DuckLake knows no primary key: that a row is there once is seen to here.
            typed = ", ".join(f'"{column.name}" {column.sql_type}' for column in table.columns)
            columns = ", ".join(f'"{column.name}"' for column in table.columns)
            con.execute(f"CREATE TABLE IF NOT EXISTS {lake}.{table.name} ({typed})")
            for column in absent_columns(con, table, f"{lake}.{table.name}"):
                con.execute(f'ALTER TABLE {lake}.{table.name} ADD COLUMN "{column.name}" {column.sql_type}')
            lacking = rows_without(table, f"{store}.{table.name}", f"{lake}.{table.name}")
            found = con.execute(f"INSERT INTO {lake}.{table.name} ({columns}) {lacking}").fetchone()
            added[table.name] = int(found[0]) if found else 0
        con.execute("COMMIT")
    except BaseException:
        con.execute("ROLLBACK")
        raise
    return added
