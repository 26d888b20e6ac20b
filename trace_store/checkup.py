"""A store file -> its faults by every law, a page of episodes at a time.

Rows are read without trusting them: an edge to nowhere or an action stored twice is a fault, never a crash. The laws
of one episode are in `doctor`, those of files in `file_checks`; here are those between tables. Invariant: nothing is
changed, and memory holds one page.
"""

# ruff: noqa: S608 - statements are put together from constants; every value is bound
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from trace_store import conventions as c
from trace_store import schema
from trace_store.assemble import Incomplete, Malformed, spans_to_trajectory
from trace_store.attributes import SpanAttributes
from trace_store.doctor import Fault, Level, assembled_to_faults, conversation_to_faults, trajectory_to_faults
from trace_store.file_checks import file_faults, journal_faults
from trace_store.records import Action, Edge, Episode, Reward, SpanRow, Trajectory
from trace_store.rows import rows_to_records
from trace_store.store import TraceStore
from trace_store.token_lists import COLUMNS, spans_with_lists
from trace_store.views import VIEWS

_PAGE = 500  # episodes
_OPEN_SCHEMA = "database_name = current_database() AND schema_name = current_schema()"
_MAX_FINDINGS = 10_000  # of one law between tables
_READABLE_TRACES = "ANTI JOIN (SELECT trace_id FROM spans WHERE json_type(attributes) <> 'OBJECT') USING (trace_id)"

# (law, level, message, query): the query gives an episode id, and the number {0} and name {1} of the message.
_RELATION_LAWS: tuple[tuple[str, Level, str, str], ...] = (
    (
        "rows",
        "error",
        "{0} actions of an episode that is not stored",
        "SELECT episode_id, count(*), NULL FROM actions ANTI JOIN episodes USING (episode_id) GROUP BY ALL",
    ),
    (
        "rows",
        "error",
        "{0} edges of an episode that is not stored",
        "SELECT episode_id, count(*), NULL FROM edges ANTI JOIN episodes USING (episode_id) GROUP BY ALL",
    ),
    (
        "rows",
        "warning",
        "{0} rewards of a trace that is not stored",
        "SELECT episode_id, count(*), NULL FROM rewards ANTI JOIN episodes USING (episode_id)"
        " ANTI JOIN spans ON trace_id = episode_id GROUP BY ALL",
    ),
    (
        "rows",
        "error",
        "action {1} is stored {0} times",
        "SELECT episode_id, count(*), action_id FROM actions GROUP BY ALL HAVING count(*) > 1",
    ),
    (
        "rows",
        "error",
        "edge {1} is stored {0} times",
        "SELECT episode_id, count(*), kind || ' ' || src || ' -> ' || dst FROM edges"
        " GROUP BY episode_id, kind, src, dst HAVING count(*) > 1",
    ),
    (
        "rows",
        "error",
        "reward {1} is stored {0} times",
        "SELECT episode_id, count(*), name FROM rewards"
        " GROUP BY episode_id, name, source, created_ns, scope, action_id, node HAVING count(*) > 1",
    ),
    (
        "rows",
        "error",
        "{0} actions have another start of the episode than the episode, so that reading misses them",
        "SELECT a.episode_id, count(*), NULL FROM actions a JOIN episodes e USING (episode_id)"
        " WHERE a.episode_started_ns <> e.started_ns GROUP BY ALL",
    ),
    (
        "rows",
        "error",
        "{0} edges have another start of the episode than the episode, so that reading misses them",
        "SELECT x.episode_id, count(*), NULL FROM edges x JOIN episodes e USING (episode_id)"
        " WHERE x.episode_started_ns <> e.started_ns GROUP BY ALL",
    ),
    (
        "rows",
        "error",
        "{0} spans have attributes that are no JSON object",
        "SELECT trace_id, count(*), NULL FROM spans WHERE json_type(attributes) <> 'OBJECT' GROUP BY ALL",
    ),
    (
        "rows",
        "error",
        "its adapters, task or tags are no JSON object",
        "SELECT episode_id, 1, NULL FROM episodes"
        " WHERE NOT (json_type(adapters) = 'OBJECT' AND json_type(task) = 'OBJECT' AND json_type(tags) = 'OBJECT')",
    ),
    (
        "rows",
        "error",
        "it is an episode and a refused trace: {1}",
        "SELECT trace_id, 1, f.reason FROM refusals f JOIN episodes ON episode_id = trace_id",
    ),
    (
        "spans",
        "error",
        "{0} spans are stored, the episode says {1}",
        "SELECT episode_id, coalesce(s.number, 0), span_count FROM episodes"
        " LEFT JOIN (SELECT trace_id, count(*) AS number FROM spans GROUP BY ALL) s ON s.trace_id = episode_id"
        " WHERE coalesce(s.number, 0) <> span_count",
    ),
    (
        "rows",
        "warning",
        "{0} episodes of the run {1}, which is not in `runs`",
        "SELECT NULL, count(*), run_id FROM episodes ANTI JOIN runs USING (run_id)"
        " WHERE split <> 'live' GROUP BY run_id",  # nobody's command asked for a live one
    ),
    (
        "adapters",
        "error",
        "{0} actions ran adapter {1}, which is not in `adapters`",
        "SELECT NULL, count(*), adapter FROM actions ANTI JOIN adapters d ON adapter = d.node || '@' || d.version"
        " WHERE adapter_version > 0 AND adapter IS NOT NULL GROUP BY adapter",  # version 0 changes nothing
    ),
    (
        "adapters",
        "error",
        "{0} episodes are said to have trained adapter {1}, which is not in `adapters`",
        "SELECT NULL, count(*), node || '@' || version FROM adapter_episodes"
        " ANTI JOIN adapters USING (node, version) GROUP BY ALL",  # an erased episode stays named here
    ),
    (
        "adapters",
        "error",
        "adapter {1} was trained from version {0}, which is not in `adapters`",
        "SELECT NULL, a.parent, a.node || '@' || a.version FROM adapters a"
        " ANTI JOIN adapters p ON p.node = a.node AND p.version = a.parent WHERE a.parent > 0",
    ),
)


