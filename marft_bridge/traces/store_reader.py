"""The path of a store or of an export -> that store, open for reading.

Invariant: another process that writes into the store holds it for moments only, so it is waited for in bounded time,
and named in the error.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console

from marft_bridge.common.progress import Reporter
from trace_store.readers import CATALOG_SUFFIX, path_to_reader
from trace_store.store import TraceStore
from trace_store.unread import UnreadJournal

WAIT_S = 5.0
SLOW_S = 5.0  # a reading of the journal that took longer gets a hint


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
