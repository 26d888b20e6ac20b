"""The journal of a process that runs for days -> its store, a minute at a time, by a thread of that process.

Invariants: a store that somebody else has open is left to them, who take in as well, until the next minute; whatever
goes wrong is said once, and never ends the thread or what runs beside it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trace_store.errors import StoreBusyError, StoreError
from trace_store.journal import folder_to_segments, journal_of
from trace_store.store import TraceStore

PERIOD_S = 60.0


@contextmanager
def periodic_intake(store: Path, warn: Callable[[str], None]) -> Iterator[None]:
    """Takes in the journal of the store every PERIOD_S seconds until the block ends; the rest is the caller's."""
    stop = threading.Event()
    thread = threading.Thread(target=take_in_until, args=(store, stop.wait, warn), name="intake", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def take_in_until(store: Path, wait: Callable[[float], bool], warn: Callable[[str], None]) -> None:
    """Takes in whenever `wait` was given the period and says False, where the journal has grown; returns when it says
    True."""
    sizes: dict[Path, int] | None = None
    warnings: set[str] = set()
    while not wait(PERIOD_S):
        current_sizes = _segment_sizes(store)
        if current_sizes == sizes:
            continue
        try:
            with TraceStore.open(store) as writer:
                writer.take_in()
        except StoreBusyError:
            continue
        except (StoreError, OSError) as error:
            if str(error) not in warnings:
                warnings.add(str(error))
                warn(f"the journal is not taken in, and grows: {error}")
            continue
        sizes = current_sizes  # of before: what was written meanwhile counts as growth


def _segment_sizes(store: Path) -> dict[Path, int]:
    sizes = {}
    for segment in folder_to_segments(journal_of(store)):
        with suppress(FileNotFoundError):
            sizes[segment] = segment.stat().st_size
    return sizes
