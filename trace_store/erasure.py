"""A subject or an age -> the traces that hold it, and a store and exports without them.

Chosen by subject: episodes that name the subject, traces that never became episodes whose spans do, and whatever
replays or goes on with one of them (`parent_episode`, to any depth), because it repeats what was said there. Chosen by
age: what ended before then.
Invariants: a chosen trace goes from every table but `adapter_episodes`, which keeps only that an adapter learned from
an episode of that number; deleting is one transaction; the files of an export are exchanged for files without the
rows, and killed at any moment, it still reads as a whole. `compaction` removes the bytes of deleted rows from the store
file.
"""

# ruff: noqa: S608 - statements are put together from constants and quoted paths; every value is bound
from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import duckdb

from trace_store import conventions as c
from trace_store.connection import connect_memory, one_line_errors, private_files
from trace_store.files import open_plain, sync
from trace_store.journal import FOREIGN_SUFFIX, ForeignLine, folder_to_segments, json_text, lines_from
from trace_store.manifest import (
    Manifest,
    PartFile,
    changing,
    file_to_part,
    read_manifest,
    remove_empty_folders,
    write_manifest,
)
from trace_store.migrations import newest_version
from trace_store.parquet import EXPORTED_TABLES, FORMAT, quoted, trace_column
from trace_store.records import Reward, SpanRow
from trace_store.store import TraceStore

RETAINED_TABLE = "adapter_episodes"  # about traces, and yet not erased
ERASED_TABLES = tuple(table for table in EXPORTED_TABLES if trace_column(table) and table.name != RETAINED_TABLE)

_IN_IDS = "IN (SELECT unnest(?::VARCHAR[]))"  # a join; a list of thousands would be searched for every row

# Every trace; the columns of one that is not an episode come from its spans.
_TRACES = f"""
known AS (
    SELECT episode_id AS trace_id, subject_id, linked_episode AS parent_episode, started_ns, ended_ns
    FROM episodes JOIN episode_links USING (episode_id)
    UNION ALL
    SELECT s.trace_id, max(json_extract_string(s.attributes, '$."{c.SUBJECT_ID}"')),
           max(json_extract_string(s.attributes, '$."{c.PARENT_EPISODE}"')),
           min(s.start_ns), max(greatest(s.start_ns, s.end_ns))
    FROM spans s ANTI JOIN episodes e ON e.episode_id = s.trace_id GROUP BY s.trace_id
)
"""


@dataclass(frozen=True, slots=True)
class ChosenTraces:
    """Traces to erase; `replays` are those of them that are not the subject's own, but go on with one of these."""

    trace_ids: tuple[str, ...]
    replays: tuple[str, ...] = ()


def subject_to_traces(store: TraceStore, subject: str, extra_ids: Sequence[str] = ()) -> ChosenTraces:
    """The traces of one subject in a store, or in a reader of an export.

    `extra_ids` are traces that are the subject's according to another store: what goes on with them is chosen, too.
    """
    rows = store.sql(
        f"WITH RECURSIVE {_TRACES}, chosen AS ("
        " SELECT trace_id, true AS own FROM known WHERE subject_id = ?"
        " UNION SELECT unnest(?::VARCHAR[]), true"
        " UNION SELECT k.trace_id, false FROM known k JOIN chosen ON k.parent_episode = chosen.trace_id"
        ") SELECT trace_id, bool_or(own) FROM chosen GROUP BY trace_id ORDER BY trace_id",
        (subject, list(extra_ids)),
    )
    return ChosenTraces(tuple(trace for trace, _ in rows), tuple(trace for trace, is_own in rows if not is_own))


def age_to_traces(store: TraceStore, before_ns: int) -> ChosenTraces:
    """The traces that ended before a Unix time, with those of which only rewards or a refusal are stored."""
    rows = store.sql(
        f"WITH {_TRACES} SELECT trace_id FROM known WHERE ended_ns < $1"
        " UNION SELECT episode_id FROM rewards r ANTI JOIN known k ON k.trace_id = r.episode_id"
        " GROUP BY episode_id HAVING max(created_ns) < $1"
        " UNION SELECT trace_id FROM refusals f ANTI JOIN known k ON k.trace_id = f.trace_id WHERE refused_ns < $1"
        " ORDER BY 1",
        (before_ns,),
    )
    return ChosenTraces(tuple(trace for (trace,) in rows))


def count_rows(store: TraceStore, trace_ids: Sequence[str]) -> dict[str, int]:
    """How many rows of each table are about these traces; tables without any are left out."""
    counts: dict[str, int] = {}
    for table in ERASED_TABLES:
        query = f'SELECT count(*) FROM {table.name} WHERE "{trace_column(table)}" {_IN_IDS}'
        ((number,),) = store.sql(query, (list(trace_ids),))
        if number:
            counts[table.name] = int(number)
    return counts


