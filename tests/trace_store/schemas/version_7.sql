-- Schema version 7, as it was written into files. It does not change any more.

CREATE TABLE runs ("run_id" VARCHAR NOT NULL, "command" VARCHAR NOT NULL, "started_ns" BIGINT NOT NULL, "config" JSON NOT NULL, "version" VARCHAR NOT NULL, PRIMARY KEY ("run_id"));
CREATE TABLE spans ("trace_id" VARCHAR NOT NULL, "span_id" VARCHAR NOT NULL, "parent_span_id" VARCHAR, "name" VARCHAR NOT NULL, "operation" VARCHAR NOT NULL, "start_ns" BIGINT NOT NULL, "end_ns" BIGINT NOT NULL, "status" VARCHAR NOT NULL, "status_message" VARCHAR, "convention" VARCHAR NOT NULL, "attributes" JSON NOT NULL);
CREATE TABLE episodes ("episode_id" VARCHAR NOT NULL, "run_id" VARCHAR NOT NULL, "task_id" VARCHAR NOT NULL, "split" VARCHAR NOT NULL, "sample" INTEGER NOT NULL, "round" INTEGER, "variant" VARCHAR, "seed" BIGINT, "adapters" JSON NOT NULL, "outcome" VARCHAR NOT NULL, "reason" VARCHAR, "started_ns" BIGINT NOT NULL, "ended_ns" BIGINT NOT NULL, "span_count" INTEGER NOT NULL, "task" JSON NOT NULL, "tags" JSON NOT NULL, "subject_id" VARCHAR, "parent_episode" VARCHAR, "lineage" JSON, "thread_id" VARCHAR, "user_id" VARCHAR, "metadata" JSON, "begins" VARCHAR, "forked" BOOLEAN, "from_checkpoint" VARCHAR, "checkpoints" VARCHAR, "fork_action" VARCHAR, PRIMARY KEY ("episode_id"));
CREATE TABLE actions ("action_id" VARCHAR NOT NULL, "episode_id" VARCHAR NOT NULL, "node" VARCHAR NOT NULL, "index" INTEGER NOT NULL, "step" INTEGER, "prompt_ids" INTEGER[], "sampled_ids" INTEGER[], "logprobs" DOUBLE[], "model" VARCHAR, "adapter" VARCHAR, "adapter_version" INTEGER, "temperature" DOUBLE, "top_p" DOUBLE, "top_k" INTEGER, "max_tokens" INTEGER, "seed" BIGINT, "finish_reason" VARCHAR, "completion" VARCHAR, "started_ns" BIGINT NOT NULL, "ended_ns" BIGINT NOT NULL, "trainable" BOOLEAN NOT NULL, "untrainable_reason" VARCHAR, "prompt_tokens" INTEGER, "sampled_tokens" INTEGER, "replayed_from" VARCHAR, "episode_started_ns" BIGINT NOT NULL);
CREATE TABLE edges ("episode_id" VARCHAR NOT NULL, "src" VARCHAR NOT NULL, "dst" VARCHAR NOT NULL, "kind" VARCHAR NOT NULL, "exact" BOOLEAN NOT NULL, "episode_started_ns" BIGINT NOT NULL);
CREATE TABLE rewards ("episode_id" VARCHAR NOT NULL, "name" VARCHAR NOT NULL, "value" DOUBLE NOT NULL, "source" VARCHAR NOT NULL, "created_ns" BIGINT NOT NULL, "scope" VARCHAR NOT NULL, "action_id" VARCHAR, "node" VARCHAR);
CREATE INDEX rewards_by_episode_id ON rewards (episode_id);
CREATE TABLE adapters ("node" VARCHAR NOT NULL, "version" INTEGER NOT NULL, "parent" INTEGER, "path" VARCHAR NOT NULL, "sha256" VARCHAR NOT NULL, "base_sha256" VARCHAR NOT NULL, "created_ns" BIGINT NOT NULL, "metrics" JSON NOT NULL, PRIMARY KEY ("node", "version"));
CREATE TABLE adapter_episodes ("node" VARCHAR NOT NULL, "version" INTEGER NOT NULL, "episode_id" VARCHAR NOT NULL, PRIMARY KEY ("node", "version", "episode_id"));
CREATE TABLE prices ("model" VARCHAR NOT NULL, "since_ns" BIGINT NOT NULL, "currency" VARCHAR NOT NULL, "per_million_prompt" DOUBLE NOT NULL, "per_million_sampled" DOUBLE NOT NULL, PRIMARY KEY ("model", "since_ns"));
CREATE TABLE predictions ("run_id" VARCHAR NOT NULL, "node" VARCHAR NOT NULL, "quantity" VARCHAR NOT NULL, "value" DOUBLE NOT NULL, "low" DOUBLE, "high" DOUBLE, "created_ns" BIGINT NOT NULL, PRIMARY KEY ("run_id", "node", "quantity"));
CREATE TABLE schema_version ("version" INTEGER NOT NULL, "sentence" VARCHAR NOT NULL, "applied_ns" BIGINT NOT NULL, PRIMARY KEY ("version"));
CREATE TABLE taken_in ("segment" VARCHAR NOT NULL, "offset" BIGINT NOT NULL, "records" BIGINT NOT NULL, "torn" BIGINT NOT NULL, "taken_ns" BIGINT NOT NULL, PRIMARY KEY ("segment"));
CREATE TABLE refusals ("trace_id" VARCHAR NOT NULL, "reason" VARCHAR NOT NULL, "refused_ns" BIGINT NOT NULL, PRIMARY KEY ("trace_id"));
CREATE OR REPLACE VIEW episode_reward AS 
    SELECT episode_id, name, first(value ORDER BY created_ns DESC, source) AS value
    FROM rewards WHERE scope = 'episode' GROUP BY episode_id, name;
