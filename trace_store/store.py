"""The store file: records in, trajectories out.

Invariants: one process writes at a time; every write is a whole transaction and can be repeated without effect;
trajectories come in the order (start, episode id), a page at a time, whatever the size of the store. `assemble` makes
a trajectory of a trace, `intake` reads the journal.
"""

# ruff: noqa: S608 - statements are put together from constants; every value is bound
from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import astuple
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import duckdb

from trace_store import intake, schema
from trace_store.connection import connect, connect_memory, one_line_errors, private_files
from trace_store.errors import StoreError
from trace_store.files import sync
from trace_store.intake import IntakeCounts
from trace_store.journal import is_recorded, journal_of
from trace_store.migrations import FIRST_VERSION, migrate, newest_version, version_of
from trace_store.reading import EpisodeFilter, find_action, find_trajectory, stream_trajectories
from trace_store.records import Action, AdapterRow, Episode, Prediction, Reward, RunRow, SpanRow, Trajectory
from trace_store.rows import rows_to_records
from trace_store.token_lists import COLUMNS, spans_with_lists
from trace_store.unread import UnreadJournal, has_unread

# DuckDB would keep what it has read in most of the machine's memory. Past this a reader reads blocks again, and puts
# what a large query needs on disk. A writer is not limited: its indexes have to fit.
READER_MEMORY = "512MB"


