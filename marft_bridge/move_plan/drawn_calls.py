"""A store -> some hosted calls of each node, drawn by a seed, with the spans that hold what was said.

Invariants: the draw depends on the seed and on the ids of the calls, not on the order of rows; calls of one task, or of
tasks with the same fields, are one group, so that whoever holds calls out can hold out whole groups. Only calls of
episodes that came to their end are drawn.
"""

# ruff: noqa: S608 - statements are put together from constants; every value is bound
from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from marft_bridge.move_plan.considered import EPISODES, HOSTED
from trace_store import schema
from trace_store.records import TOOLS_OF, SpanRow
from trace_store.rows import rows_to_records
from trace_store.store import TraceStore

_SPAN_COLUMNS = ", ".join(f's."{column.name}"' for column in schema.SPANS.columns)
_DRAWN = f"""
WITH drawn AS (
    SELECT a.node, a.episode_id, a.action_id, a.finish_reason,
           row_number() OVER (PARTITION BY a.node ORDER BY md5(a.episode_id || a.action_id || ':' || $1)) AS place
    FROM {HOSTED} a SEMI JOIN (FROM {EPISODES} WHERE outcome = 'terminated') e USING (episode_id)
    QUALIFY place <= $2
)
SELECT d.node, d.episode_id, d.finish_reason, e.task_id, e.task, e.lineage, {_SPAN_COLUMNS}
FROM drawn d JOIN episodes e USING (episode_id)
JOIN spans s ON s.trace_id = d.episode_id AND s.span_id = d.action_id
ORDER BY d.node, d.place
"""


@dataclass(frozen=True, slots=True)
class DrawnCall:
    """One hosted call."""

    node: str
    episode_id: str
    group: str  # of calls that are held out together
    finish_reason: str | None
    offers_tools: bool  # whether the record says so beside the span
    span: SpanRow


def draw_calls(store: TraceStore, per_node: int, seed: int) -> list[DrawnCall]:
    """At most so many calls of each node, by node, in the order of the draw."""
    rows = store.sql(_DRAWN, (str(seed), per_node))
    spans = rows_to_records(SpanRow, schema.SPANS, [row[6:] for row in rows])
    return [
        DrawnCall(
            node=node,
            episode_id=episode_id,
            group=_group(task_id, task),
            finish_reason=finish_reason,
            offers_tools=f"{TOOLS_OF}{node}" in json.loads(lineage or "{}"),
            span=span,
        )
        for (node, episode_id, finish_reason, task_id, task, lineage, *_), span in zip(rows, spans, strict=True)
    ]


def _group(task_id: str, task: str) -> str:
    """The fields of a task without its id, where it has any: an app's own runs of one input have ids of their own."""
    content = json.loads(task)
    fields = {key: value for key, value in content.items() if key != "id"} if isinstance(content, dict) else content
    return json.dumps(fields, sort_keys=True) if fields else task_id


def nodes_of(calls: Sequence[DrawnCall]) -> list[str]:
    """The nodes that have calls among these, each once."""
    return list(dict.fromkeys(call.node for call in calls))
