"""A run folder's store, opened for moments only: while episodes run, their records go to the journal.

Invariants: no command holds the store while a graph, a server or a trainer works, so others can read and write it in
between; a process that holds the store is waited for in bounded time, and named; records that could not be taken in
stay in the journal, and the next command takes them in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from marft_bridge.common.errors import StoreError
from marft_bridge.common.progress import Reporter
from marft_bridge.runs.run_folder import RunFolder
from trace_store.errors import StoreBusyError
from trace_store.store import TraceStore

WAIT_S = 60.0  # before and after a run, where giving up costs nothing
WAIT_IN_RUN_S = 600.0  # within one, where giving up stops work that took hours


@contextmanager
def open_run_store(folder: RunFolder, reporter: Reporter, wait_s: float = WAIT_S) -> Iterator[TraceStore]:
    """Opens the folder's store for writing until the block ends, with all journaled records taken in.

    Raises StoreBusyError when another process has it open for longer than `wait_s` seconds.
    """
    with TraceStore.open(folder.store, wait_s=wait_s, on_wait=reporter.say) as store:
        store.take_in()
        yield store


@contextmanager
def take_in_on_failure(folder: RunFolder, reporter: Reporter) -> Iterator[None]:
    """Takes the journal in when the block fails or is stopped by Ctrl-C.

    Raises StoreError where the block gave up waiting for the store; the records until then are kept in the journal.
    """
    try:
        yield
    except StoreBusyError as busy:
        raise StoreError(f"{busy}; {_kept_text(folder)}: the same command with --resume goes on") from busy
    except BaseException:
        take_in_journal(folder, reporter)
        raise


def take_in_journal(
    folder: RunFolder,
    reporter: Reporter,
    use_store: Callable[[TraceStore], None] = lambda _: None,
    wait_s: float = WAIT_S,
) -> None:
    """Takes the journal in, and passes the open store to `use_store`; reports it where the store stays busy."""
    try:
        with open_run_store(folder, reporter, wait_s) as store:
            use_store(store)
    except StoreBusyError as busy:
        reporter.say(f"{busy}; {_kept_text(folder)}, and the next command takes it in")


def _kept_text(folder: RunFolder) -> str:
    return f"what was recorded is kept in {folder.journal}"