CREATE OR REPLACE VIEW episode_links AS 
    SELECT e.episode_id, e.thread_id, e.begins,
           CASE WHEN e.forked OR e.fork_action IS NOT NULL THEN 'fork' WHEN e.begins IS NOT NULL THEN e.begins
                WHEN e.parent_episode IS NOT NULL THEN 'replay' END AS link,
           coalesce(e.parent_episode, w.episode_id) AS linked_episode,
           e.from_checkpoint IS NULL AND e.parent_episode IS NULL AS is_first
    FROM episodes e
    LEFT JOIN (
        SELECT thread_id, checkpoint_id, min(episode_id) AS episode_id FROM (
            SELECT thread_id, episode_id, unnest(string_split(checkpoints, ' ')) AS checkpoint_id
            FROM episodes WHERE checkpoints IS NOT NULL
        )
        GROUP BY thread_id, checkpoint_id
    ) w ON w.checkpoint_id = e.from_checkpoint AND w.thread_id = e.thread_id;
CREATE OR REPLACE VIEW calls AS 
    SELECT episode_id, action_id, node, "index", step, model, adapter, adapter_version, started_ns,
           (ended_ns - started_ns) / 1e9 AS seconds,
           coalesce(prompt_tokens, len(prompt_ids)) AS prompt_tokens,
           coalesce(sampled_tokens, len(sampled_ids)) AS sampled_tokens,
           finish_reason = 'length' AS cut_off, trainable, untrainable_reason, replayed_from IS NOT NULL AS replayed
    FROM actions;
CREATE OR REPLACE VIEW episode_summary AS 
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
    ) r USING (episode_id);
CREATE OR REPLACE VIEW reward_by_node_version AS 
    SELECT p.node, p.adapter_version, r.name AS reward, count(*) AS episodes,
           avg(r.value) AS mean, stddev_samp(r.value) AS deviation
    FROM (SELECT DISTINCT episode_id, node, adapter_version FROM actions WHERE node <> '') p
    JOIN episode_reward r USING (episode_id)
    JOIN episodes e USING (episode_id)
    WHERE e.fork_action IS NULL
    GROUP BY p.node, p.adapter_version, r.name;
CREATE OR REPLACE VIEW outcomes_by_task AS 
    SELECT e.task_id, e.split, count(*) AS episodes,
           count(*) FILTER (WHERE e.outcome = 'terminated') AS terminated,
           count(*) FILTER (WHERE e.outcome = 'truncated') AS truncated,
           count(*) FILTER (WHERE e.outcome = 'failed') AS failed,
           count(r.episode_id) AS rewarded
    FROM episodes e
    LEFT JOIN (SELECT DISTINCT episode_id FROM episode_reward) r USING (episode_id)
    WHERE e.fork_action IS NULL
    GROUP BY e.task_id, e.split;