def delete_traces(store: TraceStore, trace_ids: Sequence[str]) -> dict[str, int]:
    """Delete every row about these traces; their numbers by table. The bytes stay until the file is rewritten."""
    deleted_rows: dict[str, int] = {}
    with store.transaction() as con:
        for table in ERASED_TABLES:
            statement = f'DELETE FROM {table.name} WHERE "{trace_column(table)}" {_IN_IDS}'
            count_row = con.execute(statement, [list(trace_ids)]).fetchone()
            if count_row and count_row[0]:
                deleted_rows[table.name] = int(count_row[0])
    return deleted_rows


def export_to_rows(folder: Path, trace_ids: Sequence[str]) -> dict[str, int]:
    """Path of each file of an export that has rows about these traces -> their number."""
    manifest = read_manifest(folder, newest_version())
    con = connect_memory()
    try:
        return {file.path: count for file, count in _affected_files(con, folder, manifest, trace_ids=trace_ids)}
    finally:
        con.close()


def erase_from_export(folder: Path, trace_ids: Sequence[str]) -> dict[str, int]:
    """Exchange the files of an export that are about these traces for files that are not.

    Returns the path of each file that was removed, and the number of rows that were erased with it.
    """
    trace_columns = {table.name: trace_column(table) for table in ERASED_TABLES}
    con = connect_memory()
    try:
        with changing(folder), one_line_errors(folder), private_files():
            manifest = read_manifest(folder, newest_version())
            affected_files = list(_affected_files(con, folder, manifest, trace_ids=trace_ids))
            rewritten_files: list[PartFile] = []
            token = f"{time.time_ns():x}{secrets.token_hex(4)}"
            for number, (file, count) in enumerate(affected_files):
                if count == file.rows:
                    continue
                old_path = folder / file.path
                new_path = old_path.with_name(f"{token}-{number}.parquet")
                con.execute(
                    f"COPY (SELECT * FROM read_parquet({quoted(old_path)}, hive_partitioning=false)"
                    f' WHERE NOT "{trace_columns[file.table]}" {_IN_IDS})'
                    f" TO {quoted(new_path)} ({FORMAT})",
                    [list(trace_ids)],
                )
                sync(new_path.parent)
                rewritten_files.append(file_to_part(folder, new_path, file.table, rows=file.rows - count))
            removed_paths = {file.path for file, _ in affected_files}
            if removed_paths:
                files = (*(file for file in manifest.files if file.path not in removed_paths), *rewritten_files)
                write_manifest(folder, Manifest(manifest.schema_version, files))
            for path in removed_paths:
                (folder / path).unlink()
                sync((folder / path).parent)
            remove_empty_folders(folder)
    finally:
        con.close()
    return {file.path: count for file, count in affected_files}


def _affected_files(
    con: duckdb.DuckDBPyConnection, folder: Path, manifest: Manifest, trace_ids: Sequence[str]
) -> Iterator[tuple[PartFile, int]]:
    for table in ERASED_TABLES:
        for file in manifest.table_files(table.name):
            with one_line_errors(folder / file.path):
                count_row = con.execute(
                    f"SELECT count(*) FROM read_parquet({quoted(folder / file.path)}, hive_partitioning=false)"
                    f' WHERE "{trace_column(table)}" {_IN_IDS}',
                    [list(trace_ids)],
                ).fetchone()
            if count_row and count_row[0]:
                yield file, int(count_row[0])


def segments_to_records(folder: Path, trace_ids: Collection[str], subject: str | None) -> dict[Path, int]:
    """Segments of a folder that are left after an intake -> their records about these traces or this subject.

    Such a segment is still being written, or waits for the rest of its traces, so it is not changed. Lines that were
    set aside are looked through as text.
    """
    record_counts: dict[Path, int] = {}
    subject_text = None if subject is None else json_text(subject)
    needles = [text.encode() for text in (*trace_ids, *([subject_text] if subject_text is not None else []))]
    for path in (*folder_to_segments(folder), *sorted(folder.glob(f"*{FOREIGN_SUFFIX}"))):
        with open_plain(path) as file:
            for record, _ in lines_from(file, 0, growing=True):
                matches = isinstance(record, Reward) and record.episode_id in trace_ids
                if isinstance(record, ForeignLine):
                    line = record.line
                    matches = any(needle in line for needle in needles)
                if isinstance(record, SpanRow):
                    # In the spool of a receiver, attributes are as they came, so any of them may name the subject.
                    names_subject = subject_text is not None and subject_text in json_text(record.attributes)
                    matches = names_subject or record.trace_id in trace_ids
                record_counts[path] = record_counts.get(path, 0) + matches
    return {path: count for path, count in record_counts.items() if count}
