"""A store -> what the pages show of it: its runs, the values that episodes can be filtered by, a run's learning curve,
credit, the other episodes of a task, tool calls.

Invariants: the rows of a page are bounded, whatever the store holds; text of the store is returned as it is, and
escaped by the templates. Episodes are listed by `traces.listing`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from marft_bridge.runs.learning_curve import LearningPoint, runs_to_points
from marft_bridge.runs.run_folder import COLLECT, TRAIN
from trace_store import conventions as c
from trace_store.json_text import read_json
from trace_store.records import Episode, SpanRow
from trace_store.store import TraceStore

MAX_RUNS = 200
MAX_CHOICES = 100  # of a filter
MAX_REWARDS = 8  # names of a run
MAX_MATES = 12  # other episodes of a task
MAX_DUELS = 200  # pairs of a comparison


@dataclass(frozen=True, slots=True)
class Spark:
    """A team reward's means along a run, over its rounds, or over equal parts of its time."""

    name: str
    mean: float
    episodes: int  # that have it
    means: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run: how many episodes of it ended how, and its team rewards."""

    run_id: str
    episodes: int
    terminated: int
    truncated: int
    failed: int
    tasks: int
    rounds: int | None  # the last training round; None outside training
    variants: int
    first_ns: int
    last_ns: int
    rewards: tuple[Spark, ...]


@dataclass(frozen=True, slots=True)
class FilterChoices:
    """The values that episodes can be filtered by, the most frequent first; rounds and versions in order."""

    splits: list[str]
    outcomes: list[str]
    variants: list[str]
    rounds: list[int]
    rewards: list[str]
    nodes: list[str]
    adapters: list[str]
    versions: list[int]
    tags: list[str]
    threads: bool  # whether an app said anything of its runs: threads or users


_RUNS_SQL = """
SELECT run_id, count(*), count(*) FILTER (outcome = 'terminated'), count(*) FILTER (outcome = 'truncated'),
       count(*) FILTER (outcome = 'failed'), count(DISTINCT task_id), max("round"), count(DISTINCT variant),
       min(started_ns), max(ended_ns)
FROM episodes WHERE $1 IS NULL OR run_id = $1 GROUP BY run_id ORDER BY max(started_ns) DESC, run_id LIMIT $2
"""
_SPARK_POINTS = 60
_SPARKS_SQL = f"""
SELECT e.run_id, r.name, CASE WHEN s.rounds IS NULL OR s.rounds = 0
           THEN (e.started_ns - s.first_ns) * {_SPARK_POINTS} // (1 + s.last_ns - s.first_ns)
           ELSE coalesce(e."round", 0)::HUGEINT * {_SPARK_POINTS} // greatest({_SPARK_POINTS}, s.rounds + 1)
       END AS bucket,
       sum(r.value), count(*)
FROM {{rewards}} r JOIN episodes e USING (episode_id)
JOIN (SELECT run_id, max("round") AS rounds, min(started_ns)::HUGEINT AS first_ns, max(started_ns) AS last_ns
      FROM episodes WHERE run_id = ANY($1) GROUP BY run_id) s USING (run_id)
