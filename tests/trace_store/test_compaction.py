"""Owns: a store's file, rewritten.

- What a store says is the same before and after: rows, constraints, views, and the sentences about them.
- Space of deleted rows is given back; the file stays private; journal segments that were taken in are gone.
- Killed at any moment, the path holds the whole store, and the next vacuum clears away what was left.
- Nobody's writes are lost: a store that is open elsewhere, or that somebody got hold of meanwhile, is not exchanged.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import duckdb
import pytest
from support.growth_rig import dump, fill, fill_variously, kill_after, secret_trace
from support.sample_spans import START, chain

from trace_store import compaction
from trace_store.compaction import vacuum
from trace_store.errors import StoreError
from trace_store.records import RunRow
from trace_store.store import TraceStore


def describe_store(path: Path) -> list[object]:
    """What DuckDB says about a store: rows, constraints, views and comments."""
    with TraceStore.open(path) as store:
        queries = (
            "SELECT table_name, comment FROM duckdb_tables() WHERE NOT internal ORDER BY ALL",
            "SELECT table_name, column_name, data_type, is_nullable, comment FROM duckdb_columns()"
            " WHERE NOT internal ORDER BY ALL",
            "SELECT view_name, sql, comment FROM duckdb_views() WHERE NOT internal ORDER BY ALL",
            "SELECT table_name, constraint_text FROM duckdb_constraints() ORDER BY ALL",
            "SELECT tags FROM duckdb_databases() WHERE NOT internal",
        )
        return [dump(store), *(store.sql(query) for query in queries)]


def names_beside(path: Path) -> set[str]:
    return {sibling.name for sibling in path.parent.iterdir()} - {path.name, path.name + ".journal"}


def test_what_a_store_says_is_the_same_before_and_after(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    fill_variously(path)
    description = describe_store(path)
    vacuum(path)
    assert describe_store(path) == description
    assert names_beside(path) == set()


def test_space_is_given_back_and_the_file_stays_private(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    rng = random.Random(1)
    noise = [[rng.randrange(2**31) for _ in range(20_000)] for _ in range(30)]
    fill(path, [secret_trace(f"{n:x}", "ann", ids) for n, ids in enumerate(noise)])
    with TraceStore.open(path) as store, store.transaction() as con:
        con.execute("DELETE FROM spans")
        con.execute("DELETE FROM actions")
    sizes = vacuum(path)
    # 30 traces of 20,000 random 31-bit ids, packed as text in spans and as numbers in actions: 30 * 20,000 * (16/3 + 4)
    assert sizes.before - sizes.after > 30 * 20_000 * 4
    assert (sizes.after, path.stat().st_mode & 0o777) == (path.stat().st_size, 0o600)
    assert list((tmp_path / "s.duckdb.journal").iterdir()) == []


VACUUM = """
import sys; from pathlib import Path
from trace_store.compaction import vacuum
print("now", flush=True)
vacuum(Path(sys.argv[1]))
"""


@pytest.mark.slow
def test_killed_at_any_moment_the_path_holds_the_whole_store(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    fill(path, [secret_trace(f"{n:x}", "ann", list(range(n, n + 3000))) for n in range(60)])
    with TraceStore.open(path) as store:
        rows = dump(store)
    began = time.monotonic()
    vacuum(path)
    duration = time.monotonic() - began  # what there is to fall into, on this machine
    rng, killed, leftovers = random.Random(2), 0, 0
    for _ in range(25):
        killed += kill_after([VACUUM, str(path)], rng.uniform(0, duration))
        leftovers += bool(names_beside(path))
        with TraceStore.open(path, wait_s=5) as store:
            assert dump(store) == rows
    assert killed >= 5
    assert leftovers, "no kill fell into the copying: this shows nothing"
    vacuum(path)
    assert names_beside(path) == set()
    with TraceStore.open(path) as store:
        assert dump(store) == rows


def test_a_store_that_is_open_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    fill(path, [chain("a").spans()])
    with TraceStore.open(path) as store:
        with pytest.raises(StoreError, match="already open in this process"):
            vacuum(path)
        second_process = subprocess.run(
            [sys.executable, "-c", VACUUM, str(path)], capture_output=True, text=True, check=False
        )
        assert "is in use by" in second_process.stderr
        store.put_run(RunRow("run", "collect", START))
    with TraceStore.open(path) as store:
        assert [run.run_id for run in store.runs()] == ["run"]
    assert names_beside(path) == set()


@pytest.mark.parametrize("holds_on", [False, True])
def test_what_somebody_wrote_meanwhile_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holds_on: bool
) -> None:
    path = tmp_path / "s.duckdb"
    fill(path, [chain("a").spans()])
    writer = """
