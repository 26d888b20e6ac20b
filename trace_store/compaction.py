"""A store file -> the same store in a new file, without the space and the bytes of rows that were deleted.

DuckDB marks deleted rows, but leaves their bytes in the file; only a copy of what is visible is without them.
Invariants: at every moment the path holds the whole store, the old one or the new; what other processes wrote is never
lost, because the old file is exchanged only while nobody can have it open; a copy that a killed process left is
removed by the next one. What is worth deleting is not known here.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trace_store.connection import STORAGE_VERSION, connect, one_line_errors, private_files
from trace_store.errors import StoreError
from trace_store.files import sync
from trace_store.parquet import quoted
from trace_store.store import TraceStore

_FRESH = ".fresh"  # suffix of a copy that is not finished


@dataclass(frozen=True, slots=True)
class Vacuumed:
    """Bytes of the store file before and after."""

    before: int
    after: int


def vacuum(path: Path, *, wait_s: float = 0.0, say: Callable[[str], None] = lambda _: None) -> Vacuumed:
    """Take in the store's journal, then rewrite its file. Needs as much free space as the store is large.

    Whoever has the store open is waited for, as in `TraceStore.open`.

    Raises StoreError when the store does not exist, is open elsewhere or in this process, or the disk is full; the
    store is then as it was.
    """
    # This process may not have it open either: the lock below would not keep out a connection of its own.
    connect(path, read_only=True, wait_s=wait_s, say=say).close()
    with TraceStore.open(path, wait_s=wait_s, say=say) as store:
        store.take_in()
    before = path.stat().st_size
    con = connect(path, read_only=False, wait_s=wait_s, say=say)
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(4)}{_FRESH}")
    try:
        try:
            with one_line_errors(path), private_files():
                _remove_leftovers(path)
                con.execute("CHECKPOINT")
                con.execute(f"ATTACH {quoted(fresh)} AS fresh (STORAGE_VERSION '{STORAGE_VERSION}')")
                ((name,),) = con.execute("SELECT current_database()").fetchall()
                con.execute(f'COPY FROM DATABASE "{name}" TO fresh')
                con.execute("DETACH fresh")  # writes everything into the file
            closed = _state(path)
        finally:
            with private_files():
                con.close()
        sync(fresh)
        with _locked(path):
            if _state(path) != closed:
                raise StoreError(f"store {path} was changed while it was rewritten; try again")
            after = fresh.stat().st_size
            fresh.replace(path)
            sync(path.parent)
    finally:
        fresh.unlink(missing_ok=True)
        fresh.with_name(fresh.name + ".wal").unlink(missing_ok=True)
    return Vacuumed(before, after)


def _remove_leftovers(path: Path) -> None:
    """Copies, and pages that did not fit into memory, of processes that were killed: nobody else has the store open."""
    for left in path.parent.glob(f"{path.name}.*{_FRESH}*"):
        left.unlink()
    spilled = path.with_name(path.name + ".tmp")
    if spilled.is_dir() and not spilled.is_symlink():
        shutil.rmtree(spilled)


def _state(path: Path) -> tuple[int, int, int, bool]:
    """What changes when somebody writes into a store."""
    stat = path.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns, path.with_name(path.name + ".wal").exists()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """DuckDB's own lock on a store file, so that no process can open it: neither the old file nor, as this one has its
    name, the new one before the old is gone."""
    handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StoreError(f"store {path} was opened by another process while it was rewritten; try again") from None
        yield
    finally:
        os.close(handle)
