"""A database of any known version -> the current version, by ordered migrations.

An empty database gets the schema as it is declared. Where tables exist, each migration changes only these, in text of
its own, because what is declared will move on; views and comments are then set as they are declared now.
Invariants: all of it is one transaction, so a file is always at a whole version; a file that a newer marft-bridge
wrote is refused, never guessed at.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import duckdb

from trace_store import schema
from trace_store.errors import StoreError


@dataclass(frozen=True, slots=True)
class Migration:
    """One step from version - 1 to version; `statements` are SQL that leaves the tables as that version has them."""

    version: int
    sentence: str
    statements: tuple[str, ...]


FIRST_VERSION = 1  # an empty database is brought to the current version at once, so there is no migration to this one

# Counts as `assemble` reads them: whole numbers that the column holds. Another number never came from an engine.
_COUNT_OF_SPAN = """
CASE WHEN json_type(s.attributes, '$."{key}"') IN ('UBIGINT', 'BIGINT')
     THEN TRY_CAST(json_extract_string(s.attributes, '$."{key}"') AS INTEGER) END
"""

MIGRATIONS = (
    Migration(
        2,
        "counted tokens of actions; prices; what adapters were trained on; an index on rewards, none on spans",
        (
            # Made anew, and not by adding columns: what belongs to the record comes before what only speeds up reading.
            """
            CREATE TABLE actions_2 (
                action_id VARCHAR NOT NULL, episode_id VARCHAR NOT NULL, node VARCHAR NOT NULL,
                "index" INTEGER NOT NULL, step INTEGER, prompt_ids INTEGER[], sampled_ids INTEGER[],
                logprobs DOUBLE[], model VARCHAR, adapter VARCHAR, adapter_version INTEGER, temperature DOUBLE,
                top_p DOUBLE, top_k INTEGER, max_tokens INTEGER, seed BIGINT, finish_reason VARCHAR,
                completion VARCHAR, started_ns BIGINT NOT NULL, ended_ns BIGINT NOT NULL,
                trainable BOOLEAN NOT NULL, untrainable_reason VARCHAR,
                prompt_tokens INTEGER, sampled_tokens INTEGER, episode_started_ns BIGINT NOT NULL
            )
            """,
            # In the order of the rows, which a join would not keep and the zone maps of the last column live on.
            """
            INSERT INTO actions_2
            SELECT * EXCLUDE (episode_started_ns), NULL, NULL, episode_started_ns FROM actions
            """,
            f"""
            UPDATE actions_2 SET prompt_tokens = {_COUNT_OF_SPAN.format(key="gen_ai.usage.input_tokens")},
                                 sampled_tokens = {_COUNT_OF_SPAN.format(key="gen_ai.usage.output_tokens")}
            FROM spans s WHERE s.trace_id = episode_id AND s.span_id = action_id
            """,  # noqa: S608 - constants
            "DROP TABLE actions",
            "ALTER TABLE actions_2 RENAME TO actions",
            """
            CREATE TABLE adapter_episodes (
                node VARCHAR NOT NULL, version INTEGER NOT NULL, episode_id VARCHAR NOT NULL,
                PRIMARY KEY (node, version, episode_id)
            )
            """,
            """
            CREATE TABLE prices (
                model VARCHAR NOT NULL, since_ns BIGINT NOT NULL, currency VARCHAR NOT NULL,
                per_million_prompt DOUBLE NOT NULL, per_million_sampled DOUBLE NOT NULL,
                PRIMARY KEY (model, since_ns)
            )
            """,
            # DuckDB cannot drop a primary key. The order of the rows is that of the zone maps, as above.
            """
            CREATE TABLE spans_2 (
                trace_id VARCHAR NOT NULL, span_id VARCHAR NOT NULL, parent_span_id VARCHAR, "name" VARCHAR NOT NULL,
                operation VARCHAR NOT NULL, start_ns BIGINT NOT NULL, end_ns BIGINT NOT NULL, status VARCHAR NOT NULL,
                status_message VARCHAR, convention VARCHAR NOT NULL, attributes JSON NOT NULL
            )
            """,
            "INSERT INTO spans_2 SELECT * FROM spans",
            "DROP TABLE spans",
            "ALTER TABLE spans_2 RENAME TO spans",
            "CREATE INDEX rewards_by_episode_id ON rewards (episode_id)",
        ),
    ),
    Migration(
        3,
        "what episodes depend on: hashes of base model, tokenizer, chat template and tools",
        ("ALTER TABLE episodes ADD COLUMN lineage JSON",),
    ),
    Migration(
        4,
        "threads: whose they are, how a run on one begins, and which checkpoints it wrote",
        tuple(
            f"ALTER TABLE episodes ADD COLUMN {column}"
            for column in (
                "thread_id VARCHAR",
                "user_id VARCHAR",
                "metadata JSON",
                "begins VARCHAR",
                "forked BOOLEAN",
                "from_checkpoint VARCHAR",
                "checkpoints VARCHAR",
            )
        ),
    ),
    Migration(
        5,
        "forks: from which call on an episode was run anew, and which answers were given again",
        (
            "ALTER TABLE episodes ADD COLUMN fork_action VARCHAR",
            # Made anew, in the order of the rows, for the reasons of migration 2.
            """
            CREATE TABLE actions_5 (
                action_id VARCHAR NOT NULL, episode_id VARCHAR NOT NULL, node VARCHAR NOT NULL,
                "index" INTEGER NOT NULL, step INTEGER, prompt_ids INTEGER[], sampled_ids INTEGER[],
                logprobs DOUBLE[], model VARCHAR, adapter VARCHAR, adapter_version INTEGER, temperature DOUBLE,
                top_p DOUBLE, top_k INTEGER, max_tokens INTEGER, seed BIGINT, finish_reason VARCHAR,
                completion VARCHAR, started_ns BIGINT NOT NULL, ended_ns BIGINT NOT NULL,
                trainable BOOLEAN NOT NULL, untrainable_reason VARCHAR,
                prompt_tokens INTEGER, sampled_tokens INTEGER, replayed_from VARCHAR,
                episode_started_ns BIGINT NOT NULL
            )
            """,
            """
            INSERT INTO actions_5
            SELECT * EXCLUDE (episode_started_ns), NULL, episode_started_ns FROM actions
            """,
            "DROP TABLE actions",
            "ALTER TABLE actions_5 RENAME TO actions",
        ),
    ),
    Migration(
        6,
        "what plans predicted of nodes",
        (
            """
            CREATE TABLE predictions (
                run_id VARCHAR NOT NULL, node VARCHAR NOT NULL, quantity VARCHAR NOT NULL, "value" DOUBLE NOT NULL,
                low DOUBLE, high DOUBLE, created_ns BIGINT NOT NULL,
                PRIMARY KEY (run_id, node, quantity)
            )
            """,
        ),
    ),
    # No table changes. Lines that an earlier version sets aside come back once this one opens the store.
    Migration(7, "the journal holds rewards that a crash may not part as one line", ()),
    # No table changes: a file gets the views anew with any migration.
    Migration(8, "loops of control are counted without forks", ()),
)


def newest_version(migrations: Sequence[Migration] = MIGRATIONS) -> int:
    """The version that this program writes."""
    return migrations[-1].version if migrations else FIRST_VERSION


def version_of(con: duckdb.DuckDBPyConnection) -> int:
    """The version of an open database: 0 when it is not a store yet."""
    count_row = con.execute(
        "SELECT count(*) FROM duckdb_tables() WHERE table_name = 'schema_version' AND NOT internal"
    ).fetchone()
    if count_row is None or count_row[0] == 0:
        return 0
    row = con.execute("SELECT max(version) FROM schema_version").fetchone()
    return int(row[0]) if row and row[0] is not None else 0


def migrate(
    con: duckdb.DuckDBPyConnection,
    name: str = "database",
    *,
    read_only: bool = False,
    migrations: Sequence[Migration] = MIGRATIONS,
) -> int:
    """Bring an open database to the newest known version and return that version.

    Raises StoreError when the file is newer than this program, is some other DuckDB database, or is older and
    cannot be changed because it is open for reading only. `name` is what the message calls the store.
    """
    stored_version, newest_known = version_of(con), newest_version(migrations)
    if stored_version > newest_known:
        raise StoreError(
            f"store {name} has schema version {stored_version}, this marft-bridge knows up to {newest_known};"
            " upgrade marft-bridge"
        )
    if stored_version == 0 and _has_tables(con):
        raise StoreError(f"store {name} is a DuckDB database that marft-bridge did not make; give another path")
    if stored_version < newest_known and read_only:
        raise StoreError(
            f"store {name} has schema version {stored_version} and needs {newest_known}; open it once for writing,"
            " for example by collecting into it"
        )
    if stored_version == newest_known:
        return newest_known
    con.execute("BEGIN")
    try:
        if stored_version == 0:
            _apply(con, newest_known, "all tables and views", statements=tuple(schema.ddl()))
        else:
            for migration in migrations:
                if migration.version > stored_version:
                    _apply(con, migration.version, migration.sentence, statements=migration.statements)
            for statement in (*schema.views(), *schema.comments()):
                con.execute(statement)
        con.execute("COMMIT")
    except BaseException:
        with suppress(duckdb.Error):  # a failed COMMIT has rolled back already
            con.execute("ROLLBACK")
        raise
    return newest_known


def _apply(con: duckdb.DuckDBPyConnection, version: int, sentence: str, statements: Sequence[str]) -> None:
    for statement in statements:
        con.execute(statement)
    con.execute("INSERT INTO schema_version VALUES (?, ?, ?)", [version, sentence, time.time_ns()])


def _has_tables(con: duckdb.DuckDBPyConnection) -> bool:
    row = con.execute("SELECT count(*) FROM duckdb_tables() WHERE NOT internal").fetchone()
    return row is not None and row[0] > 0
