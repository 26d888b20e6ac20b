"""The store of a team -> the runs whose messages one node shall learn to say, and a count of the others by reason.

What is good is what imitation takes: the reward that `offline` chooses by reaches its threshold. Invariant: every good
run is a lesson or is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from marft_bridge.distillation.role_turns import RoleMessage, UndistillableError, spans_to_messages
from marft_bridge.rollouts.app import App
from marft_bridge.rollouts.held_out import HeldOutTasks
from marft_bridge.training.external_traces import LEARNED_SPLITS
from trace_store.records import Trajectory
from trace_store.store import TraceStore
from trainers.config import TrainerOptions


@dataclass(frozen=True, slots=True)
class RunCost:
    """What the calls of one run took."""

    calls: int
    prompt_tokens: int | None  # None where a call does not tell
    sampled_tokens: int | None


@dataclass(frozen=True, slots=True)
class Lesson:
    """A good run of the team."""

    episode_id: str
    task: dict[str, Any]
    reward: float | None  # the one that rounds are paid by; None where the team's app has none of that name
    chosen_by: float  # the one that `offline` chooses by
    messages: list[RoleMessage]
    cost: RunCost


@dataclass(frozen=True, slots=True)
class Lessons:
    """The lessons of a store, by (start, id)."""

    lessons: list[Lesson]
    read: int  # runs that the team could be learned from, had they been good
    refused: Counter[str]  # reason -> good runs that are no lesson


def store_to_lessons(
    store: TraceStore, app: App, heldout: HeldOutTasks, *, options: TrainerOptions, known_ids: Collection[str]
) -> Lessons:
    """The lessons of a team for an app.

    Args:
        store: of the team.
        app: the app with one node.
        heldout: the tasks that this app holds out.
        options: its trainer's.
        known_ids: runs of the team that were distilled before.
    """
    chosen_by = options.offline.reward or options.reward
    lessons: list[Lesson] = []
    refused: Counter[str] = Counter()
    read = 0
    for split in LEARNED_SPLITS:
        for trajectory in store.trajectories(split=split):
            read += 1
            value = trajectory.team_reward(chosen_by)
            if value is None or value < options.offline.threshold or trajectory.episode.outcome == "failed":
                continue
            if trajectory.episode.episode_id in known_ids:
                refused["it was distilled before"] += 1
                continue
            try:
                task = _require_task(trajectory, app, heldout)
                messages = spans_to_messages(store.spans(trajectory.episode.episode_id))
            except UndistillableError as error:
                refused[str(error)] += 1
                continue
            lessons.append(
                Lesson(
                    trajectory.episode.episode_id,
                    task,
                    reward=trajectory.team_reward(options.reward),
                    chosen_by=value,
                    messages=messages,
                    cost=trajectory_to_cost(trajectory),
                )
            )
    return Lessons(lessons, read, refused)


def _require_task(trajectory: Trajectory, app: App, heldout: HeldOutTasks) -> dict[str, Any]:
    """The run's task, as the app is given it. Raises UndistillableError where the app cannot be, or may not."""
    episode = trajectory.episode
    task = {**episode.task, "id": episode.task_id}
    if episode.outcome != "terminated":
        raise UndistillableError("the run was cut short")
    if not episode.task:
        raise UndistillableError("its task was not recorded")
    if heldout.is_held_out(episode):
        raise UndistillableError("its task is held out")
    try:
        app.task_to_input(task)
    except Exception as error:  # noqa: BLE001 - the app's own, on a task that is not of its making
        name = type(error).__name__
        raise UndistillableError(f"the app takes no such task: graph.task_to_input raised {name}") from None
    if app.subject_field is not None and app.subject_field not in task:
        raise UndistillableError(f"the app takes no such task: it lacks {app.subject_field!r} (graph.subject_field)")
    if episode.subject_id is not None and app.subject_of(task) != episode.subject_id:
        raise UndistillableError("it holds a subject's data, and graph.subject_field does not name that subject")
    return task


def trajectory_to_cost(trajectory: Trajectory) -> RunCost:
    """The cost of a run, by its engine's token ids, else by what each call reported."""
    actions = trajectory.actions
    prompts = [a.prompt_tokens if a.prompt_ids is None else len(a.prompt_ids) for a in actions]
    samples = [a.sampled_tokens if a.sampled_ids is None else len(a.sampled_ids) for a in actions]
    return RunCost(len(actions), _sum_known(prompts), _sum_known(samples))


def _sum_known(counts: list[int | None]) -> int | None:
    told_counts = [count for count in counts if count is not None]
    return sum(told_counts) if len(told_counts) == len(counts) else None