WHERE isfinite(r.value) AND e.fork_action IS NULL GROUP BY ALL ORDER BY 1, 2, 3
"""  # noqa: S608 - constants


def store_to_runs(store: TraceStore, run_id: str | None = None) -> list[RunSummary]:
    """The runs that have episodes, the newest first; only one of them where its id is given."""
    rows = store.sql(_RUNS_SQL, (run_id, MAX_RUNS))
    sums: dict[str, dict[str, list[tuple[float, int]]]] = {}
    query = _SPARKS_SQL.format(rewards=_newest_rewards(store))
    for run, name, _, total, count in store.sql(query, ([row[0] for row in rows],)):
        sums.setdefault(run, {}).setdefault(name, []).append((total, count))
    summaries = []
    for row in rows:
        sparks = [_sums_to_spark(name, parts) for name, parts in sums.get(row[0], {}).items()]
        sparks.sort(key=lambda spark: (-spark.episodes, spark.name))
        values = (*row, tuple(sparks[:MAX_REWARDS]))
        summaries.append(RunSummary(*values))
    return summaries


def _newest_rewards(store: TraceStore) -> str:
    """A relation with the newest team reward of each name: that of the store's view, or, where nothing was rewarded
    twice, the table itself, which takes half the time."""
    repeated = store.sql(
        "SELECT count(*) - count(DISTINCT hash(episode_id, name)) FROM rewards WHERE scope = 'episode'"
    )
    return "episode_reward" if repeated[0][0] else "(SELECT * FROM rewards WHERE scope = 'episode')"


def _sums_to_spark(name: str, parts: Sequence[tuple[float, int]]) -> Spark:
    episodes = sum(count for _, count in parts)
    mean = sum(total for total, _ in parts) / episodes
    return Spark(name, mean, episodes, means=tuple(total / count for total, count in parts))


def store_to_filter_choices(store: TraceStore, run_id: str | None) -> FilterChoices:
    """The values of each filter among the episodes of a run, or of all, at most MAX_CHOICES of each."""

    def values(column: str, order: str) -> list[object]:
        all_of_run = f"SELECT {column} FROM episodes WHERE ($1 IS NULL OR run_id = $1) AND {column} IS NOT NULL"  # noqa: S608 - constants
        query = f"{all_of_run} GROUP BY {column} ORDER BY {order} LIMIT $2"
        return [row[0] for row in store.sql(query, (run_id, MAX_CHOICES))]

    # Rewards and calls of the whole store: those of one run are found by way of all its episodes, which takes as long
    # as the rest of a page.
    reward_rows = store.sql(
        "SELECT name FROM rewards WHERE scope = 'episode' GROUP BY name ORDER BY count(*) DESC, name LIMIT ?",
        (MAX_CHOICES,),
    )
    calls = store.sql(
        "SELECT node, adapter, adapter_version, count(*) FROM actions GROUP BY ALL ORDER BY count(*) DESC, 1, 2, 3"
        " LIMIT 10000"
    )
    tag_rows = store.sql(
        "SELECT tag FROM (SELECT unnest(json_keys(tags)) AS tag FROM episodes"
        " WHERE tags <> '{}' AND ($1 IS NULL OR run_id = $1)) GROUP BY tag ORDER BY count(*) DESC, tag LIMIT $2",
        (run_id, MAX_CHOICES),
    )
    return FilterChoices(
        splits=[str(value) for value in values("split", "count(*) DESC, split")],
        outcomes=[str(value) for value in values("outcome", "count(*) DESC, outcome")],
        variants=[str(value) for value in values("variant", "count(*) DESC, variant")],
        rounds=[int(str(value)) for value in values('"round"', '"round"')],
        rewards=[row[0] for row in reward_rows],
        nodes=list(dict.fromkeys(call[0] for call in calls if call[0]))[:MAX_CHOICES],
        adapters=list(dict.fromkeys(call[1] for call in calls if call[1] is not None))[:MAX_CHOICES],
        versions=sorted({call[2] for call in calls if call[2] is not None})[-MAX_CHOICES:],
        tags=[row[0] for row in tag_rows],
        threads=bool(
            store.sql(
                "SELECT 1 FROM episodes WHERE ($1 IS NULL OR run_id = $1)"
                " AND (thread_id IS NOT NULL OR user_id IS NOT NULL) LIMIT 1",
                (run_id,),
            )
        ),
    )


@dataclass(frozen=True, slots=True)
class AgentCredit:
    """The mean of a reward that agents got of their own from one source, over the episodes of a run that have it."""

    run_id: str
    reward: str
    node: str
    source: str  # of `marft-bridge credit`: its run, what it shared out, and who stood in
    mean: float
    episodes: int
    better_episodes: int  # for having this agent
    worse_episodes: int


def store_to_credits(store: TraceStore) -> list[AgentCredit]:
    """The rewards of single agents by run, node and source, at most MAX_CHOICES: those of `marft-bridge credit`, and
    others. Each run of `credit` is a source of its own, also where several share out the episodes of one run."""
    rows = store.sql(
        "SELECT e.run_id, r.name, r.node, r.source, avg(r.value), count(DISTINCT r.episode_id),"
        " count(DISTINCT r.episode_id) FILTER (r.value > 0), count(DISTINCT r.episode_id) FILTER (r.value < 0)"
        " FROM rewards r JOIN episodes e USING (episode_id) WHERE r.scope = 'agent' AND isfinite(r.value)"
        " AND e.fork_action IS NULL"
        " GROUP BY ALL ORDER BY 1, 4, 2, 5 DESC LIMIT ?",
        (MAX_CHOICES,),
    )
    return [AgentCredit(*row) for row in rows]


@dataclass(frozen=True, slots=True)
class TaskMate:
    """Another episode of the same task: what a person would lay beside the one that is shown."""

    episode_id: str
    run_id: str
    round: int | None
    variant: str | None
    sample: int
    outcome: str
    reward: float | None


def episode_to_mates(store: TraceStore, episode: Episode, reward: str | None) -> list[TaskMate]:
    """Other episodes of the task, at most MAX_MATES: of its own round or comparison first, then the newest."""
    rows = store.sql(
        """
        SELECT e.episode_id, e.run_id, e."round", e.variant, e.sample, e.outcome,
               (SELECT first(value ORDER BY created_ns DESC, source) FROM rewards r
                WHERE r.episode_id = e.episode_id AND r.scope = 'episode' AND r.name = $4)
        FROM episodes e WHERE task_id = $1 AND split = $2 AND episode_id <> $3 AND fork_action IS NULL
        ORDER BY e.run_id = $5 DESC, e."round" IS NOT DISTINCT FROM $6 DESC, started_ns DESC, episode_id
        LIMIT $7
        """,
        (episode.task_id, episode.split, episode.episode_id, reward, episode.run_id, episode.round, MAX_MATES),
    )
    return [TaskMate(*row) for row in rows]


def variants_to_run(store: TraceStore, variants: Sequence[str]) -> str | None:
    """The newest run whose episodes are of one of these variants."""
    rows = store.sql(
        "SELECT run_id FROM episodes WHERE variant IN (SELECT unnest($1::VARCHAR[])) AND fork_action IS NULL"
        " ORDER BY started_ns DESC, run_id LIMIT 1",
        (list(variants),),
    )
    return rows[0][0] if rows else None


@dataclass(frozen=True, slots=True)
class Duel:
    """The same sample of a task in two variants; None where a side has no reward."""

    task_id: str
    sample: int
    left_id: str
    right_id: str
    left: float | None
    right: float | None


def run_to_duels(store: TraceStore, run_id: str, variants: tuple[str, str], reward: str) -> list[Duel]:
    """The pairs of a comparison's episodes, those that differ most first, at most MAX_DUELS."""
    rows = store.sql(
        """
        WITH scored AS (
            SELECT e.*, r.value FROM episodes e LEFT JOIN episode_reward r
            ON r.episode_id = e.episode_id AND r.name = $4 WHERE run_id = $1 AND variant IN ($2, $3)
            AND fork_action IS NULL
        )
        SELECT a.task_id, a.sample, a.episode_id, b.episode_id, a.value, b.value
        FROM scored a JOIN scored b ON a.task_id = b.task_id AND a.sample = b.sample
        WHERE a.variant = $2 AND b.variant = $3
        ORDER BY abs(b.value - a.value) DESC NULLS LAST, a.task_id, a.sample LIMIT $5
        """,
        (run_id, *variants, reward, MAX_DUELS),
    )
    return [Duel(*row) for row in rows]


