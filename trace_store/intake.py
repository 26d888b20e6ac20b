"""Journal segments -> rows: spans and rewards as they are, complete traces as episodes, actions and edges.

Invariants: what is taken from a segment and the offset it reaches are one transaction, so a crash between two of
them repeats or loses nothing; taking in twice adds nothing; a segment is deleted only when its writer is gone, or has
let it go, and all of it is committed and on the disk. A line that cannot be taken in is set aside in a file of its own,
and no other line waits for it. A trace whose spans are not all there waits in `spans`; one that never can be assembled
goes to `refusals` with the reason.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import duckdb

from trace_store import conventions as c
from trace_store import schema
from trace_store.assemble import Incomplete, Malformed, spans_to_trajectory
from trace_store.errors import StoreError
from trace_store.files import open_to_read
from trace_store.insertion import Record, insert, records_to_columns
from trace_store.journal import (
    ForeignLine,
    JournalLine,
    JournalRecord,
    RewardGroup,
    folder_to_odd_paths,
    folder_to_segments,
    line_of,
    lines_from,
    lock_if_abandoned,
    record_to_rewards,
    return_known,
    set_aside,
)
from trace_store.migrations import newest_version
from trace_store.records import AdapterRow, Reward, RunRow, SpanRow, Trajectory
from trace_store.rows import rows_to_records
from trace_store.token_lists import span_without_lists

log = logging.getLogger("marft_bridge")

LINES_PER_TRANSACTION = 4000
BYTES_PER_TRANSACTION = 2**24

_UNLESS_STORED = "ON CONFLICT DO NOTHING"
# What a value that the store cannot hold ends in: DuckDB's errors about data, or Python's before they get there.
_FAULTS_OF_VALUES = (
    duckdb.DataError,
    duckdb.IntegrityError,
    duckdb.InvalidInputException,
    TypeError,
    ValueError,
    KeyError,
    AttributeError,
    OverflowError,
    RecursionError,
)

_T = TypeVar("_T")
Line = tuple[JournalLine, int]
Transaction = Callable[[], AbstractContextManager[duckdb.DuckDBPyConnection]]


@dataclass(frozen=True, slots=True)
class IntakeCounts:
    """What one intake added; `torn` and `refused` count journal lines and traces.

    `foreign` counts lines that were set aside, and `odd` what is called a segment and is no plain file.
    """

    spans: int = 0
    episodes: int = 0
    rewards: int = 0
    torn: int = 0
    refused: int = 0
    foreign: int = 0
    odd: int = 0

    def __add__(self, other: IntakeCounts) -> IntakeCounts:
        return IntakeCounts(
            self.spans + other.spans,
            self.episodes + other.episodes,
            self.rewards + other.rewards,
            torn=self.torn + other.torn,
            refused=self.refused + other.refused,
            foreign=self.foreign + other.foreign,
            odd=self.odd + other.odd,
        )


def journal_to_rows(folder: Path, transaction: Transaction) -> IntakeCounts:
    """Take in every segment of a journal folder; segments that are still being written as far as they go."""
    if not folder.is_dir():
        return IntakeCounts()
    return_known(folder, newest_version())
    odd_paths = folder_to_odd_paths(folder)
    for path in odd_paths:
        log.warning("%s is called a segment, is no plain file, and is not read; remove it", path)
    total = IntakeCounts(odd=len(odd_paths))
    for path in folder_to_segments(folder):
        try:
            with open_to_read(path) as file:
                total += _take_in_segment(path, file, transaction)
        except FileNotFoundError:
            continue  # another intake finished it
        except OSError as error:
            raise StoreError(f"cannot read the journal segment {path}: {error.strerror or error}") from error
    if total.foreign:
        log.warning("%d lines of %s cannot be taken in; they are kept in files *.foreign there", total.foreign, folder)
    return total


def _take_in_segment(path: Path, file: BinaryIO, transaction: Transaction) -> IntakeCounts:
    growing = not lock_if_abandoned(file)
    with transaction() as con:
        offset_row = con.execute('SELECT "offset" FROM taken_in WHERE segment = ?', [path.name]).fetchone()
    offset = int(offset_row[0]) if offset_row else 0
    total = IntakeCounts()

    def store_part(part: Sequence[Line], begin: int, fullness: float) -> IntakeCounts:
        foreign_lines = [record for record, _ in part if isinstance(record, ForeignLine)]
        with transaction() as con:
            if fullness >= 1:
                # DuckDB merges what small transactions left when it writes its log into the file. Large ones leave
                # nothing worth it, and merging would read and write every row several times.
                con.execute("SET GLOBAL max_vacuum_tasks = 0")
            counts = records_to_rows(con, lines_to_records(part))
            note_offset(con, path.name, part)
            if foreign_lines:  # before the commit of the offset that leaves them behind
                set_aside(path, begin, foreign_lines, version=newest_version())
        torn = sum(record is None for record, _ in part)
        return counts + IntakeCounts(torn=torn, foreign=len(foreign_lines))

    for part, fullness in lines_to_parts(lines_from(file, offset, growing=growing), offset):
        for counts in around_faults(part, offset, partial(store_part, fullness=fullness)):
            total += counts
        offset = part[-1][1]
    if not growing:
        path.unlink()
    return total


def around_faults(part: Sequence[Line], begin: int, store_part: Callable[[Sequence[Line], int], _T]) -> Iterator[_T]:
    """What `store_part` returns for a part, or for the pieces of it that remain when a line in it cannot be stored.

    `store_part` gets lines and the offset before them, and is one transaction. A line that alone makes it raise is
    handed to it again as a foreign one. Raises what is not about a line: a full disk, or a store that is damaged.
    """
    try:
        result = store_part(part, begin)
    except (StoreError, *_FAULTS_OF_VALUES) as error:
        cause = error.__cause__ if isinstance(error, StoreError) else error
        if not isinstance(cause, _FAULTS_OF_VALUES) or "has been invalidated" in str(cause):
            raise
        if len(part) == 1 and not lines_to_records(part):
            raise
        reason = str(error)
    else:
        yield result
        return
    if len(part) == 1:
        (record,) = lines_to_records(part)
        yield store_part([(ForeignLine(line_of(record), reason), part[0][1])], begin)
        return
    middle = len(part) // 2
    yield from around_faults(part[:middle], begin, store_part)
    yield from around_faults(part[middle:], part[middle - 1][1], store_part)


def note_offset(con: duckdb.DuckDBPyConnection, segment: str, part: Sequence[Line]) -> None:
    """Note in `taken_in` that these lines of a segment, the next ones, are taken in."""
    record_count, torn_count = len(lines_to_records(part)), sum(record is None for record, _ in part)
    con.execute(
        "INSERT INTO taken_in VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET"
        ' "offset" = excluded."offset", records = records + excluded.records,'
        " torn = torn + excluded.torn, taken_ns = excluded.taken_ns",
        [segment, part[-1][1], record_count, torn_count, time.time_ns()],
    )


def lines_to_records(lines: Iterable[Line]) -> list[JournalRecord]:
    """The records among lines of a segment."""
    return [record for record, _ in lines if record is not None and not isinstance(record, ForeignLine)]


def lines_to_parts(lines: Iterable[Line], offset: int) -> Iterator[tuple[list[Line], float]]:
    """Lines from an offset -> those of one transaction after the other, and how full it is: from 1 on, full.

    A full one ends with a root span where one is near: the root is written last, so few traces are cut in two and
    have to be looked up again.
    """
    part: list[Line] = []
    size = 0.0
    for record, end in lines:
        part.append((record, end))
        size = max(len(part) / LINES_PER_TRANSACTION, (end - offset) / BYTES_PER_TRANSACTION)
        is_root = isinstance(record, SpanRow) and record.parent_span_id is None
        if size >= 2 or (size >= 1 and is_root):
            yield part, size
            part, offset = [], end
    if part:
        yield part, size


def records_to_rows(con: duckdb.DuckDBPyConnection, records: Iterable[JournalRecord]) -> IntakeCounts:
    """Store the records that are new, and the traces that they complete; inside a transaction of the caller's."""
    runs: list[RunRow] = []
    adapters: list[AdapterRow] = []
    rewards: list[Reward] = []
    spans: dict[tuple[str, str], SpanRow] = {}
    for record in records:
        if isinstance(record, SpanRow):
            spans.setdefault((record.trace_id, record.span_id), record)
        elif isinstance(record, Reward | RewardGroup):
            rewards.extend(record_to_rewards(record))
        elif isinstance(record, RunRow):
            runs.append(record)
        else:
            adapters.append(record)
    insert_runs(con, runs)
    insert_adapters(con, adapters)
    return IntakeCounts(rewards=insert_rewards(con, rewards)) + _spans_to_rows(con, spans)