CREATE OR REPLACE VIEW tokens_by_node_version AS 
    SELECT node, adapter_version, count(*) AS calls, count(sampled_tokens) AS counted,
           sum(prompt_tokens) AS prompt_tokens, sum(sampled_tokens) AS sampled_tokens,
           avg(prompt_tokens) AS prompt_tokens_per_call, avg(sampled_tokens) AS sampled_tokens_per_call,
           count(*) FILTER (WHERE cut_off) AS cut_off
    FROM calls WHERE NOT replayed GROUP BY node, adapter_version;
CREATE OR REPLACE VIEW latency_by_node AS 
    SELECT node, count(*) AS calls, median(seconds) AS p50, quantile_cont(seconds, 0.95) AS p95,
           max(seconds) AS longest,
           sum(sampled_tokens) / nullif(sum(seconds) FILTER (WHERE sampled_tokens IS NOT NULL), 0) AS tokens_per_second
    FROM calls WHERE NOT replayed GROUP BY node;
CREATE OR REPLACE VIEW steps_by_node AS 
    SELECT node, count(*) AS episodes, sum(times) AS executions, avg(times) AS per_episode, max(times) AS most,
           sum(failed) AS failed
    FROM (
        SELECT s.trace_id, s.attributes ->> '$."marft.node"' AS node, count(*) AS times,
               count(*) FILTER (WHERE s.status = 'error') AS failed
        FROM spans s SEMI JOIN (FROM episodes WHERE fork_action IS NULL) e ON e.episode_id = s.trace_id
        WHERE s.operation = 'invoke_agent' GROUP BY ALL
    )
    GROUP BY node;
CREATE OR REPLACE VIEW node_trouble AS 
    SELECT c.node, count(*) AS calls, count(*) FILTER (WHERE s.status = 'error') AS failed,
           count(*) FILTER (WHERE c.cut_off) AS cut_off, count(*) FILTER (WHERE NOT c.trainable) AS untrainable,
           count(DISTINCT c.episode_id) AS episodes,
           count(DISTINCT c.episode_id) FILTER (WHERE s.status = 'error' OR c.cut_off) AS episodes_in_trouble
    FROM calls c JOIN spans s ON s.trace_id = c.episode_id AND s.span_id = c.action_id
    WHERE NOT c.replayed
    GROUP BY c.node;
CREATE OR REPLACE VIEW tool_calls AS 
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
    FROM tools t LEFT JOIN nodes n ON n.trace_id = t.trace_id AND n.span_id = t.span_id;
CREATE OR REPLACE VIEW tool_errors AS 
    SELECT tool, node, count(*) AS calls, count(*) FILTER (WHERE status = 'error') AS errors,
           count(*) FILTER (WHERE status = 'error') / count(*) AS error_rate, median(seconds) AS p50
    FROM tool_calls SEMI JOIN (FROM episodes WHERE fork_action IS NULL) USING (episode_id) GROUP BY tool, node;
CREATE OR REPLACE VIEW control_returns AS 
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
    HAVING bool_or(e.kind IN ('trigger', 'send') AND s.node <> v.node AND s.started_ns >= v.before_ended);
CREATE OR REPLACE VIEW handoff_loops AS 
    SELECT episode_id, node, count(*) AS returns, count(*) FILTER (WHERE NOT new_data) AS without_new_data,
           count(*) FILTER (WHERE same_answer) AS same_answer
    FROM control_returns GROUP BY episode_id, node;
CREATE OR REPLACE VIEW call_costs AS 
    SELECT c.episode_id, c.action_id, c.node, c.model, c.prompt_tokens, c.sampled_tokens, p.currency,
           (c.prompt_tokens * p.per_million_prompt + c.sampled_tokens * p.per_million_sampled) / 1e6 AS cost
    FROM (
        SELECT *, CASE WHEN adapter IS NULL OR model IN (SELECT model FROM prices) THEN model ELSE 'local' END AS priced
        FROM calls
    ) c
    ASOF LEFT JOIN prices p ON c.priced = p.model AND c.started_ns >= p.since_ns
    WHERE NOT c.replayed;