def run_to_curve(store: TraceStore, run_id: str, reward: str) -> list[LearningPoint]:
    """One point per training round; for `train` the collected episodes are round 0. Empty outside training."""
    runs = [COLLECT, TRAIN] if run_id == TRAIN else [run_id]
    points = runs_to_points(store, runs, reward)
    return points if any(point.round for point in points) else []


def spans_to_tools(spans: Sequence[SpanRow]) -> dict[str, list[SpanRow]]:
    """Action id -> the spans of the tools that it called, in order: those whose call id is in its answer.

    A tool without a call id, or with one that no answer holds, belongs to no action.
    """
    action_by_call: dict[str, str] = {}
    for span in spans:
        if span.operation == c.CHAT:
            for call_id in _ids_in(span.attributes.get(c.OUTPUT_MESSAGES)):
                action_by_call.setdefault(call_id, span.span_id)
    tools_by_action: dict[str, list[SpanRow]] = {}
    for tool in sorted(spans, key=lambda span: (span.start_ns, span.span_id)):
        action_id = action_by_call.get(str(tool.attributes.get(c.TOOL_CALL_ID)))
        if tool.operation == c.EXECUTE_TOOL and action_id is not None:
            tools_by_action.setdefault(action_id, []).append(tool)
    return tools_by_action


def _ids_in(messages: Any) -> Iterator[str]:
    """Every id inside recorded messages: those of messages and those of tool calls, which never coincide."""
    if isinstance(messages, str):
        try:
            messages = read_json(messages)
        except ValueError:
            return
    pending = [messages]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            if isinstance(value.get("id"), str):
                yield value["id"]
            pending += value.values()
        elif isinstance(value, list):
            pending += value
