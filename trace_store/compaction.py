"""A store file -> the same store in a new file, without the space and the bytes of rows that were deleted.

DuckDB marks deleted rows, but leaves their bytes in the file; only a copy of what is visible is without them.
Invariants: at every moment the path holds the whole store, the old one or the new; what other processes wrote is never
lost, because the old file is exchanged only while nobody can have it open; a copy that a killed process left is
removed by the next one.
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
from trace_store.journal import is_recorded
from trace_store.parquet import quoted
from trace_store.store import TraceStore

COPY_SUFFIX = ".fresh"  # of a copy that is not finished


@dataclass(frozen=True, slots=True)
class VacuumResult:
    """Size of the store file in bytes, before and after."""

    before: int  # both names are keys of what `traces vacuum --json` prints
    after: int


def vacuum(path: Path, *, wait_s: float = 0.0, on_wait: Callable[[str], None] = lambda _: None) -> VacuumResult:
    """Take in the store's journal, then rewrite its file. Needs as much free space as the store is large.

    Waits for other processes that have the store open, as `TraceStore.open` does.

    Raises StoreError when the store does not exist, is open elsewhere or in this process, or the disk is full; the
    store is then as it was.
    """
    # This process may not have it open either: the lock below would not keep out a connection of its own.
    if path.exists() or not is_recorded(path):
        connect(path, read_only=True, wait_s=wait_s, on_wait=on_wait).close()
    with TraceStore.open(path, wait_s=wait_s, on_wait=on_wait) as store:
        store.take_in()
    bytes_before = path.stat().st_size
    con = connect(path, read_only=False, wait_s=wait_s, on_wait=on_wait)
    copy_path = path.with_name(f"{path.name}.{secrets.token_hex(4)}{COPY_SUFFIX}")
    try:
        try:
            with one_line_errors(path), private_files():
                _remove_leftovers(path)
                con.execute("CHECKPOINT")
                con.execute(f"ATTACH {quoted(copy_path)} AS fresh (STORAGE_VERSION '{STORAGE_VERSION}')")
                ((name,),) = con.execute("SELECT current_database()").fetchall()
                con.execute(f'COPY FROM DATABASE "{name}" TO fresh')
                con.execute("DETACH fresh")  # writes everything into the file
            closed_state = _state(path)
        finally:
            with private_files():
                con.close()
        sync(copy_path)
        sync(path.parent)  # that the log of the old file is gone: it must not be found beside the new one
        with _locked(path):
            if _state(path) != closed_state:
                raise StoreError(f"store {path} was changed while it was rewritten; try again")
            bytes_after = copy_path.stat().st_size
            copy_path.replace(path)
            sync(path.parent)
    finally:
        copy_path.unlink(missing_ok=True)
        copy_path.with_name(copy_path.name + ".wal").unlink(missing_ok=True)
    return VacuumResult(bytes_before, bytes_after)


def _remove_leftovers(path: Path) -> None:
    """Remove copies and spilled pages of killed processes: nobody else has the store open now."""
    for leftover in path.parent.glob(f"{path.name}.*{COPY_SUFFIX}*"):
        leftover.unlink()
    spill_folder = path.with_name(path.name + ".tmp")
    if spill_folder.is_dir() and not spill_folder.is_symlink():
        shutil.rmtree(spill_folder)


def _state(path: Path) -> tuple[int, int, int, bool]:
    """Inode, size, modification time and whether there is a log: these change when a process writes into a store."""
    stat = path.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns, path.with_name(path.name + ".wal").exists()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold DuckDB's own lock on the store file, so that no process can open it while it is exchanged."""
    handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StoreError(f"store {path} was opened by another process while it was rewritten; try again") from None
        yield
    finally:
        os.close(handle)
