"""A store's path -> that store, open for reading, for as long as a command looks.

Invariant: who writes into it holds it for moments, so it is waited for in bounded time, and named. What is read is not
known here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from marft_bridge.progress import Reporter
from trace_store.readers import CATALOG_SUFFIX, path_to_reader
from trace_store.store import TraceStore

WAIT_S = 5.0


@contextmanager
def store_to_read(path: Path) -> Iterator[TraceStore]:
    """The store, open for reading inside the block: a file, a folder of an export, or a DuckLake catalog.

    Raises StoreError when another process holds it for longer than WAIT_S seconds, or it cannot be opened at all.
    """
    if path.is_dir() or path.suffix == CATALOG_SUFFIX:
        with path_to_reader(path) as elsewhere:
            yield elsewhere
        return
    reporter = Reporter(Console(stderr=True, highlight=False))
    with TraceStore.open(path, read_only=True, wait_s=WAIT_S, say=reporter.say) as store:
        yield store
