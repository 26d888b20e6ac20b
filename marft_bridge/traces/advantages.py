"""A stored episode and the team rewards of its task's other samples -> the advantages that can be had without a critic.

The trainer's own formulas (`trainers.gae`, `trainers.group_estimators`), under labels that say what stands in for what
is not stored: the critic. Invariant: an advantage that is not known is None, never 0, and says why. Needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trace_store.records import Episode, Trajectory
from trace_store.store import TraceStore
from trainers.dependencies import edges_to_successors
from trainers.gae import gae_along_dependencies
from trainers.group_estimators import leave_one_out, standardise


@dataclass(frozen=True, slots=True)
class Advantages:
    """One estimate for one reward. `values`: action id -> advantage, of trainable actions; None when `why_not` says."""

    reward: str
    label: str
    values: dict[str, float] | None
    why_not: str | None = None


def episode_to_group(store: TraceStore, episode: Episode) -> dict[str, list[tuple[str, float]]]:
    """Reward name -> (episode id, value) of all samples of this task that the same run took with the same intent."""
    rows = store.sql(
        "SELECT r.name, r.episode_id, r.value FROM episodes e JOIN episode_reward r USING (episode_id)"
        ' WHERE e.run_id = ? AND e.task_id = ? AND e.split = ? AND e."round" IS NOT DISTINCT FROM ?'
        " AND e.variant IS NOT DISTINCT FROM ? AND e.outcome <> 'failed' ORDER BY ALL",
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
    found = []
    for name in names:
        found += [_along_dependencies(trajectory, name, gamma, lam), *_against_group(trajectory, name, group)]
    return found


def _along_dependencies(trajectory: Trajectory, name: str, gamma: float, lam: float) -> Advantages:
    """What the trainer's GAE gives where the critic says 0: the team reward, less the further an action is from it."""
    label = f"GAE along D, V = 0, gamma {gamma:g}, lambda {lam:g}"
    reward = trajectory.team_reward(name)
    kept = [action.trainable for action in trajectory.actions]
    position = {action.action_id: i for i, action in enumerate(trajectory.actions)}
    why_not = _why_none(trajectory, reward)
    if why_not is None and trajectory.episode.outcome == "truncated":
        why_not = "the run was cut short: what would have followed is the critic's to say"
    try:
        edges = [(position[edge.src], position[edge.dst]) for edge in trajectory.edges]
        successors = edges_to_successors(len(kept), edges, kept)
    except (KeyError, ValueError):
        why_not = "its edges do not fit its actions; see `traces doctor`"
        successors = ()
    if why_not is not None or reward is None:
        return Advantages(name, label, None, why_not)
    zeros = [0.0] * len(successors)
    rewards = [0.0 if after else reward for after in successors]
    values = gae_along_dependencies(zeros, rewards, successors, zeros, gamma, lam)
    ids = [action.action_id for action in trajectory.actions if action.trainable]
    return Advantages(name, label, dict(zip(ids, map(float, values), strict=True)))


def _against_group(
    trajectory: Trajectory, name: str, group: Mapping[str, Sequence[tuple[str, float]]]
) -> list[Advantages]:
    samples = group.get(name, ())
    why_not = _why_none(trajectory, trajectory.team_reward(name))
    if why_not is None and len(samples) < 2:
        why_not = "the only sample of its task in this run"
    ids = [action.action_id for action in trajectory.actions if action.trainable]
    estimates = []
    for title in ("GRPO", "RLOO"):
        label = title if len(samples) < 2 else f"{title} over {len(samples)} samples of the task"
        if why_not is not None:
            estimates.append(Advantages(name, label, None, why_not))
            continue
        keys, returns = [key for key, _ in samples], np.array([value for _, value in samples])
        task = [0] * len(samples)
        baseline = (
            standardise(returns, task, keys, "trajectory", std=True)
            if title == "GRPO"
            else leave_one_out(returns, task, keys)
        )
        own = baseline.advantages(returns)[keys.index(trajectory.episode.episode_id)]
        estimates.append(Advantages(name, label, dict.fromkeys(ids, float(own))))
    return estimates


def _why_none(trajectory: Trajectory, reward: float | None) -> str | None:
    if trajectory.episode.outcome == "failed":
        return "the run failed, so it is not trained on"
    if reward is None or not math.isfinite(reward):
        return f"the reward is {reward}"
    if not any(action.trainable for action in trajectory.actions):
        return "no action of it is trainable"
    return None
