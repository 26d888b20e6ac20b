"""One SELECT of a user's -> rows, from a store which is all that it can read.

Invariants: the statement cannot write, open another file, reach the network, load code or change a setting; it is
stopped after a bounded time and at a bound of memory, and spills nothing to disk; rows are fetched one by one, and no
more of them than may be printed. What the tables mean is in `trace_store.schema`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import duckdb
from rich.console import Console

from marft_bridge.common.errors import ConfigError
from marft_bridge.common.terminal_text import print_csv, print_line, print_table, text_to_line, value_to_json
from marft_bridge.traces.store_reader import open_for_reading
from trace_store.connection import first_line
from trace_store.queries import QUERIES
from trace_store.store import READER_MEMORY

Form = Literal["table", "json", "csv"]

MEMORY = READER_MEMORY
"""What DuckDB may take, for its tables and for what a query builds."""

_BOUNDS = (
    f"memory_limit = '{MEMORY}'",
    "temp_directory = ''",  # a query that needs more memory fails, instead of writing files
)
# In this order: the bounds need external access, which is taken away, and the last forbids further settings.
_LOCKS = (
    *_BOUNDS,
    "enable_external_access = false",  # files, network, ATTACH, COPY
    "python_enable_replacements = false",  # a table name is never a variable of this program
    "allow_community_extensions = false",
    "autoload_known_extensions = false",
    "lock_configuration = true",
)


_TIME_ZONE_SUFFIX = "WITH TIME ZONE"

MAX_PRINTED_BYTES = 64 << 20  # bytes of an answer in a file or a pipe
MAX_TERMINAL_BYTES = 1 << 20  # bytes of an answer on a terminal, which takes seconds to lay out


@dataclass(frozen=True, slots=True)
class QueryResult:
    """The result of a statement; `cut` says what is not all of it, None where it is all."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    cut: str | None


@dataclass(frozen=True, slots=True)
class Bounds:
    """The most that a statement may take and give."""

    rows: int | None  # None: all
    seconds: float
    printed_bytes: int = MAX_PRINTED_BYTES


def run_statement(path: Path, statement: str, bounds: Bounds) -> QueryResult:
    """Runs one SELECT (or EXPLAIN, SHOW, DESCRIBE, SUMMARIZE) on the store at `path`.

    The locks are settings of the database, so they hold for every connection of this process to the same file.

    Raises:
        ConfigError: it is not one statement that reads, or DuckDB refuses it; the message is one line.
        StoreError: the store cannot be opened.
    """
    with open_for_reading(path, export_settings=_BOUNDS) as store, store.snapshot() as con:
        try:
            _lock(con)
            return _execute(con, statement, bounds)
        except duckdb.InterruptException:
            raise ConfigError(
                f"traces sql: stopped after {bounds.seconds:g} s; ask for less, or set --seconds"
            ) from None
        except duckdb.OutOfMemoryException:
            raise ConfigError(
                f"traces sql: it needs more than {MEMORY} of memory; ask for less, or for parts"
            ) from None
        except duckdb.Error as error:
            raise ConfigError(f"traces sql: {text_to_line(_message(error))}") from None


def _lock(con: duckdb.DuckDBPyConnection) -> None:
    """Applies _LOCKS; a database of an export is opened with its configuration locked already."""
    if con.execute("SELECT current_setting('lock_configuration')").fetchone() == (True,):
        return
    for lock in _LOCKS:
        con.execute(f"SET {lock}")


def _execute(con: duckdb.DuckDBPyConnection, statement: str, bounds: Bounds) -> QueryResult:
    statements = con.extract_statements(statement)
    if len(statements) != 1:
        raise ConfigError(f"traces sql: {len(statements)} statements; give one")
    statement_kind = statements[0].type
    if statement_kind not in (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN):
        raise ConfigError(f"traces sql: {statement_kind.name} is not a statement that reads; give one SELECT")
    timer = threading.Timer(bounds.seconds, con.interrupt)
    timer.daemon = True
    timer.start()
    try:
        result = con.execute(statements[0])
        typed_columns = [(column[0], str(column[1])) for column in result.description or ()]
        if any(_TIME_ZONE_SUFFIX in column_type for _, column_type in typed_columns):
            result = con.execute(_zones_as_text(statements[0].query, [column_type for _, column_type in typed_columns]))
        columns = tuple(name for name, _ in typed_columns)
        return QueryResult(columns, *_fetch(result, columns, bounds))
    finally:
        timer.cancel()


