"""The views of the store, each declared once with a sentence: what people ask of the tables.

Invariant: what is not known is NULL and never counts as 0.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class View:
    """One view for people."""

    name: str
    sentence: str
    select: str


EPISODE_REWARD = View(
    "episode_reward",
    "The latest episode reward of each name; an episode without a reward has no row.",
    """
    SELECT episode_id, name, arg_max(value, created_ns) AS value
    FROM rewards WHERE scope = 'episode' GROUP BY episode_id, name
    """,
)

EPISODE_SUMMARY = View(
    "episode_summary",
    "One row per episode: calls, tokens that the engine reported, seconds, and rewards by name (NULL without any).",
    """
    SELECT e.episode_id, e.run_id, e.task_id, e.split, e.sample, e.round, e.variant, e.outcome, e.reason,
           coalesce(a.actions, 0) AS actions, coalesce(a.trainable_actions, 0) AS trainable_actions,
           a.prompt_tokens, a.sampled_tokens, (e.ended_ns - e.started_ns) / 1e9 AS seconds, r.rewards
    FROM episodes e
    LEFT JOIN (
        SELECT episode_id, count(*) AS actions, count(*) FILTER (WHERE trainable) AS trainable_actions,
               sum(len(prompt_ids)) AS prompt_tokens, sum(len(sampled_ids)) AS sampled_tokens
        FROM actions GROUP BY episode_id
    ) a USING (episode_id)
    LEFT JOIN (
        SELECT episode_id, map_from_entries(list((name, value) ORDER BY name)) AS rewards
        FROM episode_reward GROUP BY episode_id
    ) r USING (episode_id)
    """,
)

REWARD_BY_NODE_VERSION = View(
    "reward_by_node_version",
    "Mean episode reward by node and adapter version, over the episodes in which that version acted.",
    """
    SELECT p.node, p.adapter_version, r.name AS reward, count(*) AS episodes,
           avg(r.value) AS mean, stddev_samp(r.value) AS deviation
    FROM (SELECT DISTINCT episode_id, node, adapter_version FROM actions WHERE node <> '') p
    JOIN episode_reward r USING (episode_id)
    GROUP BY p.node, p.adapter_version, r.name
    """,
)

VIEWS = (EPISODE_REWARD, EPISODE_SUMMARY, REWARD_BY_NODE_VERSION)