import sys; from pathlib import Path
from trace_store.store import TraceStore; from trace_store.records import RunRow
store = TraceStore.open(Path(sys.argv[1]))
store.put_run(RunRow("between", "collect", 1))
if sys.argv[2] == "True":
    print("open", flush=True); sys.stdin.read()
store.close()
"""
    writers: list[subprocess.Popen[str]] = []

    def write_between(file: Path) -> None:  # called when the copy is finished and nobody has the old file open
        if file != path.parent:
            pipe = subprocess.PIPE
            command = [sys.executable, "-c", writer, str(path), str(holds_on)]
            writers.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
            assert writers[0].stdout is not None
            assert writers[0].stdout.readline() == ("open\n" if holds_on else "")
            if not holds_on:
                writers[0].wait()

    monkeypatch.setattr(compaction, "sync", write_between)
    with pytest.raises(StoreError, match="opened by another process" if holds_on else "was changed while"):
        vacuum(path)
    writers[0].communicate()
    with TraceStore.open(path) as store:
        assert [run.run_id for run in store.runs()] == ["between"]
    assert names_beside(path) == set()


def test_a_file_that_is_exchanged_while_it_is_being_opened_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("old", "new"):
        with TraceStore.open(tmp_path / name) as store:
            store.put_run(RunRow(name, "collect", START))
    real_connect, opened_paths = duckdb.connect, []

    def connect(path: str, **options: object) -> duckdb.DuckDBPyConnection:
        con = real_connect(path, **options)  # type: ignore[arg-type]
        if not opened_paths:  # what another process's vacuum does before this one has its lock
            (tmp_path / "new").replace(tmp_path / "old")
        opened_paths.append(path)
        return con

    monkeypatch.setattr(duckdb, "connect", connect)
    with TraceStore.open(tmp_path / "old") as store:
        assert [run.run_id for run in store.runs()] == ["new"]
    assert len(opened_paths) == 2


def test_what_killed_processes_left_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    fill(path, [chain("a").spans()])
    (tmp_path / "s.duckdb.0badcafe.fresh").write_text("somebody's data")
    (tmp_path / "s.duckdb.tmp").mkdir()
    (tmp_path / "s.duckdb.tmp" / "duckdb_temp_storage-0.tmp").write_text("somebody's data")
    (tmp_path / "s.duckdb.backup").write_text("mine")
    vacuum(path)
    assert names_beside(path) == {"s.duckdb.backup"}


def test_a_store_that_does_not_exist_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="does not exist"):
        vacuum(tmp_path / "s.duckdb")
    (tmp_path / "text").write_text("x" * 10_000)
    with pytest.raises(StoreError, match="not a DuckDB file"):
        vacuum(tmp_path / "text")
    assert [path.name for path in tmp_path.iterdir()] == ["text"]
    with duckdb.connect(str(tmp_path / "foreign.duckdb")) as con:
        con.execute("CREATE TABLE t (a INTEGER)")
    with pytest.raises(StoreError, match="did not make"):
        vacuum(tmp_path / "foreign.duckdb")
