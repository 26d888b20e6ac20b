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

# The latest team reward of every episode of the first rounds of a run, in an order that does not depend on when it ran.
_REWARDS = """
SELECT e.task_id, e.round, arg_max(r.value, r.created_ns)
FROM episodes e JOIN rewards r USING (episode_id)
WHERE e.run_id = ? AND e.round <= ? AND e.outcome <> 'failed' AND r.scope = 'episode' AND r.name = ?
  AND e.fork_action IS NULL
GROUP BY e.task_id, e.round, e.sample, e.episode_id ORDER BY e.task_id, e.round, e.sample, 3
"""


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """The requests that a round is planned with, and those that may be added."""

    planned: tuple[EpisodeRequest, ...]
    addable: tuple[EpisodeRequest, ...]  # on further tasks, one group after another, in the order of their use

    @property
    def requests(self) -> tuple[EpisodeRequest, ...]:
        """All of them."""
        return self.planned + self.addable

    @property
    def planned_tasks(self) -> set[str]:
        """The ids of the tasks that the round is planned with."""
        return {request.task["id"] for request in self.planned}

    @property
    def addable_tasks(self) -> list[str]:
        """The ids of the tasks that may be added, in their order."""
        return list(dict.fromkeys(request.task["id"] for request in self.addable))


def plan_round(tasks: Sequence[Task], options: TrainOptions, seed: int, **common: Any) -> RoundPlan:
    """Tasks in the order in which the round takes them -> its groups; no task that is planned is added again.

    Args:
        common: see `plan_episodes`.
    """
    samples = options.samples_per_task
    planned = options.chains_per_round
    group_count = math.ceil(planned / samples)
    most_added = min(options.refill_groups, max(0, len(tasks) - group_count))
    requests = plan_episodes(tasks, planned + most_added * samples, samples, seed=seed, **common)
    return RoundPlan(tuple(requests[:planned]), addable=tuple(requests[planned:]))


def next_wave(
    plan: RoundPlan,
    store: TraceStore,
    played: Collection[EpisodeRequest],
    to_teaching: Callable[[Sequence[Trajectory]], set[str]],
) -> list[EpisodeRequest]:
    """The requests to be played next; empty where the round is whole.

    Every wave is worked out again from the first one on, by how the groups of those before it came out, so that one
    that was cut off in its middle comes out as it was.

    Args:
        played: what this process has played of it, which is not repeated where it failed.
        to_teaching: episodes -> the ids of those that could teach something.
    """
    run_id, number = plan.planned[0].run_id, plan.planned[0].round
    played_keys = {request.key for request in played}
    open_requests = [r for r in unfinished_requests(store, plan.requests) if r.key not in played_keys]
    open_tasks = {r.task["id"] for r in open_requests}
    tasks = plan.planned_tasks
    if not plan.addable_tasks or tasks & open_tasks:
        return [r for r in open_requests if r.task["id"] in tasks]
    episodes = list(store.trajectories(run_ids=[run_id], round=number))
    teaching = to_teaching(episodes)
    informative_tasks = {each.episode.task_id for each in episodes if each.episode.episode_id in teaching}
    added = 0
    while not tasks & open_tasks:
        count = groups_to_add(
            planned=len(plan.planned_tasks),
            played=len(tasks),
            informative=len(tasks & informative_tasks),
            left=len(plan.addable_tasks) - added,
        )
        if count == 0:  # what was begun all the same is ended: an episode that had failed may have come out well since
            tasks = {each.episode.task_id for each in episodes}
            break
        tasks = tasks | set(plan.addable_tasks[added : added + count])
        added += count
    return [r for r in open_requests if r.task["id"] in tasks]


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
