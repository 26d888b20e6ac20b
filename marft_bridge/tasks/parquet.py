"""A Parquet file -> tasks, one a row, by DuckDB.

Invariants: rows come in the file's order and in chunks of bounded size; a value becomes what DuckDB writes as JSON (a
date is its ISO text, a decimal a number), so that a task can be stored; only that one local file is read, and no
extension of DuckDB is fetched.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import duckdb

from marft_bridge.common.errors import GraphError
from marft_bridge.tasks.lines import MAX_LINE, LocatedRecord, bytes_to_object

_CHUNK_ROWS = 256
_OFFLINE = {"autoinstall_known_extensions": False, "autoload_known_extensions": False, "threads": 1}
_PATTERN_CHARACTERS = frozenset("*?[")  # DuckDB reads a name with one of these as a pattern for several files


def parquet_to_objects(path: Path) -> Iterator[LocatedRecord]:
    """Every row of the file, in order. Raises GraphError: the file cannot be read, or a value is no JSON."""
    if not path.is_file():
        raise GraphError(f"graph.tasks: there is no file {str(path)!r}")
    if not _PATTERN_CHARACTERS.isdisjoint(str(path)):
        raise GraphError(
            f"graph.tasks: {str(path)!r} holds one of {' '.join(sorted(_PATTERN_CHARACTERS))}; rename the file"
        )
    try:
        with duckdb.connect(config=dict(_OFFLINE)) as connection:
            # The rows' alias must be no column's name: DuckDB would take the column for it.
            rows = connection.execute(
                "SELECT to_json(_whole_row)::VARCHAR FROM read_parquet(?) AS _whole_row", [str(path)]
            )
            number = 0
            while chunk := rows.fetchmany(_CHUNK_ROWS):
                for (text,) in chunk:
                    number += 1
                    location = f"row {number} of {str(path)!r}"
                    if len(text) > MAX_LINE:
                        raise GraphError(f"graph.tasks: {location} is longer than {MAX_LINE >> 20} MiB")
                    yield location, bytes_to_object(text.encode(), location)
    except duckdb.Error as error:
        reason = " ".join(str(error).split("LINE 1")[0].split())
        raise GraphError(f"graph.tasks: cannot read {str(path)!r}: {reason}") from None
