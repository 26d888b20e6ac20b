"""The files of a store -> their faults: permissions, and what of the journal the store has not taken in, or never will.

Invariant: nothing is changed, locked or taken in, so a recorder that is writing is not disturbed.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

from trace_store.doctor import Fault
from trace_store.files import open_to_read
from trace_store.journal import (
    FOREIGN_SUFFIX,
    ForeignLine,
    folder_to_odd_paths,
    folder_to_segments,
    lines_from,
)
from trace_store.store import TraceStore


def journal_faults(store: TraceStore) -> Iterator[Fault]:
    """Segments beside the store that it has not taken in, and lines that crashes left half written."""
    offsets = dict(store.sql('SELECT segment, "offset" FROM taken_in'))
    for segment, torn in store.sql("SELECT segment, torn FROM taken_in WHERE torn > 0 ORDER BY segment"):
        yield Fault(
            "journal", f"{torn} damaged lines of {segment} were dropped when it was taken in", None, level="warning"
        )
    folder = store.journal_folder
    for path in folder_to_odd_paths(folder):
        yield Fault("journal", f"{path} is no plain file, and nobody reads it; remove it", None, level="warning")
    for path in sorted(folder.glob(f"*{FOREIGN_SUFFIX}")) if folder.is_dir() else ():
        message = f"{path} has lines of the journal that are not known here; the marft-bridge that wrote them takes"
        yield Fault("journal", f"{message} them in when it is named *.segment", None, level="warning")
    for path in folder_to_segments(folder):
        try:
            with open_to_read(path) as file:
                records = torn = 0
                for record, _ in lines_from(file, offsets.get(path.name, 0), growing=False):
                    records += record is not None and not isinstance(record, ForeignLine)
                    torn += record is None
        except FileNotFoundError:  # taken in meanwhile
            continue
        if records:
            message = f"{records} records of {path.name} are not taken in yet; the next command that writes does so"
            yield Fault("journal", message, None, level="warning")
        if torn:
            message = f"{path.name} has {torn} damaged lines: a crash, or a line that is being written"
            yield Fault("journal", message, None, level="warning")


def file_faults(store: Path, journal: Path) -> Iterator[Fault]:
    """Files that others than their owner may read or write."""
    segments = sorted(journal.iterdir()) if journal.is_dir() else []
    for path in (store, store.with_name(store.name + ".wal"), journal, *segments):
        try:
            mode = stat.S_IMODE(path.stat().st_mode)
        except FileNotFoundError:  # no log and no journal is as it should be
            continue
        if mode & 0o077:
            private_mode = 0o700 if path.is_dir() else 0o600
            yield Fault("files", f"{path} is open to others ({mode:04o}); chmod {private_mode:o} it")