def store_to_faults(store: TraceStore, on_episode: Callable[[int], object] = lambda _: None) -> Iterator[Fault]:
    """Check an open store by every law; `on_episode` is called with the number of episodes checked so far.

    An episode with a fault between tables is not checked further.

    Raises StoreError when the journal beside it cannot be read.
    """
    table_faults = list(_table_faults(store))
    yield from table_faults
    yield from file_faults(store.path, store.journal_folder)
    if table_faults:  # the other checks query these tables
        return
    yield from _view_faults(store)
    yield from journal_faults(store)
    damaged_ids: set[str | None] = set()
    for fault in _relation_faults(store):
        damaged_ids.add(fault.episode_id)
        yield fault
    yield from _missing_episode_faults(store)
    for number, (trajectory, spans) in enumerate(_stored_episodes(store), start=1):
        if trajectory.episode.episode_id not in damaged_ids:
            yield from _episode_faults(trajectory, spans)
        on_episode(number)


def _episode_faults(trajectory: Trajectory, spans: Sequence[SpanRow]) -> list[Fault]:
    """Rows that break a law differ from their spans as well, so they are not compared with these."""
    if faults := list(trajectory_to_faults(trajectory)):
        return faults
    token_lists = {action.action_id: [getattr(action, name) for name in COLUMNS] for action in trajectory.actions}
    full_spans = spans_with_lists(spans, token_lists)
    return list(assembled_to_faults(trajectory, full_spans)) or list(
        conversation_to_faults(trajectory, spans_to_saw_answers(full_spans))
    )


def _table_faults(store: TraceStore) -> Iterator[Fault]:
    rows = store.sql(
        "SELECT table_name, list(column_name ORDER BY column_index) FROM duckdb_columns()"
        f" WHERE NOT internal AND {_OPEN_SCHEMA} GROUP BY ALL"
    )
    stored_columns = dict(rows)
    for table in schema.TABLES:
        columns = [column.name for column in table.columns]
        if table.name not in stored_columns:
            yield Fault("schema", f"there is no table {table.name}")
        elif stored_columns[table.name] != columns:
            differing_columns = (
                ", ".join(sorted(set(columns).symmetric_difference(stored_columns[table.name]))) or "their order"
            )
            yield Fault("schema", f"table {table.name} has other columns than it should: {differing_columns}")


def _view_faults(store: TraceStore) -> Iterator[Fault]:
    stored_views = {
        name for (name,) in store.sql(f"SELECT view_name FROM duckdb_views() WHERE NOT internal AND {_OPEN_SCHEMA}")
    }
    for view in VIEWS:
        if view.name not in stored_views:
            yield Fault("schema", f"there is no view {view.name}")


