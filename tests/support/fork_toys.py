"""Trajectories that fork others, as small as a test needs: calls by (node, token), each dependent on the one before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from support import tiny_trajectory
from trace_store.records import BLIND_FORK, REPLAYED, Edge, Reward, Trajectory

Call = tuple[str, int]
"""A node, and the token that it sampled."""


def run(name: str, calls: Sequence[Call], reward: float, task: str = "t") -> Trajectory:
    """An episode of its own; call k of it is `name.k`, and its prompt is what was said before."""
    actions = tuple(
        tiny_trajectory.action(
            node,
            (token,),
            action_id=f"{name}.{k}",
            episode_id=name,
            index=k,
            prompt_ids=(9, *(said for _, said in calls[:k])),
            logprobs=(-0.5,),
        )
        for k, (node, token) in enumerate(calls)
    )
    edges = tuple(Edge(name, f"{name}.{k}", f"{name}.{k + 1}", "data") for k in range(len(calls) - 1))
    whole = tiny_trajectory.trajectory(task, split="train", episode_id=name)
    return replace(whole, actions=actions, edges=edges, rewards=(Reward(name, "reward", reward, "test", 1),))


def fork(
    name: str, parent: Trajectory, at: int, calls: Sequence[Call], reward: float, *, blind: bool = True
) -> Trajectory:
    """An episode that repeats a parent's calls before `at`, and makes `calls` from there."""
    kept = [(action.node, (action.sampled_ids or ())[0]) for action in parent.actions[:at]]
    made = run(name, [*kept, *calls], reward, task=parent.episode.task_id)
    return as_fork(made, parent, at, blind=blind)


def as_fork(made: Trajectory, parent: Trajectory, at: int, *, blind: bool = True) -> Trajectory:
    """A run whose first calls are a parent's, as a fork of it at the first that is not."""
    actions = tuple(
        replace(
            action,
            replayed_from=parent.actions[k].action_id,
            trainable=False,
            untrainable_reason=REPLAYED,
        )
        if k < at
        else action
        for k, action in enumerate(made.actions)
    )
    episode = replace(
        made.episode,
        parent_episode=parent.episode.episode_id,
        fork_action=parent.actions[at].action_id,
        tags={BLIND_FORK: "yes"} if blind else {},
    )
    return replace(made, episode=episode, actions=actions)


def as_named(trajectory: Trajectory, name: str) -> Trajectory:
    """The same under ids of its own: `name`, and `name.k` for call k."""
    ids = {action.action_id: f"{name}.{k}" for k, action in enumerate(trajectory.actions)}
    return replace(
        trajectory,
        episode=replace(trajectory.episode, episode_id=name),
        actions=tuple(replace(a, episode_id=name, action_id=ids[a.action_id]) for a in trajectory.actions),
        edges=tuple(replace(e, episode_id=name, src=ids[e.src], dst=ids[e.dst]) for e in trajectory.edges),
        rewards=tuple(replace(r, episode_id=name) for r in trajectory.rewards),
    )
