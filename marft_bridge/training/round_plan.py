"""A round's tasks, and what a store holds of it -> the requests that are played next, in waves.

The first wave is the round as planned. Where the samples of some tasks all earned the same, groups on further tasks
follow, until as many tasks as planned say what was better, or the budget is spent (DAPO's dynamic sampling). Invariant:
all requests of a round, the possible ones included, are made at once, so that none is made twice; which of them are
played follows from the stored episodes, so that a round that was stopped anywhere goes on where it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from marft_bridge.config.bridge import TrainOptions
from marft_bridge.rollouts.episode_plan import EpisodeRequest, plan_episodes, unfinished_requests
from marft_bridge.tasks.reading import Task
from marft_bridge.training.task_draw import TaskReward, groups_to_add
from trace_store.records import Trajectory
from trace_store.store import TraceStore

# The latest team reward of every episode of the first rounds of a run.
_REWARDS = """
SELECT e.task_id, e.round, arg_max(r.value, r.created_ns)
FROM episodes e JOIN rewards r USING (episode_id)
WHERE e.run_id = ? AND e.round <= ? AND e.outcome <> 'failed' AND r.scope = 'episode' AND r.name = ?
GROUP BY e.task_id, e.round, e.episode_id
"""


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """The groups of samples that a round plays, and those that may be added."""

    planned: tuple[EpisodeRequest, ...]
    added_groups: tuple[tuple[EpisodeRequest, ...], ...]  # each on a task of its own, in the order of their use

    @property
    def planned_tasks(self) -> set[str]:
        """The ids of the tasks that the round was planned with."""
        return {str(request.task["id"]) for request in self.planned}


def plan_round(tasks: Sequence[Task], options: TrainOptions, seed: int, **common: Any) -> RoundPlan:
    """Tasks in the order in which the round takes them -> its groups; no task that is planned is added again.

    Args:
        common: see `plan_episodes`.
    """
    samples = options.samples_per_task
    group_count = math.ceil(options.episodes_per_round / samples)
    most_added = min(math.floor(options.refill_share * group_count), max(0, len(tasks) - group_count))
    episodes = options.episodes_per_round + most_added * samples
    requests = plan_episodes(tasks, episodes, samples, seed=seed, **common)
    first, added = requests[: options.episodes_per_round], requests[options.episodes_per_round :]
    groups = (tuple(added[start : start + samples]) for start in range(0, len(added), samples))
    return RoundPlan(tuple(first), tuple(groups))


def next_wave(
    plan: RoundPlan,
    store: TraceStore,
    played: Collection[EpisodeRequest],
    to_teaching: Callable[[Sequence[Trajectory]], set[str]],
) -> list[EpisodeRequest]:
    """The requests to be played next; empty where the round is whole.

    Args:
        played: what this process has played of it, which is not repeated where it failed.
        to_teaching: episodes -> the ids of those that could teach something.
    """
    run_id, number = plan.planned[0].run_id, plan.planned[0].round
    begun_tasks = {episode.task_id for episode in store.episodes(run_id=run_id, round=number)}
    begun_tasks |= {str(request.task["id"]) for request in played}
    begun = [k for k, group in enumerate(plan.added_groups, start=1) if str(group[0].task["id"]) in begun_tasks]
    added_count = max(begun, default=0)
    begun_requests = [*plan.planned, *_in_line(plan.added_groups[:added_count])]
    played_keys = {request.key for request in played}
    open_requests = [r for r in unfinished_requests(store, begun_requests) if r.key not in played_keys]
    if open_requests or not plan.added_groups:
        return open_requests
    episodes = list(store.trajectories(run_ids=[run_id], round=number))
    teaching = to_teaching(episodes)
    planned_count = len(plan.planned_tasks)
    count = groups_to_add(
        planned=planned_count,
        played=planned_count + added_count,
        informative=len({e.episode.task_id for e in episodes if e.episode.episode_id in teaching}),
        left=len(plan.added_groups) - added_count,
    )
    return _in_line(plan.added_groups[added_count : added_count + count])


def rewards_of_rounds(store: TraceStore, run_id: str, last_round: int, reward: str) -> list[TaskReward]:
    """What the episodes of a run's rounds up to one earned, without those that failed or have no such reward."""
    rows = store.sql(_REWARDS, (run_id, last_round, reward))
    return [TaskReward(task_id, number, value) for task_id, number, value in rows if math.isfinite(value)]


def rewards_of_stored(trajectories: Sequence[Trajectory], reward: str) -> list[TaskReward]:
    """The same of the episodes that are known before the first round."""
    return [
        TaskReward(trajectory.episode.task_id, 0, value)
        for trajectory in trajectories
        if trajectory.episode.outcome != "failed"
        and (value := trajectory.team_reward(reward)) is not None
        and math.isfinite(value)
    ]


def wasted_share(played: int, teaching: int) -> float | None:
    """The share of a round's episodes that could teach nothing; None of a round without an episode."""
    return 1 - teaching / played if played else None


def _in_line(groups: Sequence[Sequence[EpisodeRequest]]) -> list[EpisodeRequest]:
    return [request for group in groups for request in group]
