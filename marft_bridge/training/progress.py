"""What each version is worth on the tasks kept for measuring -> what a round's update changed, as its agent's reward.

    round r       played by version r; its update makes version r + 1
    change of r   the measured performance of version r + 1 less that of version r, over the same tasks

Invariants: no measured task is learned from; a change is paid to episodes of the round that made it, and to no other;
the paid agent learns from each of its calls once, with the pay in it, which is one round later than the others do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from marft_bridge.common.errors import ConfigError
from marft_bridge.config.progress import PROGRESS, ProgressOptions
from marft_bridge.rollouts.episode_plan import EpisodeRequest, plan_episodes, task_order
from marft_bridge.runs.run_folder import MEASURE, TRAIN
from marft_bridge.tasks.reading import Task
from trace_store.records import Reward, Trajectory
from trace_store.store import TraceStore

SOURCE = "train.progress"
"""What computed the reward, as the store has it."""
NOT_SETTLED = "its reward is settled after the next round"
"""Why the paid agent's calls of a fresh round are not learned from yet."""
LEARNED_BEFORE = "learned from in the round that sampled it"
"""Why calls of all others are not learned from when a round is settled."""


@dataclass(frozen=True, slots=True)
class Change:
    """The mean of the metric before and after a round's update, over the tasks on which both versions have it."""

    before: float
    after: float
    tasks: int
    known_ns: int  # when the last episode that tells it ended, Unix time

    @property
    def value(self) -> float:
        """After less before."""
        return self.after - self.before


def split_measured(tasks: Sequence[Task], options: ProgressOptions | None, seed: int) -> tuple[list[Task], list[Task]]:
    """The tasks kept for measuring, drawn by the seed, and those that rounds take, in their order.

    Raises:
        ConfigError: no task would be left for rounds.
    """
    if options is None:
        return [], list(tasks)
    if len(tasks) <= options.tasks:
        raise ConfigError(
            f"train.progress.tasks keeps {options.tasks} of {len(tasks)} training tasks, so none is left to train on: "
            "lower it, or add tasks"
        )
    measured = task_order(tasks, seed)[: options.tasks]
    ids = {task["id"] for task in measured}
    return measured, [task for task in tasks if task["id"] not in ids]


def plan_measurement(tasks: Sequence[Task], nodes: Sequence[str], version: int, seed: int) -> list[EpisodeRequest]:
    """One episode of a version on each measured task."""
    return plan_episodes(
        tasks,
        len(tasks),
        1,
        seed=seed,
        run_id=MEASURE,
        split="evaluation",
        adapters=dict.fromkeys(nodes, version),
        round=version,
    )


def store_to_change(store: TraceStore, number: int, metric: str) -> Change | None:
    """What the update of a round changed; None where no task was measured with both versions."""
    old_runs, new_runs = (
        list(store.trajectories(run_ids=[MEASURE], round=version)) for version in (number, number + 1)
    )
    before_by_task, after_by_task = _by_task(old_runs, metric), _by_task(new_runs, metric)
    task_ids = sorted(before_by_task.keys() & after_by_task.keys())
    if not task_ids:
        return None
    return Change(
        sum(before_by_task[task_id] for task_id in task_ids) / len(task_ids),
        sum(after_by_task[task_id] for task_id in task_ids) / len(task_ids),
        tasks=len(task_ids),
        known_ns=max(trajectory.episode.ended_ns for trajectory in new_runs),
    )


def _by_task(trajectories: Sequence[Trajectory], metric: str) -> dict[str, float]:
    """Task -> the metric of its newest episode that has it."""
    ordered = sorted(trajectories, key=lambda trajectory: trajectory.episode.started_ns)
    return {t.episode.task_id: value for t in ordered if (value := t.team_reward(metric)) is not None}


def change_to_rewards(change: Change, episodes: Sequence[Trajectory], options: ProgressOptions) -> list[Reward]:
    """What the episodes of a round earn by its change: `value`, times what `scaled_by` says of each.

    An episode in which the agent did not act, or that lacks the scale, earns none. Equal on every call, so that a
    resumed run pays nothing twice.
    """
    rewards = []
    for trajectory in episodes:
        scale = 1.0 if options.scaled_by is None else trajectory.team_reward(options.scaled_by)
        if scale is None or all(action.node != options.agent for action in trajectory.actions):
            continue
        rewards.append(
            Reward(
                trajectory.episode.episode_id,
                PROGRESS,
                change.value * scale,
                source=SOURCE,
                created_ns=change.known_ns,
                scope="agent",
                node=options.agent,
            )
        )
    return rewards


def settle_round(store: TraceStore, number: int, options: ProgressOptions) -> Change | None:
    """Pays a round by what its update changed, in the store; None where that is not known, and then nothing is paid."""
    change = store_to_change(store, number, options.metric)
    if change is not None:
        store.put_rewards(change_to_rewards(change, list(store.trajectories(run_ids=[TRAIN], round=number)), options))
    return change


def join_settled(fresh: Sequence[Trajectory], settled: Sequence[Trajectory], agent: str) -> list[Trajectory]:
    """What an update learns from: of the fresh episodes all but the agent's calls, of the settled ones those alone."""
    waiting = [_without(trajectory, {agent}, NOT_SETTLED) for trajectory in fresh]
    other_nodes = {action.node for trajectory in settled for action in trajectory.actions} - {agent}
    return [*waiting, *(_without(trajectory, other_nodes, LEARNED_BEFORE) for trajectory in settled)]


def _without(trajectory: Trajectory, nodes: set[str], reason: str) -> Trajectory:
    """The episode with no call of these nodes to learn from; they count as part of the environment."""
    actions = tuple(
        replace(action, trainable=False, untrainable_reason=reason)
        if action.node in nodes and action.trainable
        else action
        for action in trajectory.actions
    )
    return replace(trajectory, actions=actions)


def change_to_metrics(change: Change | None) -> dict[str, Any] | None:
    """The change as a line of metrics.jsonl has it."""
    if change is None:
        return None
    return {"before": change.before, "after": change.after, "change": change.value, "tasks": change.tasks}
