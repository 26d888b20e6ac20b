"""The part of a store's journal that no writer has taken in yet -> rows, shown beside the store's own.

The rows are made by the intake itself, in a temporary database that is attached to the open store: its schema `unread`
has them, and `main` has the store's tables as views over both. A trace of which the store holds a part is copied there
whole, and hidden in the store. Invariants: store and journal are neither written nor locked beyond the reading of the
store, which keeps intakes out, so nothing is seen twice or missed; a line that is being written is left for later.
"""

# ruff: noqa: S608 - statements are put together from constants and quoted names; every value is bound
from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import duckdb

from trace_store import intake, schema
from trace_store.connection import one_line_errors, private_files
from trace_store.errors import StoreError
from trace_store.files import open_to_read
from trace_store.journal import JournalRecord, journal_segments, lines_from, record_to_rewards
from trace_store.migrations import newest_version
from trace_store.records import SpanRow
from trace_store.relations import attached_relation, empty_relation

_FOLDER_PREFIX = "marft-unread-"
_STORE_NAME = "store"  # the file in such a folder that holds the store's path
_TRACE_COLUMNS = {
    "spans": "trace_id",
    "episodes": "episode_id",
    "actions": "episode_id",
    "edges": "episode_id",
    "refusals": "trace_id",
}
_BOTH_KEYS = {"runs": "run_id", "adapters": "node, version"}  # rows of these tables never change: the store's count


def has_unread(con: duckdb.DuckDBPyConnection, store: Path) -> bool:
    """Whether the journal beside an open store has bytes that it did not take in."""
    segments = journal_segments(store)
    if not segments:
        return False
    offsets = dict(con.execute('SELECT segment, "offset" FROM taken_in').fetchall())
    return any(_size(path) > offsets.get(path.name, 0) for path in segments)


@dataclass(frozen=True, slots=True)
class _Stored:
    """The open store: its catalog in the connection, and the stamp of its file."""

    catalog: str  # quoted
    stamp: tuple[Any, ...]


