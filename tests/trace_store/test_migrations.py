"""Owns: a store is always at a whole, known schema version, however it got there and whatever kills it on the way; what
is newer or foreign is refused in one line.

`schemas/version_<n>.sql` is what version n wrote into a file, frozen; rows of that time are put into it by SQL here.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import duckdb
import pytest
from support.sample_spans import START, chain

from trace_store import schema
from trace_store.errors import StoreError
from trace_store.migrations import MIGRATIONS, Migration, migrate, newest_version, version_of
from trace_store.store import TraceStore
from trace_store.views import VIEWS

NEWEST = newest_version()
OLDER = range(1, NEWEST)
LATER_TABLES = ("adapter_episodes", "prices", "predictions")  # than version 1
FROZEN = {version: (Path(__file__).parent / f"schemas/version_{version}.sql").read_text() for version in OLDER}
LAYOUT = {
    "columns": "SELECT table_name, column_index, column_name, data_type, is_nullable, column_default, comment"
    " FROM duckdb_columns() WHERE NOT internal ORDER BY ALL",
    "tables": "SELECT table_name, sql, comment FROM duckdb_tables() WHERE NOT internal ORDER BY ALL",
    "views": "SELECT view_name, sql, comment FROM duckdb_views() WHERE NOT internal ORDER BY ALL",
    "constraints": "SELECT table_name, constraint_type, constraint_column_names FROM duckdb_constraints() ORDER BY ALL",
}


@pytest.fixture
def con() -> duckdb.DuckDBPyConnection:
    return duckdb.connect()


def layout(con: duckdb.DuckDBPyConnection) -> dict[str, list[tuple[Any, ...]]]:
    return {name: con.execute(query).fetchall() for name, query in LAYOUT.items()}


def create_version(con: duckdb.DuckDBPyConnection, version: int) -> None:
    con.execute(FROZEN[version])
    con.execute("INSERT INTO schema_version VALUES (?, 'all tables and views', 1700000000000000000)", [version])


def insert_row(con: duckdb.DuckDBPyConnection, table: str, values: list[Any]) -> None:
    con.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(values))})", values)  # noqa: S608 - a name from here


def insert_rows(con: duckdb.DuckDBPyConnection, version: int, episodes: int = 3) -> None:
    """Traces with two calls each, as that version stored them: the spans are real, the engine counted x but not y."""
    for k in range(episodes):
        sample = chain(str(k), START + k)
        for span in sample.spans():
            attributes = dict(span.attributes)
            if span.span_id == "x":
                attributes["gen_ai.usage.input_tokens"] = 3
            if span.span_id == "y":
                attributes.pop("gen_ai.usage.output_tokens")
                attributes["gen_ai.usage.input_tokens"] = ("many", 2**40, None)[k % 3]
            values = [span.trace_id, span.span_id, span.parent_span_id, span.name, span.operation, span.start_ns]
            values += [span.end_ns, span.status, span.status_message, span.convention, json.dumps(attributes)]
            insert_row(con, "spans", values)
        episode = [sample.trace_id, "run", "task", "train", 0, None, None, 2**62, "{}", "terminated", None, START + k]
        episode += [START + k + 40, 5, "{}", "{}", None, None, *([] if version < 3 else [None])]
        episode += [] if version < 4 else [None] * 7
        episode += [] if version < 5 else [None]
        insert_row(con, "episodes", episode)
        for index, (name, node, ids) in enumerate((("x", "a", [4, 5]), ("y", "b", None))):
            values = [name, sample.trace_id, node, index, index + 1, [1, 2, 3], ids, ids and [-0.1, -1 / 3], "m"]
            values += [f"{node}@1", 1, 0.7, 1.0, None, 16, 7, "stop", "text", START + k + 11, START + k + 19]
            values += [ids is not None, None if ids else "no ids"]
            values += [] if version == 1 else [3, 2] if ids else [None, None]
            values += [] if version < 5 else [None]
            insert_row(con, "actions", [*values, START + k])
        con.execute("INSERT INTO edges VALUES (?, 'x', 'y', 'trigger', true, ?)", [sample.trace_id, START + k])
        con.execute("INSERT INTO rewards VALUES (?, 'reward', 0.5, 't', 1, 'episode', NULL, NULL)", [sample.trace_id])
    con.execute("INSERT INTO runs VALUES ('run', 'collect', 1, '{\"a\":1}', '0.1.0')")
    con.execute("INSERT INTO adapters VALUES ('a', 1, 0, 'p', 's', 'b', 1, '{\"kl\":0.1}')")
    con.execute("INSERT INTO taken_in VALUES ('1-a.segment', 10, 2, 0, 1)")
    con.execute("INSERT INTO refusals VALUES ('bad', 'why', 1)")


def rows(con: duckdb.DuckDBPyConnection, table: str) -> list[tuple[Any, ...]]:
    return con.execute(f"FROM {table} ORDER BY ALL").fetchall()


def test_a_new_database_gets_every_declared_table_column_and_sentence(con: duckdb.DuckDBPyConnection) -> None:
    assert version_of(con) == 0
    assert migrate(con) == NEWEST
    comments = con.execute(
        "SELECT table_name, column_name, comment FROM duckdb_columns() WHERE NOT internal"
        " AND table_name IN (SELECT table_name FROM duckdb_tables())"
    ).fetchall()
    declared = [(table.name, column.name, column.sentence) for table in schema.TABLES for column in table.columns]
    assert sorted(comments) == sorted(declared)
    views = con.execute("SELECT view_name, comment FROM duckdb_views() WHERE NOT internal").fetchall()
    assert sorted(views) == sorted((view.name, view.sentence) for view in VIEWS)
    assert con.execute("SELECT version FROM schema_version").fetchall() == [(NEWEST,)]


def test_migrations_are_numbered_without_a_gap() -> None:
    assert [step.version for step in MIGRATIONS] == list(range(2, NEWEST + 1))


@pytest.mark.parametrize("version", OLDER)
def test_an_older_store_becomes_what_a_new_one_is(con: duckdb.DuckDBPyConnection, version: int) -> None:
    create_version(con, version)
    new_con = duckdb.connect()
    assert migrate(con) == migrate(new_con) == NEWEST
    assert layout(con) == layout(new_con)
    versions = con.execute("SELECT version, sentence FROM schema_version ORDER BY version").fetchall()
    later_versions = [(step.version, step.sentence) for step in MIGRATIONS if step.version > version]
    assert versions == [(version, "all tables and views"), *later_versions]


def test_an_older_store_keeps_every_row_and_gains_the_counts_that_its_spans_know(
    con: duckdb.DuckDBPyConnection,
) -> None:
    create_version(con, 1)
    insert_rows(con, 1)
    names = [table.name for table in schema.TABLES if table.name not in LATER_TABLES]
    rows_before = {name: rows(con, name) for name in names}
    order = con.execute("SELECT episode_id, action_id FROM actions ORDER BY rowid").fetchall()
    migrate(con)
    rows_after = {name: rows(con, name) for name in names}
    counts = con.execute("SELECT action_id, prompt_tokens, sampled_tokens FROM actions ORDER BY ALL").fetchall()
    assert counts == [("x", 3, 2)] * 3 + [("y", None, None)] * 3
    assert [(*row[:-4], row[-1]) for row in rows_after.pop("actions")] == rows_before.pop("actions")
    nulls = (None,) * 9  # no lineage is known, no thread, and no fork
    assert [(*row, *nulls) for row in rows_before.pop("episodes")] == rows_after.pop("episodes")
    assert [row for row in rows_after.pop("schema_version") if row[0] == 1] == rows_before.pop("schema_version")
    assert rows_after == rows_before
    assert con.execute("SELECT episode_id, action_id FROM actions ORDER BY rowid").fetchall() == order
    assert [rows(con, name) for name in LATER_TABLES] == [[], [], []]


def test_a_store_of_version_2_keeps_every_row_and_knows_no_lineage(con: duckdb.DuckDBPyConnection) -> None:
    create_version(con, 2)
    insert_rows(con, 2)
    con.execute("INSERT INTO prices VALUES ('m', 0, 'EUR', 0.5, 1.5)")
    con.execute("INSERT INTO adapter_episodes VALUES ('a', 1, 'e')")
    names = [table.name for table in schema.TABLES if table.name != "predictions"]
    rows_before = {name: rows(con, name) for name in names}
    migrate(con)
    rows_after = {name: rows(con, name) for name in names}
    nulls = (None,) * 9
    assert [(*row[:-1], None, row[-1]) for row in rows_before.pop("actions")] == rows_after.pop("actions")
    assert [(*row, *nulls) for row in rows_before.pop("episodes")] == rows_after.pop("episodes")
    assert [row for row in rows_after.pop("schema_version") if row[0] == 2] == rows_before.pop("schema_version")
    assert rows_after == rows_before


def test_a_store_of_version_5_keeps_every_row_and_holds_no_prediction(con: duckdb.DuckDBPyConnection) -> None:
    create_version(con, 5)
    insert_rows(con, 5)
    names = [table.name for table in schema.TABLES if table.name not in ("predictions", "schema_version")]
    rows_before = {name: rows(con, name) for name in names}
    migrate(con)
    assert {name: rows(con, name) for name in names} == rows_before
    assert rows(con, "predictions") == []


@pytest.mark.parametrize("version", OLDER)
def test_an_older_file_is_read_as_it_is_and_gains_the_counts_when_it_is_opened_for_writing(
    tmp_path: Path, version: int
) -> None:
    path = tmp_path / "s.duckdb"
    with duckdb.connect(str(path)) as con:
        create_version(con, version)
        insert_rows(con, version)
    bytes_before = path.read_bytes()
    with TraceStore.open(path, read_only=True) as store:
        unchanged = list(store.trajectories())
        assert store.sql("SELECT * FROM prices") == []
    assert path.read_bytes() == bytes_before
    assert [action.prompt_tokens for action in unchanged[0].actions] == [None if version == 1 else 3, None]
    TraceStore.open(path).close()
    with TraceStore.open(path, read_only=True) as store:
        trajectories = list(store.trajectories())
    assert [t.episode.started_ns for t in trajectories] == [START, START + 1, START + 2]
    assert [t.episode.lineage for t in trajectories] == [{}, {}, {}]
    assert [t.edges for t in trajectories] == [t.edges for t in unchanged]
    first, second = trajectories[0].actions
    assert (first.sampled_ids, first.logprobs, first.prompt_tokens) == ((4, 5), (-0.1, -1 / 3), 3)
    assert (second.sampled_ids, second.trainable, second.prompt_tokens) == (None, False, None)
    assert trajectories[2].team_reward("reward") == 0.5


def test_a_view_that_somebody_made_survives(con: duckdb.DuckDBPyConnection) -> None:
    create_version(con, 1)
    insert_rows(con, 1)
    con.execute("CREATE VIEW mine AS SELECT count(*) AS n FROM actions")
    migrate(con)
    assert rows(con, "mine") == [(6,)]


def test_migrating_twice_changes_nothing(con: duckdb.DuckDBPyConnection) -> None:
    migrate(con)
    versions = rows(con, "schema_version")
    migrate(con)
    assert rows(con, "schema_version") == versions


def test_an_older_database_gets_only_what_it_lacks(con: duckdb.DuckDBPyConnection) -> None:
    migrate(con)
    notes = Migration(NEWEST + 1, "a column for notes", ("ALTER TABLE runs ADD COLUMN note VARCHAR",))
    assert migrate(con, migrations=[*MIGRATIONS, notes]) == NEWEST + 1
    assert con.execute("SELECT version, sentence FROM schema_version ORDER BY version").fetchall() == [
        (NEWEST, "all tables and views"),
        (NEWEST + 1, "a column for notes"),
    ]
    assert con.execute("SELECT note FROM runs").fetchall() == []


def test_a_migration_that_fails_leaves_the_version_before_it(con: duckdb.DuckDBPyConnection) -> None:
    create_version(con, 1)
    layout_before = layout(con)
    failing = Migration(NEWEST + 1, "half", ("CREATE TABLE half (x INTEGER)", "SELECT * FROM nowhere"))
    with pytest.raises(duckdb.Error, match="nowhere"):
        migrate(con, migrations=[*MIGRATIONS, failing])
    assert version_of(con) == 1  # nor is the step before it there: one opening is one transaction
    assert layout(con) == layout_before


OPENER = """
import sys
from pathlib import Path
from trace_store.store import TraceStore
print("ready", flush=True)
TraceStore.open(Path(sys.argv[1])).close()
"""


def open_for(path: Path, seconds: float | None) -> float:
    """Opens the store in another process and kills that after some seconds, or never; the seconds that it lived."""
    with subprocess.Popen([sys.executable, "-c", OPENER, str(path)], stdout=subprocess.PIPE) as opener:
        assert opener.stdout is not None
        opener.stdout.readline()
        began = time.monotonic()
        try:
            opener.wait(seconds)
        except subprocess.TimeoutExpired:
            opener.send_signal(signal.SIGKILL)
            opener.wait()
        return time.monotonic() - began


@pytest.mark.slow
def test_a_migration_that_is_killed_anywhere_leaves_a_whole_version(tmp_path: Path) -> None:
    path, original = tmp_path / "s.duckdb", tmp_path / "original.duckdb"
    with duckdb.connect(str(original)) as con:
        create_version(con, 1)
        insert_rows(con, 1, 30)
        con.execute("INSERT INTO actions SELECT a.* FROM actions a, range(500)")  # some time to be killed in
        expected = con.execute("SELECT count(*), sum(hash(action_id, prompt_ids, logprobs)) FROM actions").fetchone()
        old_layout = layout(con)
    new_con = duckdb.connect()
    migrate(new_con)
    shutil.copy(original, path)
    duration = open_for(path, None)
    versions = []
    for share in (0.0, 0.15, 0.3, 0.45, 0.6, 0.75, 0.9):
        path.with_name(path.name + ".wal").unlink(missing_ok=True)
        shutil.copy(original, path)
        open_for(path, share * duration)
        with duckdb.connect(str(path)) as con:
            versions.append(version_of(con))
            assert layout(con) == (old_layout if versions[-1] == 1 else layout(new_con))
            contents = con.execute(
                "SELECT count(*), sum(hash(action_id, prompt_ids, logprobs)) FROM actions"
            ).fetchone()
            assert contents == expected
    assert versions.count(1) >= 2  # it was killed while it worked, and not only afterwards
    open_for(path, None)
    with duckdb.connect(str(path)) as con:
        assert layout(con) == layout(new_con)


def test_a_newer_store_is_refused_with_both_versions(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    TraceStore.open(path).close()
    with duckdb.connect(str(path)) as con:
        con.execute("INSERT INTO schema_version VALUES (9, 'from the future', 0)")
    expected = f"store {path} has schema version 9, this marft-bridge knows up to {NEWEST}; upgrade marft-bridge"
    for read_only in (False, True):
        with pytest.raises(StoreError) as refused:
            TraceStore.open(path, read_only=read_only)
        assert str(refused.value) == expected


def test_an_older_store_is_not_changed_for_reading_only(con: duckdb.DuckDBPyConnection) -> None:
    with pytest.raises(StoreError, match=f"store old has schema version 0 and needs {NEWEST}; open it once"):
        migrate(con, "old", read_only=True)
    assert version_of(con) == 0


@pytest.mark.parametrize("read_only", [False, True])
def test_a_foreign_database_is_refused_and_left_alone(con: duckdb.DuckDBPyConnection, read_only: bool) -> None:
    con.execute("CREATE TABLE mine (x INTEGER)")
    with pytest.raises(StoreError, match="that marft-bridge did not make"):
        migrate(con, "mine", read_only=read_only)
    assert con.execute("SELECT table_name FROM duckdb_tables()").fetchall() == [("mine",)]