def _relation_faults(store: TraceStore) -> Iterator[Fault]:
    for law, level, sentence, query in _RELATION_LAWS:
        rows = store.sql(f"SELECT * FROM ({query}) ORDER BY ALL LIMIT ?", (_MAX_FINDINGS,))
        for episode_id, number, name in rows:
            yield Fault(law, sentence.format(number, name), episode_id, level=level)
        if len(rows) == _MAX_FINDINGS:
            yield Fault(law, f"only the first {_MAX_FINDINGS} of such findings are listed", None, level=level)


def _missing_episode_faults(store: TraceStore) -> Iterator[Fault]:
    """Traces that are not episodes, and should be."""
    for message, query in (
        (
            "all its spans are there, but it was not assembled",
            "SELECT DISTINCT trace_id FROM spans ANTI JOIN episodes ON episode_id = trace_id"
            f" ANTI JOIN refusals USING (trace_id) {_READABLE_TRACES} ORDER BY trace_id",
        ),
        (
            "it was refused, but its spans make an episode",
            "SELECT trace_id FROM refusals ANTI JOIN episodes ON episode_id = trace_id"
            f" {_READABLE_TRACES} ORDER BY trace_id",
        ),
    ):
        for (trace_id,) in store.sql(query):
            spans = store.spans(trace_id)
            try:
                spans_to_trajectory(spans)
            except (Incomplete, Malformed):
                continue
            yield Fault("spans", message, trace_id)


def _stored_episodes(store: TraceStore) -> Iterator[tuple[Trajectory, list[SpanRow]]]:
    """Every episode with its rows and its spans as they are stored, without their token lists, by (start, id)."""
    last_key: tuple[int, str] = (-(2**63), "")
    while True:
        rows = store.sql(
            f"SELECT {_column_list(schema.EPISODES)} FROM episodes"
            " WHERE started_ns >= ? AND (started_ns, episode_id) > (?, ?) ORDER BY started_ns, episode_id LIMIT ?",
            (last_key[0], *last_key, _PAGE),
        )
        page = rows_to_records(Episode, schema.EPISODES, rows)
        if not page:
            return
        ids = [episode.episode_id for episode in page]
        values = (page[0].started_ns, page[-1].started_ns, ids)
        condition = "episode_started_ns BETWEEN ? AND ? AND episode_id = ANY(?)"
        action_rows = store.sql(
            f'SELECT {_column_list(schema.ACTIONS)} FROM actions WHERE {condition} ORDER BY "index"', values
        )
        actions: dict[str, list[Action]] = {}
        for action in rows_to_records(Action, schema.ACTIONS, action_rows):
            actions.setdefault(action.episode_id, []).append(action)
        edges: dict[str, list[Edge]] = {}
        for edge in rows_to_records(
            Edge, schema.EDGES, store.sql(f"SELECT {_column_list(schema.EDGES)} FROM edges WHERE {condition}", values)
        ):
            edges.setdefault(edge.episode_id, []).append(edge)
        rewards: dict[str, list[Reward]] = {}
        for reward in rows_to_records(
            Reward,
            schema.REWARDS,
            store.sql(f"SELECT {_column_list(schema.REWARDS)} FROM rewards WHERE episode_id = ANY(?)", (ids,)),
        ):
            rewards.setdefault(reward.episode_id, []).append(reward)
        spans: dict[str, list[SpanRow]] = {}
        span_rows = store.sql(f"SELECT {_column_list(schema.SPANS)} FROM spans WHERE trace_id = ANY(?)", (ids,))
        for span in rows_to_records(SpanRow, schema.SPANS, span_rows):
            spans.setdefault(span.trace_id, []).append(span)
        for episode in page:
            key = episode.episode_id
            episode_actions = tuple(actions.pop(key, ()))
            trajectory = Trajectory(
                episode, episode_actions, tuple(edges.pop(key, ())), rewards=tuple(rewards.pop(key, ()))
            )
            yield trajectory, spans.pop(key, [])
        last_key = (page[-1].started_ns, page[-1].episode_id)


def _column_list(table: schema.Table) -> str:
    return ", ".join(f'"{column.name}"' for column in table.columns)


def spans_to_saw_answers(spans: Sequence[SpanRow]) -> dict[str, tuple[str, ...]]:
    """Action -> the actions whose answers are in its prompt, for the calls that say which node made them.

    Other calls are left out: assembling never reads the attribute there, so it may be malformed.
    """
    node_calls = (span for span in spans if span.operation == c.CHAT and SpanAttributes(span).is_set(c.NODE))
    return {span.span_id: SpanAttributes(span).texts(c.SAW_ANSWERS) for span in node_calls}
