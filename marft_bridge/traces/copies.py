"""A store -> the places that hold copies of its traces: exports, and stores of runs that were distilled from it.

Invariant: a place is listed in a file beside the store, `<store>.exports` or `<store>.distilled`, before the first byte
of the copy is written, because `traces erase` has to look there too.
"""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path

from marft_bridge.common.files import write_atomically
from trace_store.errors import StoreError


class Copies(StrEnum):
    """What holds the copies; the value is the suffix of the list."""

    EXPORTS = "exports"
    DISTILLED = "distilled"


def read_copies(path: Path, copies: Copies) -> list[Path]:
    """The absolute paths of the copies of a store, in the order in which they were made first.

    Raises StoreError when the file that lists them cannot be read.
    """
    listed = _list_file(path, copies)
    try:
        return [Path(target) for target in json.loads(listed.read_text(encoding="utf-8"))]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as error:
        raise StoreError(f"cannot read {listed}: {error}; delete it if what it lists is gone") from None


def record_copy(path: Path, copies: Copies, target: Path) -> None:
    """Lists `target`, unless it is listed. Raises OSError where nothing can be written beside the store."""
    known = read_copies(path, copies)
    if target.resolve() not in known:
        targets = [str(place) for place in (*known, target.resolve())]
        write_atomically(_list_file(path, copies), json.dumps(targets, indent=1) + "\n")


def _list_file(path: Path, copies: Copies) -> Path:
    return path.with_name(f"{path.name}.{copies}")
