"""Every table and column of the store, declared once with a sentence; the DDL is rendered from here.

Typed columns hold keys, times, token ids and log-probs; open mappings (attributes, task, tags, metrics) are JSON.
Invariant: a stored log-prob is the DOUBLE that the engine returned, and an absent value is NULL. The sentences go
into the file as DuckDB comments, so `duckdb_columns()` explains a store to whoever opens it.
The views are in `views`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trace_store.views import VIEWS


@dataclass(frozen=True, slots=True)
class Column:
    """One column; `sql_type` ends in NOT NULL where a value is always present."""

    name: str
    sql_type: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Table:
    """One table; `key` names the columns that identify a row (none for tables written once per episode)."""

    name: str
    sentence: str
    columns: tuple[Column, ...]
    key: tuple[str, ...] = ()
    indexed: bool = True  # whether DuckDB holds the key, as a primary key; its upkeep grows with the table
    index_column: str | None = None  # a column that has an index of its own


RUNS = Table(
    "runs",
    "One invocation of a command that produced records.",
    (
        Column("run_id", "VARCHAR NOT NULL", "Identifies the run."),
        Column("command", "VARCHAR NOT NULL", "What was run, for example collect, train or compare."),
        Column("started_ns", "BIGINT NOT NULL", "Unix time of the start, in nanoseconds."),
        Column("config", "JSON NOT NULL", "The resolved configuration, secrets removed."),
        Column("version", "VARCHAR NOT NULL", "Version of marft-bridge that ran."),
    ),
    key=("run_id",),
)

SPANS = Table(
    "spans",
    "One ended OpenTelemetry span: what happened, unchanged.",
    (
        Column("trace_id", "VARCHAR NOT NULL", "The trace, which is also the episode."),
        Column("span_id", "VARCHAR NOT NULL", "The span; of a chat span also the action."),
        Column("parent_span_id", "VARCHAR", "The enclosing span; NULL for the root."),
        Column("name", "VARCHAR NOT NULL", "Name of the span."),
        Column("operation", "VARCHAR NOT NULL", "invoke_workflow, invoke_agent, chat or execute_tool."),
        Column("start_ns", "BIGINT NOT NULL", "Unix time of the start, in nanoseconds."),
        Column("end_ns", "BIGINT NOT NULL", "Unix time of the end, in nanoseconds."),
        Column("status", "VARCHAR NOT NULL", "ok or error."),
        Column("status_message", "VARCHAR", "What went wrong, when status is error."),
        Column("convention", "VARCHAR NOT NULL", "Version of the attribute names in this row."),
        Column(
            "attributes",
            "JSON NOT NULL",
            "All attributes; token lists of an action are in actions, numbers that are not finite are text.",
        ),
    ),
    key=("trace_id", "span_id"),
    indexed=False,  # by far the most rows, in random order of their ids: who writes looks for a span near its start
)

EPISODES = Table(
    "episodes",
    "One graph run on one task by one set of adapter versions, assembled from a complete trace.",
    (
        Column("episode_id", "VARCHAR NOT NULL", "The trace id of the graph run."),
        Column("run_id", "VARCHAR NOT NULL", "The run that asked for it."),
        Column("task_id", "VARCHAR NOT NULL", "The task."),
        Column("split", "VARCHAR NOT NULL", "train, evaluation, heldout, or live: an app's own run."),
        Column("sample", "INTEGER NOT NULL", "Which sample of the task within the run, from 0."),
        Column("round", "INTEGER", "Training round; NULL outside training."),
        Column("variant", "VARCHAR", "Side of a comparison; NULL elsewhere."),
        Column("seed", "BIGINT", "Seed of the episode."),
        Column("adapters", "JSON NOT NULL", "Node name to adapter version."),
        Column("outcome", "VARCHAR NOT NULL", "terminated, truncated or failed."),
        Column("reason", "VARCHAR", "Why it was truncated or failed."),
        Column("started_ns", "BIGINT NOT NULL", "Unix time of the start, in nanoseconds."),
        Column("ended_ns", "BIGINT NOT NULL", "Unix time of the end, in nanoseconds."),
        Column("span_count", "INTEGER NOT NULL", "Spans of the trace, the root included."),
        Column("task", "JSON NOT NULL", "The task's fields."),
        Column("tags", "JSON NOT NULL", "Free labels."),
        Column("subject_id", "VARCHAR", "The person whose data it holds, for erasure."),
        Column("parent_episode", "VARCHAR", "The episode that this one replays, forks or resumes; see episode_links."),
        Column("lineage", "JSON", "SHA-256 of base, tokenizer, template and each node's tools; NULL if not recorded."),
        Column("thread_id", "VARCHAR", "The thread of the app's checkpointer."),
        Column("user_id", "VARCHAR", "The user, as the app's metadata names them."),
        Column("metadata", "JSON", "The metadata that the app gave the run; NULL if none."),
        Column("begins", "VARCHAR", "turn: with a new input; resume: it goes on with a run; NULL without checkpoints."),
        Column("forked", "BOOLEAN", "Whether it begins at an earlier checkpoint of the thread than the last."),
        Column("from_checkpoint", "VARCHAR", "The checkpoint where it begins; NULL for the first of a thread."),
        Column("checkpoints", "VARCHAR", "Ids of the checkpoints that it wrote, in order, a space between."),
        Column("fork_action", "VARCHAR", "The action of parent_episode from which it was run anew; NULL: no fork."),
    ),
    key=("episode_id",),
)

ACTIONS = Table(
    "actions",
    "One LLM call of one agent: a_i in the Flex-MG.",
    (
        Column("action_id", "VARCHAR NOT NULL", "The span id of the chat span."),
        Column("episode_id", "VARCHAR NOT NULL", "The episode."),
        Column("node", "VARCHAR NOT NULL", "The agent: LangGraph node name; empty outside any node."),
        Column("index", "INTEGER NOT NULL", "Position in a topological order of D, from 0."),
        Column("step", "INTEGER", "LangGraph superstep."),
        Column("prompt_ids", "INTEGER[]", "Token ids of the prompt that the engine saw."),
        Column("sampled_ids", "INTEGER[]", "Token ids that the engine sampled."),
        Column("logprobs", "DOUBLE[]", "Log-probability of each sampled id under the behaviour policy, in nats."),
        Column("model", "VARCHAR", "Model as the engine named it."),
        Column("adapter", "VARCHAR", "node@version; NULL without an adapter."),
        Column("adapter_version", "INTEGER", "Version of the adapter."),
        Column("temperature", "DOUBLE", "Sampling temperature."),
        Column("top_p", "DOUBLE", "Nucleus sampling mass."),
        Column("top_k", "INTEGER", "Top-k sampling."),
        Column("max_tokens", "INTEGER", "Limit on sampled tokens."),
        Column("seed", "BIGINT", "Sampling seed of the call."),
        Column("finish_reason", "VARCHAR", "Why sampling ended, as the engine said."),
        Column("completion", "VARCHAR", "The text, for people; training never reads it."),
        Column("started_ns", "BIGINT NOT NULL", "Unix time of the start, in nanoseconds."),
        Column("ended_ns", "BIGINT NOT NULL", "Unix time of the end, in nanoseconds."),
        Column("trainable", "BOOLEAN NOT NULL", "Whether ids and log-probs are complete and exact."),
        Column("untrainable_reason", "VARCHAR", "Why not, when trainable is false."),
        Column("prompt_tokens", "INTEGER", "Prompt tokens as the engine counted them, with or without their ids."),
        Column("sampled_tokens", "INTEGER", "Sampled tokens as the engine counted them, with or without their ids."),
        Column("replayed_from", "VARCHAR", "The action whose recorded answer was given again; NULL: sampled here."),
        Column("episode_started_ns", "BIGINT NOT NULL", "Start of the episode, so that a page reads few row groups."),
    ),
)

EDGES = Table(
    "edges",
    "D(src, dst) = 1: the action dst depended on src.",
    (
        Column("episode_id", "VARCHAR NOT NULL", "The episode."),
        Column("src", "VARCHAR NOT NULL", "The earlier action."),
        Column("dst", "VARCHAR NOT NULL", "The action that depended on it."),
        Column("kind", "VARCHAR NOT NULL", "trigger, data, send or tool."),
        Column("exact", "BOOLEAN NOT NULL", "False for an upper bound."),
        Column("episode_started_ns", "BIGINT NOT NULL", "Start of the episode, so that a page reads few row groups."),
    ),
)

REWARDS = Table(
    "rewards",
    "One named reward; it may arrive after the run, and a later one of the same name supersedes it.",
    (
        Column("episode_id", "VARCHAR NOT NULL", "The episode."),
        Column("name", "VARCHAR NOT NULL", "Name of the reward."),
        Column("value", "DOUBLE NOT NULL", "Its value."),
        Column("source", "VARCHAR NOT NULL", "What computed it."),
        Column("created_ns", "BIGINT NOT NULL", "Unix time when it was computed, in nanoseconds."),
        Column("scope", "VARCHAR NOT NULL", "episode (the team's), step or agent."),
        Column("action_id", "VARCHAR", "The action that it is for."),
        Column("node", "VARCHAR", "The agent that it is for."),
    ),
    index_column="episode_id",
)

ADAPTERS = Table(
    "adapters",
    "One published adapter version of one node.",
    (
        Column("node", "VARCHAR NOT NULL", "The agent."),
        Column("version", "INTEGER NOT NULL", "Version, rising."),
        Column("parent", "INTEGER", "Version that it was trained from."),
        Column("path", "VARCHAR NOT NULL", "Directory of the adapter."),
        Column("sha256", "VARCHAR NOT NULL", "Hash of adapter_model.safetensors."),
        Column("base_sha256", "VARCHAR NOT NULL", "Hash of the base model's weights."),
        Column("created_ns", "BIGINT NOT NULL", "Unix time of publication, in nanoseconds."),
        Column("metrics", "JSON NOT NULL", "What training measured."),
    ),
    key=("node", "version"),
)

ADAPTER_EPISODES = Table(
    "adapter_episodes",
    "The episodes that an adapter version was trained on; what its parent versions were trained on counts as well.",
    (
        Column("node", "VARCHAR NOT NULL", "The agent."),
        Column("version", "INTEGER NOT NULL", "Version of the adapter."),
        Column("episode_id", "VARCHAR NOT NULL", "An episode that its update learned from."),
    ),
    key=("node", "version", "episode_id"),
)

PRICES = Table(
    "prices",
    "What a model costs from some time on; nothing is known of the cost of a model that is not here.",
    (
        Column("model", "VARCHAR NOT NULL", "Model as the engine named it: actions.model."),
        Column("since_ns", "BIGINT NOT NULL", "Unix time from which the price holds, in nanoseconds; 0 for always."),
        Column("currency", "VARCHAR NOT NULL", "For example EUR."),
        Column("per_million_prompt", "DOUBLE NOT NULL", "Price of a million prompt tokens."),
        Column("per_million_sampled", "DOUBLE NOT NULL", "Price of a million sampled tokens."),
    ),
    key=("model", "since_ns"),
)

PREDICTIONS = Table(
    "predictions",
    "What a plan predicted of a node before anything was moved; it is held against what happened later.",
    (
        Column("run_id", "VARCHAR NOT NULL", "The plan, as plan-1; what it rests on is in the config of its run."),
        Column("node", "VARCHAR NOT NULL", "The agent."),
        Column("quantity", "VARCHAR NOT NULL", "What was predicted; docs/hosted-to-local.md has the names."),
        Column("value", "DOUBLE NOT NULL", "The prediction."),
        Column("low", "DOUBLE", "Lower end of its 95% interval; NULL without one."),
        Column("high", "DOUBLE", "Upper end of its 95% interval; NULL without one."),
        Column("created_ns", "BIGINT NOT NULL", "Unix time when it was made, in nanoseconds."),
    ),
    key=("run_id", "node", "quantity"),
)

SCHEMA_VERSION = Table(
    "schema_version",
    "The migrations that were applied to this file.",
    (
        Column("version", "INTEGER NOT NULL", "Number of the migration."),
        Column("sentence", "VARCHAR NOT NULL", "What it changed."),
        Column("applied_ns", "BIGINT NOT NULL", "Unix time when it was applied, in nanoseconds."),
    ),
    key=("version",),
)

TAKEN_IN = Table(
    "taken_in",
    "How far each journal segment was taken in.",
    (
        Column("segment", "VARCHAR NOT NULL", "File name of the segment, unique for ever."),
        Column("offset", "BIGINT NOT NULL", "Bytes taken in."),
        Column("records", "BIGINT NOT NULL", "Records read."),
        Column("torn", "BIGINT NOT NULL", "Lines dropped because they were damaged."),
        Column("taken_ns", "BIGINT NOT NULL", "Unix time of the last part, in nanoseconds."),
    ),
    key=("segment",),
)

REFUSALS = Table(
    "refusals",
    "Complete traces that could not be assembled.",
    (
        Column("trace_id", "VARCHAR NOT NULL", "The trace."),
        Column("reason", "VARCHAR NOT NULL", "Why, in words."),
        Column("refused_ns", "BIGINT NOT NULL", "Unix time of the refusal, in nanoseconds."),
    ),
    key=("trace_id",),
)

TABLES = (
    RUNS,
    SPANS,
    EPISODES,
    ACTIONS,
    EDGES,
    REWARDS,
    ADAPTERS,
    ADAPTER_EPISODES,
    PRICES,
    PREDICTIONS,
    SCHEMA_VERSION,
    TAKEN_IN,
    REFUSALS,
)


def ddl() -> Iterator[str]:
    """The statements that create every table, view and comment in an empty database, in order."""
    yield from tables()
    yield from views()
    yield from comments()


def tables() -> Iterator[str]:
    """The statements that create every table with its keys and indexes, in order."""
    for table in TABLES:
        lines = [f'"{column.name}" {column.sql_type}' for column in table.columns]
        if table.key and table.indexed:
            lines.append("PRIMARY KEY (" + ", ".join(f'"{name}"' for name in table.key) + ")")
        yield f"CREATE TABLE {table.name} (" + ", ".join(lines) + ")"
        if table.index_column is not None:
            yield f"CREATE INDEX {table.name}_by_{table.index_column} ON {table.name} ({table.index_column})"


def views() -> Iterator[str]:
    """The statements that create every view, or replace an older one of that name, in order."""
    for view in VIEWS:
        yield f"CREATE OR REPLACE VIEW {view.name} AS {view.select}"


def comments() -> Iterator[str]:
    """The statements that put every sentence into a database that has the tables and views."""
    for table in TABLES:
        yield f"COMMENT ON TABLE {table.name} IS {_quoted(table.sentence)}"
        for column in table.columns:
            yield f'COMMENT ON COLUMN {table.name}."{column.name}" IS {_quoted(column.sentence)}'
    for view in VIEWS:
        yield f"COMMENT ON VIEW {view.name} IS {_quoted(view.sentence)}"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
