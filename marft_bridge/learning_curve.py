"""A training run's episodes and metrics -> the points of its learning curve.

The reward of a point is the mean over the episodes that its version was trained *from*, so the first point, of the
collected episodes, shows the graph before training.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from marft_bridge.comparison.records import LearningPoint
from marft_bridge.metrics_lines import read_metrics
from marft_bridge.reward_points import runs_to_points
from marft_bridge.run_folder import COLLECT, TRAIN
from trace_store.store import TraceStore

_NODE_FIGURES = ("approx_kl", "kl_after", "clipfrac", "grad_norm", "adapter_norm")


def run_to_learning_curve(store: TraceStore, metrics: Path, reward: str) -> tuple[LearningPoint, ...]:
    """One point per round of the training run in this folder, the collected episodes being round 0."""
    lines = {line["round"]: line for line in read_metrics(metrics)}
    return tuple(runs_to_points(store, (COLLECT, TRAIN), reward, lambda number: _node_figures(lines.get(number, {}))))


def _node_figures(line: dict[str, Any]) -> dict[str, dict[str, float | None]]:
    agents = line.get("agents") or line.get("replay", {}).get("agents", {})
    return {
        node: {name: agent[name] for name in _NODE_FIGURES if agent.get(name) is not None}
        for node, agent in agents.items()
    }