def _spans_to_rows(con: duckdb.DuckDBPyConnection, arrived_spans: dict[tuple[str, str], SpanRow]) -> IntakeCounts:
    """Store the spans that are new, and assemble those traces that they complete."""
    for key in _stored_keys(con, arrived_spans):
        del arrived_spans[key]
    traces: dict[str, list[SpanRow]] = {}
    for span in arrived_spans.values():
        traces.setdefault(span.trace_id, []).append(span)
    partial_traces = {trace_id: spans for trace_id, spans in traces.items() if not is_complete(spans)}
    stored_traces = _stored_traces(con, partial_traces)
    candidates = {trace_id: spans for trace_id, spans in traces.items() if trace_id not in partial_traces}
    candidates |= {trace_id: [*spans, *partial_traces[trace_id]] for trace_id, spans in stored_traces.items()}

    trajectories: list[Trajectory] = []
    refusals: list[tuple[str, str]] = []
    for trace_id, spans in candidates.items():
        try:
            trajectories.append(spans_to_trajectory(spans))
        except Incomplete:
            continue
        except Malformed as error:
            refusals.append((trace_id, str(error)))
    new_trajectories = _insert_trajectories(con, trajectories)
    _insert_refusals(con, refusals)

    rows = dict(arrived_spans)
    finished_ids = [t.episode.episode_id for t in new_trajectories if t.episode.episode_id in stored_traces]
    if finished_ids:  # written once more, without their lists
        con.execute("DELETE FROM spans WHERE trace_id = ANY(?)", [finished_ids])
        rows |= {(span.trace_id, span.span_id): span for trace_id in finished_ids for span in stored_traces[trace_id]}
    for action in (action for t in new_trajectories for action in t.actions):
        key = (action.episode_id, action.action_id)
        rows[key] = span_without_lists(rows[key], action)
    insert(con, schema.SPANS, records_to_columns(schema.SPANS, list(rows.values())))
    return IntakeCounts(spans=len(arrived_spans), episodes=len(new_trajectories), refused=len(refusals))


