"""Journal segments -> rows: spans and rewards as they are, complete traces as episodes, actions and edges.

Invariants: what is taken from a segment and the offset it reaches are one transaction, so a crash between two of
them repeats or loses nothing; taking in twice adds nothing; a segment is deleted only when its writer is gone and
all of it is committed. A trace whose spans are not all there waits in `spans`; one that never can be assembled
goes to `refusals` with the reason.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import duckdb

from trace_store import conventions as c
from trace_store import schema
from trace_store.assemble import Incomplete, Malformed, spans_to_trajectory
from trace_store.errors import StoreError
from trace_store.journal import SUFFIX, JournalRecord, lines_from
from trace_store.records import AdapterRow, Reward, RunRow, SpanRow, Trajectory
from trace_store.rows import Row, records_to_rows, rows_to_arrow, rows_to_records

LINES_PER_TRANSACTION = 2000

Transaction = Callable[[], AbstractContextManager[duckdb.DuckDBPyConnection]]


@dataclass(frozen=True, slots=True)
class TakenIn:
    """What one intake added; `torn` and `refused` count journal lines and traces."""

    spans: int = 0
    episodes: int = 0
    rewards: int = 0
    torn: int = 0
    refused: int = 0

    def __add__(self, other: TakenIn) -> TakenIn:
        return TakenIn(
            self.spans + other.spans,
            self.episodes + other.episodes,
            self.rewards + other.rewards,
            self.torn + other.torn,
            self.refused + other.refused,
        )


def journal_to_rows(folder: Path, transaction: Transaction) -> TakenIn:
    """Take in every segment of a journal folder; segments that are still being written as far as they go."""
    total = TakenIn()
    for path in sorted(folder.glob(f"*{SUFFIX}")) if folder.is_dir() else ():
        try:
            with path.open("rb") as file:
                total += _take_in_segment(path, file, transaction)
        except FileNotFoundError:
            continue  # another intake finished it
        except OSError as error:
            raise StoreError(f"cannot read the journal segment {path}: {error.strerror or error}") from error
    return total


def _take_in_segment(path: Path, file: BinaryIO, transaction: Transaction) -> TakenIn:
    growing = not _lock_if_abandoned(file)
    with transaction() as con:
        found = con.execute('SELECT "offset" FROM taken_in WHERE segment = ?', [path.name]).fetchone()
    offset = int(found[0]) if found else 0
    lines = lines_from(file, offset, growing=growing)
    total = TakenIn()
    while part := list(islice(lines, LINES_PER_TRANSACTION)):
        records = [record for record, _ in part if record is not None]
        torn = len(part) - len(records)
        with transaction() as con:
            total += _records_to_rows(con, records) + TakenIn(torn=torn)
            con.execute(
                "INSERT INTO taken_in VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET"
                ' "offset" = excluded."offset", records = records + excluded.records,'
                " torn = torn + excluded.torn, taken_ns = excluded.taken_ns",
                [path.name, part[-1][1], len(records), torn, time.time_ns()],
            )
    if not growing:
        path.unlink()
    return total


def _lock_if_abandoned(file: BinaryIO) -> bool:
    """Whether the writer of a segment is gone; if so it is ours until the file is closed."""
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _records_to_rows(con: duckdb.DuckDBPyConnection, records: Iterable[JournalRecord]) -> TakenIn:
    runs: list[RunRow] = []
    adapters: list[AdapterRow] = []
    rewards: list[Reward] = []
    spans: dict[tuple[str, str], SpanRow] = {}
    for record in records:
        if isinstance(record, SpanRow):
            spans.setdefault((record.trace_id, record.span_id), record)
        elif isinstance(record, Reward):
            rewards.append(record)
        elif isinstance(record, RunRow):
            runs.append(record)
        else:
            adapters.append(record)
    insert_runs(con, runs)
    insert_adapters(con, adapters)
    new_rewards = insert_rewards(con, rewards)
    new_spans = insert(
        con,
        schema.SPANS,
        records_to_rows(schema.SPANS, spans.values()),
        where="NOT EXISTS (SELECT 1 FROM spans s WHERE s.trace_id = arriving.trace_id AND s.span_id = arriving.span_id)",
    )
    episodes, refused = _assemble_traces(con, spans.values())
    return TakenIn(spans=new_spans, episodes=episodes, rewards=new_rewards, refused=refused)


def _assemble_traces(con: duckdb.DuckDBPyConnection, arrived: Iterable[SpanRow]) -> tuple[int, int]:
    """Assemble those traces that the arrived spans (already inserted) complete; numbers of episodes and refusals."""
    traces: dict[str, list[SpanRow]] = {}
    for span in arrived:
        traces.setdefault(span.trace_id, []).append(span)
    if not traces:
        return 0, 0
    decided = con.execute(
        "SELECT episode_id FROM episodes WHERE episode_id = ANY($1)"
        " UNION ALL SELECT trace_id FROM refusals WHERE trace_id = ANY($1)",
        [list(traces)],
    ).fetchall()
    for (trace_id,) in decided:
        del traces[trace_id]
    partial = [trace_id for trace_id, spans in traces.items() if not _all_arrived(spans)]
    stored = con.execute(
        "SELECT * FROM spans WHERE trace_id IN (SELECT trace_id FROM spans WHERE trace_id = ANY(?)"
        " AND operation = ? AND parent_span_id IS NULL)",
        [partial, c.INVOKE_WORKFLOW],
    ).fetchall()
    for trace_id in partial:
        del traces[trace_id]
    for span in rows_to_records(SpanRow, schema.SPANS, stored):
        traces.setdefault(span.trace_id, []).append(span)

    trajectories: list[Trajectory] = []
    refusals: list[Row] = []
    for trace_id, spans in traces.items():
        try:
            trajectories.append(spans_to_trajectory(spans))
        except Incomplete:
            continue
        except Malformed as error:
            refusals.append((trace_id, str(error), time.time_ns()))
    _insert_trajectories(con, trajectories)
    insert(con, schema.REFUSALS, refusals)
    return len(trajectories), len(refusals)


def _all_arrived(spans: list[SpanRow]) -> bool:
    """Whether spans that arrived together are a whole trace by themselves, as is usual."""
    return any(span.parent_span_id is None and span.attributes.get(c.SPAN_COUNT) == len(spans) for span in spans)


def _insert_trajectories(con: duckdb.DuckDBPyConnection, trajectories: list[Trajectory]) -> None:
    insert(con, schema.EPISODES, records_to_rows(schema.EPISODES, [t.episode for t in trajectories]))
    actions: list[Row] = []
    edges: list[Row] = []
    for t in trajectories:
        actions += records_to_rows(schema.ACTIONS, t.actions, t.episode.started_ns)
        edges += records_to_rows(schema.EDGES, t.edges, t.episode.started_ns)
    insert(con, schema.ACTIONS, actions)
    insert(con, schema.EDGES, edges)


def insert_runs(con: duckdb.DuckDBPyConnection, runs: Iterable[RunRow]) -> int:
    """Runs that are not stored yet -> rows; their number."""
    return insert(con, schema.RUNS, records_to_rows(schema.RUNS, {run.run_id: run for run in runs}.values()))


def insert_adapters(con: duckdb.DuckDBPyConnection, adapters: Iterable[AdapterRow]) -> int:
    """Adapter versions that are not stored yet -> rows; their number."""
    by_key = {(adapter.node, adapter.version): adapter for adapter in adapters}
    return insert(con, schema.ADAPTERS, records_to_rows(schema.ADAPTERS, by_key.values()))


def insert_rewards(con: duckdb.DuckDBPyConnection, rewards: Iterable[Reward]) -> int:
    """Rewards that are not stored yet -> rows; their number. All but the value is the key, and parts may be NULL."""
    by_key: dict[Row, Reward] = {}
    for r in rewards:
        by_key.setdefault((r.episode_id, r.name, r.source, r.created_ns, r.scope, r.action_id, r.node), r)
    return insert(
        con,
        schema.REWARDS,
        records_to_rows(schema.REWARDS, by_key.values()),
        where="NOT EXISTS (SELECT 1 FROM rewards r WHERE r.episode_id = arriving.episode_id"
        " AND r.name = arriving.name AND r.source = arriving.source AND r.created_ns = arriving.created_ns"
        " AND r.scope = arriving.scope AND r.action_id IS NOT DISTINCT FROM arriving.action_id"
        " AND r.node IS NOT DISTINCT FROM arriving.node)",
    )


def insert(con: duckdb.DuckDBPyConnection, table: schema.Table, rows: list[Row], where: str = "true") -> int:
    """Bulk-insert rows, leaving alone those whose key is stored already; the number of new rows."""
    if not rows:
        return 0
    con.register("arriving", rows_to_arrow(table, rows))
    try:
        conflict = "ON CONFLICT DO NOTHING" if table.key and table.indexed else ""
        statement = f"INSERT INTO {table.name} SELECT * FROM arriving WHERE {where} {conflict}"  # noqa: S608 - constants
        found = con.execute(statement).fetchone()
    finally:
        con.unregister("arriving")
    return int(found[0]) if found else 0
