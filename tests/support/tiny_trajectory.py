"""Trajectories and actions as small as a test needs, without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from trace_store.records import Action, Episode, Reward, Trajectory


def action(node: str, sampled: Sequence[int] = (1, 2), **changes: Any) -> Action:
    """A call that sampled these tokens at temperature 1 from the whole distribution."""
    made = Action(
        action_id=node,
        episode_id="e",
        node=node,
        index=0,
        step=None,
        prompt_ids=(5, 6),
        sampled_ids=tuple(sampled),
        logprobs=(-1.0,) * len(sampled),
        model="base",
        adapter=None,
        adapter_version=None,
        temperature=1.0,
        top_p=1.0,
        top_k=None,
        max_tokens=8,
        seed=None,
        finish_reason="stop",
        completion=None,
        started_ns=0,
        ended_ns=1,
        trainable=True,
    )
    return replace(made, **changes)


def trajectory(
    task_id: str,
    actions: Sequence[Action] = (),
    *,
    reward: float | None = None,
    task: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Trajectory:
    """An episode of one task; `changes` are fields of its `Episode`."""
    episode = Episode(
        episode_id=f"episode of {task_id}",
        run_id="run",
        task_id=task_id,
        split="heldout",
        sample=0,
        round=None,
        variant=None,
        seed=None,
        adapters={},
        outcome="terminated",
        reason=None,
        started_ns=0,
        ended_ns=1,
        span_count=1,
        task=dict(task or {"id": task_id}),
    )
    episode = replace(episode, **changes)
    numbered = tuple(
        replace(a, episode_id=episode.episode_id, action_id=f"{n}", index=n) for n, a in enumerate(actions)
    )
    rewards = () if reward is None else (Reward(episode.episode_id, "reward", reward, "test", 1),)
    return Trajectory(episode, numbered, (), rewards)
