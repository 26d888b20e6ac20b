"""`traces export` and `traces import`: a store <-> a folder of Parquet files, or a store -> a DuckLake catalog; and
`traces take-in`: a journal -> its store.

Invariant: an export is listed beside its store before its first byte is written, see `copies`. The format of the files
is that of `trace_store.parquet` and `trace_store.ducklake`.
"""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console

from marft_bridge.common.errors import ConfigError
from marft_bridge.common.progress import Reporter
from marft_bridge.common.terminal_text import print_line, value_to_json
from marft_bridge.traces.copies import Copies, record_copy
from trace_store.ducklake import store_to_catalog
from trace_store.errors import StoreError
from trace_store.journal import is_recorded
from trace_store.parquet import parquet_to_store, store_to_parquet
from trace_store.readers import CATALOG_SUFFIX, require_ducklake
from trace_store.store import TraceStore

WAIT_S = 60.0  # for another process that has the store open


def export(path: Path, target: Path, as_json: bool, console: Console) -> None:
    """Adds what `target` lacks: a folder, or a DuckLake catalog by its suffix. Prints the rows added, by table.

    Raises StoreError when the store does not exist, or the target holds something else.
    """
    started = time.monotonic()
    is_catalog = target.suffix == CATALOG_SUFFIX
    if is_catalog:
        require_ducklake()
    with open_existing_store(path) as store:
        store.take_in()
        record_copy(path, Copies.EXPORTS, target)  # before the first byte: an export that is interrupted counts too
        rows = {} if is_catalog else store_to_parquet(store, target).rows
    if is_catalog:
        rows = store_to_catalog(path, target)
    _print_rows(f"exported to {target}", rows, time.monotonic() - started, as_json=as_json, console=console)


def import_(folder: Path, path: Path, as_json: bool, console: Console) -> None:
    """Adds what the store lacks of a folder that `export` wrote, and prints the rows added, by table.

    Raises StoreError when the folder is damaged, or holds a run of the same name that is another one.
    """
    if folder.suffix == CATALOG_SUFFIX:
        raise ConfigError(f"traces import: {folder} is a DuckLake catalog, which is read in place: see train.traces")
    started = time.monotonic()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open_store(path) as store:
        store.take_in()
        rows = parquet_to_store(folder, store)
    _print_rows(f"imported into {path}", rows, time.monotonic() - started, as_json=as_json, console=console)


def take_in_journal(path: Path, as_json: bool, console: Console) -> None:
    """Takes the journal of a store in, and prints what was added. Raises StoreError where there is nothing."""
    started = time.monotonic()
    with open_existing_store(path) as store:
        counts = store.take_in()
    rows = {"spans": counts.spans, "episodes": counts.episodes, "rewards": counts.rewards, "refusals": counts.refused}
    rows |= {"damaged lines dropped": counts.torn, "lines set aside": counts.foreign, "paths passed over": counts.odd}
    _print_rows(f"taken into {path}", rows, time.monotonic() - started, as_json=as_json, console=console)


def open_existing_store(path: Path) -> TraceStore:
    """The store, open for writing. Made where there is only its journal.

    Raises StoreError where there is neither.
    """
    if not is_recorded(path):
        raise StoreError(f"store {path} does not exist; name one with --store, --run or --config")
    return open_store(path)


def open_store(path: Path) -> TraceStore:
    """The store, open for writing; made where there is none. Waits for another process, and says so."""
    return TraceStore.open(path, wait_s=WAIT_S, on_wait=say_waiting)


def say_waiting(line: str) -> None:
    """Prints on standard error that another process has the store: standard output is for what was asked for."""
    Reporter(Console(stderr=True, highlight=False)).say(line)


def _print_rows(title: str, rows: dict[str, int], seconds: float, as_json: bool, console: Console) -> None:
    added = {table: count for table, count in rows.items() if count}
    if as_json:
        print_line(console, value_to_json({"rows": added, "seconds": seconds}))
        return
    counts = ", ".join(f"{count} {table}" for table, count in added.items()) or "nothing new"
    print_line(console, f"{title}: {counts} [{seconds:.1f} s]")
