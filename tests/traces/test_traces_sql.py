"""Owns: `traces sql` answers questions, and can do nothing else.

- Every way out of the file is refused in one line: other files, network, extensions, settings, writing, a second
  statement; each was seen to work on a plain DuckDB connection, so the refusal is ours.
- Time, memory and rows are bounded, and what was cut is said.
- What people see cannot steer their terminal.
"""

# ruff: noqa: S608 - statements are put together from constants
from __future__ import annotations

import csv
import io
import json
import time
from pathlib import Path

import duckdb
import pytest
from support.sample_spans import SampleTrace
from support.traces_rig import sound_store, store_of, terminal, traces, written

from marft_bridge.common.errors import ConfigError
from marft_bridge.traces import sql
from trace_store.queries import QUERIES
from trace_store.store import TraceStore


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return sound_store(tmp_path)


def answer(path: Path, statement: str, limit: int | None = 100, seconds: float = 60.0) -> sql.QueryResult:
    return sql.run_statement(path, statement, sql.Bounds(limit, seconds))


def test_a_select_gives_columns_and_rows(path: Path) -> None:
    found = answer(path, "SELECT node, count(*) AS calls FROM actions GROUP BY ALL ORDER BY ALL")
    assert found == sql.QueryResult(("node", "calls"), [("actor", 3), ("reasoner", 3)], cut=None)
    assert answer(path, "SHOW TABLES").columns == ("name",)
    assert answer(path, "DESCRIBE actions").rows[0][:2] == ("action_id", "VARCHAR")
    assert answer(path, "EXPLAIN FROM actions").rows


@pytest.mark.parametrize("name", sorted(QUERIES))
def test_the_documented_queries_have_names(path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert traces(capsys, "sql", name, "--store", path)[0] == 0


FILES = [
    "SELECT * FROM read_csv('{other}')",
    "SELECT * FROM read_text('{other}')",
    "SELECT * FROM read_blob('{other}')",
    "SELECT * FROM read_json('{other}')",
    "SELECT * FROM '{other}'",
    "SELECT * FROM sniff_csv('{other}')",
    "SELECT * FROM glob('{folder}/*')",
    "SELECT (SELECT content FROM read_text('{other}')) FROM actions",
    "SELECT * FROM query('SELECT * FROM read_text(''{other}'')')",
]


@pytest.mark.parametrize("statement", FILES)
def test_no_other_file_can_be_read(path: Path, tmp_path: Path, statement: str) -> None:
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    asked = statement.format(other=other, folder=tmp_path)
    if "read_json" not in asked:  # the same statement works where nothing forbids it
        assert duckdb.connect().execute(f"SELECT count(*) FROM ({asked.replace('FROM actions', '')})").fetchall()
    with pytest.raises(ConfigError, match=r"disabled by configuration|does not exist") as refused:
        answer(path, asked)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("statement", "why"),
    [
        ("COPY actions TO '{folder}/out.csv'", "COPY is not a statement that reads"),
        ("COPY actions FROM '{folder}/other.csv'", "COPY is not a statement that reads"),
        ("EXPORT DATABASE '{folder}/out'", "EXPORT is not a statement that reads"),
        ("ATTACH '{folder}/other.duckdb'", "ATTACH is not a statement that reads"),
        ("INSTALL httpfs", "LOAD is not a statement that reads"),
        ("LOAD httpfs", "LOAD is not a statement that reads"),
        ("SET enable_external_access = true", "SET is not a statement that reads"),
        ("RESET lock_configuration", "SET is not a statement that reads"),
        ("PRAGMA enable_external_access = true", "SET is not a statement that reads"),
        ("PRAGMA database_size", "PRAGMA is not a statement that reads"),
        ("CALL enable_logging(storage = 'file')", "CALL is not a statement that reads"),
        ("CREATE TEMP TABLE t (a INT)", "CREATE is not a statement that reads"),
        ("DELETE FROM actions", "DELETE is not a statement that reads"),
        ("CHECKPOINT", "CALL is not a statement that reads"),
        ("SELECT 1; SELECT 2", "2 statements; give one"),
        ("SELECT 1; COPY actions TO '{folder}/out.csv'", "2 statements; give one"),
        ("", "0 statements; give one"),
        ("SELECT * FROM query('COPY actions TO ''{folder}/out.csv''')", "Expected a single SELECT statement"),
        ("SELECT getenv('HOME')", "getenv does not exist"),
        ("SELECT * FROM duckdb_secrets()", "disabled by configuration"),
        ("SELECT * FROM 'https://127.0.0.1:1/a.csv'", "disabled by configuration"),
        ("SELECT * FROM FILES", "Table with name FILES does not exist"),
        ("EXPLAIN ANALYZE DELETE FROM actions", "read-only mode"),
        ("SELECT nodes FROM actions", 'Candidate bindings: "node"'),
    ],
)
def test_what_does_not_only_read_the_store_is_refused_in_one_line(
    path: Path, tmp_path: Path, statement: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.iterdir()), path.read_bytes()
    code, out, err = traces(capsys, "sql", statement.format(folder=tmp_path), "--store", path)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("marft-bridge: traces sql: ")
    assert why in err
    assert (sorted(tmp_path.iterdir()), path.read_bytes()) == before


