"""A table of the schema in somebody else's database -> SQL with the columns that it has today.

Invariant: what an older marft-bridge did not write is NULL or no row, never a guess.
"""

# ruff: noqa: S608 - statements are put together from constants and quoted names
from __future__ import annotations

import duckdb

from trace_store.schema import Column, Table


def attached_relation(con: duckdb.DuckDBPyConnection, table: Table, database: str) -> str:
    """A table of an attached database as SQL, in the columns of the schema.

    A column or a table that it does not have, because an older marft-bridge wrote it, is NULL or empty.
    """
    relation = f"{database}.{table.name}"
    try:
        missing_columns = absent_columns(con, table, relation)
    except duckdb.CatalogException:
        return empty_relation(table)
    nulls = "".join(f', NULL::{column.sql_type} AS "{column.name}"' for column in missing_columns)
    return f"(SELECT *{nulls} FROM {relation})" if missing_columns else relation


def empty_relation(table: Table) -> str:
    """A table without a row, as SQL."""
    columns = (f'NULL::{column.sql_type.removesuffix(" NOT NULL")} AS "{column.name}"' for column in table.columns)
    return f"(SELECT {', '.join(columns)} WHERE false)"


def absent_columns(con: duckdb.DuckDBPyConnection, table: Table, relation: str) -> list[Column]:
    """The nullable columns that a relation lacks, because an older marft-bridge made it.

    A NOT NULL column has existed from the first version on: a table without it is not ours, and queries of it fail.
    """
    present_names = {name for name, *_ in con.execute(f"DESCRIBE {relation}").fetchall()}
    optional_columns = (column for column in table.columns if not column.sql_type.endswith("NOT NULL"))
    return [column for column in optional_columns if column.name not in present_names]
