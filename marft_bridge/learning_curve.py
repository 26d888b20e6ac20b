"""A training run's episodes and metrics -> the points of its learning curve.

The reward of a point is the mean over the episodes that its version was trained *from*, so the first point, of the
collected episodes, shows the graph before training.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from marft_bridge import collect, train
from marft_bridge.comparison.records import LearningPoint
from marft_bridge.reward_points import rewards_to_points
from trace_store.store import TraceStore

_NODE_FIGURES = ("approx_kl", "kl_after", "clipfrac", "grad_norm", "adapter_norm")

_REWARDS = """
SELECT coalesce(e.round, 0), e.task_id, r.value FROM episodes e JOIN episode_reward r USING (episode_id)
WHERE e.run_id IN (?, ?) AND r.name = ? ORDER BY 1, e.episode_id
"""


def run_to_learning_curve(store: TraceStore, metrics: Path, reward: str) -> tuple[LearningPoint, ...]:
    """One point per round of the training run in this folder, the collected episodes being round 0."""
    lines = {line["round"]: line for line in train.read_metrics(metrics)}
    rows = store.sql(_REWARDS, (collect.RUN_ID, train.RUN_ID, reward))
    return tuple(rewards_to_points(rows, lambda number: _node_figures(lines.get(number, {}))))


def _node_figures(line: dict[str, Any]) -> dict[str, dict[str, float | None]]:
    agents = line.get("agents") or line.get("replay", {}).get("agents", {})
    return {
        node: {name: agent[name] for name in _NODE_FIGURES if agent.get(name) is not None}
        for node, agent in agents.items()
    }
