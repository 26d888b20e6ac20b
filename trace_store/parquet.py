"""A store <-> a folder of Parquet files, by run and UTC day; a file is written once and never changed.

An export adds the rows that the folder does not have yet, so it can be repeated, an archive keeps what was later
deleted from the store, and several stores may share a folder. An import adds the rows that the store does not have.
Invariants: imported rows equal the exported ones to the bit; a row is one row however often it is exported; a run,
adapter or price of the same name with other contents is refused, never merged.
"""

# ruff: noqa: S608 - statements are put together from constants and quoted paths
from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trace_store import schema
from trace_store.connection import private_files
from trace_store.errors import StoreError
from trace_store.files import sync
from trace_store.manifest import (
    WRITING,
    Manifest,
    PartFile,
    changing,
    check_hashes,
    file_to_part,
    read_manifest,
    remove_empty_folders,
    totals,
    write_manifest,
)
from trace_store.migrations import newest_version
from trace_store.store import TraceStore

FILE_TABLES = ("schema_version", "taken_in")  # about a store file and its journal: they are not exported
EXPORTED_TABLES = tuple(table for table in schema.TABLES if table.name not in FILE_TABLES)
# A reader asks for a few thousand rows at a time, and skips the row groups between them.
FORMAT = "FORMAT parquet, COMPRESSION zstd, ROW_GROUP_SIZE 4096"
_MAX_NAME_BYTES = 150  # of a folder that is named after a run

# Columns that identify a row of a table without a primary key.
_IDENTITY = {
    "actions": ("episode_id", "action_id"),
    "edges": ("episode_id", "src", "dst", "kind"),
    "rewards": ("episode_id", "name", "source", "created_ns", "scope", "action_id", "node"),
}
# Every trace with its run and start. The run of a trace that is no episode (yet) is not known.
_TRACE_RUNS = """
placed AS (
    SELECT episode_id AS trace_id, run_id AS run, started_ns AS ns FROM episodes
    UNION ALL
    SELECT trace_id, NULL, min(start_ns) FROM spans
    WHERE NOT EXISTS (SELECT 1 FROM episodes e WHERE e.episode_id = spans.trace_id) GROUP BY trace_id
)
"""


@dataclass(frozen=True, slots=True)
class ExportResult:
    """Rows by table that an export added, and the files that hold them."""

    rows: dict[str, int]
    files: tuple[str, ...]


def store_to_parquet(store: TraceStore, folder: Path) -> ExportResult:
    """Write the rows that the folder does not have yet.

    Raises StoreError when the folder holds something else, was written by a newer marft-bridge or is being written.
    """
    with changing(folder):
        old_manifest = read_manifest(folder, newest_version())
        hidden_folder = folder / f"{WRITING}{secrets.token_hex(4)}"
        export = f"{time.time_ns():x}{secrets.token_hex(4)}"
        added_files: list[PartFile] = []
        for table in EXPORTED_TABLES:
            target = hidden_folder / table.name
            target.mkdir(parents=True, mode=0o700)
            store.sql(_new_rows_statement(table, folder, old_manifest.table_files(table.name), target=target))
            with private_files():
                added_files += _move_into_place(store, folder, target, table=table.name, name=f"{export}-{{}}.parquet")
        if added_files:
            write_manifest(folder, Manifest(newest_version(), (*old_manifest.files, *added_files)))
        remove_empty_folders(folder)
    return ExportResult(totals(added_files), tuple(file.path for file in added_files))


def _new_rows_statement(table: schema.Table, folder: Path, known_files: Sequence[PartFile], target: Path) -> str:
    """COPY of the rows that are in no known file, one folder per run and day."""
    trace, time_column = trace_column(table), _time_column(table)
    run = "p.run" if trace else "t.run_id" if _has_column(table, "run_id") else "NULL::VARCHAR"
    ns = ", ".join((["p.ns"] if trace else []) + ([f't."{time_column}"'] if time_column else []) + ["0"])
    columns = ", ".join(f't."{column.name}"' for column in table.columns)
    join = f'LEFT JOIN placed p ON p.trace_id = t."{trace}"' if trace else ""
    # A run's name becomes a folder's: one that is too long for the file system is replaced by its hash.
    name = f"CASE WHEN octet_length(url_encode({run})::BLOB) > {_MAX_NAME_BYTES} THEN sha256({run}) ELSE {run} END"
    anti_join = _anti_join(table, parquet_relation(table, folder, known_files)) if known_files else ""
    day = f"strftime(make_timestamp_ns(coalesce({ns})), '%Y-%m-%d')"
    return (
        f"COPY (WITH {_TRACE_RUNS} SELECT {columns}, {name} AS run, {day} AS day"
        f" FROM {table.name} t {join} {anti_join})"
        f" TO {quoted(target)} ({FORMAT}, PARTITION_BY (run, day), OVERWRITE_OR_IGNORE)"
    )