CREATE OR REPLACE VIEW cost_by_run_node AS 
    SELECT e.run_id, c.node, c.model, c.currency, count(*) AS calls, count(*) - count(c.cost) AS unknown,
           sum(c.cost) AS cost
    FROM call_costs c JOIN episodes e USING (episode_id)
    GROUP BY e.run_id, c.node, c.model, c.currency;
CREATE OR REPLACE VIEW adapters_served AS 
    SELECT s.node, s.adapter, s.adapter_version AS version, s.calls, s.episodes, s.first_ns, s.last_ns,
           a.parent, a.sha256
    FROM (
        SELECT node, adapter, adapter_version, count(*) AS calls, count(DISTINCT episode_id) AS episodes,
               min(started_ns) AS first_ns, max(started_ns) AS last_ns
        FROM actions WHERE adapter IS NOT NULL AND replayed_from IS NULL GROUP BY node, adapter, adapter_version
    ) s
    LEFT JOIN adapters a ON a.node = s.node AND a.version = s.adapter_version;
CREATE OR REPLACE VIEW waiting_traces AS 
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
    );
COMMENT ON TABLE runs IS 'One invocation of a command that produced records.';
COMMENT ON COLUMN runs."run_id" IS 'Identifies the run.';
COMMENT ON COLUMN runs."command" IS 'What was run, for example collect, train or compare.';
COMMENT ON COLUMN runs."started_ns" IS 'Unix time of the start, in nanoseconds.';
COMMENT ON COLUMN runs."config" IS 'The resolved configuration, secrets removed.';
COMMENT ON COLUMN runs."version" IS 'Version of marft-bridge that ran.';
COMMENT ON TABLE spans IS 'One ended OpenTelemetry span: what happened, unchanged.';
COMMENT ON COLUMN spans."trace_id" IS 'The trace, which is also the episode.';
COMMENT ON COLUMN spans."span_id" IS 'The span; of a chat span also the action.';
COMMENT ON COLUMN spans."parent_span_id" IS 'The enclosing span; NULL for the root.';
COMMENT ON COLUMN spans."name" IS 'Name of the span.';
COMMENT ON COLUMN spans."operation" IS 'invoke_workflow, invoke_agent, chat or execute_tool.';
COMMENT ON COLUMN spans."start_ns" IS 'Unix time of the start, in nanoseconds.';
COMMENT ON COLUMN spans."end_ns" IS 'Unix time of the end, in nanoseconds.';
COMMENT ON COLUMN spans."status" IS 'ok or error.';
COMMENT ON COLUMN spans."status_message" IS 'What went wrong, when status is error.';
COMMENT ON COLUMN spans."convention" IS 'Version of the attribute names in this row.';
COMMENT ON COLUMN spans."attributes" IS 'All attributes; token lists of an action are in actions, numbers that are not finite are text.';
COMMENT ON TABLE episodes IS 'One graph run on one task by one set of adapter versions, assembled from a complete trace.';
COMMENT ON COLUMN episodes."episode_id" IS 'The trace id of the graph run.';
COMMENT ON COLUMN episodes."run_id" IS 'The run that asked for it.';
COMMENT ON COLUMN episodes."task_id" IS 'The task.';
COMMENT ON COLUMN episodes."split" IS 'train, evaluation, heldout, or live: an app''s own run.';
COMMENT ON COLUMN episodes."sample" IS 'Which sample of the task within the run, from 0.';
COMMENT ON COLUMN episodes."round" IS 'Training round; NULL outside training.';
COMMENT ON COLUMN episodes."variant" IS 'Side of a comparison; NULL elsewhere.';
COMMENT ON COLUMN episodes."seed" IS 'Seed of the episode.';
COMMENT ON COLUMN episodes."adapters" IS 'Node name to adapter version.';
COMMENT ON COLUMN episodes."outcome" IS 'terminated, truncated or failed.';
COMMENT ON COLUMN episodes."reason" IS 'Why it was truncated or failed.';
COMMENT ON COLUMN episodes."started_ns" IS 'Unix time of the start, in nanoseconds.';
COMMENT ON COLUMN episodes."ended_ns" IS 'Unix time of the end, in nanoseconds.';
COMMENT ON COLUMN episodes."span_count" IS 'Spans of the trace, the root included.';
COMMENT ON COLUMN episodes."task" IS 'The task''s fields.';
COMMENT ON COLUMN episodes."tags" IS 'Free labels.';
COMMENT ON COLUMN episodes."subject_id" IS 'The person whose data it holds, for erasure.';
COMMENT ON COLUMN episodes."parent_episode" IS 'The episode that this one replays, forks or resumes; see episode_links.';
COMMENT ON COLUMN episodes."lineage" IS 'SHA-256 of base, tokenizer, template and each node''s tools; NULL if not recorded.';
COMMENT ON COLUMN episodes."thread_id" IS 'The thread of the app''s checkpointer.';
COMMENT ON COLUMN episodes."user_id" IS 'The user, as the app''s metadata names them.';
COMMENT ON COLUMN episodes."metadata" IS 'The metadata that the app gave the run; NULL if none.';
COMMENT ON COLUMN episodes."begins" IS 'turn: with a new input; resume: it goes on with a run; NULL without checkpoints.';
COMMENT ON COLUMN episodes."forked" IS 'Whether it begins at an earlier checkpoint of the thread than the last.';
COMMENT ON COLUMN episodes."from_checkpoint" IS 'The checkpoint where it begins; NULL for the first of a thread.';
COMMENT ON COLUMN episodes."checkpoints" IS 'Ids of the checkpoints that it wrote, in order, a space between.';
COMMENT ON COLUMN episodes."fork_action" IS 'The action of parent_episode from which it was run anew; NULL: no fork.';
COMMENT ON TABLE actions IS 'One LLM call of one agent: a_i in the Flex-MG.';
COMMENT ON COLUMN actions."action_id" IS 'The span id of the chat span.';
COMMENT ON COLUMN actions."episode_id" IS 'The episode.';
COMMENT ON COLUMN actions."node" IS 'The agent: LangGraph node name; empty outside any node.';
COMMENT ON COLUMN actions."index" IS 'Position in a topological order of D, from 0.';
COMMENT ON COLUMN actions."step" IS 'LangGraph superstep.';
COMMENT ON COLUMN actions."prompt_ids" IS 'Token ids of the prompt that the engine saw.';
COMMENT ON COLUMN actions."sampled_ids" IS 'Token ids that the engine sampled.';
COMMENT ON COLUMN actions."logprobs" IS 'Log-probability of each sampled id under the behaviour policy, in nats.';
COMMENT ON COLUMN actions."model" IS 'Model as the engine named it.';
COMMENT ON COLUMN actions."adapter" IS 'node@version; NULL without an adapter.';
COMMENT ON COLUMN actions."adapter_version" IS 'Version of the adapter.';
COMMENT ON COLUMN actions."temperature" IS 'Sampling temperature.';
COMMENT ON COLUMN actions."top_p" IS 'Nucleus sampling mass.';
COMMENT ON COLUMN actions."top_k" IS 'Top-k sampling.';
COMMENT ON COLUMN actions."max_tokens" IS 'Limit on sampled tokens.';
COMMENT ON COLUMN actions."seed" IS 'Sampling seed of the call.';
COMMENT ON COLUMN actions."finish_reason" IS 'Why sampling ended, as the engine said.';
COMMENT ON COLUMN actions."completion" IS 'The text, for people; training never reads it.';
COMMENT ON COLUMN actions."started_ns" IS 'Unix time of the start, in nanoseconds.';
COMMENT ON COLUMN actions."ended_ns" IS 'Unix time of the end, in nanoseconds.';
COMMENT ON COLUMN actions."trainable" IS 'Whether ids and log-probs are complete and exact.';
COMMENT ON COLUMN actions."untrainable_reason" IS 'Why not, when trainable is false.';
COMMENT ON COLUMN actions."prompt_tokens" IS 'Prompt tokens as the engine counted them, with or without their ids.';
COMMENT ON COLUMN actions."sampled_tokens" IS 'Sampled tokens as the engine counted them, with or without their ids.';
COMMENT ON COLUMN actions."replayed_from" IS 'The action whose recorded answer was given again; NULL: sampled here.';
COMMENT ON COLUMN actions."episode_started_ns" IS 'Start of the episode, so that a page reads few row groups.';
COMMENT ON TABLE edges IS 'D(src, dst) = 1: the action dst depended on src.';
COMMENT ON COLUMN edges."episode_id" IS 'The episode.';
COMMENT ON COLUMN edges."src" IS 'The earlier action.';
COMMENT ON COLUMN edges."dst" IS 'The action that depended on it.';
COMMENT ON COLUMN edges."kind" IS 'trigger, data, send or tool.';
COMMENT ON COLUMN edges."exact" IS 'False for an upper bound.';
COMMENT ON COLUMN edges."episode_started_ns" IS 'Start of the episode, so that a page reads few row groups.';
COMMENT ON TABLE rewards IS 'One named reward; it may arrive after the run, and a later one of the same name supersedes it.';
COMMENT ON COLUMN rewards."episode_id" IS 'The episode.';
COMMENT ON COLUMN rewards."name" IS 'Name of the reward.';
COMMENT ON COLUMN rewards."value" IS 'Its value.';
COMMENT ON COLUMN rewards."source" IS 'What computed it.';
COMMENT ON COLUMN rewards."created_ns" IS 'Unix time when it was computed, in nanoseconds.';
COMMENT ON COLUMN rewards."scope" IS 'episode (the team''s), step or agent.';
COMMENT ON COLUMN rewards."action_id" IS 'The action that it is for.';
COMMENT ON COLUMN rewards."node" IS 'The agent that it is for.';
COMMENT ON TABLE adapters IS 'One published adapter version of one node.';
COMMENT ON COLUMN adapters."node" IS 'The agent.';
COMMENT ON COLUMN adapters."version" IS 'Version, rising.';
COMMENT ON COLUMN adapters."parent" IS 'Version that it was trained from.';
COMMENT ON COLUMN adapters."path" IS 'Directory of the adapter.';
COMMENT ON COLUMN adapters."sha256" IS 'Hash of adapter_model.safetensors.';
COMMENT ON COLUMN adapters."base_sha256" IS 'Hash of the base model''s weights.';
COMMENT ON COLUMN adapters."created_ns" IS 'Unix time of publication, in nanoseconds.';
COMMENT ON COLUMN adapters."metrics" IS 'What training measured.';
COMMENT ON TABLE adapter_episodes IS 'The episodes that an adapter version was trained on; what its parent versions were trained on counts as well.';
COMMENT ON COLUMN adapter_episodes."node" IS 'The agent.';
COMMENT ON COLUMN adapter_episodes."version" IS 'Version of the adapter.';
COMMENT ON COLUMN adapter_episodes."episode_id" IS 'An episode that its update learned from.';
COMMENT ON TABLE prices IS 'What a model costs from some time on; nothing is known of the cost of a model that is not here.';
COMMENT ON COLUMN prices."model" IS 'Model as the engine named it: actions.model.';
COMMENT ON COLUMN prices."since_ns" IS 'Unix time from which the price holds, in nanoseconds; 0 for always.';
COMMENT ON COLUMN prices."currency" IS 'For example EUR.';
COMMENT ON COLUMN prices."per_million_prompt" IS 'Price of a million prompt tokens.';
COMMENT ON COLUMN prices."per_million_sampled" IS 'Price of a million sampled tokens.';
COMMENT ON TABLE predictions IS 'What a plan predicted of a node before anything was moved; it is held against what happened later.';
COMMENT ON COLUMN predictions."run_id" IS 'The plan, as plan-1; what it rests on is in the config of its run.';
COMMENT ON COLUMN predictions."node" IS 'The agent.';
COMMENT ON COLUMN predictions."quantity" IS 'What was predicted; docs/hosted-to-local.md has the names.';
COMMENT ON COLUMN predictions."value" IS 'The prediction.';
COMMENT ON COLUMN predictions."low" IS 'Lower end of its 95% interval; NULL without one.';
COMMENT ON COLUMN predictions."high" IS 'Upper end of its 95% interval; NULL without one.';
COMMENT ON COLUMN predictions."created_ns" IS 'Unix time when it was made, in nanoseconds.';
COMMENT ON TABLE schema_version IS 'The migrations that were applied to this file.';
COMMENT ON COLUMN schema_version."version" IS 'Number of the migration.';
COMMENT ON COLUMN schema_version."sentence" IS 'What it changed.';
COMMENT ON COLUMN schema_version."applied_ns" IS 'Unix time when it was applied, in nanoseconds.';
COMMENT ON TABLE taken_in IS 'How far each journal segment was taken in.';
COMMENT ON COLUMN taken_in."segment" IS 'File name of the segment, unique for ever.';
COMMENT ON COLUMN taken_in."offset" IS 'Bytes taken in.';
COMMENT ON COLUMN taken_in."records" IS 'Records read.';
COMMENT ON COLUMN taken_in."torn" IS 'Lines dropped because they were damaged.';
COMMENT ON COLUMN taken_in."taken_ns" IS 'Unix time of the last part, in nanoseconds.';
COMMENT ON TABLE refusals IS 'Complete traces that could not be assembled.';
COMMENT ON COLUMN refusals."trace_id" IS 'The trace.';
COMMENT ON COLUMN refusals."reason" IS 'Why, in words.';
COMMENT ON COLUMN refusals."refused_ns" IS 'Unix time of the refusal, in nanoseconds.';
COMMENT ON VIEW episode_reward IS 'The latest episode reward of each name; an episode without a reward has no row.';
COMMENT ON VIEW episode_links IS 'The episode with which each one goes on, also from another process: link says how. fork: from an earlier checkpoint; resume: the rest of one that was interrupted or failed; replay: said so when it ran; turn: a new input on its thread. NULL for the first of a thread, and where the other was not recorded.';
COMMENT ON VIEW calls IS 'One row per action: tokens as the engine counted them, or else as many as their ids; NULL where neither is known. cut_off: it stopped at its token limit. replayed: a recorded answer was given again, nothing was computed.';
COMMENT ON VIEW episode_summary IS 'One row per episode: calls, tokens (NULL unless known for every call, those of answers that were given again left out), seconds, rewards by name (NULL without any), and whether it is a fork.';
COMMENT ON VIEW reward_by_node_version IS 'Mean episode reward by node and adapter version, over the episodes in which that version acted, without forks.';
COMMENT ON VIEW outcomes_by_task IS 'How the episodes of each task ended, and how many of them have a reward; without forks.';
COMMENT ON VIEW tokens_by_node_version IS 'Tokens by node and adapter version, over the calls whose number of tokens is known (counted); cut_off: calls that stopped at their token limit.';
COMMENT ON VIEW latency_by_node IS 'Seconds per call by node: the median, the 95th percentile and the longest, failed calls included; and sampled tokens per second of the calls whose number is known.';
COMMENT ON VIEW steps_by_node IS 'How often each node ran in the episodes in which it ran, with or without a call; retries count, forks do not.';
COMMENT ON VIEW node_trouble IS 'What goes wrong at each node: calls that failed, that were cut off at their token limit, that cannot be trained on, and the episodes in which a call of it failed or was cut off.';
COMMENT ON VIEW tool_calls IS 'One row per tool call of an episode; its node is that of the nearest node execution around it (NULL without one).';
COMMENT ON VIEW tool_errors IS 'How often each tool was called by each node, and the share of these calls that failed; without forks.';
COMMENT ON VIEW control_returns IS 'The calls by which control came back to an agent: another agent, whose call began after the agent''s previous call had ended, triggered it or sent it work. new_data: since that previous call, something came in that it may depend on, which is a data edge from such a call of another agent, or a tool''s result. same_answer: the text is that of the previous call, word for word; NULL where a text is missing.';
COMMENT ON VIEW handoff_loops IS 'How often control came back to an agent within an episode (see control_returns), how often without new data, which is at least so often where edges are upper bounds, and how often it then said the same as before.';
COMMENT ON VIEW call_costs IS 'What each call cost at the price of its model that held when it began, or, where an adapter answered under a name without a price, at that of `local`; NULL without a price or its tokens. An answer that was given again cost nothing, and has no row.';
COMMENT ON VIEW cost_by_run_node IS 'What the calls of each node cost in each run, by model and currency: the sum over the calls whose cost is known, and how many it leaves out (unknown); NULL when that is all of them.';
COMMENT ON VIEW adapters_served IS 'Which adapter answered how many calls, from when to when; parent and hash are NULL when it is not in adapters.';
COMMENT ON VIEW waiting_traces IS 'Traces that are no episode yet and were not refused, and what they wait for.';
