"""A Parquet file -> tasks, one a row, by DuckDB.

Invariants: rows come in the file's order and in bounded pieces; a value becomes what DuckDB writes as JSON (a date is
its ISO text, a decimal a number), so that a task can be stored; only that one local file is read, and no extension of
DuckDB is fetched. It does not know what the columns mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import duckdb

from marft_bridge.errors import GraphError
from marft_bridge.tasks.lines import MAX_LINE, Placed, bytes_to_object

_ROWS = 256  # at a time
_OFFLINE = {"autoinstall_known_extensions": False, "autoload_known_extensions": False, "threads": 1}
_PATTERN = frozenset("*?[")  # DuckDB would take such a name for several files


def parquet_to_objects(path: Path) -> Iterator[Placed]:
    """Every row of the file, in order. Raises GraphError: it cannot be read, or a value cannot be a task's."""
    if not path.is_file():
        raise GraphError(f"graph.tasks: there is no file {str(path)!r}")
    if not _PATTERN.isdisjoint(str(path)):
        raise GraphError(f"graph.tasks: {str(path)!r} holds one of {' '.join(sorted(_PATTERN))}; rename the file")
    try:
        with duckdb.connect(config=dict(_OFFLINE)) as connection:
            # The rows' alias must be no column's name: DuckDB would take the column for it.
            rows = connection.execute(
                "SELECT to_json(_whole_row)::VARCHAR FROM read_parquet(?) AS _whole_row", [str(path)]
            )
            number = 0
            while some := rows.fetchmany(_ROWS):
                for (text,) in some:
                    number += 1
                    where = f"row {number} of {str(path)!r}"
                    if len(text) > MAX_LINE:
                        raise GraphError(f"graph.tasks: {where} is longer than {MAX_LINE >> 20} MiB")
                    yield where, bytes_to_object(text.encode(), where)
    except duckdb.Error as error:
        why = " ".join(str(error).split("LINE 1")[0].split())
        raise GraphError(f"graph.tasks: cannot read {str(path)!r}: {why}") from None
