"""A store file -> everything that is wrong with it, as faults, a page of episodes at a time.

Rows are read without trusting them: an edge to nowhere or an action stored twice is a finding, never a crash. The laws
of one episode are in `doctor`, those of files in `file_checks`; here are those between tables. Invariant: nothing is
changed, and memory holds one page.
"""

# ruff: noqa: S608 - statements are put together from constants; every value is bound
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from trace_store import conventions as c
from trace_store import schema
from trace_store.assemble import Incomplete, Malformed, spans_to_trajectory
from trace_store.attributes import Bag
from trace_store.doctor import Fault, Level, assembled_to_faults, conversation_to_faults, trajectory_to_faults
from trace_store.file_checks import file_faults, journal_faults
from trace_store.records import Action, Edge, Episode, Reward, SpanRow, Trajectory
from trace_store.rows import rows_to_records
from trace_store.store import TraceStore
from trace_store.token_lists import COLUMNS, spans_with_lists
from trace_store.views import VIEWS

_PAGE = 500  # episodes
_MOST_ROWS = 10_000  # findings of one law between tables
_READABLE = "ANTI JOIN (SELECT trace_id FROM spans WHERE json_type(attributes) <> 'OBJECT') USING (trace_id)"

# (law, level, what is said of the number and the name in the 2nd and 3rd column, query; the 1st is the episode)
_BETWEEN_TABLES: tuple[tuple[str, Level, str, str], ...] = (
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


def store_to_faults(store: TraceStore, checked: Callable[[int], object] = lambda _: None) -> Iterator[Fault]:
    """Checks an open store by every law; `checked` is told how many episodes are done.

    An episode whose rows do not even fit together is looked at no further.

    Raises StoreError when the journal beside it cannot be read.
    """
    broken = list(_table_faults(store))
    yield from broken
    yield from file_faults(store.path, store.journal_folder)
    if broken:  # nothing can be asked of tables that are not there
        return
    yield from _view_faults(store)
    yield from journal_faults(store)
    damaged: set[str | None] = set()
    for fault in _faults_between_tables(store):
        damaged.add(fault.episode_id)
        yield fault
    yield from _faults_of_others(store)
    for number, (trajectory, spans) in enumerate(_stored_episodes(store), start=1):
        if trajectory.episode.episode_id not in damaged:
            yield from _faults_of_episode(trajectory, spans)
        checked(number)


def _faults_of_episode(trajectory: Trajectory, spans: Sequence[SpanRow]) -> list[Fault]:
    """Rows that break a law differ from their spans as well; said once is enough."""
    if found := list(trajectory_to_faults(trajectory)):
        return found
    lists = {action.action_id: [getattr(action, name) for name in COLUMNS] for action in trajectory.actions}
    written = spans_with_lists(spans, lists)
    return list(assembled_to_faults(trajectory, written)) or list(
        conversation_to_faults(trajectory, saw_answers(written))
    )


def _table_faults(store: TraceStore) -> Iterator[Fault]:
    rows = store.sql(
        "SELECT table_name, list(column_name ORDER BY column_index) FROM duckdb_columns()"
        " WHERE NOT internal GROUP BY ALL"
    )
    known = dict(rows)
    for table in schema.TABLES:
        columns = [column.name for column in table.columns]
        if table.name not in known:
            yield Fault("schema", f"there is no table {table.name}")
        elif known[table.name] != columns:
            different = ", ".join(sorted(set(columns).symmetric_difference(known[table.name]))) or "their order"
            yield Fault("schema", f"table {table.name} has other columns than it should: {different}")


def _view_faults(store: TraceStore) -> Iterator[Fault]:
    known = {name for (name,) in store.sql("SELECT view_name FROM duckdb_views() WHERE NOT internal")}
    for view in VIEWS:
        if view.name not in known:
            yield Fault("schema", f"there is no view {view.name}")


def _faults_between_tables(store: TraceStore) -> Iterator[Fault]:
    for law, level, sentence, query in _BETWEEN_TABLES:
        rows = store.sql(f"SELECT * FROM ({query}) ORDER BY ALL LIMIT ?", (_MOST_ROWS,))
        for episode_id, number, name in rows:
            yield Fault(law, sentence.format(number, name), episode_id, level)
        if len(rows) == _MOST_ROWS:
            yield Fault(law, f"only the first {_MOST_ROWS} of such findings are listed", None, level)


def _faults_of_others(store: TraceStore) -> Iterator[Fault]:
    """Traces that are no episodes, and should be."""
    for why, query in (
        (
            "all its spans are there, but it was not assembled",
            "SELECT DISTINCT trace_id FROM spans ANTI JOIN episodes ON episode_id = trace_id"
            f" ANTI JOIN refusals USING (trace_id) {_READABLE} ORDER BY trace_id",
        ),
        (
            "it was refused, but its spans make an episode",
            f"SELECT trace_id FROM refusals ANTI JOIN episodes ON episode_id = trace_id {_READABLE} ORDER BY trace_id",
        ),
    ):
        for (trace_id,) in store.sql(query):
            spans = store.spans(trace_id)
            try:
                spans_to_trajectory(spans)
            except (Incomplete, Malformed):
                continue
            yield Fault("spans", why, trace_id)


def _stored_episodes(store: TraceStore) -> Iterator[tuple[Trajectory, list[SpanRow]]]:
    """Every episode with its rows and its rows of spans as they are, by (start, id)."""
    after: tuple[int, str] = (-(2**63), "")
    while True:
        rows = store.sql(
            f"SELECT {_names(schema.EPISODES)} FROM episodes"
            " WHERE started_ns >= ? AND (started_ns, episode_id) > (?, ?) ORDER BY started_ns, episode_id LIMIT ?",
            (after[0], *after, _PAGE),
        )
        page = rows_to_records(Episode, schema.EPISODES, rows)
        if not page:
            return
        ids = [episode.episode_id for episode in page]
        near = (page[0].started_ns, page[-1].started_ns, ids)
        where = "episode_started_ns BETWEEN ? AND ? AND episode_id = ANY(?)"
        found = store.sql(f'SELECT {_names(schema.ACTIONS)} FROM actions WHERE {where} ORDER BY "index"', near)
        actions: dict[str, list[Action]] = {}
        for action in rows_to_records(Action, schema.ACTIONS, found):
            actions.setdefault(action.episode_id, []).append(action)
        edges: dict[str, list[Edge]] = {}
        for edge in rows_to_records(
            Edge, schema.EDGES, store.sql(f"SELECT {_names(schema.EDGES)} FROM edges WHERE {where}", near)
        ):
            edges.setdefault(edge.episode_id, []).append(edge)
        rewards: dict[str, list[Reward]] = {}
        for reward in rows_to_records(
            Reward,
            schema.REWARDS,
            store.sql(f"SELECT {_names(schema.REWARDS)} FROM rewards WHERE episode_id = ANY(?)", (ids,)),
        ):
            rewards.setdefault(reward.episode_id, []).append(reward)
        spans: dict[str, list[SpanRow]] = {}
        found = store.sql(f"SELECT {_names(schema.SPANS)} FROM spans WHERE trace_id = ANY(?)", (ids,))
        for span in rows_to_records(SpanRow, schema.SPANS, found):
            spans.setdefault(span.trace_id, []).append(span)
        for episode in page:
            key = episode.episode_id
            own = tuple(actions.pop(key, ()))
            trajectory = Trajectory(episode, own, tuple(edges.pop(key, ())), tuple(rewards.pop(key, ())))
            yield trajectory, spans.pop(key, [])
        after = (page[-1].started_ns, page[-1].episode_id)


def _names(table: schema.Table) -> str:
    return ", ".join(f'"{column.name}"' for column in table.columns)


def saw_answers(spans: Sequence[SpanRow]) -> dict[str, tuple[str, ...]]:
    """Action -> the actions whose answers are in its prompt, for the calls that say which node made them.

    Of others this may be unreadable: assembling does not look at it.
    """
    inside = (span for span in spans if span.operation == c.CHAT and Bag(span).has(c.NODE))
    return {span.span_id: Bag(span).texts(c.SAW_ANSWERS) for span in inside}
