"""A path -> an open DuckDB connection whose files only their owner can read, and DuckDB's errors in one line.

Invariant: one process at a time holds a store open for writing (DuckDB's own lock); who comes second is told by
whom. DuckDB creates its files with the process's mode, so whatever may create one runs inside `private_files`.
Knows no table.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import duckdb

from trace_store.errors import StoreError

# 'latest' is the default, and would make a file that the oldest supported DuckDB cannot read.
_CONFIG: dict[str, str] = {"storage_compatibility_version": "v2.0.0", "autoinstall_known_extensions": "false"}
_HOLDER = re.compile(r"Conflicting lock is held in (?P<program>.*?) \(PID (?P<pid>\d+)")
_umask_lock = threading.RLock()


@contextmanager
def private_files() -> Iterator[None]:
    """Files that are created inside are readable by their owner only: the database, its log and its spill files."""
    with _umask_lock:  # the mask belongs to the process: two overlapping changes would leave it changed
        before = os.umask(0o077)
        try:
            yield
        finally:
            os.umask(before)


def connect(path: Path, *, read_only: bool) -> duckdb.DuckDBPyConnection:
    """Open a DuckDB file. Raises StoreError when it is missing, held by another process, or not DuckDB's."""
    if read_only and not path.exists():
        raise StoreError(f"store {path} does not exist; collect some episodes into it first")
    if not path.parent.is_dir():
        raise StoreError(f"store {path} cannot be made: there is no directory {path.parent}; create it")
    try:
        with private_files():
            return duckdb.connect(str(path), read_only=read_only, config=dict(_CONFIG))
    except duckdb.Error as error:
        raise StoreError(_opening_failure(path, str(error))) from error


def _opening_failure(path: Path, message: str) -> str:
    holder = _HOLDER.search(message)
    if holder:
        return (
            f"store {path} is in use by process {holder['pid']} ({holder['program']}); wait until it ends, or stop it"
        )
    if "not a valid DuckDB" in message:
        return f"store {path} is not a DuckDB file; give another path"
    if "different configuration" in message:
        return f"store {path} is already open in this process in another mode; close that one first"
    return f"store {path} cannot be opened: {first_line(message)}; check the path and its permissions"


@contextmanager
def one_line_errors(path: Path) -> Iterator[None]:
    """DuckDB's errors inside become StoreErrors that name the store."""
    try:
        yield
    except duckdb.Error as error:
        raise StoreError(f"store {path}: {first_line(str(error))}") from error


def first_line(message: str) -> str:
    """The first line of a message that DuckDB spreads over several."""
    return message.strip().split("\n", 1)[0]
