"""The questions that people ask of a store first, as SQL with the answer's columns explained.

Each runs on any store, an empty one included, and takes no parameters. They read the views of `schema` where one fits.
"""

from __future__ import annotations

REWARD_BY_NODE_AND_VERSION = """
SELECT node, adapter_version, reward, episodes, mean, deviation
FROM reward_by_node_version
ORDER BY node, reward, adapter_version NULLS FIRST
"""
"""Is a newer adapter better? Episodes in which the version acted, mean and sample deviation of each reward."""

TOKENS_PER_RUN = """
SELECT r.run_id, r.command, count(s.episode_id) AS episodes, sum(s.actions) AS actions,
       sum(s.prompt_tokens) AS prompt_tokens, sum(s.sampled_tokens) AS sampled_tokens
FROM runs r LEFT JOIN episode_summary s USING (run_id)
GROUP BY r.run_id, r.command, r.started_ns
ORDER BY r.started_ns, r.run_id
"""
"""What did a run cost? Episodes, LLM calls and the tokens that the engine reported."""

LONGEST_EPISODES = """
SELECT episode_id, task_id, outcome, seconds, actions, prompt_tokens, sampled_tokens
FROM episode_summary
ORDER BY seconds DESC, episode_id
LIMIT 20
"""
"""Which episodes hold a round up? The twenty slowest."""

FAILURES_BY_REASON = """
SELECT what, reason, count(*) AS number FROM (
    SELECT 'episode ' || outcome AS what, reason FROM episodes WHERE outcome <> 'terminated'
    UNION ALL SELECT 'untrainable action', untrainable_reason FROM actions WHERE NOT trainable
    UNION ALL SELECT 'refused trace', reason FROM refusals
)
GROUP BY what, reason
ORDER BY number DESC, what, reason
"""
"""What goes wrong most? Episodes that did not end by themselves, actions without training value, refused traces."""

LEARNING_CURVE = """
SELECT e.run_id, e.round, e.split, w.name AS reward, count(*) AS episodes, avg(w.value) AS mean,
       stddev_samp(w.value) / sqrt(count(*)) AS standard_error
FROM episodes e JOIN episode_reward w USING (episode_id)
WHERE e.round IS NOT NULL
GROUP BY e.run_id, e.round, e.split, w.name
ORDER BY e.run_id, w.name, e.split, e.round
"""
"""Does it learn? Mean reward and its standard error by training round."""

DEPENDENCIES_BETWEEN_NODES = """
SELECT s.node AS src_node, d.node AS dst_node, x.kind, count(*) AS edges
FROM edges x
JOIN actions s ON s.episode_id = x.episode_id AND s.action_id = x.src
JOIN actions d ON d.episode_id = x.episode_id AND d.action_id = x.dst
GROUP BY s.node, d.node, x.kind
ORDER BY edges DESC, src_node, dst_node, x.kind
"""
"""Who depends on whom? D summed over all episodes, by node."""

QUERIES = {
    "reward-by-node-and-version": REWARD_BY_NODE_AND_VERSION,
    "tokens-per-run": TOKENS_PER_RUN,
    "longest-episodes": LONGEST_EPISODES,
    "failures-by-reason": FAILURES_BY_REASON,
    "learning-curve": LEARNING_CURVE,
    "dependencies-between-nodes": DEPENDENCIES_BETWEEN_NODES,
}
"""Name -> SQL."""
