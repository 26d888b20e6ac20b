"""Rewards of agents that `marft-bridge credit` wrote -> each agent's mean difference, with its interval."""

from __future__ import annotations

from dataclasses import dataclass

from marft_bridge.fork_credit.estimates import Estimate
from marft_bridge.rewards.agent_credit import CREDIT_REWARDS, read_credit_values
from marft_bridge.statistics import mean_interval
from trace_store.store import TraceStore


@dataclass(frozen=True, slots=True)
class LeaveOneOut:
    """What one `credit` run found by replacing agents."""

    run_id: str
    substitute: str
    estimates: dict[str, Estimate]  # node -> mean difference reward, Student's t over tasks


def read_leave_one_out(store: TraceStore, metric: str) -> LeaveOneOut | None:
    """The latest run of `credit` on this team reward; None where the store has none."""
    run = read_credit_values(store, CREDIT_REWARDS[0], metric)
    if run is None:
        return None
    estimates = {}
    for node, pairs in run.values.items():
        tasks = [task for task, _ in pairs]
        interval = mean_interval([value for _, value in pairs], clusters=tasks)
        estimates[node] = Estimate(interval.mean, interval.low, interval.high, runs=len(pairs), tasks=len({*tasks}))
    return LeaveOneOut(run.run_id, run.substitute, estimates)
