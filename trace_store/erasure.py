"""A subject or an age -> the traces that hold it, and a store, exports and journal segments without them.

Chosen by subject: episodes that name the subject, traces that never became episodes whose spans do, and whatever
replays or goes on with one of them (`parent_episode`, to any depth), because it repeats what was said there. Chosen by
age: what ended before then.
Invariants: a chosen trace goes from every table but `adapter_episodes`, which keeps only that an adapter learned from
an episode of that number; deleting is one transaction; the files of an export are exchanged for files without the
rows, and killed at any moment, it still reads as a whole; lines of a segment are overwritten where they stand, so its
writer goes on. `compaction` removes the bytes of deleted rows from the store
file.
"""

# ruff: noqa: S608 - statements are put together from constants and quoted paths; every value is bound
from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import duckdb

from trace_store import conventions as c
from trace_store.attribute_kinds import Kind, key_to_kind
from trace_store.connection import connect_memory, one_line_errors, private_files
from trace_store.files import open_to_read, open_to_write, sync
from trace_store.journal import (
    FOREIGN_SUFFIX,
    HIDDEN_SUFFIX,
    ForeignLine,
    begins_unfinished,
    blank_lines,
    folder_to_segments,
    is_plain,
    json_text,
    lines_from,
    lock_if_abandoned,
    record_of,
    record_to_rewards,
)
from trace_store.json_text import read_json
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
from trace_store.records import SpanRow
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


def erased_texts(store: TraceStore, trace_ids: Sequence[str]) -> Iterator[str]:
    """What people and models said in these traces: the texts in their content attributes and tasks, at any depth."""
    rows = store.sql(
        f"SELECT attributes::VARCHAR, status_message FROM spans WHERE trace_id {_IN_IDS}"
        f" UNION ALL SELECT task::VARCHAR, reason FROM episodes WHERE episode_id {_IN_IDS}",
        (list(trace_ids), list(trace_ids)),
    )
    for content, message in rows:
        values = json.loads(content)
        yield from _texts_in({key: value for key, value in values.items() if key_to_kind(key) is Kind.CONTENT})
        yield from _texts_in(message)


def _texts_in(value: Any) -> Iterator[str]:
    """The texts in a JSON value, also in JSON that is itself a text, as messages are in an attribute."""
    waiting_values = [value]
    while waiting_values:
        value = waiting_values.pop()
        if isinstance(value, dict):
            waiting_values += value.values()
        elif isinstance(value, list):
            waiting_values += value
        elif isinstance(value, str):
            parsed = None
            if value[:1] in ("{", "["):
                with suppress(ValueError):
                    parsed = read_json(value)
            if parsed is None:
                yield value
            else:
                waiting_values.append(parsed)


def has_text_elsewhere(store: TraceStore, text: str, trace_ids: Sequence[str]) -> bool:
    """Whether a trace that is not among these says the same."""
    ((is_there,),) = store.sql(
        f"SELECT EXISTS (SELECT 1 FROM spans WHERE contains(attributes::VARCHAR, ?) AND trace_id NOT {_IN_IDS})",
        (text, list(trace_ids)),
    )
    return bool(is_there)


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


@dataclass(frozen=True, slots=True)
class SegmentTraces:
    """What to erase from segments: every record about these traces, and spans that name the subject.

    Of a line that is no record of this version, its text decides: it has the id of a trace, or the subject where this
    version writes it.
    """

    trace_ids: frozenset[str]
    subject: str | None = None


def spool_to_traces(
    folder: Path, trace_ids: Sequence[str], names_subject: Callable[[SpanRow], bool], before_ns: int | None
) -> SegmentTraces:
    """These traces, and those that wait in a receiver's spool and name the subject, or ended before a Unix time.

    Args:
        names_subject: reads a span as it was received, in whatever convention that is.
    """
    last_ends_ns: dict[str, int] = {}
    chosen_ids = set(trace_ids)
    for path in folder_to_segments(folder):
        with open_to_read(path) as file:
            for record, _ in lines_from(file, 0, growing=True):
                if isinstance(record, SpanRow):
                    if names_subject(record):
                        chosen_ids.add(record.trace_id)
                    last_ends_ns[record.trace_id] = max(last_ends_ns.get(record.trace_id, 0), record.end_ns)
    if before_ns is not None:
        chosen_ids |= {trace_id for trace_id, end_ns in last_ends_ns.items() if end_ns < before_ns}
    return SegmentTraces(frozenset(chosen_ids))


def count_in_segments(folder: Path, chosen: SegmentTraces) -> dict[Path, int]:
    """Segment of a journal or spool -> its records about these traces or this subject; those without are left out.

    Lines that were set aside, or were to be by a process that was killed, count as well; so do lines that a crash left
    half written, whatever they are about.
    """
    counts = {}
    for path in _segments(folder):
        with _damaged_lines(path) as damaged_lines:
            counts[path] = len(_lines_where(path, partial(_is_chosen, chosen))) + len(damaged_lines)
    return {path: count for path, count in counts.items() if count}


