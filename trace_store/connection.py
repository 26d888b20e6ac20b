"""A path -> an open DuckDB connection whose files only their owner can read, and DuckDB's errors in one line.

Invariant: one process at a time holds a store open for writing (DuckDB's own lock); who comes second is told by
whom. DuckDB creates its files with the process's mode, so whatever may create one runs inside `private_files`.
Knows no table.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import duckdb

from trace_store.errors import StoreBusyError, StoreError

# 'latest' is the default, and would make a file that the oldest supported DuckDB cannot read.
STORAGE_VERSION = "v2.0.0"
_CONFIG: dict[str, str] = {"storage_compatibility_version": STORAGE_VERSION, "autoinstall_known_extensions": "false"}
_HOLDER = re.compile(r"Conflicting lock is held in (?P<program>.*?) \(PID (?P<pid>\d+)")
# What a message of DuckDB leaves its reader to do.
_TODO = {
    "Could not write file": "free space on its disk and run the command again: nothing that was acknowledged is lost",
    "has been invalidated": "an earlier error says why; once that is mended, run the command again",
}
LOOK_EVERY_S = 0.05  # at a store that somebody else has open
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


def connect(
    path: Path, *, read_only: bool, wait_s: float = 0.0, say: Callable[[str], None] = lambda _: None
) -> duckdb.DuckDBPyConnection:
    """Open a DuckDB file.

    Whoever else has it open is waited for, up to `wait_s` seconds; `say` is then told, once, for whom and how long.
    Raises StoreBusyError when another process still holds it, and StoreError when it is missing or not DuckDB's.
    """
    until = time.monotonic() + wait_s
    told = False
    while True:
        try:
            return _connect_now(path, read_only=read_only)
        except StoreBusyError as busy:
            left = until - time.monotonic()
            if left <= 0:
                raise
            if not told:
                say(f"store {path} is in use by {busy.holder}; waiting up to {wait_s:g} s for it")
                told = True
        time.sleep(min(LOOK_EVERY_S, left))


def _connect_now(path: Path, *, read_only: bool) -> duckdb.DuckDBPyConnection:
    if read_only and not path.exists():
        raise StoreError(f"store {path} does not exist; collect some episodes into it first")
    if not path.parent.is_dir():
        raise StoreError(f"store {path} cannot be made: there is no directory {path.parent}; create it")
    while True:
        before = _file_number(path)
        try:
            with private_files():
                con = duckdb.connect(str(path), read_only=read_only, config=dict(_CONFIG))
        except duckdb.Error as error:
            raise _opening_failure(path, str(error)) from error
        if before in (None, _file_number(path)):
            return con
        con.close()  # between its opening and its locking, `compaction` put another file into its place


def _file_number(path: Path) -> int | None:
    return path.stat().st_ino if path.exists() else None


def connect_memory() -> duckdb.DuckDBPyConnection:
    """An empty database in memory, which installs and loads no extension by itself."""
    return duckdb.connect(":memory:", config={**_CONFIG, "autoload_known_extensions": "false"})


def _opening_failure(path: Path, message: str) -> StoreError:
    holder = _HOLDER.search(message)
    if holder:
        return StoreBusyError(path, f"process {holder['pid']} ({holder['program']})")
    if "not a valid DuckDB" in message:
        return StoreError(f"store {path} is not a DuckDB file; give another path")
    if "different configuration" in message:
        return StoreError(f"store {path} is already open in this process in another mode; close that one first")
    return StoreError(f"store {path} cannot be opened: {first_line(message)}; check the path and its permissions")


@contextmanager
def one_line_errors(path: Path) -> Iterator[None]:
    """DuckDB's errors inside become StoreErrors that name the store."""
    try:
        yield
    except duckdb.Error as error:
        message = first_line(str(error))
        todo = next((f"; {todo}" for part, todo in _TODO.items() if part in message), "")
        raise StoreError(f"store {path}: {message}{todo}") from error


def first_line(message: str) -> str:
    """The first line of a message that DuckDB spreads over several."""
    return message.strip().split("\n", 1)[0]
