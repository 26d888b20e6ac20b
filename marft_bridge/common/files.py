"""A text -> a whole file: a reader sees the old one or the new one, never a part, and only its owner can read it.

Invariant: once it is written, a power cut takes neither its bytes nor its name away.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from trace_store.files import sync


def write_atomically(path: Path, text: str) -> None:
    """Replaces `path` by `text`, 0600, synced to disk before it takes the name; the name is synced too."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # created 0600
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
        sync(path.parent)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