def _fetch(
    result: duckdb.DuckDBPyConnection, columns: Sequence[str], bounds: Bounds
) -> tuple[list[tuple[Any, ...]], str | None]:
    """(the rows within the bounds, what was cut or None)."""
    rows: list[tuple[Any, ...]] = []
    bytes_left, name_bytes = bounds.printed_bytes, _value_to_printed_bytes(columns)  # JSON repeats them in each row
    while (row := result.fetchone()) is not None:
        if len(rows) == bounds.rows:
            return rows, f"the first {len(rows)} rows; --limit 0 shows all of them"
        bytes_left -= name_bytes + _value_to_printed_bytes(row)
        if bytes_left < 0:
            size = f"{bounds.printed_bytes >> 20} MiB"
            return rows, f"the first {len(rows)} rows, since more would be above {size}; ask for less, or for parts"
        rows.append(row)
    return rows, None


def _value_to_printed_bytes(value: Any, depth: int = 2) -> int:
    """At most so many bytes of a value are printed, whatever the form; JSON has a line for each item."""
    around = depth + 4
    if isinstance(value, str):
        return around + (len(value) + 2 if value.isascii() and value.isprintable() else len(json.dumps(value)))
    if isinstance(value, (bytes, bytearray)):
        return around + 4 * len(value)  # as \\x00
    if isinstance(value, (list, tuple)):
        return 2 * around + sum(_value_to_printed_bytes(item, depth + 1) for item in value)
    if isinstance(value, dict):
        items = [*value.keys(), *value.values()]
        return 2 * around + sum(_value_to_printed_bytes(item, depth + 1) for item in items)
    return around + len(str(value))


def _zones_as_text(statement: str, column_types: Sequence[str]) -> str:
    """The statement with its columns WITH TIME ZONE cast to text: as objects they would need a time zone package."""
    names = [f"c{number}" for number in range(len(column_types))]
    expressions = [
        f"{name}::VARCHAR" if _TIME_ZONE_SUFFIX in column_type else name
        for name, column_type in zip(names, column_types, strict=True)
    ]
    inner = statement.rstrip().removesuffix(";")
    return f"SELECT {', '.join(expressions)} FROM (\n{inner}\n) t({', '.join(names)})"  # noqa: S608 - the user's own


def _message(error: duckdb.Error) -> str:
    """The first line of DuckDB's message, and its hint where it has one on a line of its own."""
    lines = str(error).strip().splitlines()
    advice = [line for line in lines[1:] if line.startswith(("Did you mean", "Candidate bindings"))]
    return " ".join([first_line(str(error)), *advice[:1]])


def show_sql(
    path: Path, statement_or_name: str, form: Form, limit: int | None, seconds: float, console: Console
) -> None:
    """Prints the answer to a SELECT, or to one of the documented `QUERIES` by its name.

    At most `limit` rows (None: all) and MAX_PRINTED_BYTES, or MAX_TERMINAL_BYTES on a terminal; what is cut is said.
    """
    max_bytes = MAX_TERMINAL_BYTES if console.is_terminal else MAX_PRINTED_BYTES
    statement = QUERIES.get(statement_or_name, statement_or_name)
    result = run_statement(path, statement, Bounds(limit, seconds, printed_bytes=max_bytes))
    if form == "json":
        print_line(console, value_to_json([_row_to_object(result.columns, row) for row in result.rows]))
    elif form == "csv":
        print_csv(console, result.columns, result.rows)
    else:
        numbers = {
            name
            for name, *values in zip(result.columns, *result.rows, strict=True)
            if all(isinstance(value, (int, float)) for value in values if value is not None)
        }
        print_table(console, result.columns, result.rows, numbers=numbers)
    if result.cut is not None:
        Console(stderr=True, highlight=False).print(result.cut, markup=False, soft_wrap=True)


def _row_to_object(columns: Sequence[str], row: Sequence[Any]) -> dict[str, Any]:
    """A row by the names of its columns; a repeated name gets its position as a suffix."""
    row_object: dict[str, Any] = {}
    for position, (column, value) in enumerate(zip(columns, row, strict=True), start=1):
        row_object[column if column not in row_object else f"{column}_{position}"] = value
    return row_object
