"""Records -> rows of a table, many at once: columns of values, handed to DuckDB as one.

With pyarrow the columns become an Arrow table whose lists of ids are flat buffers, packed list by list. Without it
DuckDB's appender takes them row by row, but for the lists, which it takes number by number: these are registered as
arrays of numpy, which gives the same rows in half as much time again as with pyarrow.
Invariant: a row read back equals the record, log-probs bit for bit; a value that its column cannot hold is refused.
"""

# ruff: noqa: S608 - statements are put together from constants
from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import duckdb

from trace_store.errors import StoreError
from trace_store.journal import json_text, storable_text
from trace_store.records import Action, AdapterRow, Edge, Episode, Reward, RunRow, SpanRow
from trace_store.schema import Table

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

Columns = list[Sequence[Any]]
Record = RunRow | SpanRow | Episode | Action | Edge | Reward | AdapterRow

_STRUCT_CODES = {"INTEGER[]": "i", "DOUBLE[]": "d"}
_VALUE_ERRORS = (struct.error, TypeError, ValueError, OverflowError)


def records_to_columns(table: Table, records: Sequence[Record], *extra_columns: Sequence[Any]) -> Columns:
    """Columns in the table's order; `extra_columns` are those that the records do not have, after their own."""
    record_columns = table.columns[: len(table.columns) - len(extra_columns)]
    columns: Columns = list(zip(*map(attrgetter(*(column.name for column in record_columns)), records), strict=True))
    for number, column in enumerate(record_columns if records else ()):
        if column.sql_type.startswith("JSON"):
            columns[number] = list(
                map(json_text if column.sql_type.endswith("NOT NULL") else _nonempty_json, columns[number])
            )
        elif column.name == "completion":  # the one text that is not as the journal had it, but decoded from JSON in it
            columns[number] = [None if text is None else storable_text(text) for text in columns[number]]
    return [*columns, *extra_columns]


def _nonempty_json(mapping: Any) -> str | None:
    """A dict as JSON text; None for an empty one, which was not recorded."""
    return json_text(mapping) if mapping else None


def insert(con: duckdb.DuckDBPyConnection, table: Table, columns: Columns, clause: str = "") -> list[tuple[Any, ...]]:
    """Insert rows, and return the rows of the statement: one with the number inserted, or what RETURNING gives.

    `clause` follows the SELECT, for example ON CONFLICT or WHERE; the rows are called `arriving` there. Raises
    StoreError for a value that does not fit, naming the column or, without pyarrow and for a value that is not a list,
    the table.
    """
    if not columns or not len(columns[0]):
        return []
    if find_spec("pyarrow") is None:
        return _insert_without_arrow(con, table, columns, clause=clause)
    con.register("arriving", columns_to_arrow(table, columns))
    try:
        return con.execute(_statement(table, "arriving", clause)).fetchall()
    finally:
        con.unregister("arriving")


def _statement(table: Table, source: str, clause: str) -> str:
    return f"INSERT INTO {table.name} SELECT * FROM {source} {clause}"


def _insert_without_arrow(
    con: duckdb.DuckDBPyConnection, table: Table, columns: Columns, clause: str
) -> list[tuple[Any, ...]]:
    arrays = _columns_to_arrays(table, columns)
    # Of a list in an array, the appender learns only whether there is one.
    rows = zip(
        *(
            [None if numbers is None else () for numbers in values] if column.name in arrays else values
            for column, values in zip(table.columns, columns, strict=True)
        ),
        strict=True,
    )
    try:
        if not clause and not arrays:
            with con.appender(table.name) as appender:
                appender.append_rows(rows)
            return [(len(columns[0]),)]
        con.execute(f"CREATE OR REPLACE TEMP TABLE arriving AS SELECT * FROM {table.name} LIMIT 0")
        with con.appender("arriving") as appender:
            appender.append_rows(rows)
        if not arrays:
            return con.execute(_statement(table, "arriving", clause)).fetchall()
        return _insert_with_arrays(con, table, arrays, clause=clause)
    except (duckdb.DataError, duckdb.InvalidInputException) as error:
        raise StoreError(f"cannot store a value in {table.name}: {error}") from error