def _move_into_place(store: TraceStore, folder: Path, target: Path, table: str, name: str) -> list[PartFile]:
    """Files under a hidden folder -> files of the folder, not named by its manifest yet."""
    parts: list[PartFile] = []
    written_paths = sorted(target.rglob("*.parquet"))
    for number, path in enumerate(written_paths):
        ((rows,),) = store.sql(f"SELECT sum(num_rows) FROM parquet_file_metadata({quoted(path)})")
        final_path = folder / table / path.parent.relative_to(target) / name.format(number)
        final_path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.rename(final_path)
        parts.append(file_to_part(folder, final_path, table, rows=int(rows)))
        for parent in (final_path.parent, final_path.parent.parent, final_path.parent.parent.parent):
            sync(parent)
    return parts


def parquet_to_store(folder: Path, store: TraceStore) -> dict[str, int]:
    """Add the rows that the store does not have yet: all of them or, when it raises, none. Rows added, by table.

    Raises StoreError when a file was changed since it was written, and when a run, adapter or price that the store
    has is another one in the folder.
    """
    manifest = read_manifest(folder, newest_version())
    check_hashes(folder, manifest)
    added_rows: dict[str, int] = {}
    with store.transaction() as con:
        for table in EXPORTED_TABLES:
            files = manifest.table_files(table.name)
            if not files:
                continue
            arriving_rows = parquet_relation(table, folder, files)
            if table.key and not trace_column(table):
                clashing_key = con.execute(_clash_statement(table, arriving_rows)).fetchone()
                if clashing_key is not None:
                    name = "@".join(map(str, clashing_key))
                    raise StoreError(
                        f"store {store.path} has another {table.name.removesuffix('s')} {name} than {folder};"
                        " import into a new store, or read the folder in place"
                    )
            columns = ", ".join(f'"{column.name}"' for column in table.columns)
            new_rows_query = rows_without(table, arriving_rows, table.name)
            count_row = con.execute(f"INSERT INTO {table.name} ({columns}) {new_rows_query}").fetchone()
            added_rows[table.name] = int(count_row[0]) if count_row else 0
    return added_rows


def _clash_statement(table: schema.Table, arriving_rows: str) -> str:
    difference = " OR ".join(
        f'a."{column.name}" IS DISTINCT FROM t."{column.name}"'
        for column in table.columns
        if column.name not in table.key
    )
    keys = ", ".join(f'a."{name}"' for name in table.key)
    return (
        f"SELECT {keys} FROM {arriving_rows} a JOIN {table.name} t USING ({_key_list(table)})"
        f" WHERE {difference} LIMIT 1"
    )


def parquet_relation(table: schema.Table, folder: Path, files: Sequence[PartFile]) -> str:
    """The rows of some files of one table as SQL, in the columns and types of the schema; with none, no rows.

    A column that a file does not have, because an older marft-bridge wrote it, is NULL.
    """
    columns = ", ".join(
        f'CAST("{column.name}" AS {column.sql_type.removesuffix(" NOT NULL")}) AS "{column.name}"'
        for column in table.columns
    )
    null_columns = ", ".join(
        f'NULL::{column.sql_type.removesuffix(" NOT NULL")} AS "{column.name}"' for column in table.columns
    )
    no_rows = f"SELECT {null_columns} WHERE false"
    if not files:
        return f"({no_rows})"
    paths = ", ".join(quoted((folder / file.path).resolve()) for file in files)
    file_rows = f"SELECT * FROM read_parquet([{paths}], hive_partitioning=false, union_by_name=true)"
    return f"(SELECT {columns} FROM ({no_rows} UNION ALL BY NAME {file_rows}))"


def rows_without(table: schema.Table, source: str, target: str) -> str:
    """SQL for the rows of a source, in the table's columns, that a target does not have."""
    columns = ", ".join(f't."{column.name}"' for column in table.columns)
    return f"SELECT {columns} FROM {source} t {_anti_join(table, target)}"


def trace_column(table: schema.Table) -> str | None:
    """The column that says which trace a row is about; None in tables about something else."""
    return next((name for name in ("episode_id", "trace_id") if _has_column(table, name)), None)


def quoted(path: Path) -> str:
    """A path as an SQL literal, for statements in which it cannot be bound."""
    return "'" + str(path).replace("'", "''") + "'"


def _identity(table: schema.Table) -> tuple[str, ...]:
    return table.key or _IDENTITY[table.name]


def _key_list(table: schema.Table) -> str:
    return ", ".join(f'"{name}"' for name in _identity(table))


def _anti_join(table: schema.Table, relation: str) -> str:
    """A join that leaves out the rows of `t` that a relation has."""
    same_key = " AND ".join(f'k."{name}" IS NOT DISTINCT FROM t."{name}"' for name in _identity(table))
    return f"ANTI JOIN {relation} k ON {same_key}"


def _has_column(table: schema.Table, name: str) -> bool:
    return any(column.name == name for column in table.columns)


def _time_column(table: schema.Table) -> str | None:
    return next((column.name for column in table.columns if column.name.endswith("_ns")), None)
