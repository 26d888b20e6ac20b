"""Owns: docs/store.md and docs/reference/tables.md show the questions, tables and views that there are, and run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest
from support.pages.store_page import PAGE, ROOT, TABLES_PAGE, filled, rendered
from support.sample_spans import START, chain

from marft_bridge import cli
from trace_store.journal import Journal
from trace_store.queries import QUERIES
from trace_store.records import Reward, RunRow
from trace_store.schema import TABLES
from trace_store.store import TraceStore

TEXT = PAGE.read_text()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a store `traces.duckdb` of two episodes."""
    with TraceStore.open(tmp_path / "traces.duckdb") as store:
        journal = Journal(store.journal_folder)
        for k in range(2):
            for span in chain(str(k), START + k).spans():
                journal.append(span)
        journal.close()
        store.take_in()
        store.put_run(RunRow("run", "collect", 1))
        store.put_rewards([Reward("1".rjust(32, "0"), "reward", 0.5, "test", 1)])
    return tmp_path


def run(folder: Path, command: list[str]) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)


def test_the_pages_show_what_is_declared() -> None:
    tables = TABLES_PAGE.read_text()
    assert (filled(TEXT), filled(tables)) == (TEXT, tables), "run `make pages`"
    assert all(part in TEXT + tables for part in rendered().values())


def test_every_question_on_the_page_runs_as_it_stands_there(folder: Path) -> None:
    shown = blocks("sql")
    assert len(shown) == len(QUERIES)
    with duckdb.connect(str(folder / "traces.duckdb"), read_only=True) as con:
        answered = {query: len(con.execute(query).fetchall()) for query in shown}
    assert sum(count > 0 for count in answered.values()) >= 8  # the rest asks for what two short episodes lack


def test_what_the_page_shows_in_python_runs(folder: Path) -> None:
    reading, pricing = blocks("python")
    assert run(folder, [sys.executable, "-c", reading]).count("\n") == 2
    run(folder, [sys.executable, "-c", pricing])
    with TraceStore.open(folder / "traces.duckdb", read_only=True) as store:
        assert store.sql("SELECT * FROM prices") == [("gpt-5-mini", 0, "USD", 0.25, 2.0)]


def test_the_commands_on_the_page_exist(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    look, *_ = blocks("sh")
    words = look.split()
    assert words[0] == "marft-bridge"
    assert cli.run([*words[1:-1], str(folder / words[-1])]) == 0
    assert "with_trouble" in capsys.readouterr().out
    for command in ("export", "import"):
        assert cli.run(["traces", command, "--help"]) == 0


@pytest.mark.parametrize("way", ["copy", "export"])
def test_a_backup_holds_every_row_and_is_a_store(folder: Path, way: str) -> None:
    if way == "copy":
        *_, command = blocks("sh")
        run(folder, ["sh", "-c", command])
    else:
        with duckdb.connect(str(folder / "traces.duckdb"), read_only=True) as con:
            con.execute(f"EXPORT DATABASE '{folder}/exported' (FORMAT parquet)")
        with duckdb.connect(str(folder / "backup.duckdb")) as con:
            con.execute(f"IMPORT DATABASE '{folder}/exported'")
    with (
        TraceStore.open(folder / "backup.duckdb") as backup,
        TraceStore.open(folder / "traces.duckdb") as live,
    ):
        for table in TABLES:
            rows = f"FROM {table.name} ORDER BY ALL"
            assert backup.sql(rows) == live.sql(rows)
        assert list(backup.trajectories()) == list(live.trajectories())
        assert backup.sql("FROM handoff_loops") == []
    assert way == "export" or (folder / "backup.duckdb").stat().st_mode & 0o777 == 0o600