def _insert_with_arrays(
    con: duckdb.DuckDBPyConnection, table: Table, arrays: dict[str, np.ndarray], clause: str
) -> list[tuple[Any, ...]]:
    con.register("lists", arrays)
    replacements = ", ".join(f"if(arriving.{name} IS NULL, NULL, lists.{name}) AS {name}" for name in arrays)
    rows = f"(SELECT arriving.* REPLACE ({replacements}) FROM arriving POSITIONAL JOIN lists) arriving"
    try:
        return con.execute(_statement(table, rows, clause)).fetchall()
    finally:
        con.unregister("lists")


def _columns_to_arrays(table: Table, columns: Columns) -> dict[str, np.ndarray]:
    """The columns of lists, by name: an array of arrays of numbers, an empty one for None.

    A column with a NaN is left out: what DuckDB reads from an array has NULL there. Raises StoreError for a value that
    does not fit.
    """
    arrays = {}
    for column, values in zip(table.columns, columns, strict=True):
        code = _STRUCT_CODES.get(column.sql_type)
        if code:
            try:
                array = _lists_to_array(values, code)
            except _VALUE_ERRORS as error:
                raise StoreError(f"cannot store a value as {table.name}.{column.name}: {error}") from error
            if array is not None:
                arrays[column.name] = array
    return arrays


def _lists_to_array(lists: Sequence[Sequence[Any] | None], code: str) -> np.ndarray | None:
    import numpy as np

    flat, lengths = _lists_to_bytes(lists, code)
    numbers = np.frombuffer(flat, code)
    if np.isnan(numbers).any():
        return None
    array = np.empty(len(lists), object)
    for row, (begin, end) in enumerate(pairwise(accumulate(lengths, initial=0))):
        array[row] = numbers[begin:end]
    return array


def columns_to_arrow(table: Table, columns: Columns) -> pa.Table:
    """Columns -> one Arrow table with the table's names and types. Raises StoreError for a value that does not fit."""
    import pyarrow as pa

    types = {
        "VARCHAR": pa.string(),
        "JSON": pa.string(),
        "BIGINT": pa.int64(),
        "INTEGER": pa.int32(),
        "DOUBLE": pa.float64(),
        "BOOLEAN": pa.bool_(),
    }
    arrays = []
    for column, values in zip(table.columns, columns, strict=True):
        code = _STRUCT_CODES.get(column.sql_type)
        try:
            if code:
                arrays.append(_lists_to_arrow(values, code))
            else:
                arrays.append(pa.array(values, type=types[column.sql_type.removesuffix(" NOT NULL")]))
        except (pa.ArrowException, *_VALUE_ERRORS) as error:
            raise StoreError(f"cannot store a value as {table.name}.{column.name}: {error}") from error
    return pa.table(arrays, names=[column.name for column in table.columns])


def _lists_to_arrow(lists: Sequence[Sequence[Any] | None], code: str) -> pa.ListArray:
    """Lists of numbers, None for an absent one, without an Arrow value being made of each number."""
    import pyarrow as pa

    flat, lengths = _lists_to_bytes(lists, code)
    offsets = pa.array([0, *accumulate(lengths)], type=pa.int32())
    value_type = pa.int32() if code == "i" else pa.float64()
    values = pa.Array.from_buffers(value_type, sum(lengths), [None, pa.py_buffer(flat)])
    mask = pa.array([numbers is None for numbers in lists]) if None in lists else None
    return pa.ListArray.from_arrays(offsets, values, mask=mask)


def _lists_to_bytes(lists: Sequence[Sequence[Any] | None], code: str) -> tuple[bytes, list[int]]:
    """The numbers of all lists behind one another, and how many each has; None has none."""
    lengths = [0 if numbers is None else len(numbers) for numbers in lists]
    pack: dict[int, Callable[..., bytes]] = {length: struct.Struct(f"={length}{code}").pack for length in set(lengths)}
    return b"".join([pack[len(numbers)](*numbers) for numbers in lists if numbers is not None]), lengths
