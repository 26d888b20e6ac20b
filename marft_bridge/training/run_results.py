"""A store -> what each request for a whole run of a command came to: what its run earned, or no result.

Invariants: a run that failed, or has no finite reward, is a request without a result, and not one that was never made;
one that a limit cut short came to what `graph.limit_reward` says; only what was cancelled says nothing. A request
counts by the attempts that came to a result, else once, however often it was tried. The order does not depend on the
ids of episodes, which are random: in theirs sums of rewards would differ in their last bits from one execution to the
next.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from marft_bridge.recording.episode_context import CANCELLED
from trace_store.records import HELDOUT
from trace_store.store import TraceStore

# Every attempt at a whole run, with its latest team reward; of what failed a reward does not count.
_ATTEMPTS = """
SELECT e.round, e.task_id, e.sample, e.variant, any_value(e.adapters)::VARCHAR, e.outcome,
  arg_max(r.value, r.created_ns)
FROM episodes e LEFT JOIN rewards r
  ON r.episode_id = e.episode_id AND r.scope = 'episode' AND r.name = $2 AND e.outcome <> 'failed'
WHERE e.run_id = $1 AND e.split <> $3 AND e.fork_action IS NULL AND ($4::INTEGER IS NULL OR e.round <= $4)
GROUP BY e.episode_id, e.round, e.task_id, e.sample, e.variant, e.started_ns, e.outcome, e.reason
HAVING count(r.value) > 0 OR e.outcome <> 'truncated' OR e.reason IS DISTINCT FROM $5
ORDER BY e.round, e.task_id, e.sample, e.variant, e.started_ns, 7
"""


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a request for a whole run came to."""

    task_id: str
    round: int | None
    adapters: Mapping[str, int]  # node -> version
    value: float | None  # None: no result
    ended: bool  # by itself: without a result then because its reward was not to be had


def store_to_results(store: TraceStore, run_id: str, reward: str, last_round: int | None = None) -> list[RunResult]:
    """The results of a run's requests, of all its rounds or of those up to one, without held-out tasks."""
    rows = store.sql(_ATTEMPTS, (run_id, reward, HELDOUT, last_round, CANCELLED))
    attempts = defaultdict[tuple[int | None, str, int, str | None], list[RunResult]](list)
    for number, task_id, sample, variant, adapters, outcome, value in rows:
        finite = value if value is not None and math.isfinite(value) else None
        ended = outcome == "terminated"
        result = RunResult(task_id, number, adapters=json.loads(adapters), value=finite, ended=ended)
        attempts[number, task_id, sample, variant].append(result)
    results: list[RunResult] = []
    for tried in attempts.values():
        results += [result for result in tried if result.value is not None] or tried[-1:]
    return results
