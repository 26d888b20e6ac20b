"""A database of any known version -> the current version, by ordered migrations.

Invariant: a migration and its row in `schema_version` are one transaction, so a file is always at a whole version.
A file that a newer marft-bridge wrote is refused, never guessed at. Version 1 is the schema as declared; once
there is a second version, version 1 has to be frozen as text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import duckdb

from trace_store import schema
from trace_store.errors import StoreError

Change = Callable[[duckdb.DuckDBPyConnection], None]


@dataclass(frozen=True, slots=True)
class Migration:
    """One step from version - 1 to version."""

    version: int
    sentence: str
    change: Change


MIGRATIONS: list[Migration] = []


def migration(sentence: str, into: list[Migration] = MIGRATIONS) -> Callable[[Change], Change]:
    """Register the decorated function as the next version."""

    def register(change: Change) -> Change:
        into.append(Migration(len(into) + 1, sentence, change))
        return change

    return register


@migration("all tables and views")
def _create(con: duckdb.DuckDBPyConnection) -> None:
    for statement in schema.ddl():
        con.execute(statement)


def version_of(con: duckdb.DuckDBPyConnection) -> int:
    """The version of an open database: 0 when nothing was applied yet."""
    known = con.execute(
        "SELECT count(*) FROM duckdb_tables() WHERE table_name = 'schema_version' AND NOT internal"
    ).fetchone()
    if known is None or known[0] == 0:
        return 0
    row = con.execute("SELECT max(version) FROM schema_version").fetchone()
    return int(row[0]) if row and row[0] is not None else 0


def migrate(
    con: duckdb.DuckDBPyConnection,
    name: str = "database",
    *,
    read_only: bool = False,
    migrations: Sequence[Migration] = MIGRATIONS,
) -> int:
    """Bring an open database to the newest known version and return that version.

    Raises StoreError when the file is newer than this program, is some other DuckDB database, or is older and
    cannot be changed because it is open for reading only. `name` is what the message calls the store.
    """
    found, newest = version_of(con), len(migrations)
    if found > newest:
        raise StoreError(
            f"store {name} has schema version {found}, this marft-bridge knows up to {newest}; upgrade marft-bridge"
        )
    if found < newest and read_only:
        raise StoreError(
            f"store {name} has schema version {found} and needs {newest}; open it once for writing, for example by"
            " collecting into it"
        )
    if found == 0 and _has_tables(con):
        raise StoreError(f"store {name} is a DuckDB database that marft-bridge did not make; give another path")
    for step in migrations[found:]:
        con.execute("BEGIN")
        try:
            step.change(con)
            con.execute("INSERT INTO schema_version VALUES (?, ?, ?)", [step.version, step.sentence, time.time_ns()])
            con.execute("COMMIT")
        except BaseException:
            with suppress(duckdb.Error):  # a failed COMMIT has rolled back already
                con.execute("ROLLBACK")
            raise
    return newest


def _has_tables(con: duckdb.DuckDBPyConnection) -> bool:
    row = con.execute("SELECT count(*) FROM duckdb_tables() WHERE NOT internal").fetchone()
    return row is not None and row[0] > 0