class TraceStore:
    """An open store. Use it as a context manager; methods may be called from several threads."""

    def __init__(
        self, path: Path, con: duckdb.DuckDBPyConnection, *, read_only: bool, schema_name: str | None = None
    ) -> None:
        """`schema_name`: the schema of the connection that is read, where it is not the first one."""
        self.path = path
        self.read_only = read_only
        self._con = con
        self._schema_name = schema_name
        self._closing = ExitStack()  # what ends with this store, after its connection
        self._write_lock = threading.Lock()
        self._log_stamp = (0, 0)  # inode and size of the log whose name is on the disk; zeros where there is none

    @classmethod
    def open(
        cls,
        path: Path,
        read_only: bool = False,
        *,
        wait_s: float = 0.0,
        on_wait: Callable[[str], None] = lambda _: None,
        unread: UnreadJournal | None = None,
    ) -> Self:
        """Open or create a store, and bring it to the current schema version.

        One process may have a store open for writing, or any number for reading. Waits up to `wait_s` seconds for
        a process that is in the way; `on_wait` is then called once, with a line that names it.

        For reading, the store shows as well what its journal has by now and no writer has taken in, also where there
        is a journal only, or a file of an older version. `unread` keeps what was read of the journal from one opening
        to the next; without one it is read each time.

        Raises StoreBusyError when another process is still in the way, and StoreError when it is not a store or a
        newer one, and, for reading only, when neither it nor a journal beside it exists.
        """
        path = Path(path)
        if read_only:
            return cls._open_reader(path, unread, wait_s=wait_s, on_wait=on_wait)
        is_new = not path.exists()
        con = connect(path, read_only=False, wait_s=wait_s, on_wait=on_wait)
        try:
            with one_line_errors(path), private_files():
                migrate(con, str(path))
            if is_new:
                sync(path.parent)  # DuckDB syncs what is in its files, but not their names
        except BaseException:
            con.close()
            raise
        return cls(path, con, read_only=False)

    @classmethod
    def _open_reader(
        cls, path: Path, unread: UnreadJournal | None, *, wait_s: float, on_wait: Callable[[str], None]
    ) -> Self:
        while True:
            has_store = path.exists() or not is_recorded(path)  # where there is nothing at all, `connect` says so
            closing = ExitStack()
            with ExitStack() as on_error:
                con = connect(path, read_only=True, wait_s=wait_s, on_wait=on_wait) if has_store else connect_memory()
                on_error.enter_context(closing)
                on_error.callback(con.close)
                with one_line_errors(path), private_files():
                    is_older = has_store and FIRST_VERSION <= version_of(con) < newest_version()
                    if has_store and not is_older:
                        migrate(con, str(path), read_only=True)
                    con.execute(f"SET memory_limit = '{READER_MEMORY}'")
                    needs_journal = not has_store or is_older or has_unread(con, path)
                schema_name = None
                if needs_journal:
                    journal = closing.enter_context(UnreadJournal(path)) if unread is None else unread
                    schema_name = journal.attach(con, has_store=has_store)
                elif unread is not None:
                    unread.close()  # what it holds was taken in or erased since, and nobody would look at it again
                if not has_store and path.exists():
                    continue  # made meanwhile: it may have taken in what was to be read
                on_error.pop_all()
            store = cls(path, con, read_only=True, schema_name=schema_name)
            store._closing = closing
            return store

    @property
    def journal_folder(self) -> Path:
        """Where recorders journal for this store, next to the file."""
        return journal_of(self.path)

    def close(self) -> None:
        """Write everything into the file and release it."""
        with self._closing, self._write_lock, one_line_errors(self.path), private_files():
            self._con.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _transaction(self) -> Iterator[duckdb.DuckDBPyConnection]:
        if self.read_only:
            raise StoreError(f"store {self.path} is open for reading only; open it for writing")
        with self._write_lock, private_files(), one_line_errors(self.path):
            self._con.execute("BEGIN")
            try:
                yield self._con
                self._con.execute("COMMIT")
            except BaseException:
                with suppress(duckdb.Error):  # a failed COMMIT has rolled back already
                    self._con.execute("ROLLBACK")
                raise
            self._sync_log_name()

    def _sync_log_name(self) -> None:
        """DuckDB syncs what is in its log, but not that there is one: it begins a new one after each checkpoint."""
        try:
            status = self.path.with_name(self.path.name + ".wal").stat()
            log_stamp = (status.st_ino, status.st_size)
        except FileNotFoundError:
            log_stamp = (0, 0)
        known_inode, known_size = self._log_stamp
        if log_stamp[0] != known_inode or log_stamp[1] < known_size:  # a new log may have the number of the old one
            sync(self.path.parent)
        self._log_stamp = log_stamp

    def transaction(self) -> AbstractContextManager[duckdb.DuckDBPyConnection]:
        """One write transaction, for the modules of this package that change several tables at once."""
        return self._transaction()

    def take_in(self) -> IntakeCounts:
        """Take in what recorders have journaled since the last time, and assemble the traces that are complete."""
        if self.read_only:
            raise StoreError(f"store {self.path} is open for reading only; open it for writing to take in its journal")
        return intake.journal_to_rows(self.journal_folder, self._transaction)

    def put_run(self, run: RunRow) -> None:
        """Store a run; nothing changes when its id is stored already."""
        with self._transaction() as con:
            intake.insert_runs(con, [run])

    def put_adapter(self, adapter: AdapterRow) -> None:
        """Store an adapter version; raises StoreError when that version is stored with another hash."""
        with self._transaction() as con:
            if intake.insert_adapters(con, [adapter]) == 0:
                stored_row = con.execute(
                    "SELECT sha256 FROM adapters WHERE node = ? AND version = ?", [adapter.node, adapter.version]
                ).fetchone()
                if stored_row and stored_row[0] != adapter.sha256:
                    raise StoreError(
                        f"store {self.path} has another adapter {adapter.node}@{adapter.version}; publish a new version"
                    )

    def put_adapter_episodes(self, node: str, version: int, episode_ids: Sequence[str]) -> None:
        """Store which episodes a version of a node's adapter was trained on, besides those of its parents."""
        with self._transaction() as con:
            con.execute(
                "INSERT INTO adapter_episodes SELECT ?, ?, unnest(?::VARCHAR[]) ON CONFLICT DO NOTHING",
                [node, version, list(episode_ids)],
            )

    def put_price(
        self, model: str, per_million_prompt: float, per_million_sampled: float, currency: str, since_ns: int = 0
    ) -> None:
        """Store the price of a million tokens of a model from a Unix time (ns) on; replaces a price of that time."""
        with self._transaction() as con:
            con.execute(
                "INSERT OR REPLACE INTO prices BY NAME SELECT ? AS model, ? AS since_ns, ? AS currency,"
                " ? AS per_million_prompt, ? AS per_million_sampled",
                [model, since_ns, currency, per_million_prompt, per_million_sampled],
            )

    def put_predictions(self, predictions: Sequence[Prediction]) -> None:
        """Store what a plan predicted; one of the same plan, node and quantity is kept as it is."""
        with self._transaction() as con:
            for prediction in predictions:
                con.execute(
                    "INSERT INTO predictions VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
                    list(astuple(prediction)),
                )

    def put_rewards(self, rewards: Sequence[Reward]) -> int:
        """Store rewards and return how many were new; all but the value is a reward's key."""
        with self._transaction() as con:
            return intake.insert_rewards(con, rewards)

    def runs(self) -> list[RunRow]:
        """All runs, oldest first."""
        return rows_to_records(RunRow, schema.RUNS, self.sql("SELECT * FROM runs ORDER BY started_ns, run_id"))

    def adapters(self, node: str | None = None) -> list[AdapterRow]:
        """Adapter versions of one node or of all, by node and version."""
        rows = self.sql("SELECT * FROM adapters WHERE $1 IS NULL OR node = $1 ORDER BY node, version", (node,))
        return rows_to_records(AdapterRow, schema.ADAPTERS, rows)

    def predictions(self) -> list[Prediction]:
        """What plans predicted, the oldest first, by node and quantity."""
        rows = self.sql("SELECT * FROM predictions ORDER BY created_ns, run_id, node, quantity")
        return rows_to_records(Prediction, schema.PREDICTIONS, rows)

    def episodes(
        self,
        *,
        run_id: str | None = None,
        split: str | None = None,
        round: int | None = None,  # noqa: A002
        variant: str | None = None,
        forks: bool = False,
    ) -> list[Episode]:
        """Episodes that match every argument that is not None, by (start, id); no forks unless `forks` is true."""
        condition, values = EpisodeFilter(
            None if run_id is None else [run_id], split, round, variant=variant, forks=forks
        ).condition()
        rows = self.sql(f"SELECT * FROM episodes WHERE {condition} ORDER BY started_ns, episode_id", values)
        return rows_to_records(Episode, schema.EPISODES, rows)

    def trajectories(
        self,
        *,
        run_ids: Sequence[str] | None = None,
        split: str | None = None,
        round: int | None = None,  # noqa: A002
        variant: str | None = None,
        episode_ids: Sequence[str] | None = None,
        forks: bool = False,
        limit: int | None = None,
    ) -> Iterator[Trajectory]:
        """Stream the trajectories of matching episodes, by (start, id); memory holds a page of them.

        Forks are left out unless `forks` is true: their beginning is another episode's, and they are no fresh sample of
        their task.

        Raises StoreError, when it gets there, at an edge whose actions are not there.
        """
        episode_filter = EpisodeFilter(run_ids, split, round, variant=variant, episode_ids=episode_ids, forks=forks)
        return stream_trajectories(self._snapshot, episode_filter, limit)

    def trajectory(self, episode_id: str) -> Trajectory | None:
        """The trajectory of one episode; None when there is no such episode."""
        with self._snapshot() as con:
            return find_trajectory(con, episode_id)

    def action(self, episode_id: str, action_id: str) -> Action | None:
        """One action, or None. It is found through its episode, which every span, edge and reward names beside it."""
        with self._snapshot() as con:
            return find_action(con, episode_id, action_id)

    @contextmanager
    def _snapshot(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """A connection of its own that sees one state of the store throughout."""
        with one_line_errors(self.path), private_files(), self._cursor() as cursor:
            cursor.execute("BEGIN")
            yield cursor
            cursor.execute("COMMIT")

    def snapshot(self) -> AbstractContextManager[duckdb.DuckDBPyConnection]:
        """A connection that sees one state of the store throughout, for questions that need more than rows."""
        return self._snapshot()

    def spans(self, episode_id: str) -> list[SpanRow]:
        """The spans of one trace, by (start, id)."""
        rows = self.sql("SELECT * FROM spans WHERE trace_id = ? ORDER BY start_ns, span_id", (episode_id,))
        spans = rows_to_records(SpanRow, schema.SPANS, rows)
        roots = [span.start_ns for span in spans if span.parent_span_id is None]
        actions = self.sql(
            f"SELECT action_id, {', '.join(COLUMNS)} FROM actions WHERE episode_started_ns = ANY(?) AND episode_id = ?",
            (roots, episode_id),
        )
        return spans_with_lists(spans, {action_id: lists for action_id, *lists in actions})

    def counts(self) -> dict[str, int]:
        """Rows of each table, and under `waiting` the traces whose spans have not all arrived."""
        counts = {table.name: self._number(f"SELECT count(*) FROM {table.name}") for table in schema.TABLES}
        counts["waiting"] = self._number(
            "SELECT count(*) FROM (SELECT DISTINCT trace_id FROM spans) t"
            " ANTI JOIN episodes e ON e.episode_id = t.trace_id ANTI JOIN refusals f ON f.trace_id = t.trace_id"
        )
        return counts

    def sql(self, query: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Rows of one query, its parameters bound. Raises StoreError with DuckDB's first line."""
        with one_line_errors(self.path), private_files(), self._cursor() as cursor:
            return cursor.execute(query, list(params)).fetchall()

    def _cursor(self) -> duckdb.DuckDBPyConnection:
        cursor = self._con.cursor()
        if self._schema_name is not None:
            cursor.execute(f"USE {self._schema_name}")
        return cursor

    def _number(self, query: str) -> int:
        return int(self.sql(query)[0][0])
