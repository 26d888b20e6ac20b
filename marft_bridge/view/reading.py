"""Questions to a store -> what the pages show: its runs, what a run can be filtered by, its learning curve.

Invariants: a page's rows are bounded, whatever the store holds; text of the store is not made safe here. Episodes
themselves are listed by `traces.listing`. It does not know HTML.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from marft_bridge.comparison.records import LearningPoint
from marft_bridge.reward_points import runs_to_points
from marft_bridge.run_folder import COLLECT, TRAIN
from trace_store import conventions as c
from trace_store.records import SpanRow
from trace_store.store import TraceStore

MOST_RUNS = 200
MOST_CHOICES = 100  # of a filter
MOST_REWARDS = 8  # names of a run


@dataclass(frozen=True, slots=True)
class RunLine:
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
class Choices:
    """What the episodes of a run can be filtered by, the most frequent first."""

    splits: list[str]
    outcomes: list[str]
    rounds: list[int]
    rewards: list[str]


_RUNS = """
SELECT run_id, count(*), count(*) FILTER (outcome = 'terminated'), count(*) FILTER (outcome = 'truncated'),
       count(*) FILTER (outcome = 'failed'), count(DISTINCT task_id), max("round"), count(DISTINCT variant),
       min(started_ns), max(ended_ns)
FROM episodes WHERE $1 IS NULL OR run_id = $1 GROUP BY run_id ORDER BY max(started_ns) DESC, run_id LIMIT $2
"""
_MEANS = """
SELECT e.run_id, r.name, avg(r.value), count(*) FROM episode_reward r JOIN episodes e USING (episode_id)
WHERE e.run_id = ANY(?) AND isfinite(r.value) GROUP BY ALL ORDER BY e.run_id, count(*) DESC, r.name
"""


def store_to_runs(store: TraceStore, run_id: str | None = None) -> list[RunLine]:
    """The runs that have episodes, the newest first; only one of them where its id is given."""
    rows = store.sql(_RUNS, (run_id, MOST_RUNS))
    means: dict[str, list[tuple[str, float, int]]] = {}
    for run, *mean in store.sql(_MEANS, ([row[0] for row in rows],)):
        means.setdefault(run, []).append((mean[0], mean[1], mean[2]))
    complete = [(*row, tuple(means.get(row[0], [])[:MOST_REWARDS])) for row in rows]
    return [RunLine(*values) for values in complete]


def run_to_choices(store: TraceStore, run_id: str) -> Choices:
    """What a run's episodes differ in."""

    def values(column: str, order: str) -> list[object]:
        query = f"SELECT {column} FROM episodes WHERE run_id = ? AND {column} IS NOT NULL GROUP BY {column}"  # noqa: S608 - constants
        return [row[0] for row in store.sql(f"{query} ORDER BY {order} LIMIT ?", (run_id, MOST_CHOICES))]

    names = store.sql(
        "SELECT r.name FROM rewards r JOIN episodes e USING (episode_id) WHERE e.run_id = ? AND r.scope = 'episode'"
        " GROUP BY r.name ORDER BY count(*) DESC, r.name LIMIT ?",
        (run_id, MOST_CHOICES),
    )
    return Choices(
        splits=[str(value) for value in values("split", "count(*) DESC, split")],
        outcomes=[str(value) for value in values("outcome", "count(*) DESC, outcome")],
        rounds=[int(str(value)) for value in values('"round"', '"round"')],
        rewards=[row[0] for row in names],
    )


def run_to_curve(store: TraceStore, run_id: str, reward: str) -> list[LearningPoint]:
    """One point per training round; for `train` the collected episodes are round 0. Empty outside training."""
    runs = [COLLECT, TRAIN] if run_id == TRAIN else [run_id]
    points = runs_to_points(store, runs, reward)
    return points if any(point.round for point in points) else []


def spans_to_tools(spans: Sequence[SpanRow]) -> dict[str, list[SpanRow]]:
    """Action id -> the spans of the tools that it called, in order: those whose call id is one of its answer's.

    A tool without a call id, or with one that no answer holds, belongs to no action.
    """
    asked: dict[str, str] = {}
    for span in spans:
        if span.operation == c.CHAT:
            for call_id in _ids_in(span.attributes.get(c.OUTPUT_MESSAGES)):
                asked.setdefault(call_id, span.span_id)
    found: dict[str, list[SpanRow]] = {}
    for tool in sorted(spans, key=lambda span: (span.start_ns, span.span_id)):
        action_id = asked.get(str(tool.attributes.get(c.TOOL_CALL_ID)))
        if tool.operation == c.EXECUTE_TOOL and action_id is not None:
            found.setdefault(action_id, []).append(tool)
    return found


def _ids_in(messages: Any) -> Iterator[str]:
    """Every id inside recorded messages: of messages and of tool calls, which share no value."""
    if isinstance(messages, str):
        try:
            messages = json.loads(messages)
        except ValueError:
            return
    inside = [messages]
    while inside:
        value = inside.pop()
        if isinstance(value, dict):
            if isinstance(value.get("id"), str):
                yield value["id"]
            inside += value.values()
        elif isinstance(value, list):
            inside += value
