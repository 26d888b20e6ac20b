"""Rewards of agents that `marft-bridge credit` wrote into a store -> each agent's mean difference, with its interval.

Invariant: they are of one run of that command, the latest on the same team reward; others are not mixed in.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from marft_bridge.fork_credit.estimates import Estimate
from marft_bridge.rewards.agent_credit import CREDIT_REWARDS
from marft_bridge.statistics import mean_interval
from trace_store.store import TraceStore

_SOURCE = re.compile(r"credit:(?P<run>[^:]+): (?P<metric>.*), (?P<substitute>.*) instead")


@dataclass(frozen=True, slots=True)
class LeaveOneOut:
    """What one `credit` run found by replacing agents."""

    run_id: str
    substitute: str
    estimates: dict[str, Estimate]  # node -> mean difference reward, Student's t over tasks


def read_leave_one_out(store: TraceStore, metric: str) -> LeaveOneOut | None:
    """The latest run of `credit` on this team reward; None where the store has none."""
    rows = store.sql(
        "SELECT r.source, r.node, r.value, e.task_id FROM rewards r JOIN episodes e USING (episode_id)"
        " WHERE r.scope = 'agent' AND r.name = ? AND starts_with(r.source, 'credit:')"
        " ORDER BY r.created_ns DESC, r.source, r.node, e.task_id, r.episode_id",
        (CREDIT_REWARDS[0],),
    )
    matches = {source: match for source, *_ in rows if (match := _SOURCE.fullmatch(source)) is not None}
    latest = next((source for source, match in matches.items() if match["metric"] == metric), None)
    if latest is None:
        return None
    values: dict[str, list[tuple[str, float]]] = {}
    for source, node, value, task in rows:
        if source == latest:
            values.setdefault(node, []).append((task, value))
    estimates = {}
    for node, pairs in values.items():
        tasks = [task for task, _ in pairs]
        interval = mean_interval([value for _, value in pairs], clusters=tasks)
        estimates[node] = Estimate(interval.mean, interval.low, interval.high, runs=len(pairs), tasks=len({*tasks}))
    return LeaveOneOut(matches[latest]["run"], matches[latest]["substitute"], estimates)
