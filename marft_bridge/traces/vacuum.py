"""`traces vacuum`: a store's file -> the same store without the space of deleted rows.

Invariant: see `trace_store.compaction`.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from marft_bridge.common.terminal_text import print_line, value_to_json
from marft_bridge.traces.exports import WAIT_S, say_waiting
from trace_store.compaction import vacuum


def vacuum_store(path: Path, as_json: bool, console: Console) -> None:
    """Rewrites the store's file and prints its size before and after."""
    started = time.monotonic()
    sizes = vacuum(path, wait_s=WAIT_S, on_wait=say_waiting)
    seconds = time.monotonic() - started
    if as_json:
        print_line(console, value_to_json({**asdict(sizes), "seconds": seconds}))
    else:
        print_line(console, f"store {path}: {sizes.before} -> {sizes.after} bytes [{seconds:.1f} s]")
