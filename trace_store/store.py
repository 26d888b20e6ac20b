"""The store file: records in, trajectories out.

Invariants: one process writes at a time; every write is a whole transaction and can be repeated without effect;
trajectories come in the order (start, episode id), a page at a time, whatever the size of the store. How a trace
becomes a trajectory (`assemble`) and how a journal is read (`intake`) is decided elsewhere.
"""

# ruff: noqa: S608 - statements are put together from constants; every value is bound
from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import duckdb

from trace_store import intake, schema
from trace_store.connection import connect, one_line_errors, private_files
from trace_store.errors import StoreError
from trace_store.intake import TakenIn
from trace_store.migrations import migrate
from trace_store.reading import Wanted, find_action, find_trajectory, stream_trajectories
from trace_store.records import Action, AdapterRow, Episode, Reward, RunRow, SpanRow, Trajectory
from trace_store.rows import rows_to_records
from trace_store.token_lists import COLUMNS, spans_with_lists

# DuckDB would keep what it has read in most of the machine's memory. Past this a reader reads blocks again, and puts
# what a large query needs on disk. A writer is not limited: its indexes have to fit.
READER_MEMORY = "512MB"


class TraceStore:
    """An open store. Use it as a context manager; methods may be called from several threads."""

    def __init__(self, path: Path, con: duckdb.DuckDBPyConnection, *, read_only: bool) -> None:
        self.path = path
        self.read_only = read_only
        self._con = con
        self._write_lock = threading.Lock()

    @classmethod
    def open(
        cls,
        path: Path,
        read_only: bool = False,
        *,
        wait_s: float = 0.0,
        say: Callable[[str], None] = lambda _: None,
    ) -> Self:
        """Open or create a store, and bring it to the current schema version.

        One process may have a store open for writing, or any number for reading. Whoever is in the way is waited
        for, up to `wait_s` seconds; `say` is then told, once, for whom.

        Raises StoreBusyError when another process is still in the way, and StoreError when it is not a store or a
        newer one, and, for reading only, when it does not exist or is an older one.
        """
        path = Path(path)
        con = connect(path, read_only=read_only, wait_s=wait_s, say=say)
        try:
            with one_line_errors(path), private_files():
                migrate(con, str(path), read_only=read_only)
                if read_only:
                    con.execute(f"SET memory_limit = '{READER_MEMORY}'")
        except BaseException:
            con.close()
            raise
        return cls(path, con, read_only=read_only)

    @property
    def journal_folder(self) -> Path:
        """Where recorders journal for this store, next to the file."""
        return self.path.with_name(self.path.name + ".journal")

    def close(self) -> None:
        """Write everything into the file and release it."""
        with self._write_lock, one_line_errors(self.path), private_files():
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

    def transaction(self) -> AbstractContextManager[duckdb.DuckDBPyConnection]:
        """One write transaction, for the modules of this package that change several tables at once."""
        return self._transaction()

    def take_in(self) -> TakenIn:
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
                known = con.execute(
                    "SELECT sha256 FROM adapters WHERE node = ? AND version = ?", [adapter.node, adapter.version]
                ).fetchone()
                if known and known[0] != adapter.sha256:
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
        """Store what a million tokens of a model cost from a time on (Unix, in nanoseconds); replaces what it said."""
        with self._transaction() as con:
            con.execute(
                "INSERT OR REPLACE INTO prices BY NAME SELECT ? AS model, ? AS since_ns, ? AS currency,"
                " ? AS per_million_prompt, ? AS per_million_sampled",
                [model, since_ns, currency, per_million_prompt, per_million_sampled],
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

    def episodes(
        self,
        *,
        run_id: str | None = None,
        split: str | None = None,
        round: int | None = None,  # noqa: A002
        variant: str | None = None,
    ) -> list[Episode]:
        """Episodes that match everything that is given, by (start, id)."""
        where, values = Wanted(None if run_id is None else [run_id], split, round, variant).condition()
        rows = self.sql(f"SELECT * FROM episodes WHERE {where} ORDER BY started_ns, episode_id", values)
        return rows_to_records(Episode, schema.EPISODES, rows)

    def trajectories(
        self,
        *,
        run_ids: Sequence[str] | None = None,
        split: str | None = None,
        round: int | None = None,  # noqa: A002
        variant: str | None = None,
        limit: int | None = None,
    ) -> Iterator[Trajectory]:
        """Stream the trajectories of matching episodes, by (start, id); memory holds a page of them.

        Raises StoreError, when it gets there, at an edge whose actions are not there.
        """
        wanted = Wanted(run_ids, split, round, variant)
        return stream_trajectories(self._snapshot, wanted, limit)

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
        with one_line_errors(self.path), private_files(), self._con.cursor() as cursor:
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
        with one_line_errors(self.path), private_files(), self._con.cursor() as cursor:
            return cursor.execute(query, list(params)).fetchall()

    def _number(self, query: str) -> int:
        return int(self.sql(query)[0][0])