def _stored_keys(
    con: duckdb.DuckDBPyConnection, arrived_spans: Mapping[tuple[str, str], SpanRow]
) -> list[tuple[str, str]]:
    """Keys of arrived spans that are stored already: a span that arrives again has the start that it had.

    The starts keep DuckDB to the rows of that time, however many there are of other times.
    """
    if not arrived_spans:
        return []
    starts = [span.start_ns for span in arrived_spans.values()]
    traces = list({trace_id for trace_id, _ in arrived_spans})
    stored_keys = con.execute(
        "SELECT trace_id, span_id FROM spans WHERE start_ns BETWEEN ? AND ? AND trace_id = ANY(?)",
        [min(starts), max(starts), traces],
    ).fetchall()
    return [key for key in stored_keys if key in arrived_spans]


def _stored_traces(
    con: duckdb.DuckDBPyConnection, partial_traces: Mapping[str, list[SpanRow]]
) -> dict[str, list[SpanRow]]:
    """The stored spans of undecided traces that may be complete now: their root has just arrived or is stored."""
    if not partial_traces:
        return {}
    decided_rows = con.execute(
        "SELECT episode_id FROM episodes WHERE episode_id = ANY($1)"
        " UNION ALL SELECT trace_id FROM refusals WHERE trace_id = ANY($1)",
        [list(partial_traces)],
    ).fetchall()
    open_ids = set(partial_traces) - {trace_id for (trace_id,) in decided_rows}
    rooted_ids = {
        trace_id for trace_id in open_ids if any(span.parent_span_id is None for span in partial_traces[trace_id])
    }
    span_rows = con.execute(
        "SELECT * FROM spans WHERE trace_id = ANY(?) OR trace_id IN (SELECT trace_id FROM spans"
        " WHERE trace_id = ANY(?) AND operation = ? AND parent_span_id IS NULL)",
        [list(rooted_ids), list(open_ids - rooted_ids), c.INVOKE_WORKFLOW],
    ).fetchall()
    traces: dict[str, list[SpanRow]] = {trace_id: [] for trace_id in rooted_ids}
    for span in rows_to_records(SpanRow, schema.SPANS, span_rows):
        traces.setdefault(span.trace_id, []).append(span)
    return traces


