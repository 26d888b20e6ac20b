"""A run folder's store, opened for moments: while episodes run, journals hold what they record.

Invariants: no command holds the store while a graph, a server or a trainer works, so others can read and write it in
between; whoever is in the way is waited for in bounded time, and named; what could not be taken in stays in the
journal, and the next command takes it in. What is done with an open store is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from marft_bridge.errors import StoreError
from marft_bridge.progress import Reporter
from marft_bridge.run_folder import RunFolder
from trace_store.errors import StoreBusyError
from trace_store.store import TraceStore

WAIT_S = 60.0  # before and after a run, where giving up costs nothing
WAIT_IN_RUN_S = 600.0  # within one, where giving up stops work that took hours


@contextmanager
def store_up_to_date(folder: RunFolder, reporter: Reporter, wait_s: float = WAIT_S) -> Iterator[TraceStore]:
    """The folder's store, open for writing inside the block, with everything in it that was journaled until now.

    Raises StoreBusyError when another process has it open for longer than `wait_s` seconds.
    """
    with TraceStore.open(folder.store, wait_s=wait_s, say=reporter.say) as store:
        store.take_in()
        yield store


@contextmanager
def keeping_what_runs(folder: RunFolder, reporter: Reporter, command: str) -> Iterator[None]:
    """Takes in what the block journaled when it fails or is stopped by Ctrl-C.

    Raises StoreError where the block gave up waiting for the store; what was recorded until then is kept.
    """
    try:
        yield
    except StoreBusyError as busy:
        raise StoreError(f"{busy}; {_kept(folder)}: go on with `marft-bridge {command} --resume`") from busy
    except BaseException:
        take_in_what_ran(folder, reporter)
        raise


def take_in_what_ran(
    folder: RunFolder,
    reporter: Reporter,
    then: Callable[[TraceStore], None] = lambda _: None,
    wait_s: float = WAIT_S,
) -> None:
    """Takes in what was journaled, and hands the open store to `then`; says so where the store is not to be had."""
    try:
        with store_up_to_date(folder, reporter, wait_s) as store:
            then(store)
    except StoreBusyError as busy:
        reporter.say(f"{busy}; {_kept(folder)}, and the next command takes it in")


def _kept(folder: RunFolder) -> str:
    return f"what was recorded is kept in {folder.journal}"
