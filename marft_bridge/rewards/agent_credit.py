"""Rewards of level `agent` that `marft-bridge credit` writes, for training and reports: their names, and reading them.

Invariant: what is read is of one run of that command; those on another team reward, or with another stand-in, are never
mixed in.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trace_store.store import TraceStore

CREDIT_REWARDS = ("difference", "shapley")

_SOURCE = re.compile(r"credit:(?P<run>[^:]+): (?P<metric>.*), (?P<substitute>.*) instead")
_ROWS = """
SELECT r.source, r.node, e.task_id, r.value FROM rewards r JOIN episodes e USING (episode_id)
WHERE r.scope = 'agent' AND r.name = $1 AND starts_with(r.source, 'credit:') AND isfinite(r.value)
ORDER BY r.created_ns DESC, r.source, r.node, e.task_id, r.episode_id
"""


@dataclass(frozen=True, slots=True)
class CreditValues:
    """What one run of `credit` wrote under one name."""

    run_id: str
    substitute: str
    values: dict[str, list[tuple[str, float]]]  # node -> (task, value) of each episode


def read_credit_values(store: TraceStore, name: str, metric: str | None) -> CreditValues | None:
    """The latest run of `credit` on this team reward, or on any (None); None where the store has none.

    Args:
        name: one of `CREDIT_REWARDS`.
    """
    rows = store.sql(_ROWS, (name,))
    matches = {source: match for source, *_ in rows if (match := _SOURCE.fullmatch(source)) is not None}
    latest = next((source for source, match in matches.items() if metric in (None, match["metric"])), None)
    if latest is None:
        return None
    values: dict[str, list[tuple[str, float]]] = {}
    for source, node, task, value in rows:
        if source == latest:
            values.setdefault(node, []).append((task, value))
    match = matches[latest]
    return CreditValues(match["run"], match["substitute"], values)
