"""Records <-> table rows, by the column order of `schema`.

Invariant: a row read back equals the record that was written, log-probs bit for bit; tuples of ids become lists
on the way in and tuples again on the way out, open bags become JSON text. Knows Arrow, but no SQL and no files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from trace_store.errors import StoreError
from trace_store.journal import json_text, storable_text
from trace_store.records import Action, AdapterRow, Edge, Episode, Reward, RunRow, SpanRow
from trace_store.schema import Table

if TYPE_CHECKING:
    import pyarrow as pa

Row = tuple[Any, ...]
Record = RunRow | SpanRow | Episode | Action | Edge | Reward | AdapterRow
R = TypeVar("R", RunRow, SpanRow, Episode, Action, Edge, Reward, AdapterRow)


def records_to_rows(table: Table, records: Iterable[Record], *extra: Any) -> list[Row]:
    """Rows in the table's column order; `extra` fills the columns after those that the records have."""
    own = table.columns[: len(table.columns) - len(extra)]
    names = [column.name for column in own]
    bags = [column.name for column in own if column.sql_type.startswith("JSON")]
    rows = []
    for record in records:
        values = {name: getattr(record, name) for name in names}
        for name in bags:
            values[name] = json_text(values[name])
        if values.get("completion") is not None:
            values["completion"] = storable_text(values["completion"])
        rows.append((*values.values(), *extra))
    return rows


def rows_to_records(record_class: type[R], table: Table, rows: Iterable[Sequence[Any]]) -> list[R]:
    """Rows that begin with the record's columns in the table's order -> records; further columns are ignored."""
    names = [field.name for field in fields(record_class)]
    columns = [column for column in table.columns if column.name in names]
    records = []
    for row in rows:
        values = dict(zip((column.name for column in columns), row, strict=False))
        for column in columns:
            value = values[column.name]
            if column.sql_type.startswith("JSON"):
                values[column.name] = json.loads(value)
            elif column.sql_type.endswith("[]") and value is not None:
                values[column.name] = tuple(value)
        records.append(record_class(**values))
    return records


def rows_to_arrow(table: Table, rows: Sequence[Row]) -> pa.Table:
    """Rows -> one Arrow table with the table's columns and types, for a bulk insert.

    Raises StoreError naming the column when a value does not fit it.
    """
    import pyarrow as pa

    types = {
        "VARCHAR": pa.string(),
        "JSON": pa.string(),
        "BIGINT": pa.int64(),
        "INTEGER": pa.int32(),
        "DOUBLE": pa.float64(),
        "BOOLEAN": pa.bool_(),
        "INTEGER[]": pa.list_(pa.int32()),
        "DOUBLE[]": pa.list_(pa.float64()),
    }
    arrays = []
    for column, values in zip(table.columns, zip(*rows, strict=True), strict=True):
        try:
            arrays.append(pa.array(values, type=types[column.sql_type.removesuffix(" NOT NULL")]))
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise StoreError(f"cannot store a value as {table.name}.{column.name}: {error}") from error
    return pa.table(arrays, names=[column.name for column in table.columns])
