"""A text or bytes -> a whole file: a reader sees the old one or the new one, never a part; only its owner can read it.

Invariant: once it is written, a power cut takes neither its bytes nor its name away.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from trace_store.files import sync


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replaces `path` by a text as UTF-8, or by bytes; 0600, synced to disk before it takes the name, which is synced.

    A link of that name is replaced itself; what it leads to stays as it is.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # created 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
        sync(path.parent)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
