"""Rewards of a store's runs, round by round -> the points of a learning curve. It knows no run folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from marft_bridge.comparison.records import LearningPoint
from marft_bridge.statistics import mean_interval
from trace_store.store import TraceStore

NodeFigures = dict[str, dict[str, float | None]]

_REWARDS = """
SELECT coalesce(e.round, 0), e.task_id, r.value FROM episodes e JOIN episode_reward r USING (episode_id)
WHERE e.run_id = ANY(?) AND r.name = ? AND isfinite(r.value) ORDER BY 1, e.episode_id
"""


def runs_to_points(
    store: TraceStore, run_ids: Sequence[str], reward: str, nodes_of: Callable[[int], NodeFigures] = lambda _: {}
) -> list[LearningPoint]:
    """One point per round, in order, over all episodes of these runs that have the team reward.

    Args:
        run_ids: round 0 is what was collected before training.
        nodes_of: round -> the update's figures per node.
    """
    rewards: dict[int, list[tuple[str, float]]] = {}
    for number, task, value in store.sql(_REWARDS, (list(run_ids), reward)):
        rewards.setdefault(number, []).append((task, value))
    points = []
    for number, found in sorted(rewards.items()):
        tasks, values = zip(*found, strict=True)
        interval = mean_interval(values, clusters=tasks)  # samples of one task are not independent
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
