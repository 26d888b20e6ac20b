"""The views of the store, each declared once with a sentence: what people ask of the tables.

Invariant: what is not known is NULL and never counts as 0, and terminated, truncated and failed stay apart. A
store gets its views when it is made or migrated.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class View:
    """One view for people; it may use those before it."""

    name: str
    sentence: str
    select: str


EPISODE_REWARD = View(
    "episode_reward",
    "The latest episode reward of each name; an episode without a reward has no row.",
    """
    SELECT episode_id, name, first(value ORDER BY created_ns DESC, source) AS value
    FROM rewards WHERE scope = 'episode' GROUP BY episode_id, name
    """,
)


def links_of(episodes: str) -> str:
    """The query of `episode_links` over some episodes, which are a table or a query in parentheses."""
    return f"""
    SELECT e.episode_id, e.thread_id, e.begins,
           CASE WHEN e.forked OR e.fork_action IS NOT NULL THEN 'fork' WHEN e.begins IS NOT NULL THEN e.begins
                WHEN e.parent_episode IS NOT NULL THEN 'replay' END AS link,
           coalesce(e.parent_episode, w.episode_id) AS linked_episode,
           e.from_checkpoint IS NULL AND e.parent_episode IS NULL AS is_first
    FROM {episodes} e
    LEFT JOIN (
        SELECT thread_id, checkpoint_id, min(episode_id) AS episode_id FROM (
            SELECT thread_id, episode_id, unnest(string_split(checkpoints, ' ')) AS checkpoint_id
            FROM {episodes} WHERE checkpoints IS NOT NULL
        )
        GROUP BY thread_id, checkpoint_id
    ) w ON w.checkpoint_id = e.from_checkpoint AND w.thread_id = e.thread_id
    """  # noqa: S608 - constants


EPISODE_LINKS = View(
    "episode_links",
    "The episode with which each one goes on, also from another process: link says how. fork: from an earlier"
    " checkpoint; resume: the rest of one that was interrupted or failed; replay: said so when it ran; turn: a new"
    " input on its thread. NULL for the first of a thread, and where the other was not recorded.",
    links_of("episodes"),
)

CALLS = View(
    "calls",
    "One row per action: tokens as the engine counted them, or else as many as their ids; NULL where neither is known."
    " cut_off: it stopped at its token limit. replayed: a recorded answer was given again, nothing was computed.",
    """
    SELECT episode_id, action_id, node, "index", step, model, adapter, adapter_version, started_ns,
           (ended_ns - started_ns) / 1e9 AS seconds,
           coalesce(prompt_tokens, len(prompt_ids)) AS prompt_tokens,
           coalesce(sampled_tokens, len(sampled_ids)) AS sampled_tokens,
           finish_reason = 'length' AS cut_off, trainable, untrainable_reason, replayed_from IS NOT NULL AS replayed
    FROM actions
    """,
)

EPISODE_SUMMARY = View(
    "episode_summary",
    "One row per episode: calls, tokens (NULL unless known for every call, those of answers that were given again left"
    " out), seconds, rewards by name (NULL without any), and whether it is a fork.",
    """
    SELECT e.episode_id, e.run_id, e.task_id, e.split, e.sample, e.round, e.variant, e.outcome, e.reason,
           coalesce(a.actions, 0) AS actions, coalesce(a.trainable_actions, 0) AS trainable_actions,
           CASE WHEN a.actions IS NULL THEN 0 ELSE a.prompt_tokens END AS prompt_tokens,
           CASE WHEN a.actions IS NULL THEN 0 ELSE a.sampled_tokens END AS sampled_tokens,
           (e.ended_ns - e.started_ns) / 1e9 AS seconds, r.rewards, e.fork_action IS NOT NULL AS is_fork
    FROM episodes e
    LEFT JOIN (
        SELECT episode_id, count(*) AS actions, count(*) FILTER (WHERE trainable) AS trainable_actions,
               CASE WHEN bool_and(replayed OR prompt_tokens IS NOT NULL)
                    THEN coalesce(sum(prompt_tokens) FILTER (WHERE NOT replayed), 0) END AS prompt_tokens,
               CASE WHEN bool_and(replayed OR sampled_tokens IS NOT NULL)
                    THEN coalesce(sum(sampled_tokens) FILTER (WHERE NOT replayed), 0) END AS sampled_tokens
        FROM calls GROUP BY episode_id
    ) a USING (episode_id)
    LEFT JOIN (
        SELECT episode_id, map_from_entries(list((name, value) ORDER BY name)) AS rewards
        FROM episode_reward GROUP BY episode_id
    ) r USING (episode_id)
    """,
)

REWARD_BY_NODE_VERSION = View(
    "reward_by_node_version",
    "Mean episode reward by node and adapter version, over the episodes in which that version acted, without forks.",
    """
    SELECT p.node, p.adapter_version, r.name AS reward, count(*) AS episodes,
           avg(r.value) AS mean, stddev_samp(r.value) AS deviation
    FROM (SELECT DISTINCT episode_id, node, adapter_version FROM actions WHERE node <> '') p
    JOIN episode_reward r USING (episode_id)
    JOIN episodes e USING (episode_id)
    WHERE e.fork_action IS NULL
    GROUP BY p.node, p.adapter_version, r.name
    """,
)

OUTCOMES_BY_TASK = View(
    "outcomes_by_task",
    "How the episodes of each task ended, and how many of them have a reward; without forks.",
    """
    SELECT e.task_id, e.split, count(*) AS episodes,
           count(*) FILTER (WHERE e.outcome = 'terminated') AS terminated,
           count(*) FILTER (WHERE e.outcome = 'truncated') AS truncated,
           count(*) FILTER (WHERE e.outcome = 'failed') AS failed,
           count(r.episode_id) AS rewarded
    FROM episodes e
    LEFT JOIN (SELECT DISTINCT episode_id FROM episode_reward) r USING (episode_id)
    WHERE e.fork_action IS NULL
    GROUP BY e.task_id, e.split
    """,
)

TOKENS_BY_NODE_VERSION = View(
    "tokens_by_node_version",
    "Tokens by node and adapter version, over the calls whose number of tokens is known (counted); cut_off: calls that"
    " stopped at their token limit.",
    """
    SELECT node, adapter_version, count(*) AS calls, count(sampled_tokens) AS counted,
           sum(prompt_tokens) AS prompt_tokens, sum(sampled_tokens) AS sampled_tokens,
           avg(prompt_tokens) AS prompt_tokens_per_call, avg(sampled_tokens) AS sampled_tokens_per_call,
           count(*) FILTER (WHERE cut_off) AS cut_off
    FROM calls WHERE NOT replayed GROUP BY node, adapter_version
    """,
)

LATENCY_BY_NODE = View(
    "latency_by_node",
    "Seconds per call by node: the median, the 95th percentile and the longest, failed calls included; and sampled"
    " tokens per second of the calls whose number is known.",
    """
    SELECT node, count(*) AS calls, median(seconds) AS p50, quantile_cont(seconds, 0.95) AS p95,
           max(seconds) AS longest,
           sum(sampled_tokens) / nullif(sum(seconds) FILTER (WHERE sampled_tokens IS NOT NULL), 0) AS tokens_per_second
    FROM calls WHERE NOT replayed GROUP BY node
    """,
)

STEPS_BY_NODE = View(
    "steps_by_node",
    "How often each node ran in the episodes in which it ran, with or without a call; retries count, forks do not.",
    """
    SELECT node, count(*) AS episodes, sum(times) AS executions, avg(times) AS per_episode, max(times) AS most,
           sum(failed) AS failed
    FROM (
        SELECT s.trace_id, s.attributes ->> '$."marft.node"' AS node, count(*) AS times,
               count(*) FILTER (WHERE s.status = 'error') AS failed
        FROM spans s SEMI JOIN (FROM episodes WHERE fork_action IS NULL) e ON e.episode_id = s.trace_id
        WHERE s.operation = 'invoke_agent' GROUP BY ALL
    )
    GROUP BY node
    """,
)

NODE_TROUBLE = View(
    "node_trouble",
    "What goes wrong at each node: calls that failed, that were cut off at their token limit, that cannot be trained"
    " on, and the episodes in which a call of it failed or was cut off.",
    """
    SELECT c.node, count(*) AS calls, count(*) FILTER (WHERE s.status = 'error') AS failed,
           count(*) FILTER (WHERE c.cut_off) AS cut_off, count(*) FILTER (WHERE NOT c.trainable) AS untrainable,
           count(DISTINCT c.episode_id) AS episodes,
           count(DISTINCT c.episode_id) FILTER (WHERE s.status = 'error' OR c.cut_off) AS episodes_in_trouble
    FROM calls c JOIN spans s ON s.trace_id = c.episode_id AND s.span_id = c.action_id
    WHERE NOT c.replayed
    GROUP BY c.node
    """,
)

TOOL_CALLS = View(
    "tool_calls",
    "One row per tool call of an episode; its node is that of the nearest node execution around it (NULL without one).",
    """
    WITH RECURSIVE tools AS (
        SELECT s.trace_id, s.span_id, s.parent_span_id, s.attributes ->> '$."gen_ai.tool.name"' AS tool,
               s.attributes ->> '$."marft.node"' AS node, s.status, s.status_message, s.start_ns, s.end_ns
        FROM spans s SEMI JOIN episodes e ON e.episode_id = s.trace_id WHERE s.operation = 'execute_tool'
    ),
    climb AS (
        SELECT trace_id, span_id, parent_span_id AS around FROM tools WHERE node IS NULL
        UNION ALL
        SELECT c.trace_id, c.span_id, s.parent_span_id
        FROM climb c JOIN spans s ON s.trace_id = c.trace_id AND s.span_id = c.around
        WHERE s.operation <> 'invoke_agent'
    ),
    nodes AS (
        SELECT c.trace_id, c.span_id, s.attributes ->> '$."marft.node"' AS node
        FROM climb c JOIN spans s ON s.trace_id = c.trace_id AND s.span_id = c.around
        WHERE s.operation = 'invoke_agent'
    )
    SELECT t.trace_id AS episode_id, t.span_id, coalesce(t.node, n.node) AS node, t.tool, t.status, t.status_message,
           t.start_ns AS started_ns, (t.end_ns - t.start_ns) / 1e9 AS seconds
    FROM tools t LEFT JOIN nodes n ON n.trace_id = t.trace_id AND n.span_id = t.span_id
    """,
)

TOOL_ERRORS = View(
    "tool_errors",
    "How often each tool was called by each node, and the share of these calls that failed; without forks.",
    """
    SELECT tool, node, count(*) AS calls, count(*) FILTER (WHERE status = 'error') AS errors,
           count(*) FILTER (WHERE status = 'error') / count(*) AS error_rate, median(seconds) AS p50
    FROM tool_calls SEMI JOIN (FROM episodes WHERE fork_action IS NULL) USING (episode_id) GROUP BY tool, node
    """,
)

CONTROL_RETURNS = View(
    "control_returns",
    "The calls by which control came back to an agent: another agent, whose call began after the agent's previous call"
    " had ended, triggered it or sent it work. new_data: since that previous call, something came in that it may depend"
    " on, which is a data edge from such a call of another agent, or a tool's result. same_answer: the text is that of"
    " the previous call, word for word; NULL where a text is missing.",
    """
    WITH visits AS (
        SELECT episode_id, node, action_id, "index", lag("index") OVER visit AS before_index,
               lag(ended_ns) OVER visit AS before_ended, completion = lag(completion) OVER visit AS same_answer
        FROM actions WHERE node <> ''
        WINDOW visit AS (PARTITION BY episode_id, node ORDER BY "index")
    )
    SELECT v.episode_id, v.node, v.action_id, v."index",
           bool_or(e.kind = 'data' AND s.node <> v.node AND s.started_ns >= v.before_ended
                   OR e.kind = 'tool' AND s."index" >= v.before_index) AS new_data,
           any_value(v.same_answer) AS same_answer
    FROM visits v
    JOIN edges e ON e.episode_id = v.episode_id AND e.dst = v.action_id
    JOIN actions s ON s.episode_id = e.episode_id AND s.action_id = e.src
    WHERE v.before_index IS NOT NULL
    GROUP BY v.episode_id, v.node, v.action_id, v."index"
    HAVING bool_or(e.kind IN ('trigger', 'send') AND s.node <> v.node AND s.started_ns >= v.before_ended)
    """,
)

HANDOFF_LOOPS = View(
    "handoff_loops",
    "How often control came back to an agent within an episode (see control_returns), how often without new data, which"
    " is at least so often where edges are upper bounds, and how often it then said the same as before; without forks,"
    " which repeat what came before them.",
    """
    SELECT episode_id, node, count(*) AS returns, count(*) FILTER (WHERE NOT new_data) AS without_new_data,
           count(*) FILTER (WHERE same_answer) AS same_answer
    FROM control_returns SEMI JOIN (FROM episodes WHERE fork_action IS NULL) USING (episode_id)
    GROUP BY episode_id, node
    """,
)

CALL_COSTS = View(
    "call_costs",
    "What each call cost at the price of its model that held when it began, or, where an adapter answered under a name"
    " without a price, at that of `local`; NULL without a price or its tokens. An answer that was given again cost"
    " nothing, and has no row.",
    """
    SELECT c.episode_id, c.action_id, c.node, c.model, c.prompt_tokens, c.sampled_tokens, p.currency,
           (c.prompt_tokens * p.per_million_prompt + c.sampled_tokens * p.per_million_sampled) / 1e6 AS cost
    FROM (
        SELECT *, CASE WHEN adapter IS NULL OR model IN (SELECT model FROM prices) THEN model ELSE 'local' END AS priced
        FROM calls
    ) c
    ASOF LEFT JOIN prices p ON c.priced = p.model AND c.started_ns >= p.since_ns
    WHERE NOT c.replayed
    """,
)

COST_BY_RUN_NODE = View(
    "cost_by_run_node",
    "What the calls of each node cost in each run, by model and currency: the sum over the calls whose cost is known,"
    " and how many it leaves out (unknown); NULL when that is all of them.",
    """
    SELECT e.run_id, c.node, c.model, c.currency, count(*) AS calls, count(*) - count(c.cost) AS unknown,
           sum(c.cost) AS cost
    FROM call_costs c JOIN episodes e USING (episode_id)
    GROUP BY e.run_id, c.node, c.model, c.currency
    """,
)

ADAPTERS_SERVED = View(
    "adapters_served",
    "Which adapter answered how many calls, from when to when; parent and hash are NULL when it is not in adapters.",
    """
    SELECT s.node, s.adapter, s.adapter_version AS version, s.calls, s.episodes, s.first_ns, s.last_ns,
           a.parent, a.sha256
    FROM (
        SELECT node, adapter, adapter_version, count(*) AS calls, count(DISTINCT episode_id) AS episodes,
               min(started_ns) AS first_ns, max(started_ns) AS last_ns
        FROM actions WHERE adapter IS NOT NULL AND replayed_from IS NULL GROUP BY node, adapter, adapter_version
    ) s
    LEFT JOIN adapters a ON a.node = s.node AND a.version = s.adapter_version
    """,
)

WAITING_TRACES = View(
    "waiting_traces",
    "Traces that are no episode yet and were not refused, and what they wait for.",
    """
    SELECT trace_id, spans, expected, started_ns, last_ns,
           CASE WHEN expected IS NULL THEN 'the root span has not arrived'
                ELSE spans || ' of ' || expected || ' spans have arrived' END AS why
    FROM (
        SELECT s.trace_id, count(*) AS spans, min(s.start_ns) AS started_ns, max(s.end_ns) AS last_ns,
               max(CASE WHEN s.parent_span_id IS NULL
                        THEN TRY_CAST(s.attributes ->> '$."marft.span_count"' AS INTEGER) END) AS expected
        FROM spans s
        ANTI JOIN episodes e ON e.episode_id = s.trace_id
        ANTI JOIN refusals r ON r.trace_id = s.trace_id
        GROUP BY s.trace_id
    )
    """,
)

VIEWS = (
    EPISODE_REWARD,
    EPISODE_LINKS,
    CALLS,
    EPISODE_SUMMARY,
    REWARD_BY_NODE_VERSION,
    OUTCOMES_BY_TASK,
    TOKENS_BY_NODE_VERSION,
    LATENCY_BY_NODE,
    STEPS_BY_NODE,
    NODE_TROUBLE,
    TOOL_CALLS,
    TOOL_ERRORS,
    CONTROL_RETURNS,
    HANDOFF_LOOPS,
    CALL_COSTS,
    COST_BY_RUN_NODE,
    ADAPTERS_SERVED,
    WAITING_TRACES,
)
