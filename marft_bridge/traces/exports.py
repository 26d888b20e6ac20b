"""`traces export` and `traces import`: a store <-> a folder of Parquet files, or rows into a DuckLake catalog.

Invariant: a store knows every place that it was exported to, in a file beside it, because who erases somebody has to
look there too. How rows become files is not known here.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from rich.console import Console

from marft_bridge.errors import ConfigError
from marft_bridge.files import write_atomically
from marft_bridge.traces.plain import print_line, value_to_json
from trace_store.ducklake import store_to_catalog
from trace_store.errors import StoreError
from trace_store.parquet import parquet_to_store, store_to_parquet
from trace_store.readers import CATALOG_SUFFIX, require_ducklake
from trace_store.store import TraceStore

WAIT_S = 60.0  # for whoever has the store open


def export(path: Path, target: Path, as_json: bool, console: Console) -> None:
    """Adds what `target` lacks: a folder, or a DuckLake catalog by its suffix. Prints the rows added, by table.

    Raises StoreError when the store does not exist, or the target holds something else.
    """
    began = time.monotonic()
    is_catalog = target.suffix == CATALOG_SUFFIX
    if is_catalog:
        require_ducklake()
    with existing_store(path, console) as store:
        store.take_in()
        _remember(path, target)  # before the first byte: what was half written counts too
        rows = {} if is_catalog else store_to_parquet(store, target).rows
    if is_catalog:
        rows = store_to_catalog(path, target)
    _print_rows(f"exported to {target}", rows, time.monotonic() - began, as_json, console)


def import_(folder: Path, path: Path, as_json: bool, console: Console) -> None:
    """Adds what the store lacks of a folder that `export` wrote, and prints the rows added, by table.

    Raises StoreError when the folder is damaged, or holds a run of the same name that is another one.
    """
    if folder.suffix == CATALOG_SUFFIX:
        raise ConfigError(f"traces import: {folder} is a DuckLake catalog, which is read in place: see train.traces")
    began = time.monotonic()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _open(path, console) as store:
        store.take_in()
        rows = parquet_to_store(folder, store)
    _print_rows(f"imported into {path}", rows, time.monotonic() - began, as_json, console)


def existing_store(path: Path, console: Console) -> TraceStore:
    """A store open for writing, which is not made when it is missing: StoreError."""
    if not path.exists():
        raise StoreError(f"store {path} does not exist; name one with --store, --run or --config")
    return _open(path, console)


def _open(path: Path, console: Console) -> TraceStore:
    return TraceStore.open(path, wait_s=WAIT_S, say=lambda line: console.print(line, markup=False, soft_wrap=True))


def known_exports(path: Path) -> list[Path]:
    """Where a store was exported to, in the order of the first time."""
    try:
        return [Path(target) for target in json.loads(_memory(path).read_text(encoding="utf-8"))]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as error:
        raise StoreError(f"cannot read {_memory(path)}: {error}; delete it if its exports are gone") from None


def _remember(path: Path, target: Path) -> None:
    known = known_exports(path)
    if target.resolve() not in known:
        targets = [str(each) for each in (*known, target.resolve())]
        write_atomically(_memory(path), json.dumps(targets, indent=1) + "\n")


def _memory(path: Path) -> Path:
    return path.with_name(path.name + ".exports")


def _print_rows(what: str, rows: dict[str, int], seconds: float, as_json: bool, console: Console) -> None:
    added = {table: count for table, count in rows.items() if count}
    if as_json:
        print_line(console, value_to_json({"rows": added, "seconds": seconds}))
        return
    counts = ", ".join(f"{count} {table}" for table, count in added.items()) or "nothing new"
    print_line(console, f"{what}: {counts} [{seconds:.1f} s]")