def count_mentions(folder: Path, chosen: SegmentTraces) -> dict[Path, int]:
    """Segment -> its lines of other versions that hold the subject as a text, and may mean something else by it."""
    counts = {path: len(_lines_where(path, partial(_is_mention, chosen))) for path in _segments(folder)}
    return {path: count for path, count in counts.items() if count}


def erase_from_segments(folder: Path, chosen: SegmentTraces) -> dict[Path, int]:
    """Overwrite the records about these traces or this subject, in segments that grow as well.

    Where the writer of a segment is gone, what it left half written goes too: it was never acknowledged, nobody takes
    it in, and nobody can tell whom it is about.
    The caller has the store of a journal open for writing, or holds the lock of a spool, so nobody takes them in.
    Returns the numbers of erased records, as `count_in_segments`. A file of lines set aside goes when none is left.
    """
    counts: dict[Path, int] = {}
    for path in _segments(folder):
        with _damaged_lines(path) as damaged_lines:
            lines = _lines_where(path, partial(_is_chosen, chosen))
            if not (lines or damaged_lines):
                continue
            counts[path] = len(lines) + len(damaged_lines)
            handle = open_to_write(path)
            try:
                if damaged_lines:  # else somebody may be writing, and what came since would be cut off
                    _cut_damaged_end(handle, damaged_lines)
                blank_lines(handle, (*lines, *damaged_lines))
            finally:
                os.close(handle)
        if path.suffix == FOREIGN_SUFFIX and not _lines_where(path, lambda line: not line.isspace()):
            path.unlink()
    return counts


def _segments(folder: Path) -> list[Path]:
    """Every file of a journal or spool that holds records, in whatever state it is."""
    others = (path for suffix in (FOREIGN_SUFFIX, HIDDEN_SUFFIX) for path in sorted(folder.glob(f"*{suffix}")))
    return [*folder_to_segments(folder), *filter(is_plain, others)]


def _cut_damaged_end(handle: int, damaged_lines: list[tuple[int, int]]) -> None:
    """Shortens a file by the damaged lines at its end, and the list by these: the last one may have no end to be left
    standing."""
    whole_size = size = os.fstat(handle).st_size
    while damaged_lines and damaged_lines[-1][1] == size:
        size, _ = damaged_lines.pop()
    if size < whole_size:
        os.ftruncate(handle, size)


def _lines_where(path: Path, is_wanted: Callable[[bytes], bool]) -> list[tuple[int, int]]:
    """Start and end of each of these lines; none where the file was removed.

    Those of an append that has not returned are its writer's, or damaged ones where it is gone.
    """
    lines: list[tuple[int, int]] = []
    end = 0
    with suppress(FileNotFoundError), open_to_read(path) as file:
        for line in file:
            if begins_unfinished(line):
                break
            start, end = end, end + len(line)
            if is_wanted(line):
                lines.append((start, end))
    return lines


@contextmanager
def _damaged_lines(path: Path) -> Iterator[list[tuple[int, int]]]:
    """Start and end of each line that is no whole one, with what was erased before it; none where somebody may still
    write. Who would write or take in is kept out until the block ends."""
    lines: list[tuple[int, int]] = []
    with ExitStack() as stack:
        with suppress(FileNotFoundError):
            file = stack.enter_context(open_to_read(path))
            end = 0
            if lock_if_abandoned(file):
                for record, line_end in lines_from(file, 0, growing=False):
                    start, end = end, line_end
                    if record is None:
                        lines.append((start, end))
        yield lines


def _is_chosen(chosen: SegmentTraces, line: bytes) -> bool:
    record = record_of(line)  # None for what is damaged, erased or still being written
    if isinstance(record, ForeignLine):
        needles = [trace_id.encode() for trace_id in chosen.trace_ids]
        if chosen.subject is not None:
            needles.append(f"{json_text(c.SUBJECT_ID)}:{json_text(chosen.subject)}".encode())
        return any(needle in line for needle in needles)
    if record is None:
        return False
    if not isinstance(record, SpanRow):
        return any(reward.episode_id in chosen.trace_ids for reward in record_to_rewards(record))
    names_subject = chosen.subject is not None and record.attributes.get(c.SUBJECT_ID) == chosen.subject
    return names_subject or record.trace_id in chosen.trace_ids


def _is_mention(chosen: SegmentTraces, line: bytes) -> bool:
    if chosen.subject is None or json_text(chosen.subject).encode() not in line:
        return False
    return isinstance(record_of(line), ForeignLine) and not _is_chosen(chosen, line)
