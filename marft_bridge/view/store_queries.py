"""A store -> what the pages show of it: its runs, the values a run can be filtered by, its learning curve, tool calls.

Invariants: the rows of a page are bounded, whatever the store holds; text of the store is returned as it is, and
escaped by the templates. Episodes are listed by `traces.listing`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from marft_bridge.runs.learning_curve import LearningPoint, runs_to_points
from marft_bridge.runs.run_folder import COLLECT, TRAIN
from trace_store import conventions as c
from trace_store.records import SpanRow
from trace_store.store import TraceStore

MAX_RUNS = 200
MAX_CHOICES = 100  # of a filter
MAX_REWARDS = 8  # names of a run


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run: how many episodes of it ended how, and its mean team rewards."""

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
    rewards: tuple[tuple[str, float, int], ...]  # name, mean, episodes that have it


@dataclass(frozen=True, slots=True)
class FilterChoices:
    """The values that the episodes of a run can be filtered by, the most frequent first; rounds in order."""

    splits: list[str]
    outcomes: list[str]
    rounds: list[int]
    rewards: list[str]
    threads: bool  # whether an app said anything of its runs: threads, users or tags


_RUNS_SQL = """
SELECT run_id, count(*), count(*) FILTER (outcome = 'terminated'), count(*) FILTER (outcome = 'truncated'),
       count(*) FILTER (outcome = 'failed'), count(DISTINCT task_id), max("round"), count(DISTINCT variant),
       min(started_ns), max(ended_ns)
FROM episodes WHERE $1 IS NULL OR run_id = $1 GROUP BY run_id ORDER BY max(started_ns) DESC, run_id LIMIT $2
"""
_MEANS_SQL = """
SELECT e.run_id, r.name, avg(r.value), count(*) FROM episode_reward r JOIN episodes e USING (episode_id)
WHERE e.run_id = ANY(?) AND isfinite(r.value) GROUP BY ALL ORDER BY e.run_id, count(*) DESC, r.name
"""


def store_to_runs(store: TraceStore, run_id: str | None = None) -> list[RunSummary]:
    """The runs that have episodes, the newest first; only one of them where its id is given."""
    rows = store.sql(_RUNS_SQL, (run_id, MAX_RUNS))
    means: dict[str, list[tuple[str, float, int]]] = {}
    for run, *mean in store.sql(_MEANS_SQL, ([row[0] for row in rows],)):
        means.setdefault(run, []).append((mean[0], mean[1], mean[2]))
    summary_rows = [(*row, tuple(means.get(row[0], [])[:MAX_REWARDS])) for row in rows]
    return [RunSummary(*values) for values in summary_rows]


def run_to_filter_choices(store: TraceStore, run_id: str) -> FilterChoices:
    """The values of each filter among a run's episodes, at most MAX_CHOICES of each."""

    def values(column: str, order: str) -> list[object]:
        query = f"SELECT {column} FROM episodes WHERE run_id = ? AND {column} IS NOT NULL GROUP BY {column}"  # noqa: S608 - constants
        return [row[0] for row in store.sql(f"{query} ORDER BY {order} LIMIT ?", (run_id, MAX_CHOICES))]

    reward_rows = store.sql(
        "SELECT r.name FROM rewards r JOIN episodes e USING (episode_id) WHERE e.run_id = ? AND r.scope = 'episode'"
        " GROUP BY r.name ORDER BY count(*) DESC, r.name LIMIT ?",
        (run_id, MAX_CHOICES),
    )
    return FilterChoices(
        splits=[str(value) for value in values("split", "count(*) DESC, split")],
        outcomes=[str(value) for value in values("outcome", "count(*) DESC, outcome")],
        rounds=[int(str(value)) for value in values('"round"', '"round"')],
        rewards=[row[0] for row in reward_rows],
        threads=bool(
            store.sql(
                "SELECT 1 FROM episodes WHERE run_id = ? AND (thread_id IS NOT NULL OR user_id IS NOT NULL"
                " OR tags <> '{}') LIMIT 1",
                (run_id,),
            )
        ),
    )


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
            messages = json.loads(messages)
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
