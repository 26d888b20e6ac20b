"""The path of a store or of an export -> that store, open for reading.

Invariants: another process that writes into the store holds it for moments only, so it is waited for in bounded time,
and named in the error; what is kept of a journal from one opening to the next is never shown once it was erased.
"""

from __future__ import annotations

import atexit
import os
import shlex
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console

from marft_bridge.common.progress import Reporter
from trace_store.errors import StoreError
from trace_store.readers import CATALOG_SUFFIX, path_to_reader
from trace_store.store import TraceStore
from trace_store.unread import UnreadJournal

WAIT_S = 5.0
SLOW_S = 5.0  # a reading of the journal that took longer gets a hint
_MAX_KEPT = 8  # stores of whose journals something is kept


@contextmanager
def open_for_reading(
    path: Path, unread: UnreadJournal | None = None, export_settings: Sequence[str] = ()
) -> Iterator[TraceStore]:
    """The store, open for reading inside the block: a file with its journal, a folder of an export, or a DuckLake
    catalog. `unread` is for who opens it again and again, see `TraceStore.open`; `export_settings` are DuckDB's for
    the last two, see `path_to_reader`.

    Raises StoreError when another process holds it for longer than WAIT_S seconds, or it cannot be opened at all.
    """
    if path.is_dir() or path.suffix == CATALOG_SUFFIX:
        with path_to_reader(path, export_settings) as export_reader:
            yield export_reader
        return
    reporter = Reporter(Console(stderr=True, highlight=False))
    started = time.monotonic()
    with ExitStack() as stack:
        journal = stack.enter_context(UnreadJournal(path)) if unread is None else unread
        store = TraceStore.open(path, read_only=True, wait_s=WAIT_S, on_wait=reporter.say, unread=journal)
        with store:
            if journal.bytes_read and unread is None and time.monotonic() - started > SLOW_S:
                megabytes = journal.bytes_read / 2**20
                hint = f"`marft-bridge traces take-in --store {shlex.quote(str(path))}` spares that"
                reporter.say(f"{megabytes:.0f} MiB of the journal were read; {hint}")
            yield store


class KeptJournals:
    """What this process has read of the journals beside its stores, for who opens these again and again.

    An opening reads what came since the last one. All of it is read again where the store was written into, as `traces
    erase` does, or a segment is gone or another file; `UnreadJournal` says more. What is kept is removed when the
    process ends. Safe in any thread: while one has a store open, another one reads its journal for itself.
    """

    def __init__(self) -> None:
        self._journals: dict[tuple[int, Path], tuple[threading.Lock, UnreadJournal]] = {}
        self._lock = threading.Lock()
        atexit.register(self.close)

    @contextmanager
    def open_for_reading(self, path: Path) -> Iterator[TraceStore]:
        """As the function of this name."""
        key = (os.getpid(), path.absolute())  # a process that was forked has nothing of its parent's
        with self._lock:
            if key not in self._journals:
                self._journals[key] = threading.Lock(), UnreadJournal(key[1])
            lock, journal = self._journals[key] = self._journals.pop(key)  # the last one
            is_free = lock.acquire(blocking=False)
            self._forget_some()
        if not is_free:
            with open_for_reading(path) as store:
                yield store
            return
        try:
            with open_for_reading(path, journal) as store:
                yield store
        except StoreError:
            journal.close()  # it may hold a part of a segment
            raise
        finally:
            lock.release()

    def _forget_some(self) -> None:
        """Removes what is kept of stores that were not opened for longest, beyond _MAX_KEPT; none that is open."""
        for key, (lock, journal) in list(self._journals.items())[:-_MAX_KEPT]:
            if lock.acquire(blocking=False):
                if key[0] == os.getpid():
                    journal.close()
                del self._journals[key]

    def close(self) -> None:
        """Removes what is kept by this process. No store of it may be open."""
        with self._lock:
            journals, self._journals = self._journals, {}
        for (pid, _), (_, journal) in journals.items():
            if pid == os.getpid():
                journal.close()
