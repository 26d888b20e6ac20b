"""Episodes that `wrap` and `instrument` recorded in this process -> one line on stderr when it ends.

Invariants: one line for each store, however many graphs record into it; none where nothing was recorded, or where
MARFT_QUIET is set; a forked child speaks of its own episodes only.
"""

from __future__ import annotations

import atexit
import os
import shlex
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from trace_store.journal import is_recorded

QUIET_VARIABLE = "MARFT_QUIET"

_lock = threading.Lock()
_counts: dict[Path, tuple[int, int]] = {}  # store -> the process that counts, and its episodes


def count_for_exit(store: Path) -> Callable[[], None]:
    """A function that counts one more episode of this store for the line at the end of the process."""

    def count_episode() -> None:
        with _lock:
            if not _counts:
                atexit.register(_print_lines)
            pid, count = _counts.get(store, (0, 0))
            _counts[store] = (os.getpid(), 1 if pid != os.getpid() else count + 1)

    return count_episode


def _print_lines() -> None:
    if os.environ.get(QUIET_VARIABLE):
        return
    for store, (pid, count) in _counts.items():
        if pid == os.getpid() and is_recorded(store):  # not where the app removed it again
            episodes = "1 episode" if count == 1 else f"{count} episodes"
            command = f"marft-bridge traces list --store {shlex.quote(str(store))}"
            with suppress(OSError, ValueError, AttributeError):  # stderr is closed, or there is none
                sys.stderr.write(f"marft-bridge recorded {episodes}; see them with: {command}\n")
