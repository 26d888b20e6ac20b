"""The questions that people ask of a store first, as SQL with the answer's columns explained.

Each runs on any store, an empty one included, and takes no parameters. They read the views where one fits; the page
docs/store.md shows them all.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Question:
    """A question in words, what its answer holds, and the SQL that gives it."""

    name: str
    text: str
    answer: str
    sql: str


QUESTIONS = (
    Question(
        "reward-by-node-and-version",
        "Is a newer adapter better?",
        "Episodes in which the version acted, mean and sample deviation of each reward.",
        sql="""
        SELECT node, adapter_version, reward, episodes, mean, deviation
        FROM reward_by_node_version
        ORDER BY node, reward, adapter_version NULLS FIRST
        """,
    ),
    Question(
        "tokens-per-run",
        "What did a run cost?",
        "Episodes, LLM calls, and the tokens of the episodes in which they are known for every call (counted).",
        sql="""
        SELECT r.run_id, r.command, count(s.episode_id) AS episodes, sum(s.actions) AS actions,
               count(s.sampled_tokens) AS counted,
               sum(s.prompt_tokens) AS prompt_tokens, sum(s.sampled_tokens) AS sampled_tokens
        FROM runs r LEFT JOIN episode_summary s USING (run_id)
        GROUP BY r.run_id, r.command, r.started_ns
        ORDER BY r.started_ns, r.run_id
        """,
    ),
    Question(
        "longest-episodes",
        "Which episodes hold a round up?",
        "The twenty slowest.",
        sql="""
        SELECT episode_id, task_id, outcome, seconds, actions, prompt_tokens, sampled_tokens
        FROM episode_summary
        ORDER BY seconds DESC, episode_id
        LIMIT 20
        """,
    ),
    Question(
        "failures-by-reason",
        "What goes wrong most?",
        "Episodes that did not end by themselves, actions without training value, refused traces.",
        sql="""
        SELECT what, reason, count(*) AS number FROM (
            SELECT 'episode ' || outcome AS what, reason FROM episodes WHERE outcome <> 'terminated'
            UNION ALL SELECT 'untrainable action', untrainable_reason FROM actions
            WHERE NOT trainable AND replayed_from IS NULL
            UNION ALL SELECT 'refused trace', reason FROM refusals
        )
        GROUP BY what, reason
        ORDER BY number DESC, what, reason
        """,
    ),
    Question(
        "learning-curve",
        "Does it learn?",
        "Mean reward and its standard error by training round.",
        sql="""
        SELECT e.run_id, e.round, e.split, w.name AS reward, count(*) AS episodes, avg(w.value) AS mean,
               stddev_samp(w.value) / sqrt(count(*)) AS standard_error
        FROM episodes e JOIN episode_reward w USING (episode_id)
        WHERE e.round IS NOT NULL AND e.fork_action IS NULL
        GROUP BY e.run_id, e.round, e.split, w.name
        ORDER BY e.run_id, w.name, e.split, e.round
        """,
    ),
    Question(
        "dependencies-between-nodes",
        "Who depends on whom?",
        "D summed over all episodes but forks, by node.",
        sql="""
        SELECT s.node AS src_node, d.node AS dst_node, x.kind, count(*) AS edges
        FROM edges x
        JOIN actions s ON s.episode_id = x.episode_id AND s.action_id = x.src
        JOIN actions d ON d.episode_id = x.episode_id AND d.action_id = x.dst
        JOIN episodes e ON e.episode_id = x.episode_id AND e.fork_action IS NULL
        GROUP BY s.node, d.node, x.kind
        ORDER BY edges DESC, src_node, dst_node, x.kind
        """,
    ),
    Question(
        "which-node-hurts",
        "Which node hurts?",
        "What went wrong in its calls, and the mean reward of the episodes in which one of them failed or was cut "
        "off at its token limit, against that of the episodes in which all went well.",
        sql="""
        SELECT t.node, t.calls, t.failed, t.cut_off, t.untrainable, r.reward, r.with_trouble, r.without_trouble
        FROM node_trouble t
        LEFT JOIN (
            SELECT p.node, r.name AS reward, avg(r.value) FILTER (WHERE p.trouble) AS with_trouble,
                   avg(r.value) FILTER (WHERE NOT p.trouble) AS without_trouble
            FROM (
                SELECT c.episode_id, c.node, bool_or(s.status = 'error' OR coalesce(c.cut_off, false)) AS trouble
                FROM calls c JOIN spans s ON s.trace_id = c.episode_id AND s.span_id = c.action_id
                JOIN episodes e ON e.episode_id = c.episode_id AND e.fork_action IS NULL
                GROUP BY c.episode_id, c.node
            ) p
            JOIN episode_reward r USING (episode_id)
            GROUP BY p.node, r.name
        ) r USING (node)
        ORDER BY t.failed + t.cut_off DESC, t.node, r.reward
        """,
    ),
    Question(
        "failing-tasks",
        "Which tasks fail?",
        "The fifty with the lowest mean reward, those without any reward first.",
        sql="""
        SELECT o.task_id, o.split, o.episodes, o.terminated, o.truncated, o.failed, o.rewarded, r.reward, r.mean
        FROM outcomes_by_task o
        LEFT JOIN (
            SELECT e.task_id, e.split, w.name AS reward, avg(w.value) AS mean
            FROM episodes e JOIN episode_reward w USING (episode_id)
            WHERE e.fork_action IS NULL
            GROUP BY e.task_id, e.split, w.name
        ) r USING (task_id, split)
        ORDER BY r.mean NULLS FIRST, o.failed DESC, o.task_id, o.split, r.reward
        LIMIT 50
        """,
    ),
    Question(
        "what-got-longer",
        "What got longer?",
        "Tokens per call of each node and version, and the change from the version before it.",
        sql="""
        SELECT node, adapter_version, calls, sampled_tokens_per_call,
               sampled_tokens_per_call - lag(sampled_tokens_per_call) OVER version AS longer_than_before,
               prompt_tokens_per_call - lag(prompt_tokens_per_call) OVER version AS more_prompt_than_before
        FROM tokens_by_node_version
        WINDOW version AS (PARTITION BY node ORDER BY adapter_version NULLS FIRST)
        ORDER BY longer_than_before DESC NULLS LAST, node, adapter_version NULLS FIRST
        """,
    ),
    Question(
        "tool-failures",
        "How often does a tool fail?",
        "Calls and errors by tool and node, and the median seconds of a call.",
        sql="""
        SELECT tool, node, calls, errors, error_rate, p50
        FROM tool_errors ORDER BY error_rate DESC, errors DESC, tool, node
        """,
    ),
    Question(
        "where-tokens-go",
        "Where do the tokens go?",
        "Each node's share of all tokens that are known.",
        sql="""
        SELECT node, calls, counted, prompt_tokens, sampled_tokens,
               (prompt_tokens + sampled_tokens) / sum(prompt_tokens + sampled_tokens) OVER () AS share
        FROM (
            SELECT node, sum(calls) AS calls, sum(counted) AS counted, sum(prompt_tokens) AS prompt_tokens,
                   sum(sampled_tokens) AS sampled_tokens
            FROM tokens_by_node_version GROUP BY node
        )
        ORDER BY share DESC NULLS LAST, node
        """,
    ),
    Question(
        "slowest-nodes",
        "Who keeps the others waiting?",
        "Seconds per call by node.",
        sql="""
        SELECT node, calls, p50, p95, longest, tokens_per_second FROM latency_by_node ORDER BY p95 DESC, node
        """,
    ),
    Question(
        "handoff-loops",
        "Who runs in circles?",
        "Agents that got control back without anything new, or only to repeat themselves.",
        sql="""
        SELECT l.node, count(*) AS episodes, sum(l.returns) AS returns, sum(l.without_new_data) AS without_new_data,
               sum(l.same_answer) AS same_answer, max(l.without_new_data) AS most_in_one_episode,
               first(l.episode_id ORDER BY l.without_new_data DESC, l.episode_id) AS that_episode
        FROM handoff_loops l
        WHERE l.without_new_data > 0 OR l.same_answer > 0
        GROUP BY l.node
        ORDER BY without_new_data DESC, same_answer DESC, l.node
        """,
    ),
    Question(
        "costs",
        "What did each node cost?",
        "By run; `unknown` calls have no price in `prices`, or no known number of tokens.",
        sql="""
        SELECT run_id, node, model, currency, calls, unknown, cost
        FROM cost_by_run_node ORDER BY run_id, cost DESC NULLS LAST, node, model
        """,
    ),
    Question(
        "adapters-served",
        "Which adapter served what?",
        "Calls and episodes by adapter version, and when (UTC).",
        sql="""
        SELECT node, version, adapter, calls, episodes, make_timestamp_ns(first_ns) AS first,
               make_timestamp_ns(last_ns) AS last, parent, sha256
        FROM adapters_served ORDER BY node, version, adapter
        """,
    ),
    Question(
        "waiting",
        "What is waiting, and for what?",
        "Oldest first; a run that was killed leaves traces that wait for ever.",
        sql="""
        SELECT trace_id, spans, expected, why, make_timestamp_ns(last_ns) AS last
        FROM waiting_traces ORDER BY last_ns, trace_id
        """,
    ),
)

QUERIES = {question.name: question.sql for question in QUESTIONS}
"""Name -> SQL."""