class UnreadJournal:
    """What the journal of one store has and the store has not.

    Keep it open while the store is opened again and again: as long as nothing was written into the store, and nothing
    of its journal deleted, only what came since the last time is read. Use it as a context manager; not thread-safe.
    """

    def __init__(self, store: Path) -> None:
        self._store = Path(store)
        self._alias = f"unread_{secrets.token_hex(4)}"
        self._folder: Path | None = None
        self._stamp: tuple[Any, ...] | None = None  # of the store whose rows are left out
        self._inodes: dict[str, int] = {}  # of the segments whose rows are here
        self.bytes_read = 0  # of segments, since this was made

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove the temporary database. It must not be attached any more."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
            self._inodes = {}

    def attach(self, con: duckdb.DuckDBPyConnection, *, has_store: bool) -> str:
        """Read what is new in the journal, and return the schema of the connection that shows store and journal as one.

        `con` is the open store, or an empty database in memory where there is no store yet. The caller detaches by
        closing the connection.

        Raises StoreError when a segment cannot be read.
        """
        stored = None
        if has_store:
            ((name,),) = con.execute("SELECT current_database()").fetchall()
            stored = _Stored('"' + name.replace('"', '""') + '".main', store_to_stamp(self._store))
        stamp = None if stored is None else stored.stamp
        is_new = self._folder is None or stamp != self._stamp or self._has_lost_segment()
        if is_new:
            self.close()
            self._folder = _make_folder(self._store)
        assert self._folder is not None
        with one_line_errors(self._store), private_files(), con.cursor() as cursor:
            database = str(self._folder / "rows.duckdb").replace("'", "''")
            cursor.execute(f"ATTACH '{database}' AS {self._alias} (READ_WRITE)")
            if stored is None:
                # A database in memory would spill into the working directory.
                cursor.execute("SET temp_directory = ?", [str(self._folder / "spill")])
            relations = {
                table.name: empty_relation(table)
                if stored is None
                else attached_relation(cursor, table, stored.catalog)
                for table in schema.TABLES
            }
            if is_new:
                self._create_tables(cursor, relations)
            cursor.execute(f"USE {self._alias}.unread")
            self._read_segments(cursor, relations)
            self._create_views(cursor, relations, has_store=has_store)
        self._stamp = stamp
        return f"{self._alias}.main"

    def _has_lost_segment(self) -> bool:
        """Whether a segment whose rows are here is gone, or another file has its name: the journal was deleted, since
        nobody takes one in without writing into the store."""
        present_inodes = {path.name: _inode(path) for path in journal_segments(self._store)}
        return any(present_inodes.get(name) != inode for name, inode in self._inodes.items())

    def _create_tables(self, cursor: duckdb.DuckDBPyConnection, relations: Mapping[str, str]) -> None:
        cursor.execute(f"CREATE SCHEMA {self._alias}.unread")
        cursor.execute(f"USE {self._alias}.unread")
        for statement in schema.tables():
            cursor.execute(statement)
        cursor.execute(f"INSERT INTO taken_in SELECT * FROM {relations['taken_in']}")
        cursor.execute("CREATE TABLE hidden_traces (trace_id VARCHAR PRIMARY KEY)")
        cursor.execute("CREATE TABLE hidden_rewards (episode_id VARCHAR PRIMARY KEY)")

    def _read_segments(self, cursor: duckdb.DuckDBPyConnection, relations: Mapping[str, str]) -> None:
        offsets = dict(cursor.execute('SELECT segment, "offset" FROM taken_in').fetchall())
        for path in journal_segments(self._store):
            offset = offsets.get(path.name, 0)
            try:
                if _size(path) <= offset:
                    continue
                show = partial(_show_part, cursor, path.name, relations)
                with open_to_read(path) as file:
                    self._inodes[path.name] = os.fstat(file.fileno()).st_ino
                    for part, _ in intake.lines_to_parts(lines_from(file, offset, growing=True), offset):
                        for _ in intake.around_faults(part, offset, show):
                            pass
                        self.bytes_read += part[-1][1] - offset
                        offset = part[-1][1]
            except FileNotFoundError:
                continue  # taken in by somebody who made the store just now, which the caller looks for
            except OSError as error:
                raise StoreError(f"cannot read the journal segment {path}: {error.strerror or error}") from error

    def _create_views(
        self, cursor: duckdb.DuckDBPyConnection, relations: Mapping[str, str], *, has_store: bool
    ) -> None:
        hidden = {
            name: f"(SELECT * FROM {self._alias}.unread.{name})"
            for name in ("hidden_traces", "hidden_rewards")
            if cursor.execute(f"SELECT count(*) FROM {name}").fetchall() != [(0,)]
        }
        cursor.execute(f"USE {self._alias}.main")
        for table in schema.TABLES:
            columns = ", ".join(f'"{column.name}"' for column in table.columns)
            rows = " UNION ALL ".join(
                f"SELECT {columns} FROM {relation}"
                for relation in self._table_to_parts(table.name, relations[table.name], hidden, has_store=has_store)
            )
            cursor.execute(f"CREATE OR REPLACE VIEW {table.name} AS {rows}")
        for statement in schema.views():
            cursor.execute(statement)

    def _table_to_parts(self, table: str, stored: str, hidden: Mapping[str, str], *, has_store: bool) -> Iterator[str]:
        """The relations whose rows make up a table."""
        unread = f"{self._alias}.unread.{table}"
        if table == "schema_version" and not has_store:
            yield f"(SELECT {newest_version()} AS version, 'not made yet' AS sentence, 0::BIGINT AS applied_ns)"
        elif table in _TRACE_COLUMNS:
            yield unread
            column = _TRACE_COLUMNS[table]
            is_shown = (
                f"{column} NOT IN (SELECT trace_id FROM {hidden['hidden_traces']})"
                if "hidden_traces" in hidden
                else "true"
            )
            yield f"{stored} WHERE {is_shown}"
        elif table == "rewards":
            yield unread
            is_shown = f"episode_id NOT IN (FROM {hidden['hidden_rewards']})" if "hidden_rewards" in hidden else "true"
            yield f"{stored} WHERE {is_shown}"
        elif table in _BOTH_KEYS:
            yield f"{unread} ANTI JOIN {stored} stored USING ({_BOTH_KEYS[table]})"
            yield stored
        else:
            yield stored


def _show_part(
    cursor: duckdb.DuckDBPyConnection,
    segment: str,
    relations: Mapping[str, str],
    part: Sequence[intake.Line],
    _begin: int,
) -> None:
    """Lines of a segment -> rows of the temporary database, in one transaction; foreign lines are passed over."""
    cursor.execute("BEGIN")
    try:
        records = intake.lines_to_records(part)
        _copy_touched(cursor, records, relations)
        intake.records_to_rows(cursor, records)
        intake.note_offset(cursor, segment, part)
        cursor.execute("COMMIT")
    except BaseException:
        with suppress(duckdb.Error):  # a failed COMMIT has rolled back already
            cursor.execute("ROLLBACK")
        raise


