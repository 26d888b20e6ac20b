"""The store file: records in, trajectories out.

Invariants: one process writes at a time; every write is a whole transaction and can be repeated without effect;
trajectories come in the order (start, episode id), a page at a time, whatever the size of the store. How a trace
becomes a trajectory (`assemble`) and how a journal is read (`intake`) is decided elsewhere.
"""

# ruff: noqa: S608 - statements are put together from constants; every value is bound
from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import duckdb

from trace_store import intake, schema
from trace_store.connection import connect, one_line_errors, private_files
from trace_store.errors import StoreError
from trace_store.intake import TakenIn
from trace_store.migrations import migrate
from trace_store.records import Action, AdapterRow, Edge, Episode, Reward, RunRow, SpanRow, Trajectory
from trace_store.rows import rows_to_records

EPISODES_PER_PAGE = 1000


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
        where, values = _matching(None if run_id is None else [run_id], split, round, variant)
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
        """Stream the trajectories of matching episodes, by (start, id); memory holds one page of them."""
        where, values = _matching(run_ids, split, round, variant)
        after: tuple[int, str] = (-(2**63), "")
        left = limit
        while left is None or left > 0:
            size = EPISODES_PER_PAGE if left is None else min(left, EPISODES_PER_PAGE)
            # The first comparison lets DuckDB skip row groups; the second is exact.
            rows = self.sql(
                f"SELECT * FROM episodes WHERE {where} AND started_ns >= ? AND (started_ns, episode_id) > (?, ?)"
                " ORDER BY started_ns, episode_id LIMIT ?",
                (*values, after[0], *after, size),
            )
            page = rows_to_records(Episode, schema.EPISODES, rows)
            yield from self._filled(page)
            if len(page) < size:
                return
            after = (page[-1].started_ns, page[-1].episode_id)
            left = None if left is None else left - size

    def _filled(self, page: list[Episode]) -> Iterator[Trajectory]:
        """Episodes in order of their start -> trajectories, with one query per table."""
        if not page:
            return
        ids = [episode.episode_id for episode in page]
        near = "episode_started_ns BETWEEN ? AND ? AND episode_id = ANY(?)"
        span = (page[0].started_ns, page[-1].started_ns, ids)
        actions: dict[str, list[Action]] = {key: [] for key in ids}
        edges: dict[str, list[Edge]] = {key: [] for key in ids}
        rewards: dict[str, list[Reward]] = {key: [] for key in ids}
        rows = self.sql(f'SELECT * FROM actions WHERE {near} ORDER BY episode_id, "index"', span)
        for action in rows_to_records(Action, schema.ACTIONS, rows):
            actions[action.episode_id].append(action)
        for edge in rows_to_records(Edge, schema.EDGES, self.sql(f"SELECT * FROM edges WHERE {near}", span)):
            edges[edge.episode_id].append(edge)
        rows = self.sql(
            "SELECT * FROM rewards WHERE episode_id = ANY(?) ORDER BY created_ns, name, scope, action_id, node, source",
            (ids,),
        )
        for reward in rows_to_records(Reward, schema.REWARDS, rows):
            rewards[reward.episode_id].append(reward)
        for episode in page:
            key = episode.episode_id
            position = {action.action_id: action.index for action in actions[key]}
            edges[key].sort(key=lambda edge: (position[edge.dst], position[edge.src]))
            yield Trajectory(episode, tuple(actions.pop(key)), tuple(edges.pop(key)), tuple(rewards.pop(key)))

    def spans(self, episode_id: str) -> list[SpanRow]:
        """The spans of one trace, by (start, id)."""
        rows = self.sql("SELECT * FROM spans WHERE trace_id = ? ORDER BY start_ns, span_id", (episode_id,))
        return rows_to_records(SpanRow, schema.SPANS, rows)

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


def _matching(
    run_ids: Sequence[str] | None,
    split: str | None,
    round: int | None,  # noqa: A002
    variant: str | None,
) -> tuple[str, tuple[Any, ...]]:
    """What is asked for -> a condition on episodes and its parameters; None asks for nothing."""
    asked = {
        "run_id = ANY(?)": None if run_ids is None else list(run_ids),
        "split = ?": split,
        '"round" = ?': round,
        "variant = ?": variant,
    }
    given = {condition: value for condition, value in asked.items() if value is not None}
    return " AND ".join(["true", *given]), tuple(given.values())
