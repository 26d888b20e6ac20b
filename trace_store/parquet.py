"""A store <-> a folder of Parquet files, by run and UTC day; what is written is never written again.

An export adds the rows that the folder does not have yet, so it can be repeated, an archive keeps what was later
deleted from the store, and several stores may share a folder. An import adds the rows that the store does not have.
Invariants: what comes back is equal to the bit; a row is one row however often it travels; a run, adapter or price of
the same name with other contents is refused, never merged. What of a store is worth keeping is not decided here.
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

OF_THE_FILE = ("schema_version", "taken_in")  # tables about a store file and its journal: they do not travel
TRAVELLING = tuple(table for table in schema.TABLES if table.name not in OF_THE_FILE)
# Who reads in place asks for a few thousand rows at a time: what lies between two of them is skipped by the group.
FORMAT = "FORMAT parquet, COMPRESSION zstd, ROW_GROUP_SIZE 4096"
_LONGEST_NAME = 150  # bytes of a folder name that stands for a run

# What makes a row of a table without a primary key itself.
_IDENTITY = {
    "actions": ("episode_id", "action_id"),
    "edges": ("episode_id", "src", "dst", "kind"),
    "rewards": ("episode_id", "name", "source", "created_ns", "scope", "action_id", "node"),
}
# Every trace with its run and start. The run of a trace that is no episode (yet) is not known.
_PLACED = """
placed AS (
    SELECT episode_id AS trace_id, run_id AS run, started_ns AS ns FROM episodes
    UNION ALL
    SELECT trace_id, NULL, min(start_ns) FROM spans
    WHERE NOT EXISTS (SELECT 1 FROM episodes e WHERE e.episode_id = spans.trace_id) GROUP BY trace_id
)
"""


@dataclass(frozen=True, slots=True)
class Exported:
    """Rows by table that an export added, and the files that hold them."""

    rows: dict[str, int]
    files: tuple[str, ...]


def store_to_parquet(store: TraceStore, folder: Path) -> Exported:
    """Write the rows that the folder does not have yet.

    Raises StoreError when the folder holds something else, was written by a newer marft-bridge or is being written.
    """
    with changing(folder):
        before = read_manifest(folder, newest_version())
        hidden = folder / f"{WRITING}{secrets.token_hex(4)}"
        export = f"{time.time_ns():x}{secrets.token_hex(4)}"
        added: list[PartFile] = []
        for table in TRAVELLING:
            target = hidden / table.name
            target.mkdir(parents=True, mode=0o700)
            store.sql(_new_rows_statement(table, folder, before.of(table.name), target))
            with private_files():
                added += _move_into_place(store, folder, target, table.name, f"{export}-{{}}.parquet")
        if added:
            write_manifest(folder, Manifest(newest_version(), (*before.files, *added)))
        remove_empty_folders(folder)
    return Exported(totals(added), tuple(file.path for file in added))


def _new_rows_statement(table: schema.Table, folder: Path, known: Sequence[PartFile], target: Path) -> str:
    """COPY of the rows that are in no known file, one folder per run and day."""
    trace, time_column = trace_column(table), _time_column(table)
    run = "p.run" if trace else "t.run_id" if _has(table, "run_id") else "NULL::VARCHAR"
    ns = ", ".join((["p.ns"] if trace else []) + ([f't."{time_column}"'] if time_column else []) + ["0"])
    columns = ", ".join(f't."{column.name}"' for column in table.columns)
    joined = f'LEFT JOIN placed p ON p.trace_id = t."{trace}"' if trace else ""
    # A run's name becomes a folder's: one that is too long for the file system is replaced by its hash.
    name = f"CASE WHEN octet_length(url_encode({run})::BLOB) > {_LONGEST_NAME} THEN sha256({run}) ELSE {run} END"
    absent = _without(table, parquet_relation(table, folder, known)) if known else ""
    day = f"strftime(make_timestamp_ns(coalesce({ns})), '%Y-%m-%d')"
    return (
        f"COPY (WITH {_PLACED} SELECT {columns}, {name} AS run, {day} AS day FROM {table.name} t {joined} {absent})"
        f" TO {quoted(target)} ({FORMAT}, PARTITION_BY (run, day), OVERWRITE_OR_IGNORE)"
    )


def _move_into_place(store: TraceStore, folder: Path, target: Path, table: str, name: str) -> list[PartFile]:
    """Files under a hidden folder -> files of the folder, not named by its manifest yet."""
    parts: list[PartFile] = []
    written = sorted(target.rglob("*.parquet"))
    for number, path in enumerate(written):
        ((rows,),) = store.sql(f"SELECT sum(num_rows) FROM parquet_file_metadata({quoted(path)})")
        place = folder / table / path.parent.relative_to(target) / name.format(number)
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.rename(place)
        parts.append(file_to_part(folder, place, table, int(rows)))
        for above in (place.parent, place.parent.parent, place.parent.parent.parent):
            sync(above)
    return parts


def parquet_to_store(folder: Path, store: TraceStore) -> dict[str, int]:
    """Add the rows that the store does not have yet: all of them or, when it raises, none. Rows added, by table.

    Raises StoreError when a file was changed since it was written, and when a run, adapter or price that the store
    has is another one in the folder.
    """
    manifest = read_manifest(folder, newest_version())
    check_hashes(folder, manifest)
    added: dict[str, int] = {}
    with store.transaction() as con:
        for table in TRAVELLING:
            files = manifest.of(table.name)
            if not files:
                continue
            arriving = parquet_relation(table, folder, files)
            if table.key and not trace_column(table):
                clash = con.execute(_clash_statement(table, arriving)).fetchone()
                if clash is not None:
                    name = "@".join(map(str, clash))
                    raise StoreError(
                        f"store {store.path} has another {table.name.removesuffix('s')} {name} than {folder};"
                        " import into a new store, or read the folder in place"
                    )
            columns = ", ".join(f'"{column.name}"' for column in table.columns)
            lacking = rows_without(table, arriving, table.name)
            found = con.execute(f"INSERT INTO {table.name} ({columns}) {lacking}").fetchone()
            added[table.name] = int(found[0]) if found else 0
    return added


def _clash_statement(table: schema.Table, arriving: str) -> str:
    other = " OR ".join(
        f'a."{column.name}" IS DISTINCT FROM t."{column.name}"'
        for column in table.columns
        if column.name not in table.key
    )
    keys = ", ".join(f'a."{name}"' for name in table.key)
    return f"SELECT {keys} FROM {arriving} a JOIN {table.name} t USING ({_key_list(table)}) WHERE {other} LIMIT 1"


def parquet_relation(table: schema.Table, folder: Path, files: Sequence[PartFile]) -> str:
    """The rows of some files of one table as SQL, in the columns and types of the schema; with none, no rows.

    A column that a file does not have, because an older marft-bridge wrote it, is NULL.
    """
    wanted = ", ".join(
        f'CAST("{column.name}" AS {column.sql_type.removesuffix(" NOT NULL")}) AS "{column.name}"'
        for column in table.columns
    )
    empty = ", ".join(
        f'NULL::{column.sql_type.removesuffix(" NOT NULL")} AS "{column.name}"' for column in table.columns
    )
    nothing = f"SELECT {empty} WHERE false"
    if not files:
        return f"({nothing})"
    paths = ", ".join(quoted((folder / file.path).resolve()) for file in files)
    read = f"SELECT * FROM read_parquet([{paths}], hive_partitioning=false, union_by_name=true)"
    return f"(SELECT {wanted} FROM ({nothing} UNION ALL BY NAME {read}))"


def rows_without(table: schema.Table, source: str, target: str) -> str:
    """SQL for the rows of a source, in the table's columns, that a target does not have."""
    columns = ", ".join(f't."{column.name}"' for column in table.columns)
    return f"SELECT {columns} FROM {source} t {_without(table, target)}"


def trace_column(table: schema.Table) -> str | None:
    """The column that says which trace a row is about; None in tables about something else."""
    return next((name for name in ("episode_id", "trace_id") if _has(table, name)), None)


def quoted(path: Path) -> str:
    """A path as an SQL literal: such places take no parameter."""
    return "'" + str(path).replace("'", "''") + "'"


def _identity(table: schema.Table) -> tuple[str, ...]:
    return table.key or _IDENTITY[table.name]


def _key_list(table: schema.Table) -> str:
    return ", ".join(f'"{name}"' for name in _identity(table))


def _without(table: schema.Table, relation: str) -> str:
    """Leaves out the rows of `t` that a relation has."""
    same = " AND ".join(f'k."{name}" IS NOT DISTINCT FROM t."{name}"' for name in _identity(table))
    return f"ANTI JOIN {relation} k ON {same}"


def _has(table: schema.Table, name: str) -> bool:
    return any(column.name == name for column in table.columns)


def _time_column(table: schema.Table) -> str | None:
    return next((column.name for column in table.columns if column.name.endswith("_ns")), None)