def _copy_touched(
    cursor: duckdb.DuckDBPyConnection, records: Sequence[JournalRecord], relations: Mapping[str, str]
) -> None:
    """Copy what the store has of the traces and rewards that records are about; the store's own is hidden from then."""
    traces: dict[str, list[SpanRow]] = {}
    for record in records:
        if isinstance(record, SpanRow):
            traces.setdefault(record.trace_id, []).append(record)
    if traces:
        starts = [span.start_ns for spans in traces.values() for span in spans]
        partial_ids = [trace_id for trace_id, spans in traces.items() if not intake.is_complete(spans)]
        # A span that arrives again has the start that it had, by which DuckDB skips what is of other times.
        queries = [(f"start_ns BETWEEN {min(starts)} AND {max(starts)} AND ", list(traces))]
        queries += [("", partial_ids)] if partial_ids else []
        for bounds, trace_ids in queries:
            cursor.execute(
                "INSERT INTO hidden_traces SELECT DISTINCT trace_id"
                f" FROM {relations['spans']} WHERE {bounds}trace_id = ANY(?) ON CONFLICT DO NOTHING RETURNING trace_id",
                [trace_ids],
            )
            hidden_ids = [trace_id for (trace_id,) in cursor.fetchall()]
            _copy_rows(cursor, hidden_ids, relations, trace_columns=_TRACE_COLUMNS)
    rewarded_ids = list({reward.episode_id for record in records for reward in record_to_rewards(record)})
    if rewarded_ids:
        cursor.execute(
            "INSERT INTO hidden_rewards SELECT DISTINCT episode_id"
            f" FROM {relations['rewards']} WHERE episode_id = ANY(?) ON CONFLICT DO NOTHING RETURNING episode_id",
            [rewarded_ids],
        )
        hidden_ids = [episode_id for (episode_id,) in cursor.fetchall()]
        _copy_rows(cursor, hidden_ids, relations, trace_columns={"rewards": "episode_id"})


def _copy_rows(
    cursor: duckdb.DuckDBPyConnection,
    trace_ids: Sequence[str],
    relations: Mapping[str, str],
    trace_columns: Mapping[str, str],
) -> None:
    for table, column in trace_columns.items() if trace_ids else ():
        cursor.execute(
            f"INSERT INTO {table} BY NAME SELECT * FROM {relations[table]} WHERE {column} = ANY(?)", [list(trace_ids)]
        )


def _make_folder(store: Path) -> Path:
    """A folder for this user only, which says whose rows it holds; those of killed processes are removed."""
    remove_abandoned()
    folder = Path(tempfile.mkdtemp(prefix=f"{_FOLDER_PREFIX}{os.getpid()}-"))
    (folder / _STORE_NAME).write_bytes(os.fsencode(store.resolve()))
    return folder


def remove_abandoned() -> None:
    """Remove the temporary databases of processes of this user that were killed."""
    for folder, pid in _own_folders():
        if not _is_running(pid):
            shutil.rmtree(folder, ignore_errors=True)


def readers_of(store: Path) -> dict[Path, int]:
    """Temporary database with rows of a store's journal -> the process that shows them, and lets go when it ends.

    It lets go as well when it next looks at the store, if that was written into.
    """
    readers = {}
    for folder, pid in _own_folders():
        with suppress(OSError):
            if (folder / _STORE_NAME).read_bytes() == os.fsencode(store.resolve()):
                readers[folder] = pid
    return readers


def _own_folders() -> Iterator[tuple[Path, int]]:
    """The folders of this user's processes in the system's folder for temporary files."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*"):
        pid = folder.name.removeprefix(_FOLDER_PREFIX).partition("-")[0]
        with suppress(OSError):
            if pid.isdecimal() and not folder.is_symlink() and folder.stat().st_uid == os.getuid():
                yield folder, int(pid)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # taken in meanwhile
        return 0


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:  # deleted just now
        return None


def store_to_stamp(store: Path) -> tuple[Any, ...]:
    """What changes with every write into a store's file; it is taken while nobody can write."""
    stamps: list[tuple[int, int, int] | None] = []
    for path in (store, store.with_name(store.name + ".wal")):
        try:
            status = path.stat()
        except FileNotFoundError:
            stamps.append(None)
        else:
            stamps.append((status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(stamps)
