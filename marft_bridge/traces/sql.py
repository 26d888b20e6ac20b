"""One SELECT of a user's -> rows, on a store that it can read and nothing else.

Invariants: the statement cannot write, open another file, reach the network, load code or change a setting; it is
stopped after a bounded time, and spills nothing to disk. What the tables mean is in `trace_store.schema`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import duckdb
from rich.console import Console

from marft_bridge.errors import ConfigError
from marft_bridge.traces.opening import store_to_read
from marft_bridge.traces.plain import print_csv, print_line, print_table, text_to_line, value_to_json
from trace_store.connection import first_line
from trace_store.queries import QUERIES

Form = Literal["table", "json", "csv"]

# In this order: the first needs what the second forbids, and the last forbids all changes.
_LOCKS = (
    "temp_directory = ''",  # a query that needs more memory than there is fails, instead of writing files
    "enable_external_access = false",  # files, network, ATTACH, COPY
    "python_enable_replacements = false",  # a table name is never a variable of this program
    "allow_community_extensions = false",
    "autoload_known_extensions = false",
    "lock_configuration = true",
)


_ZONED = "WITH TIME ZONE"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a statement gave; `cut` when there were more rows than the limit."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    cut: bool


def statement_to_answer(path: Path, statement: str, limit: int | None, seconds: float) -> Answer:
    """Runs one SELECT (or EXPLAIN, SHOW, DESCRIBE, SUMMARIZE) on the store at `path`.

    The locks are the database's, so whoever has the same file open in this process has them too.

    Raises:
        ConfigError: it is not one statement that reads, or DuckDB refuses it; the message is one line.
        StoreError: the store cannot be opened.
    """
    with store_to_read(path) as store, store.snapshot() as con:
        try:
            _lock(con)
            return _run(con, statement, limit, seconds)
        except duckdb.InterruptException:
            raise ConfigError(f"traces sql: stopped after {seconds:g} s; ask for less, or set --seconds") from None
        except duckdb.Error as error:
            raise ConfigError(f"traces sql: {text_to_line(_message(error))}") from None


def _lock(con: duckdb.DuckDBPyConnection) -> None:
    """Takes from the database what it does not need; an export is opened without it."""
    if con.execute("SELECT current_setting('lock_configuration')").fetchone() == (True,):
        return
    for lock in _LOCKS:
        con.execute(f"SET {lock}")


def _run(con: duckdb.DuckDBPyConnection, statement: str, limit: int | None, seconds: float) -> Answer:
    found = con.extract_statements(statement)
    if len(found) != 1:
        raise ConfigError(f"traces sql: {len(found)} statements; give one")
    kind = found[0].type
    if kind not in (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN):
        raise ConfigError(f"traces sql: {kind.name} is not a statement that reads; give one SELECT")
    timer = threading.Timer(seconds, con.interrupt)
    timer.daemon = True
    timer.start()
    try:
        result = con.execute(found[0])
        described = [(column[0], str(column[1])) for column in result.description or ()]
        if any(_ZONED in kind for _, kind in described):
            result = con.execute(_zones_as_text(found[0].query, [kind for _, kind in described]))
        columns = tuple(name for name, _ in described)
        rows = result.fetchall() if limit is None else result.fetchmany(limit + 1)
    finally:
        timer.cancel()
    cut = limit is not None and len(rows) > limit
    return Answer(columns, rows[:limit], cut)


def _zones_as_text(statement: str, kinds: Sequence[str]) -> str:
    """The statement with its times with a zone as text: as objects they would need a library of time zones."""
    names = [f"c{number}" for number in range(len(kinds))]
    chosen = [f"{name}::VARCHAR" if _ZONED in kind else name for name, kind in zip(names, kinds, strict=True)]
    inner = statement.rstrip().removesuffix(";")
    return f"SELECT {', '.join(chosen)} FROM (\n{inner}\n) t({', '.join(names)})"  # noqa: S608 - the user's own


def _message(error: duckdb.Error) -> str:
    """DuckDB's first line, with its advice when it has one on a line of its own."""
    lines = str(error).strip().splitlines()
    advice = [line for line in lines[1:] if line.startswith(("Did you mean", "Candidate bindings"))]
    return " ".join([first_line(str(error)), *advice[:1]])


def show_sql(path: Path, question: str, form: Form, limit: int | None, seconds: float, console: Console) -> None:
    """Prints the answer to a SELECT, or to one of the documented `QUERIES` by its name."""
    answer = statement_to_answer(path, QUERIES.get(question, question), limit, seconds)
    if form == "json":
        print_line(console, value_to_json([_row_to_object(answer.columns, row) for row in answer.rows]))
    elif form == "csv":
        print_csv(console, answer.columns, answer.rows)
    else:
        numbers = {
            name
            for name, *values in zip(answer.columns, *answer.rows, strict=True)
            if all(isinstance(value, (int, float)) for value in values if value is not None)
        }
        print_table(console, answer.columns, answer.rows, numbers)
    if answer.cut:
        Console(stderr=True, highlight=False).print(
            f"the first {limit} rows; --limit 0 shows all of them", markup=False, soft_wrap=True
        )


def _row_to_object(columns: Sequence[str], row: Sequence[Any]) -> dict[str, Any]:
    """A row by the names of its columns; a name that comes again gets its position."""
    named: dict[str, Any] = {}
    for position, (column, value) in enumerate(zip(columns, row, strict=True), start=1):
        named[column if column not in named else f"{column}_{position}"] = value
    return named
