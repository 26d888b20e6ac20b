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
from marft_bridge.recording.episode_context import CANCELLED
from marft_bridge.rollouts.episode_plan import EpisodeRequest, Key, episode_to_key, plan_episodes, unfinished_requests
from marft_bridge.tasks.reading import Task
from marft_bridge.training.run_results import store_to_results
from marft_bridge.training.task_draw import LostRun, TaskReward, TaskRun, groups_to_add
from trace_store.records import Trajectory
from trace_store.store import TraceStore


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


def runs_of_rounds(store: TraceStore, run_id: str, last_round: int, reward: str) -> list[TaskRun]:
    """What the requests of a run's rounds up to one came to."""
    return [
        LostRun(result.task_id, result.round or 0)
        if result.value is None
        else TaskReward(result.task_id, result.round or 0, result.value)
        for result in store_to_results(store, run_id, reward, last_round=last_round)
    ]


def runs_of_stored(trajectories: Sequence[Trajectory], own_ids: Collection[str], reward: str) -> list[TaskRun]:
    """The same of the episodes that are known before the first round.

    Args:
        own_ids: of those that this run collected. Others without a reward of this name say nothing of how often runs
            come to one.
    """
    task_runs: list[TaskRun] = []
    rewarded: set[Key] = set()  # requests of this run
    lost: dict[Key, LostRun] = {}
    for trajectory in trajectories:
        episode = trajectory.episode
        is_own = episode.episode_id in own_ids
        value = None if episode.outcome == "failed" else trajectory.team_reward(reward)
        if value is not None and math.isfinite(value):
            task_runs.append(TaskReward(episode.task_id, 0, value))
            if is_own:
                rewarded.add(episode_to_key(episode))
        elif is_own and not (episode.outcome == "truncated" and episode.reason == CANCELLED):
            lost[episode_to_key(episode)] = LostRun(episode.task_id, 0)
    if not rewarded:  # as where the reward has another name by now: nothing says how they went
        return task_runs
    return [*task_runs, *(run for key, run in lost.items() if key not in rewarded)]


def wasted_share(played: int, teaching: int) -> float | None:
    """The share of a round's episodes that could teach nothing; None of a round without an episode."""
    return 1 - teaching / played if played else None