def is_complete(spans: list[SpanRow]) -> bool:
    """Whether spans that arrived together are a whole trace by themselves, as is usual."""
    return any(span.parent_span_id is None and span.attributes.get(c.SPAN_COUNT) == len(spans) for span in spans)


def _insert_trajectories(con: duckdb.DuckDBPyConnection, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Store those whose episode is not stored yet, and return them."""
    episodes = records_to_columns(schema.EPISODES, [t.episode for t in trajectories])
    new_ids = {
        key for (key,) in insert(con, schema.EPISODES, episodes, clause=f"{_UNLESS_STORED} RETURNING episode_id")
    }
    new_trajectories = [t for t in trajectories if t.episode.episode_id in new_ids]
    actions = [(action, t.episode.started_ns) for t in new_trajectories for action in t.actions]
    edges = [(edge, t.episode.started_ns) for t in new_trajectories for edge in t.edges]
    for table, records_with_start in ((schema.ACTIONS, actions), (schema.EDGES, edges)):
        if records_with_start:
            records, starts = zip(*records_with_start, strict=True)
            insert(con, table, records_to_columns(table, records, starts))
    return new_trajectories


def _insert_refusals(con: duckdb.DuckDBPyConnection, refusals: Sequence[tuple[str, str]]) -> None:
    now = time.time_ns()
    columns = [*zip(*refusals, strict=True), [now] * len(refusals)]
    insert(con, schema.REFUSALS, columns if refusals else [], clause=_UNLESS_STORED)


def insert_runs(con: duckdb.DuckDBPyConnection, runs: Iterable[RunRow]) -> int:
    """Runs that are not stored yet -> rows; their number."""
    by_key = {run.run_id: run for run in runs}
    return _insert_new(con, schema.RUNS, list(by_key.values()))


def insert_adapters(con: duckdb.DuckDBPyConnection, adapters: Iterable[AdapterRow]) -> int:
    """Adapter versions that are not stored yet -> rows; their number."""
    by_key = {(adapter.node, adapter.version): adapter for adapter in adapters}
    return _insert_new(con, schema.ADAPTERS, list(by_key.values()))


def insert_rewards(con: duckdb.DuckDBPyConnection, rewards: Iterable[Reward]) -> int:
    """Rewards that are not stored yet -> rows; their number. All but the value is the key, and parts may be NULL."""
    by_key: dict[tuple[Any, ...], Reward] = {}
    for r in rewards:
        by_key.setdefault((r.episode_id, r.name, r.source, r.created_ns, r.scope, r.action_id, r.node), r)
    if not by_key:
        return 0
    times = [r.created_ns for r in by_key.values()]
    return _insert_new(
        con,
        schema.REWARDS,
        list(by_key.values()),
        # The first comparison keeps DuckDB to the rows of that time; it is part of the key.
        clause=f"WHERE NOT EXISTS (SELECT 1 FROM rewards r WHERE r.created_ns BETWEEN {min(times)} AND {max(times)}"  # noqa: S608
        " AND r.episode_id = arriving.episode_id"
        " AND r.name = arriving.name AND r.source = arriving.source AND r.created_ns = arriving.created_ns"
        " AND r.scope = arriving.scope AND r.action_id IS NOT DISTINCT FROM arriving.action_id"
        " AND r.node IS NOT DISTINCT FROM arriving.node)",
    )


def _insert_new(
    con: duckdb.DuckDBPyConnection, table: schema.Table, records: Sequence[Record], clause: str = _UNLESS_STORED
) -> int:
    inserted_counts = insert(con, table, records_to_columns(table, records), clause=clause)
    return int(inserted_counts[0][0]) if inserted_counts else 0
