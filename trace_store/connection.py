"""A path -> an open DuckDB connection whose files only their owner can read, and DuckDB's errors in one line.

Invariant: one process at a time holds a store open for writing (DuckDB's own lock); the error of a second one names the
first. DuckDB creates its files with the process's umask, so whatever may create one runs inside `private_files`.
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
from trace_store.files import check_before_opening

# 'latest' is the default, and would make a file that the oldest supported DuckDB cannot read.
STORAGE_VERSION = "v2.0.0"
_CONFIG: dict[str, str] = {"storage_compatibility_version": STORAGE_VERSION, "autoinstall_known_extensions": "false"}
_LOCK_HOLDER = re.compile(r"Conflicting lock is held in (?P<program>.*?) \(PID (?P<pid>\d+)")
# Part of a message of DuckDB -> what its reader should do.
_ADVICE = {
    "Could not write file": "free space on its disk and run the command again: nothing that was acknowledged is lost",
    "has been invalidated": "an earlier error says why; once that is mended, run the command again",
}
POLL_S = 0.05  # between attempts to open a store that another process has open
_umask_lock = threading.RLock()


@contextmanager
def private_files() -> Iterator[None]:
    """Files that are created inside are readable by their owner only: the database, its log and its spill files."""
    with _umask_lock:  # the mask belongs to the process: two overlapping changes would leave it changed
        old_mask = os.umask(0o077)
        try:
            yield
        finally:
            os.umask(old_mask)


def connect(
    path: Path, *, read_only: bool, wait_s: float = 0.0, on_wait: Callable[[str], None] = lambda _: None
) -> duckdb.DuckDBPyConnection:
    """Open a DuckDB file.

    Waits up to `wait_s` seconds while another process has it open; `on_wait` is then called once, with a line that says
    for which process and how long.
    Raises StoreBusyError when another process still holds it, and StoreError when it is missing or not DuckDB's.
    """
    deadline = time.monotonic() + wait_s
    has_reported_wait = False
    while True:
        try:
            return _connect_now(path, read_only=read_only)
        except StoreBusyError as busy:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise
            if not has_reported_wait:
                on_wait(f"store {path} is in use by {busy.lock_holder}; waiting up to {wait_s:g} s for it")
                has_reported_wait = True
        time.sleep(min(POLL_S, remaining_s))


def _connect_now(path: Path, *, read_only: bool) -> duckdb.DuckDBPyConnection:
    if read_only and not path.exists():
        raise StoreError(f"store {path} does not exist; collect some episodes into it first")
    for file in (path, path.with_name(path.name + ".wal")):
        check_before_opening(file, read_only=read_only)
    if not path.parent.is_dir():
        raise StoreError(f"store {path} cannot be made: there is no directory {path.parent}; create it")
    while True:
        inode = _inode(path)
        try:
            with private_files():
                con = duckdb.connect(str(path), read_only=read_only, config=dict(_CONFIG))
        except duckdb.Error as error:
            raise _opening_failure(path, str(error)) from error
        if inode in (None, _inode(path)):
            return con
        con.close()  # between its opening and its locking, `compaction` put another file into its place


def _inode(path: Path) -> int | None:
    return path.stat().st_ino if path.exists() else None


def connect_memory() -> duckdb.DuckDBPyConnection:
    """An empty database in memory, which installs and loads no extension by itself."""
    return duckdb.connect(":memory:", config={**_CONFIG, "autoload_known_extensions": "false"})


def _opening_failure(path: Path, message: str) -> StoreError:
    holder_match = _LOCK_HOLDER.search(message)
    if holder_match:
        return StoreBusyError(path, f"process {holder_match['pid']} ({holder_match['program']})")
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
        advice = next((f"; {advice}" for part, advice in _ADVICE.items() if part in message), "")
        raise StoreError(f"store {path}: {message}{advice}") from error


def first_line(message: str) -> str:
    """The first line of a message that DuckDB spreads over several."""
    return message.strip().split("\n", 1)[0]