def test_no_setting_can_be_changed_back(path: Path) -> None:
    names = ("enable_external_access", "autoload_known_extensions", "python_enable_replacements", "temp_directory")
    asked = ", ".join(f"current_setting('{name}')" for name in (*names, "lock_configuration"))
    assert answer(path, f"SELECT {asked}").rows == [(False, False, False, "", True)]


def test_a_query_that_takes_too_long_is_stopped(path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"stopped after 0\.3 s"):
        answer(path, "SELECT sum(a.range * b.range) FROM range(1000000000) a, range(1000000) b", seconds=0.3)
    assert time.monotonic() - began < 10


BIG_QUERIES = {
    "a list of a cross join": "SELECT list(a.range) FROM range(100000) a, range(100000) b",
    "an order of many": "SELECT range FROM range(100000000) ORDER BY hash(range)",
}


@pytest.mark.parametrize("kind", ["store", "export"])
@pytest.mark.parametrize("name", BIG_QUERIES)
def test_a_query_that_takes_too_much_memory_is_one_line(
    path: Path,
    tmp_path: Path,
    kind: str,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """DuckDB's own limit is four fifths of the machine's memory; what is above it goes into the working folder."""
    monkeypatch.chdir(tmp_path)
    source = path
    if kind == "export":
        source = tmp_path / "export"
        assert traces(capsys, "export", source, "--store", path)[0] == 0
    before = sorted(tmp_path.rglob("*"))
    code, out, err = traces(capsys, "sql", BIG_QUERIES[name], "--store", source)
    assert (code, out) == (2, "")
    assert err == "marft-bridge: traces sql: it needs more than 512MB of memory; ask for less, or for parts\n"
    assert sorted(tmp_path.rglob("*")) == before
    assert answer(source, "SELECT current_setting('memory_limit'), current_setting('temp_directory')").rows == [
        ("488.2 MiB", "")
    ]


def test_rows_are_limited_and_what_is_left_out_is_said(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = "SELECT * FROM range(7)"
    code, out, err = traces(capsys, "sql", asked, "--limit", "3", "--store", path)
    assert (code, out, err) == (0, "range\n0\n1\n2\n", "the first 3 rows; --limit 0 shows all of them\n")
    assert traces(capsys, "sql", asked, "--limit", "7", "--store", path)[2] == ""
    assert traces(capsys, "sql", asked, "--limit", "0", "--store", path)[1].count("\n") == 8


@pytest.mark.parametrize("form", ["--json", "--csv", None])
@pytest.mark.parametrize(
    "value", ["repeat('x', 1000)", "repeat(chr(1), 100)", "repeat('ü', 200)", "range(200)", "repeat('x', 700)::BLOB"]
)
def test_no_more_bytes_are_printed_than_may_be_and_that_is_said(
    path: Path, form: str | None, value: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A million rows of a KiB each, of which 64 KiB may be printed: whole rows, in every form."""
    monkeypatch.setattr(sql, "MAX_PRINTED_BYTES", 1 << 16)
    asked = ["sql", f"SELECT {value} AS v FROM range(1000000)", "--limit", "0", "--store", path]
    code, out, err = traces(capsys, *asked, *([form] if form else []))
    assert (code, err[:10], err.count("\n")) == (0, "the first ", 1)
    assert "more would be above" in err
    rows = int(err.split()[2])
    assert 10 < rows < 2_000
    assert len(out.encode()) < (1 << 16) + 1_000
    if form == "--json":
        assert len(json.loads(out)) == rows
    elif form == "--csv":
        assert sum(1 for _ in csv.reader(io.StringIO(out))) == rows + 1


def test_one_value_that_is_too_large_is_said(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = traces(capsys, "sql", "SELECT repeat('x', 70000000) AS v", "--store", path)
    assert (code, out) == (0, "v\n")
    assert err == "the first 0 rows, since more would be above 64 MiB; ask for less, or for parts\n"


def test_a_terminal_gets_what_it_can_lay_out(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    console = terminal()
    sql.show_sql(path, "SELECT repeat('x', 100) AS v FROM range(1000000)", "table", None, 60.0, console)
    assert len(written(console).splitlines()) < 11_000
    assert "more would be above 1 MiB" in capsys.readouterr().err


def test_json_and_csv_hold_every_value_exactly(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = (
        "SELECT range(9) AS ids, NULL AS none, 0.1::DOUBLE AS x, 'nan'::DOUBLE AS y, 1.5::DECIMAL(4, 2) AS z,"
        " 'a,\"b\"' || chr(10) || 'c' AS words, {'k': [1]} AS bag, 2 AS x"
    )
    code, out, _ = traces(capsys, "sql", asked, "--json", "--store", path)
    assert code == 0
    assert json.loads(out) == [
        {
            "ids": list(range(9)),
            "none": None,
            "x": 0.1,
            "y": "nan",
            "z": 1.5,
            "words": 'a,"b"\nc',
            "bag": {"k": [1]},
            "x_8": 2,
        }
    ]
    _, out, _ = traces(capsys, "sql", asked, "--csv", "--store", path)
    names, values = csv.reader(io.StringIO(out))
    assert names == ["ids", "none", "x", "y", "z", "words", "bag", "x"]
    assert values == ["[0, 1, 2, 3, 4, 5, 6, 7, 8]", "", "0.1", "nan", "1.50", 'a,"b"\nc', '{"k": [1]}', "2"]


def test_times_with_a_zone_are_text(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = "SELECT to_timestamp(0) AS at, 1 AS at, [to_timestamp(60)] AS both;"
    (row,) = json.loads(traces(capsys, "sql", asked, "--json", "--store", path)[1])
    assert row["at_2"] == 1
    with duckdb.connect() as plain:
        assert plain.execute(
            "SELECT ?::TIMESTAMPTZ = to_timestamp(0), ?::TIMESTAMPTZ[] = [to_timestamp(60)]",
            [
                row["at"],
                row["both"],
            ],
        ).fetchone() == (True, True)


def test_long_lists_show_their_ends_and_their_length(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = traces(capsys, "sql", "SELECT range(256) AS ids, range(3) AS few", "--store", path)
    assert out.splitlines()[1] == "[0, 1, 2, … 253, 254, 255] (256)\t[0, 1, 2]"


def test_text_of_the_store_cannot_steer_a_terminal(tmp_path: Path) -> None:
    t = SampleTrace()
    hostile = "\x1b]0;owned\x07\x1b[2J [red]x[/red] \u202egnp.exe\r\n\tb"
    t.call("x", t.node("a:1", 10, 20, step=1), 11, 19, OUTPUT_MESSAGES=json.dumps([{"content": hostile}]))
    path = store_of(tmp_path / "s.duckdb", *t.spans())
    forms: tuple[sql.Form, ...] = ("table", "json", "csv")
    for form in forms:
        console = terminal(no_color=True)
        sql.show_sql(path, "SELECT completion FROM actions", form, None, 60.0, console)
        shown = written(console).replace("\x1b[1m", "").replace("\x1b[0m", "")  # the bold head of a table
        assert all(letter.isprintable() or letter == "\n" for letter in shown), (form, shown)
        assert "[red]x[/red]" in shown
        assert "owned" in shown


def test_a_store_that_is_too_wide_for_the_terminal_is_shown_row_by_row(path: Path) -> None:
    console = terminal(width=60)
    sql.show_sql(path, "FROM actions ORDER BY node, started_ns", "table", 1, 60.0, console)
    lines = written(console).splitlines()
    assert lines[0] == "-- 1"
    assert "node: actor" in lines
    assert "sampled_ids: [49, 256]" in lines


def test_a_column_is_named_as_it_is_even_when_hostile(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = traces(capsys, "sql", 'SELECT 1 AS "\x1b[2J"', "--store", path)
    assert out == "\\x1b[2J\n1\n"


def test_two_ways_to_print_or_two_places_are_refused(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = traces(capsys, "sql", "SELECT 1", "--json", "--csv", "--store", path)
    assert (code, err) == (2, "marft-bridge: traces sql: --json and --csv both say how to print; leave one out\n")
    code, _, err = traces(capsys, "sql", "SELECT 1", "--store", path, "--run", "x")
    assert (code, err) == (2, f"marft-bridge: traces sql: --store {path} and x are two runs; leave one out\n")


def test_looking_leaves_the_file_to_its_writer(path: Path) -> None:
    before = path.read_bytes()
    assert answer(path, "SELECT 1").rows == [(1,)]
    assert path.read_bytes() == before
    with TraceStore.open(path) as store:  # the locks went with the connection
        assert store.sql("SELECT current_setting('lock_configuration')") == [(False,)]
