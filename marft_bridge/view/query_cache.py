"""Results of queries over a whole store, cached for as long as nothing is written into it or its journal.

Sums over all episodes of a run grow with the store, and each turn of a page needs the same ones. Invariant: a result
is never older than the file, whose inode, size and modification time are compared while the store is open, when no
other process writes into it, nor than what was read of the journal.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, TypeVar, cast

from trace_store.unread import UnreadJournal, store_to_stamp

_Result = TypeVar("_Result")
_MAX_RESULTS = 64  # beyond them all are forgotten


class QueryCache:
    """Results about the store at `path` and what is read of its journal. Not thread-safe."""

    def __init__(self, path: Path, unread: UnreadJournal) -> None:
        self._unread = unread
        self._store = path
        self._stamp: tuple[Any, ...] | None = None
        self._results: dict[Hashable, Any] = {}

    def get(self, key: Hashable, compute: Callable[[], _Result]) -> _Result:
        """The cached result under `key`, or else that of `compute`. Call it while the store is open."""
        # An export is a folder, whose own stamp does not change with the files in it: nothing of it is cached.
        stamp = None if self._store.is_dir() else (store_to_stamp(self._store), self._unread.bytes_read)
        if stamp is None or stamp != self._stamp or len(self._results) >= _MAX_RESULTS:
            self._stamp, self._results = stamp, {}
        if key not in self._results:
            self._results[key] = compute()
        return cast("_Result", self._results[key])
