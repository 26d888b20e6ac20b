"""Training runs of a store, and their metrics -> the points of a learning curve, one per round.

The reward of a point is the mean over the episodes that its version was trained *on*, so the first point, of the
collected episodes, shows the graph before training. Invariant: the sample size of an interval is the number of tasks,
not of episodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from marft_bridge.runs.run_folder import COLLECT, TRAIN, read_metrics
from marft_bridge.statistics import mean_interval, pass_at_k
from trace_store.store import TraceStore

NodeFigures = dict[str, dict[str, float | None]]

_NODE_FIGURES = ("approx_kl", "kl_after", "clipfrac", "grad_norm", "adapter_norm")

_REWARDS = """
SELECT coalesce(e.round, 0), e.task_id, r.value FROM episodes e JOIN episode_reward r USING (episode_id)
WHERE e.run_id = ANY(?) AND r.name = ? AND isfinite(r.value) AND e.fork_action IS NULL
ORDER BY 1, e.task_id, e.sample, e.started_ns
"""


class LearningPoint(BaseModel):
    """One round of training: the mean team reward of its episodes, and the update's metrics per node."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    round: int
    phase: str  # e.g. "offline", "online"
    episodes: int = Field(ge=0)
    reward_mean: float | None
    reward_low: float | None = None
    reward_high: float | None = None
    nodes: NodeFigures = Field(default_factory=dict)


def runs_to_points(
    store: TraceStore, run_ids: Sequence[str], reward: str, nodes_of: Callable[[int], NodeFigures] = lambda _: {}
) -> list[LearningPoint]:
    """One point per round, in order, over all episodes of these runs that have the team reward.

    The interval is a t interval; that of a share, where all tasks of a round earned the same and no round ever earned
    anything but 0 and 1. A round whose tasks all earned the same otherwise has none.

    Args:
        run_ids: round 0 is the episodes that were collected before training.
        nodes_of: round -> the update's metrics per node.
    """
    rewards: dict[int, list[tuple[str, float]]] = {}
    for number, task, value in store.sql(_REWARDS, (list(run_ids), reward)):
        rewards.setdefault(number, []).append((task, value))
    is_share = {value for scored in rewards.values() for _, value in scored} <= {0.0, 1.0}
    points = []
    for number, scored in sorted(rewards.items()):
        tasks, values = zip(*scored, strict=True)
        interval = mean_interval(values, clusters=tasks)  # samples of one task are not independent
        if interval.low is None and len({*tasks}) > 1 and is_share:
            interval = pass_at_k(values, tasks, 1)  # exact where all tasks are equal: a round that solves none is seen
        points.append(
            LearningPoint(
                round=number,
                phase="offline" if number == 0 else "online",
                episodes=len(values),
                reward_mean=interval.mean,
                reward_low=interval.low,
                reward_high=interval.high,
                nodes=nodes_of(number),
            )
        )
    return points


def run_to_learning_curve(store: TraceStore, metrics: Path, reward: str) -> tuple[LearningPoint, ...]:
    """One point per round of the training run in this folder, the collected episodes being round 0."""
    lines = {line["round"]: line for line in read_metrics(metrics)}
    return tuple(
        runs_to_points(store, (COLLECT, TRAIN), reward, nodes_of=lambda number: _node_figures(lines.get(number, {})))
    )


def _node_figures(line: dict[str, Any]) -> dict[str, dict[str, float | None]]:
    agents = line.get("agents") or line.get("replay", {}).get("agents", {})
    return {
        node: {name: agent[name] for name in _NODE_FIGURES if agent.get(name) is not None}
        for node, agent in agents.items()
    }
