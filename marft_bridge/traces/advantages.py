"""A stored episode and the team rewards of its task's other samples -> advantages that need no critic.

The formulas are the trainer's (`trainers.advantages`); a label names each estimate and what replaces the critic, which
is not stored. Invariant: an unknown advantage is None, never 0, with a reason. Needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trace_store.records import Episode, Trajectory
from trace_store.store import TraceStore
from trainers.advantages.group_baselines import leave_one_out, standardise
from trainers.advantages.recurrences import gae_along_dependencies
from trainers.dependencies import edges_to_successors


@dataclass(frozen=True, slots=True)
class Advantages:
    """One estimate for one reward. `values`: action id -> advantage, of trainable actions; or None, and `why_not`."""

    reward: str
    label: str
    values: dict[str, float] | None
    why_not: str | None = None


def episode_to_group(store: TraceStore, episode: Episode) -> dict[str, list[tuple[str, float]]]:
    """Reward name -> (episode id, value) of the samples of this task with the same run, split, round and variant."""
    rows = store.sql(
        "SELECT r.name, r.episode_id, r.value FROM episodes e JOIN episode_reward r USING (episode_id)"
        ' WHERE e.run_id = ? AND e.task_id = ? AND e.split = ? AND e."round" IS NOT DISTINCT FROM ?'
        " AND e.variant IS NOT DISTINCT FROM ? AND e.outcome <> 'failed' AND e.fork_action IS NULL ORDER BY ALL",
        (episode.run_id, episode.task_id, episode.split, episode.round, episode.variant),
    )
    group: dict[str, list[tuple[str, float]]] = {}
    for name, episode_id, value in rows:
        if math.isfinite(value):
            group.setdefault(name, []).append((episode_id, value))
    return group


def trajectory_to_advantages(
    trajectory: Trajectory, group: Mapping[str, Sequence[tuple[str, float]]], gamma: float, lam: float
) -> list[Advantages]:
    """Every estimate for every team reward of the episode: GAE along D with V = 0, GRPO and RLOO.

    Args:
        group: see `episode_to_group`.
        gamma, lam: discount per link of D, and lambda of GAE.
    """
    names = sorted({reward.name for reward in trajectory.rewards if reward.scope == "episode"})
    estimates = []
    for name in names:
        estimates += [_gae_estimate(trajectory, name, gamma, lam=lam), *_group_estimates(trajectory, name, group)]
    return estimates


def _gae_estimate(trajectory: Trajectory, name: str, gamma: float, lam: float) -> Advantages:
    """The trainer's GAE with a critic of 0: the team reward, times gamma * lambda for each link of D up to the end."""
    label = f"GAE along D, V = 0, gamma {gamma:g}, lambda {lam:g}"
    reward = trajectory.team_reward(name)
    trainable = [action.trainable for action in trajectory.actions]
    position = {action.action_id: i for i, action in enumerate(trajectory.actions)}
    reason = _missing_reason(trajectory, reward)
    if reason is None and trajectory.is_unfinished(name):
        reason = "the run was cut short: what would have followed is the critic's to say"
    try:
        edges = [(position[edge.src], position[edge.dst]) for edge in trajectory.edges]
        successors = edges_to_successors(len(trainable), edges, trainable)
    except (KeyError, ValueError):
        reason = "its edges do not fit its actions; see `traces doctor`"
        successors = ()
    if reason is not None or reward is None:
        return Advantages(name, label, None, why_not=reason)
    zeros = [0.0] * len(successors)
    # The team reward is that of the last actions: those which no trainable action depends on.
    rewards = [0.0 if action_successors else reward for action_successors in successors]
    values = gae_along_dependencies(zeros, rewards, successors, bootstrap_A=zeros, gamma=gamma, lam=lam)
    ids = [action.action_id for action in trajectory.actions if action.trainable]
    return Advantages(name, label, dict(zip(ids, map(float, values), strict=True)))


def _group_estimates(
    trajectory: Trajectory, name: str, group: Mapping[str, Sequence[tuple[str, float]]]
) -> list[Advantages]:
    samples = group.get(name, ())
    reason = _missing_reason(trajectory, trajectory.team_reward(name))
    if reason is None and len(samples) < 2:
        reason = "the only sample of its task in this run"
    ids = [action.action_id for action in trajectory.actions if action.trainable]
    estimates = []
    for estimator in ("GRPO", "RLOO"):
        label = estimator if len(samples) < 2 else f"{estimator} over {len(samples)} samples of the task"
        if reason is not None:
            estimates.append(Advantages(name, label, None, why_not=reason))
            continue
        keys, returns = [key for key, _ in samples], np.array([value for _, value in samples])
        task = [0] * len(samples)
        baseline = (
            standardise(returns, task, keys, weight="trajectory", std=True)
            if estimator == "GRPO"
            else leave_one_out(returns, task, keys)
        )
        advantage = baseline.advantages(returns)[keys.index(trajectory.episode.episode_id)]
        estimates.append(Advantages(name, label, dict.fromkeys(ids, float(advantage))))
    return estimates


def _missing_reason(trajectory: Trajectory, reward: float | None) -> str | None:
    if trajectory.episode.outcome == "failed":
        return "the run failed, so it is not trained on"
    if reward is None or not math.isfinite(reward):
        return f"the reward is {reward}"
    if not any(action.trainable for action in trajectory.actions):
        return "no action of it is trainable"
    return None
